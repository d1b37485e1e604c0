// Up to eight runs side by side.

import { get } from "./api.js";
import { lineChart, room } from "./charts.js";
import { h } from "./dom.js";
import { bytes, num, percent, score } from "./format.js";
import { none, runLink, scroll, section, table } from "./parts.js";

const MOST = 8;

export const compare = {
  events: ["evaluation", "resync"],
  chosen: null,
  title: () => "Compare",
  async load() {
    this.runs = (await get("runs", { limit: 50 })).items.filter(run => run.round > 0 || run.state === "running");
    if (this.chosen === null) this.chosen = this.runs.slice(0, 3).map(run => run.run);
    const query = new URLSearchParams(this.chosen.map(run => ["run", run]));
    const turn = this.turn = (this.turn || 0) + 1, data = this.chosen.length ? (await get("compare", query)).runs : [];
    if (turn === this.turn || !this.data) this.data = data; // else somebody has chosen others meanwhile
  },
  choose(run, is) {
    this.chosen = is ? [...this.chosen, run].slice(-MOST) : this.chosen.filter(name => name !== run);
    this.reload();
  },
  render() {
    const { data } = this, judged = data.filter(run => run.points.length);
    const same = new Set(data.map(run => run.row.method)).size < data.length;
    const name = run => same ? run.row.run : run.row.method;
    return [
      h("div", { class: "head" }, h("div", {}, h("h1", { tabindex: "-1" }, "Compare runs"), h("p", { class: "lead" }, "One seed each, so a difference below 0.01 may be chance: ", h("code", {}, "coordinator simulate --seed 1,2,3"), " tells."))),
      this.runs.length ? h("fieldset", { class: "choices" }, h("legend", {}, `Runs, at most ${MOST}`), this.runs.map(run => h("label", { "data-key": run.run },
        h("input", { type: "checkbox", checked: this.chosen.includes(run.run), onchange: event => this.choose(run.run, event.target.checked) }), ` ${run.run} `, h("span", { class: "soft" }, run.method)))) : none("There is no run with a trained model yet."),
      judged.length ? h("div", { class: "stack" },
        section("Accuracy", "After each round, on the devices’ test data.", lineChart(judged.slice(0, MOST).map(run => ({ name: name(run), points: run.points.map(p => [p.version, p.accuracy]) })),
          { w: room([1, 1, 1]), height: 380, label: `Accuracy of ${judged.length} runs by round` })),
        section("Side by side", null, scroll("Runs side by side", table(["Run", "Method", "Round", "Last", "Best", "Up", "Down", "Highest peak"], data.map(run => [runLink(run.row.run), run.row.method,
          `${num(run.row.round)} of ${num(run.row.rounds)}`, run.points.length ? score(run.points[run.points.length - 1].accuracy) : "–", score(run.row.best_score), bytes(run.bytes_up), bytes(run.bytes_down),
          run.highest_share == null ? "–" : percent(run.highest_share)]), [2, 3, 4, 5, 6, 7], { caption: "Runs side by side", keys: data.map(run => run.row.run) })))) : null,
    ];
  },
};
