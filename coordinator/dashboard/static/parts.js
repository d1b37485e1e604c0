// What several views show: tables, alerts, the fleet in one bar, the round, memory, accuracy.

import { SIDE, crowd, gantt, histogram, lineChart, memoryBar, memoryLegend, phaseLegend, room } from "./charts.js";
import { part } from "./api.js";
import { h } from "./dom.js";
import { METRICS, PHASES, STATES, ago, bytes, num, percent, plural, score } from "./format.js";
import { age, state } from "./state.js";

export const dot = name => h("i", { class: `dot s-${name}`, "aria-hidden": "true" });
export const deviceLink = name => h("a", { href: `#/devices/${part(name)}` }, name);
export const runLink = name => h("a", { href: `#/run/${part(name)}` }, name);

export function table(heads, rows, right = [], { caption = "", keys = [], cards = false } = {}) {
  return h("table", { class: cards ? "cards" : null }, caption ? h("caption", { class: "unseen" }, caption) : null,
    h("thead", {}, h("tr", {}, heads.map((text, i) => h("th", { scope: "col", class: right.includes(i) ? "num" : null }, text)))),
    h("tbody", {}, rows.map((cells, r) => h("tr", { "data-key": keys[r] || null },
      cells.map((cell, i) => h("td", { class: right.includes(i) ? "num nowrap" : null }, cell))))));
}

export const scroll = (label, ...content) => h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, content);
export const section = (title, note, ...content) => h("section", {}, h("h2", {}, title), note ? h("p", { class: "note" }, note) : null, content);
export const none = text => h("p", { class: "none" }, text);

export function facts(list) {
  return h("dl", { class: "facts" }, list.filter(Boolean).map(([term, value, small]) =>
    h("div", {}, h("dt", {}, term), h("dd", {}, value, small ? h("small", {}, ` ${small}`) : null))));
}

// ---- what needs somebody

const VERBS = { offline: "offline", rests: "resting", failed: "out of this run" };

export function alertList(alerts) {
  if (!alerts.length) return none("Nothing needs you.");
  return h("ul", { class: "alerts" }, alerts.slice(0, 8).map(alert => {
    const many = alert.count > 1, since = alert.since_s == null ? null : ago(alert.since_s + age("alerts"));
    const who = many ? h("a", { href: `#/devices?state=${alert.state}` }, plural(alert.count, "device")) : deviceLink(alert.devices[0]);
    const names = many ? [alert.devices.map((name, i) => [i ? ", " : "", deviceLink(name)]), alert.count > 3 ? ` and ${num(alert.count - 3)} more. ` : ". "] : null;
    return h("li", { class: alert.state === "failed" ? "failed" : null, "data-key": `${alert.state}-${alert.code}` },
      h("span", {}, h("b", {}, who), ` ${many ? "are" : "is"} ${VERBS[alert.state]}`), h("span", { class: "soft small nowrap" }, since ? `for ${since}` : ""),
      h("p", {}, names, alert.text, " ", h("span", { class: "mend" }, alert.mend)));
  }));
}

// ---- the fleet by state

const ORDER = ["train", "evaluate", "upload", "fetch", "start", "wait", "done", "idle", "rests", "offline", "failed"];

export function fleetBar(fleet) {
  const present = ORDER.filter(name => fleet.counts[name]);
  return [h("div", { class: "fleet", "aria-hidden": "true" }, present.map(name => h("span", { class: `s-${name}`, grow: fleet.counts[name], "data-key": name }))),
    h("ul", { class: "counts" }, present.map(name => h("li", { "data-key": name }, dot(name),
      h("a", { href: `#/devices?state=${name}` }, h("b", {}, num(fleet.counts[name])), ` ${STATES[name]}`))))];
}

// ---- accuracy

export function accuracySection(points, run, width) {
  if (!points.length) return section("Accuracy", null, none("No version has been evaluated yet."));
  const best = run.metric === "accuracy" && run.best_score != null ? [run.best_version, run.best_score] : null;
  const last = points[points.length - 1], judged = points.filter(p => p.macro_f1 != null);
  const band = points.filter(p => p.p10 != null && p.num_devices > 2).map(p => [p.version, p.p10, p.p90]);
  const chart = lineChart([{ name: "accuracy", points: points.map(p => [p.version, p.accuracy]) }, { name: "macro-F1", points: judged.map(p => [p.version, p.macro_f1]) }],
    { w: width, target: run.metric === "loss" ? null : run.target, best, band,
      label: `Accuracy by round, from ${score(points[0].accuracy)} to ${score(last.accuracy)}` });
  const note = last.num_devices ? `On the test data of ${plural(last.num_devices, "device")}, pooled.${band.length > 1 ? " The band holds the middle 80 % of the devices." : ""}` : "On the server’s own test data.";
  return section("Accuracy", note, chart, numbers(points));
}

export function numbers(points) {
  return h("details", {}, h("summary", {}, "Show the numbers"), scroll("Results by round",
    table(["Round", "Accuracy", "Macro-F1", "Loss", "Devices", "Seconds"], points.slice().reverse().map(p => [p.version === 0 ? "start" : p.version, p.accuracy.toFixed(4),
      p.macro_f1 == null ? "…" : p.macro_f1.toFixed(4), p.loss.toFixed(4), num(p.num_devices), p.seconds == null ? "–" : p.seconds.toFixed(1)]),
    [0, 1, 2, 3, 4, 5], { caption: "Results by round", keys: points.slice().reverse().map(p => `v${p.version}`) })));
}

export function lossSection(points, width) {
  if (points.length < 2) return null;
  const most = Math.max(...points.map(p => p.loss));
  return section("Loss", "Mean cross-entropy on the same test data.", lineChart([{ name: "loss", points: points.map(p => [p.version, p.loss]), tone: 3 }],
    { w: width, height: 190, top: most * 1.08, label: `Loss by round, from ${score(points[0].loss)} to ${score(points[points.length - 1].loss)}` }));
}

// ---- the round

export function movedRound(round) {
  const more = state.connected ? age("round") : 0, elapsed = round.elapsed_s + more;
  const devices = round.devices.map(device => {
    const open = ["offered", "accepted"].includes(device.state), spans = device.spans.slice();
    if (open && spans.length) spans[spans.length - 1] = { ...spans[spans.length - 1], ends_s: elapsed };
    return { ...device, spans };
  });
  return { ...round, elapsed_s: elapsed, devices };
}

export function roundSection(live, width, most = 14) {
  if (!live.round) return null;
  const round = movedRound(live.round), rows = round.is_complete ? round.devices.slice(0, most) : round.devices;
  const left = round.left_s == null ? "" : `; it ends at the latest in ${ago(round.left_s - age("round"))}`;
  const began = `Round ${round.number} began ${ago(round.elapsed_s)} ago${left}. ${num(round.num_done)} of ${num(round.num_devices)} updates are here.`;
  const fewer = rows.length < round.num_devices ? ` Below, the ${rows.length} that hold it up.` : "";
  const heads = ["fetch", "start", "train", "evaluate", "upload"];
  const seconds = (device, name) => { const own = device.spans.filter(span => span.name === name); return own.length ? own.reduce((sum, span) => sum + span.ends_s - span.begins_s, 0).toFixed(1) : ""; };
  return section("This round, device by device", began + fewer, phaseLegend(round.area ? [...heads, "lost", "done"] : undefined),
    round.area ? crowd(round.area, round.num_devices, width) : null, gantt(rows, round.elapsed_s, width),
    h("details", {}, h("summary", {}, "Show as a table"), scroll("Seconds of each device in this round",
      table(["Device", ...heads.map(name => `${PHASES[name]} (s)`)], rows.map(device => [deviceLink(device.name), ...heads.map(name => seconds(device, name))]),
        [1, 2, 3, 4, 5], { caption: "Seconds of each device in this round", keys: rows.map(device => device.name) }))));
}

// ---- memory

export const memoryCell = row => [memoryBar(row)];

export function memoryTable(rows) {
  return h("table", { class: "cards" }, h("caption", { class: "unseen" }, "Peak memory of devices"),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Device"), h("th", { scope: "col" }, "Share of the budget"), h("th", { scope: "col", class: "num" }, "Peak of budget"))),
    h("tbody", {}, rows.map(row => h("tr", { "data-key": row.name }, h("td", {}, deviceLink(row.name)), h("td", { class: "mem" }, memoryBar(row)),
      h("td", { class: "num nowrap" }, bytes(row.peak_bytes), h("small", {}, ` of ${bytes(row.budget_bytes)}`))))));
}

export function memorySection(fleet) {
  if (!fleet.num_measured) return section("Memory", "A device’s peak is measured with its first update.", none("No device has sent an update in this run."));
  const worst = fleet.nearest[0], share = worst.peak_bytes / worst.budget_bytes;
  const note = fleet.num_over ? `${plural(fleet.num_over, "device")} went over the budget.` :
    `Every measured peak is inside its budget. The nearest is ${worst.name}, with ${percent(share)} of it.`;
  const many = fleet.num_measured > 6;
  return section("Memory", note, many ? [histogram(fleet.histogram, room(SIDE)), h("h3", {}, "Nearest to their budget")] : null, memoryLegend(), memoryTable(fleet.nearest));
}

export const metricName = run => METRICS[run.metric] || run.metric;
