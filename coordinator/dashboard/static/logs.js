// Log lines: of the coordinator, and those that devices' owners share with failures.

import { get } from "./api.js";
import { h } from "./dom.js";
import { clock } from "./format.js";
import { deviceLink, none } from "./parts.js";

export const logs = {
  events: ["log", "resync"],
  query: { source: "coordinator", level: "info", q: "" },
  title: () => "Logs",
  async load() {
    const { source, level } = this.query;
    const turn = this.turn = (this.turn || 0) + 1, page = await get("logs", { source, level, limit: 300 });
    if (turn !== this.turn && this.page) return; // somebody has asked for something else meanwhile
    this.page = page;
    this.loadedAt = Date.now();
  },
  change(values) { this.query = { ...this.query, ...values }; if ("q" in values) this.refresh(); else this.reload(); },
  render() {
    const find = this.query.q.toLowerCase(), since = (Date.now() - this.loadedAt) / 1000;
    const lines = this.page.items.filter(line => !find || `${line.device} ${line.run} ${line.text}`.toLowerCase().includes(find));
    const select = (name, key, options) => h("label", { "data-key": key }, name, h("select", { onchange: event => this.change({ [key]: event.target.value }) },
      options.map(([value, text]) => h("option", { value, selected: this.query[key] === value }, text))));
    return [
      h("div", { class: "head" }, h("div", {}, h("h1", { tabindex: "-1" }, "Logs"), h("p", { class: "lead" }, this.query.source === "devices" ? "What devices sent with their failures, where their owners share it." : "What the coordinator has logged since it was started, newest first."))),
      h("div", { class: "tools" }, h("label", { "data-key": "q" }, "Find", h("input", { type: "search", id: "find", value: this.query.q, autocomplete: "off", oninput: event => this.change({ q: event.target.value }) })),
        select("Of", "source", [["coordinator", "the coordinator"], ["devices", "devices"]]),
        this.query.source === "coordinator" ? select("Level", "level", [["info", "all lines"], ["warning", "warnings and errors"], ["error", "errors"]]) : null),
      lines.length ? h("table", { class: "loglines" }, h("caption", { class: "unseen" }, "Log lines, newest first"), h("thead", {}, h("tr", {}, ["Time", "Device", "Run", "Line"].map(text => h("th", { scope: "col" }, text)))),
        h("tbody", {}, lines.map((line, i) => h("tr", { class: line.level, "data-key": `${line.number}-${line.age_s == null ? i : ""}` },
          h("td", { class: "nowrap soft" }, line.age_s == null ? "" : clock(line.age_s + since)), h("td", { class: "nowrap" }, line.device ? deviceLink(line.device) : ""),
          h("td", { class: "nowrap soft opt" }, line.run ? `${line.run}${line.round ? ` · ${line.round}` : ""}` : ""), h("td", { class: "text" }, line.level === "info" ? "" : h("b", { class: "level" }, `${line.level} `), line.text))))) :
        none(this.query.source === "devices" ? "No device has sent log lines." : "No line matches."),
    ];
  },
};
