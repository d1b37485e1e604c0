// Who may look, what was done, where the coordinator is. Read only: tokens are made in a terminal.

import { get, remove } from "./api.js";
import { h } from "./dom.js";
import { ago, num } from "./format.js";
import { none, section, table } from "./parts.js";
import { state } from "./state.js";

export const settings = {
  events: ["resync"],
  title: () => "Settings",
  async load() { this.data = await get("settings"); },
  render() {
    const { tokens, actions, viewers, addresses, brokers } = this.data, { session } = state;
    const role = session.role === "operate" ? "may start, stop, export and deploy" : "may look";
    return [
      h("div", { class: "head" }, h("div", {}, h("h1", { tabindex: "-1" }, "Settings"), h("p", { class: "lead" }, `Signed in as ${session.name}, who ${role}.`)),
        h("div", { class: "acts" }, h("button", { type: "button", onclick: async () => { await remove("session").catch(() => null); location.reload(); } }, "Sign out"))),
      h("div", { class: "grid" },
        h("div", { class: "stack" },
          section("Who may look", "Tokens are stored as hashes; a new one is shown once, in the terminal.", tokens.length ? table(["Name", "May", "Last used"],
            tokens.map(token => [token.name, token.role === "operate" ? "operate" : "look", token.used_s == null ? "never" : `${ago(token.used_s)} ago`]), [], { caption: "Tokens" }) : none("There is no token."),
          h("pre", { tabindex: "0" }, "coordinator page link\ncoordinator page token add wall-screen\ncoordinator page token add anna --operate\ncoordinator page token remove wall-screen")),
          section("What was done here", null, actions.length ? table(["When", "Who", "What"], actions.map(action => [`${ago(action.age_s)} ago`, action.name, `${action.action} ${action.detail}`]), [], { caption: "Actions" }) : none("Nothing yet."))),
        h("div", { class: "stack" },
          section("Addresses", `${num(viewers)} ${viewers === 1 ? "viewer looks" : "viewers look"} at the moment.`, h("dl", { class: "about" }, h("dt", {}, "Page"), h("dd", {}, addresses.map(a => h("div", {}, a))), h("dt", {}, "Devices connect to"), h("dd", {}, brokers.map(b => h("div", {}, b))))),
          section("For scripts", "The same answers, with a token instead of a browser.", h("pre", { tabindex: "0" }, `curl -H "Authorization: Bearer TOKEN" ${addresses[0]}/api/v1/live\ncurl -H "Authorization: Bearer TOKEN" ${addresses[0]}/api/v1/schema`)))),
    ];
  },
};
