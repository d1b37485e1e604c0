// Charts as SVG without a library: text stays text, colours follow the theme, and the policy needs no exception.

import { h, s } from "./dom.js";
import { PHASES, bytes, num, percent, plural, score } from "./format.js";

// The width of a chart in pixels: letters keep their size when a chart is drawn at the width of its box.
export function room(share = [1, .55, .36]) {
  const width = document.documentElement.clientWidth;
  if (width < 1000) return Math.max(288, width - Math.max(32, Math.min(96, width * .06)));
  return Math.round((Math.min(width, 1760) - 96) * (width < 1700 ? share[1] : share[2]));
}
export const SIDE = [1, .375, .245];

const path = points => "M" + points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L");

function steps(most, count) {
  const rough = Math.max(most / count, 1e-9), power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 2.5, 5, 10].map(f => f * power).find(v => v >= rough);
}

// Lines over rounds. `lines` is [{name, points: [[x, y]]}], each labelled at its end.
export function lineChart(lines, { w = room(), height = 280, target = null, band = null, best = null, label, top = null } = {}) {
  const shown = lines.filter(line => line.points.length);
  const all = shown.flatMap(line => line.points);
  const fixed = top === null, highest = fixed ? 1 : Math.max(top, 1e-9);
  const names = shown.map(line => `${line.name} ${score(line.points[line.points.length - 1][1])}`);
  const L = 38, R = 14 + 7 * Math.max(6, ...names.map(name => name.length)), T = 12, B = 30;
  const last = Math.max(...all.map(p => p[0]), 4);
  const X = v => L + (w - L - R) * v / last, Y = v => T + (height - T - B) * (1 - Math.min(v, highest) / highest);
  const g = s("svg", { viewBox: `0 0 ${w} ${height}`, role: "img", "aria-label": label });
  const step = fixed ? .25 : steps(highest, 4);
  for (let v = 0; v <= highest + 1e-9; v += step) {
    const text = fixed && v % 1 ? v.toFixed(2).replace(/0$/, "") : String(+v.toPrecision(3));
    g.append(s("line", { class: "ax", x1: L, x2: w - R, y1: Y(v), y2: Y(v) }), s("text", { x: L - 8, y: Y(v) + 4, "text-anchor": "end" }, text));
  }
  const every = Math.max(1, Math.ceil(steps(last, w < 500 ? 4 : 8)));
  for (let v = 0; v <= last; v += every) g.append(s("text", { x: X(v), y: height - 8, "text-anchor": "middle" }, v === 0 ? "start" : v));
  if (target != null && target <= highest) g.append(
    s("line", { class: "target", x1: L, x2: w - R, y1: Y(target), y2: Y(target) }),
    s("text", { x: L + 8, y: Y(target) < T + 14 ? Y(target) + 15 : Y(target) - 6 }, `target ${target}`));
  if (band && band.length > 1) g.append(s("path", { class: "band",
    d: `${path(band.map(p => [X(p[0]), Y(p[2])]))}L${path(band.slice().reverse().map(p => [X(p[0]), Y(p[1])])).slice(1)}Z` }));
  const ends = shown.map((line, i) => ({ i, y: Y(line.points[line.points.length - 1][1]) })).sort((a, b) => a.y - b.y);
  ends.forEach((end, k) => { if (k && end.y - ends[k - 1].y < 16) end.y = ends[k - 1].y + 16; });
  const over = Math.max(0, ...ends.map(end => end.y - (height - B)));
  shown.forEach((line, i) => {
    const at = line.points[line.points.length - 1], n = line.tone || i + 1;
    if (line.points.length > 1) g.append(s("path", { class: `l${n}`, d: path(line.points.map(p => [X(p[0]), Y(p[1])])) }));
    g.append(s("circle", { class: `c${n}`, cx: X(at[0]), cy: Y(at[1]), r: line.points.length > 1 ? 2.5 : 4 }),
      s("text", { class: `t${n}`, x: X(at[0]) + 9, y: ends.find(end => end.i === i).y + 4 - over }, names[i]));
  });
  if (best) g.append(s("circle", { class: "ring", cx: X(best[0]), cy: Y(best[1]), r: 4.5 },
    s("title", {}, `best so far: ${best[1].toFixed(4)} after round ${best[0]}`)));
  return g;
}

// The budget is the whole width, so devices of any size compare at a glance.
export function memoryBar({ name, budget_bytes: budget, predicted_bytes: predicted, peak_bytes: peak }, w = 300) {
  const label = `${name}: ${peak ? `peak ${bytes(peak)}` : "no peak measured yet"}, predicted ${bytes(predicted)}, budget ${bytes(budget)}`;
  const g = s("svg", { class: "memory", viewBox: `0 0 ${w} 16`, role: "img", preserveAspectRatio: "none", "aria-label": label });
  const x = b => (w - 2) * Math.min(1, b / budget);
  g.append(s("rect", { class: "track", x: 0, y: 3, width: w - 2, height: 10 }));
  if (budget && peak) g.append(s("rect", { class: `peak${peak > budget ? " over" : peak < .6 * budget ? " easy" : ""}`, x: 0, y: 3, width: x(peak), height: 10 }));
  if (budget && predicted) g.append(s("line", { class: "pred", x1: x(predicted), x2: x(predicted), y1: 0, y2: 16 }));
  g.append(s("line", { class: "limit", x1: w - 1, x2: w - 1, y1: 1, y2: 15 }));
  return g;
}

export const memoryLegend = () => h("ul", { class: "legend" }, h("li", {}, h("i", { class: "b-train" }), "measured peak"),
  h("li", {}, h("i", { class: "tick" }), "predicted"), h("li", {}, "right edge: the device’s budget"));

// Devices by the share of their budget that their peak took.
export function histogram(bins, w = room(SIDE)) {
  const most = Math.max(1, ...bins), total = bins.reduce((a, b) => a + b, 0), L = 6, R = 8, H = 150, base = H - 24;
  const inside = bins.slice(0, -1), width = (w - L - R - 10) / inside.length, X = v => L + (w - L - R - 10) * v;
  const g = s("svg", { viewBox: `0 0 ${w} ${H}`, role: "img",
    "aria-label": `Peak memory as a share of each device’s budget, ${plural(total, "device")}; ${bins[bins.length - 1]} over the budget` });
  for (const v of [0, .25, .5, .75, 1]) g.append(
    s("line", { class: v === 1 ? "limit" : "ax", x1: X(v), x2: X(v), y1: 6, y2: base }),
    s("text", { x: X(v), y: H - 6, "text-anchor": v === 0 ? "start" : v === 1 ? "end" : "middle" }, v === 1 ? "budget" : `${v * 100} %`));
  bins.forEach((count, i) => {
    if (!count) return;
    const height = Math.max(2, (base - 10) * count / most), over = i === bins.length - 1;
    g.append(s("rect", { class: `peak${over ? " over" : i < .6 * inside.length ? " easy" : ""}`, x: L + i * width + (over ? 3 : .75), y: base - height, width: Math.max(1, width - 1.5), height },
      s("title", {}, over ? `${plural(count, "device")} over the budget` : `${plural(count, "device")} at ${percent(i / inside.length)} to ${percent((i + 1) / inside.length)}`)));
  });
  return g;
}

export const phaseLegend = (names = ["fetch", "start", "train", "evaluate", "upload", "lost"]) =>
  h("ul", { class: "legend" }, names.map(name => h("li", {}, h("i", { class: `b-${name}` }), PHASES[name])));

function timeTicks(end, w) {
  const step = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200].find(v => end / v <= (w < 500 ? 4 : 7)) || 14400;
  return Array.from({ length: Math.floor(end / step) + 1 }, (_, i) => i * step);
}
const timeText = t => t < 120 ? `${t} s` : t < 7200 ? `${t / 60} min` : `${t / 3600} h`;

// One row per device: what it did since the round began.
export function gantt(rows, elapsed, w = room()) {
  const row = rows.length > 30 ? 16 : 25, bar = row - (rows.length > 30 ? 6 : 12), L = Math.min(132, w * .3);
  const end = Math.max(elapsed * 1.06, 5), H = rows.length * row + 28, X = t => L + (w - L - 30) * Math.min(t, end) / end;
  const letters = Math.floor((L - 8) / 6.9);
  const g = s("svg", { viewBox: `0 0 ${w} ${H}`, role: "img", "aria-label": "What each device did in this round; the same as a table below" });
  for (const t of timeTicks(end, w)) g.append(s("line", { class: "ax", x1: X(t), x2: X(t), y1: 0, y2: H - 24 }),
    s("text", { x: X(t), y: H - 8, "text-anchor": "middle" }, timeText(t)));
  rows.forEach((device, i) => {
    const name = device.name.length > letters ? device.name.slice(0, letters - 1) + "…" : device.name;
    g.append(s("text", { class: "ink", x: 0, y: i * row + row / 2 + 4 }, name, s("title", {}, device.name)),
      s("rect", { class: "track", x: X(0), y: i * row + row / 2 - .5, width: X(elapsed) - X(0), height: 1 }));
    for (const span of device.spans) {
      const lost = span.name === "lost";
      g.append(s("rect", { class: `p-${span.name}`, x: X(span.begins_s), y: i * row + (row - bar) / 2 + (lost ? bar / 2 - 1.5 : 0),
        width: Math.max(1, X(span.ends_s) - X(span.begins_s) - .6), height: lost ? 3 : bar },
        s("title", {}, `${device.name}, ${PHASES[span.name]}: ${(span.ends_s - span.begins_s).toFixed(1)} s`)));
    }
  });
  g.append(s("line", { class: "now", x1: X(elapsed), x2: X(elapsed), y1: 0, y2: H - 24 }));
  return g;
}

// Many devices: how many were in which phase at each time of the round.
export function crowd(area, total, w = room()) {
  const L = 44, R = 14, H = 210, T = 8, B = 30, kinds = ["lost", "done", "upload", "evaluate", "train", "start", "fetch"].filter(k => area.phases[k]);
  const end = area.times_s[area.times_s.length - 1] || 1, X = t => L + (w - L - R) * t / end, Y = v => T + (H - T - B) * (1 - v / Math.max(1, total));
  const g = s("svg", { viewBox: `0 0 ${w} ${H}`, role: "img", "aria-label": `How many of ${num(total)} devices were in each phase of this round` });
  let base = area.times_s.map(() => 0);
  for (const kind of kinds) {
    const low = base; base = low.map((v, i) => v + area.phases[kind][i]);
    if (Math.max(...area.phases[kind]) === 0) continue;
    const upper = area.times_s.map((t, i) => [X(t), Y(base[i])]), lower = area.times_s.map((t, i) => [X(t), Y(low[i])]).reverse();
    g.append(s("path", { class: kind === "done" ? "p-done" : `p-${kind}`, d: `${path(upper)}L${path(lower).slice(1)}Z` }, s("title", {}, PHASES[kind])));
  }
  for (const v of [0, total / 2, total]) g.append(s("text", { x: L - 8, y: Y(v) + 4, "text-anchor": "end" }, num(Math.round(v))),
    s("line", { class: "ax over", x1: L, x2: w - R, y1: Y(v), y2: Y(v) }));
  for (const t of timeTicks(end, w)) g.append(s("text", { x: X(t), y: H - 8, "text-anchor": "middle" }, timeText(t)));
  return g;
}

export function shareBar(value, w = 220) {
  return s("svg", { class: "memory", viewBox: `0 0 ${w} 12`, preserveAspectRatio: "none", "aria-hidden": "true" },
    s("rect", { class: "track", x: 0, y: 1, width: w, height: 10 }), s("rect", { class: "peak", x: 0, y: 1, width: w * value, height: 10 }));
}
