// The overview: one sentence that says how it goes, then what needs somebody, then the rest.

import { deployModel, exportModel, startRun, stopRun } from "./dialogs.js";
import { h } from "./dom.js";
import { WORKING, ago, num, score } from "./format.js";
import { accuracySection, alertList, fleetBar, memorySection, metricName, none, roundSection, runLink, section } from "./parts.js";
import { age, mayOperate, state } from "./state.js";

export function headline(run) {
  if (!run) return "No run yet";
  if (run.state === "queued") return `${run.run} is getting ready`;
  if (run.state === "running") {
    if (run.paused) return `${run.run} is paused`;
    if (run.waiting) return `${run.run} waits for devices`;
    if (run.phase === "EVALUATING" && run.version >= run.rounds) return `${run.run} is being evaluated`;
    return `${run.run} is training: round ${run.round} of ${run.rounds}`;
  }
  if (run.state === "failed") return `${run.run} failed`;
  return `${run.run} ${run.state === "stopped" ? "was stopped" : "has finished"} after ${run.version === 1 ? "one round" : `${num(run.version)} rounds`}`;
}

export function lead(live) {
  const { run, fleet } = live, parts = [], b = text => h("b", {}, text);
  if (!run) {
    return fleet.total ? [`${num(fleet.total)} ${fleet.total === 1 ? "device is" : "devices are"} enrolled. Start a run with `, h("code", {}, "coordinator run start FILE.toml"), "."] :
      ["Add a device first: ", h("code", {}, "coordinator device add NAME"), "."];
  }
  if (run.waiting) parts.push(`It ${run.paused ? "is paused: " : ""}${run.waiting}. `);
  if (run.score != null) {
    parts.push(`${metricName(run)} `, b(score(run.score)), run.score_version ? ` after round ${run.score_version}` : " before training");
    if (run.target != null) parts.push(`, target ${run.target}`);
    parts.push(". ");
  }
  if (run.state !== "running" && run.state !== "queued") {
    if (run.best_version != null) parts.push("The best version is ", b(String(run.best_version)), ` with ${score(run.best_score)}. `);
    if (run.reason && !/^\d+ rounds$/.test(run.reason)) parts.push(`${run.reason.charAt(0).toUpperCase()}${run.reason.slice(1)}.`);
    return parts;
  }
  if (run.time_left_s != null) parts.push("About ", b(ago(Math.max(0, run.time_left_s - age("run")))), " left. ");
  if (run.state === "running") {
    const working = WORKING.reduce((sum, name) => sum + (fleet.counts[name] || 0), 0);
    const bad = (fleet.counts.rests || 0) + (fleet.counts.offline || 0) + (fleet.counts.failed || 0);
    parts.push(working === fleet.total ? `All ${num(fleet.total)} devices are at work` : `${num(working)} of ${num(fleet.total)} devices are at work`);
    parts.push(bad ? ["; ", b(bad === 1 ? "one needs you" : `${num(bad)} need you`), "."] : ".");
  }
  return parts;
}

export function actions(run, fleet) {
  if (!mayOperate()) return null;
  const button = (text, act, main = false) => h("button", { type: "button", class: main ? "main" : null, onclick: act, "data-key": text }, text);
  const open = run && (run.state === "running" || run.state === "queued");
  return h("div", { class: "acts" }, open ? button("Stop", () => stopRun(run)) : null,
    run && run.version > 0 ? button("Export", () => exportModel(run)) : null,
    run && run.version > 0 && !open && fleet.total ? button("Deploy", () => deployModel(run, fleet)) : null,
    run && !open ? button("Start again", () => startRun(run)) : null, !open ? button("Start a run", () => startRun(), !run) : null);
}

export const overview = {
  events: [],
  title: () => "Overview",
  render() {
    const live = state.live, { run, fleet, alerts } = live;
    const waits = run && (run.state === "running" || run.state === "queued");
    return [
      h("div", { class: "head" }, h("div", {}, h("h1", { tabindex: "-1" }, headline(run)), h("p", { class: "lead" }, lead(live))), actions(run, fleet)),
      h("div", { class: "grid home" },
        h("div", { class: "stack urgent" },
          section(alerts.length ? "Needs attention" : "All is well", null, alertList(alerts)),
          section("Fleet now", null, fleet.total ? fleetBar(fleet) : none("No device is enrolled yet."))),
        h("div", { class: "stack story" },
          run ? accuracySection(live.curve ? live.curve.points : [], run) : section("Accuracy", null, none("It is shown here while a run trains.")),
          roundSection(live) || (waits ? section("This round", null, none("Between two rounds.")) : null),
          run ? h("p", { class: "more" }, "Everything about ", runLink(run.run)) : null),
        h("div", { class: "stack proof" }, memorySection(fleet))),
    ];
  },
};
