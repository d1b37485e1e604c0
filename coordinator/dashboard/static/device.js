// One device: what to do, its memory round by round, this round, what it is, what it said when it failed.

import { get, part } from "./api.js";
import { SIDE, gantt, memoryBar, memoryLegend, phaseLegend, room } from "./charts.js";
import { h } from "./dom.js";
import { STATES, ago, bytes, num, percent, score } from "./format.js";
import { none, runLink, scroll, section, table } from "./parts.js";
import { state } from "./state.js";

export const device = {
  events: ["devices", "round", "resync"],
  data: null,
  title() { return this.name; },
  async load({ name }) {
    this.name = name;
    [this.data, this.rounds] = await Promise.all([get(`devices/${part(name)}`), get(`devices/${part(name)}/rounds`, { limit: 50 })]);
    this.loadedAt = performance.now();
  },
  render() {
    const { row, client, kind, samples, failures, spans, round_elapsed_s: began } = this.data;
    const since = (performance.now() - this.loadedAt) / 1000, live = state.live;
    const working = row.total && row.state === "train" ? `Step ${num(row.step)} of ${num(row.total)}${live.run ? ` in round ${live.run.round}` : ""}.` : "";
    const seen = row.state === "offline" ? (row.seen_s == null ? "" : `Last seen ${ago(row.seen_s + since)} ago.`) : "Connected.";
    const worst = this.rounds.items.reduce((best, item) => item.budget_bytes && (!best || item.peak_bytes / item.budget_bytes > best.peak_bytes / best.budget_bytes) ? item : best, null);
    const elapsed = began == null ? null : began + since;
    const open = spans.length && ["train", "evaluate", "upload", "fetch", "start", "wait"].includes(row.state);
    const shown = open ? [...spans.slice(0, -1), { ...spans[spans.length - 1], ends_s: elapsed }] : spans;
    return [
      h("div", { class: "head" }, h("div", {}, h("h1", { tabindex: "-1" }, `${row.name} is ${row.state === "failed" ? "out of this run" : STATES[row.state]}`),
        h("p", { class: "lead" }, row.why ? `${row.why.text} ` : "", working, " ", seen))),
      row.why ? h("ul", { class: "alerts" }, h("li", { class: row.state === "failed" ? "failed" : null }, h("b", {}, "What to do"), h("span", {}), h("p", {}, row.why.mend))) : null,
      h("div", { class: "grid" },
        section("Memory, round by round", worst ? `Highest peak: ${bytes(worst.peak_bytes)} in round ${worst.round}, ${percent(worst.peak_bytes / worst.budget_bytes)} of its budget.` : "A peak is measured with every update.",
          memoryLegend(), this.rounds.items.length ? scroll("Memory by round", table(["Round", "Share of the budget", "Predicted", "Peak", "Budget", "Seconds"], this.rounds.items.map(item =>
            [item.round, memoryBar({ name: `round ${item.round}`, ...item }, 260), bytes(item.predicted_bytes), bytes(item.peak_bytes), bytes(item.budget_bytes), item.seconds.toFixed(1)]), [0, 2, 3, 4, 5],
          { caption: "Memory by round", keys: this.rounds.items.map(item => `r${item.round}`) })) : none("It has sent no update in this run.")),
        h("div", { class: "stack" },
          section("This round", null, elapsed != null && shown.length ? [phaseLegend(), gantt([{ name: row.name, spans: shown }], elapsed, room(SIDE))] : none("It has no part in a round at the moment.")),
          section("About it", null, h("dl", { class: "about" }, [["Plan", row.plan || "none yet"], ["Kind", kind || "not known"], ["Budget", bytes(row.budget_bytes)],
            ["Labels", Object.entries(row.labels).map(pair => pair.join("=")).join(", ") || "none"], ["Samples", samples ? num(samples) : "not known"],
            ["Accuracy on its data", score(row.accuracy)], ["Client", client || "not seen yet"]].map(([term, value]) => [h("dt", {}, term), h("dd", {}, value)]))),
          section("Failures", "With the last lines of its log, where its owner shares them.", failures.length ? failures.map(failure => h("div", { class: "failure", "data-key": `${failure.run}-${failure.round}-${failure.code}` },
            h("p", {}, h("b", {}, `${failure.state}, ${failure.code.replaceAll("_", " ")}`), h("span", { class: "soft" }, " in round ", failure.round, " of "), runLink(failure.run)), h("p", { class: "soft" }, failure.detail),
            failure.log.length ? h("pre", { class: "log", tabindex: "0", "aria-label": "Log lines" }, failure.log.join("\n")) : null)) : none("None.")))),
    ];
  },
};
