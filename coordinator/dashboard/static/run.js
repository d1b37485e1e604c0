// A run: facts, curves, recall, the round, its file, what failed. Without a name in the address: all runs.

import { get, part } from "./api.js";
import { SIDE, room, shareBar } from "./charts.js";
import { h } from "./dom.js";
import { ago, bytes, clock, num, plural, score } from "./format.js";
import { actions, headline, lead } from "./overview.js";
import { accuracySection, deviceLink, facts, lossSection, metricName, none, roundSection, runLink, scroll, section, table } from "./parts.js";
import { state } from "./state.js";

export const run = {
  events: ["run", "evaluation", "resync"],
  data: null,
  title() { return this.data ? this.data.view.run : "Run"; },
  async load({ name }) {
    const id = name || (state.live.run ? state.live.run.run : "");
    const [data, runs] = await Promise.all([id ? get(`runs/${part(id)}`) : null, get("runs", { limit: 50 })]);
    this.data = data;
    this.runs = runs;
  },
  render() {
    if (!this.data) return [h("h1", { tabindex: "-1" }, "No run yet"), h("p", { class: "lead" }, lead(state.live)), actions(null, state.live.fleet)];
    const { curve, file, failures, failed_devices: names } = this.data, live = state.live;
    const shown = live.run && live.run.run === this.data.view.run;
    const view = shown ? live.run : this.data.view, points = shown && live.curve ? live.curve.points : curve;
    return [
      h("div", { class: "head" }, h("div", {}, h("h1", { tabindex: "-1" }, headline(view)),
        h("p", { class: "lead" }, `${view.method} with ${view.model}; classes ${listed(view.classes)}. Started ${started(this.data.created_s)}. `, view.reason && !/^\d+ rounds$/.test(view.reason) ? `${view.reason.charAt(0).toUpperCase()}${view.reason.slice(1)}.` : "")),
        h("div", { class: "acts" }, h("a", { class: "button", href: `api/v1/runs/${part(view.run)}/report`, download: `${view.run}.html` }, "Report"), actions(view, live.fleet))),
      facts([
        ["Round", view.version, `of ${view.rounds}`],
        [`Best ${metricName(view).toLowerCase()}`, score(view.best_score), view.best_version == null ? "" : `version ${view.best_version}`],
        view.time_left_s == null ? null : ["Time left", ago(view.time_left_s), ""],
        ["A round takes", view.median_round_s == null ? "–" : ago(view.median_round_s), "median"],
        ["Sent by devices", bytes(view.bytes_up), ""], ["Sent to devices", bytes(view.bytes_down), ""],
      ]),
      h("div", { class: "grid" },
        h("div", { class: "stack" }, accuracySection(points, view, room([1, .55, .55])), lossSection(points, room([1, .55, .55]))),
        h("div", { class: "stack" }, recall(view),
          section("Did not work out", "The newest assignments that brought no update.", failures.length ? h("ul", { class: "alerts" }, failures.slice(0, 6).map((failure, i) =>
            h("li", {}, h("span", {}, h("b", {}, deviceLink(names[i])), ` ${failure.state}, ${failure.code.replaceAll("_", " ")}`), h("span", { class: "soft small" }, `round ${failure.round}`), h("p", {}, failure.detail)))) :
            none("Every assignment brought its update.")))),
      shown && live.round ? h("div", { class: "wide" }, roundSection(live, room([1, 1, 1]), 60)) : null,
      section("All runs", null, this.runs.items.length ? scroll("All runs", table(["Run", "State", "Method", "Model", "Round", "Best", "Started"], this.runs.items.map(row =>
        [runLink(row.run), row.state, row.method, row.model, `${num(row.round)} of ${num(row.rounds)}`, score(row.best_score), row.created_s ? started(row.created_s) : "–"]),
      [4, 5, 6], { caption: "All runs", keys: this.runs.items.map(row => row.run) })) : none("There is no run yet."), h("p", { class: "more" }, h("a", { href: "#/compare" }, "Compare runs"))),
      h("section", {}, h("h2", {}, "Run file"), h("details", {}, h("summary", {}, "Show the run file"), h("pre", { tabindex: "0" }, JSON.stringify(file, null, 1)))),
    ];
  },
};

const started = seconds => `${clock(Math.max(0, Date.now() / 1000 - seconds))}`;
const listed = names => names.length <= 6 ? names.join(", ") : `${names.slice(0, 5).join(", ")} and ${plural(names.length - 5, "more", "more")}`;

function recall(view) {
  if (!view.recall.length) return section("Recall per class", null, none("No version has been evaluated yet."));
  return section("Recall per class", `Version ${view.recall_version}: of the samples of a class, the share that is recognised.`,
    table(["Class", "", "Recall"], view.classes.slice(0, 20).map((name, i) => [name, view.recall[i] == null ? h("span", { class: "soft small" }, "no sample") : shareBar(view.recall[i], room(SIDE)), score(view.recall[i])]), [2],
      { caption: "Recall per class", keys: view.classes.slice(0, 20).map((_, i) => `c${i}`) }));
}
