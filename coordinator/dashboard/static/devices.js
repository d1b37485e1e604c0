// All devices: find, filter and sort at the coordinator, 50 on a page; rows are changed in place.

import { get } from "./api.js";
import { memoryBar, memoryLegend } from "./charts.js";
import { h } from "./dom.js";
import { STATES, ago, bytes, num, plural, score } from "./format.js";
import { deviceLink, dot, none } from "./parts.js";

const SIZE = 50;
const fresh = () => ({ q: "", state: "", label: "", sort: "name", after: 0 });

export const devices = {
  events: ["devices", "fleet", "resync"],
  query: fresh(),
  page: null,
  title: () => "Devices",
  async load({ params }) {
    if (params.has("state")) { this.query = { ...fresh(), state: params.get("state") }; history.replaceState(null, "", "#/devices"); }
    const asked = Object.fromEntries(Object.entries(this.query).filter(([, value]) => value !== "" && value !== 0));
    const turn = this.turn = (this.turn || 0) + 1, page = await get("devices", { ...asked, limit: SIZE });
    if (turn !== this.turn && this.page) return; // somebody has asked for something else meanwhile
    this.page = page;
    this.loadedAt = performance.now();
  },
  change(values) {
    this.query = { ...this.query, after: 0, ...values };
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.reload(), "q" in values ? 120 : 0);
  },
  render() {
    const { page, query } = this, first = query.after + 1, last = Math.min(query.after + SIZE, page.total);
    const turned = sort => query.sort === sort ? `-${sort}` : sort;
    const head = (sort, text, kind = "") => {
      const is = query.sort.replace("-", "") === sort, down = query.sort.startsWith("-");
      return h("th", { scope: "col", class: kind || null, "aria-sort": is ? (down ? "descending" : "ascending") : null },
        h("button", { type: "button", onclick: () => this.change({ sort: turned(sort) }) }, text, is ? (down ? " ↓" : " ↑") : ""));
    };
    const select = (name, key, options) => h("label", { "data-key": key }, name, h("select", { onchange: event => this.change({ [key]: event.target.value }) },
      options.map(([value, text]) => h("option", { value, selected: query[key] === value }, text))));
    const turn = (text, after) => h("button", { type: "button", disabled: after === null, onclick: () => { this.query.after = after; this.reload(); scrollTo(0, 0); } }, text);
    return [
      h("div", { class: "head" }, h("h1", { tabindex: "-1" }, "Devices")),
      h("div", { class: "tools" },
        h("label", { "data-key": "q" }, "Find", h("input", { type: "search", id: "find", value: query.q, autocomplete: "off", oninput: event => this.change({ q: event.target.value }) })),
        select("State", "state", [["", "any"], ...Object.entries(STATES)]),
        page.labels.length ? select("Label", "label", [["", "any"], ...page.labels.map(label => [label, label])]) : null),
      h("div", { class: "above" }, h("p", { class: "soft small", role: "status" }, page.total === page.all ? plural(page.all, "device") : `${num(page.total)} of ${plural(page.all, "device")}`), memoryLegend()),
      page.items.length ? h("table", { class: "cards devices" }, h("caption", { class: "unseen" }, "Devices"),
        h("thead", {}, h("tr", {}, head("name", "Device"), head("state", "State"), h("th", { scope: "col" }, "Plan"), head("memory", "Peak, as a share of the budget"),
          head("budget", "Budget", "num"), head("accuracy", "Accuracy", "num"), head("seen", "Last seen", "num"))),
        h("tbody", {}, page.items.map(row => this.row(row)))) :
        none(page.all ? "No device matches. " : "No device is enrolled yet; add one with: coordinator device add NAME"),
      page.total > SIZE ? h("nav", { class: "pages", "aria-label": "Pages" }, turn("Previous", query.after > 0 ? Math.max(0, query.after - SIZE) : null),
        h("span", {}, `${num(first)} to ${num(last)} of ${num(page.total)}`), turn("Next", page.next)) : null,
    ];
  },
  row(row) {
    const bad = ["rests", "offline", "failed"].includes(row.state);
    const doing = row.state === "train" && row.total ? ` ${num(row.step)}/${num(row.total)}` : "";
    const seen = row.state === "offline" ? (row.seen_s == null ? "not yet" : `${ago(row.seen_s + (performance.now() - this.loadedAt) / 1000)} ago`) : "now";
    return h("tr", { "data-key": row.name }, h("td", { class: "name" }, deviceLink(row.name)),
      h("td", { class: "state" }, dot(row.state), STATES[row.state], doing, row.why && bad ? h("span", { class: `why${row.state === "failed" ? " failed" : ""}` }, row.why.text) : null),
      h("td", { class: "opt plan" }, row.plan || "–"), h("td", { class: "mem" }, row.budget_bytes ? memoryBar(row) : "–"),
      h("td", { class: "num opt nowrap" }, bytes(row.budget_bytes)), h("td", { class: "num opt" }, score(row.accuracy)), h("td", { class: "num opt nowrap" }, seen));
  },
};
