// Questions before something changes, and short notices about what has.

import { get, part, post } from "./api.js";
import { h } from "./dom.js";
import { plural } from "./format.js";

const dialog = document.getElementById("dialog");

dialog.addEventListener("close", () => dialog.replaceChildren());

export function notice(text, { href = "", link = "", download = "" } = {}) {
  const close = h("button", { type: "button", class: "plain", "aria-label": "Close this notice", onclick: () => box.remove() }, "×");
  const box = h("div", { class: "notice" }, h("p", {}, text, href ? [" ", h("a", download ? { href, download } : { href }, link)] : null), close);
  document.getElementById("notices").append(box);
  if (!href) setTimeout(() => box.remove(), 8000);
}

// Ask once, naming the effect. `choices` is [[label, what to do, is it the main one]].
function ask(title, content, choices) {
  const failed = h("p", { class: "wrong", role: "alert" });
  const buttons = choices.map(([label, act, main]) => h("button", { type: "button", class: main ? "main" : null, onclick: async event => {
    event.target.disabled = true;
    try { await act(); dialog.close(); } catch (error) { failed.textContent = error.message; }
    event.target.disabled = false;
  } }, label));
  dialog.replaceChildren(h("h2", { id: "dialog-title" }, title), h("div", {}, content), failed,
    h("div", { class: "acts" }, buttons, h("button", { type: "button", class: "plain", onclick: () => dialog.close() }, "Cancel")));
  dialog.showModal();
}

async function watchJob(job, { done, href = "", link = "", download = "" }) {
  let now = job;
  while (now.state === "running") {
    await new Promise(resolve => setTimeout(resolve, 700));
    now = await get(`jobs/${part(job.id)}`).catch(() => now);
  }
  if (now.state === "done") notice(done(now), { href, link, download });
  else notice(`${now.kind} failed: ${now.lines.slice(-2).join(" ") || "no reason was printed"}`);
}

export function stopRun(run) {
  ask(`Stop ${run.run}?`, h("p", {}, `It ends after round ${run.round}, and its model is kept. “Stop now” also drops the round that is under way.`), [
    ["Stop after this round", async () => { await post(`runs/${part(run.run)}/stop`, { now: false }); notice(`${run.run} ends after its round.`); }, true],
    ["Stop now", async () => { await post(`runs/${part(run.run)}/stop`, { now: true }); notice(`${run.run} ends now.`); }, false],
  ]);
}

export function exportModel(run) {
  const start = version => async () => {
    const job = await post(`runs/${part(run.run)}/export`, { version });
    notice(`Writing ${run.run}-${version}.onnx; it is compared with torch, which takes a while.`);
    watchJob(job, { done: () => `${run.run}-${version}.onnx is ready.`, href: `api/v1/jobs/${part(job.id)}/file`, link: "Download", download: `${run.run}-${version}.onnx` });
  };
  const best = run.best_version == null ? "" : ` The best version is ${run.best_version}.`;
  ask(`Export a model of ${run.run}?`, h("p", {}, `It is written as ONNX and checked against torch.${best}`),
    [["Export the best", start("best"), true], ["Export the last", start("last"), false]]);
}

export function deployModel(run, fleet) {
  const start = version => async () => {
    const job = await post(`runs/${part(run.run)}/deploy`, { version });
    watchJob(job, { done: now => now.lines[0] || `${run.run} is on its way to the devices.` });
    notice(`Sending ${run.run} (${version}) to the devices.`);
  };
  ask(`Deploy ${run.run} to ${plural(fleet.total, "device")}?`, h("p", {}, "Each device tests the model before it uses it, and goes back to the one before if the test fails."),
    [["Deploy the best", start("best"), true], ["Deploy the last", start("last"), false]]);
}

export function startRun(run = null) {
  if (run) {
    ask(`Start ${run.method} with ${run.model} again?`, h("p", {}, `A new run with the file of ${run.run}. It waits if another run trains.`), [
      ["Start", async () => { const made = await post("runs", { again: run.run }); notice(`${made.run} was started.`); location.hash = `#/run/${part(made.run)}`; }, true],
    ]);
    return;
  }
  const text = h("textarea", { id: "run-file", rows: 14, spellcheck: "false", placeholder: 'name = "photos"\nmodel = { name = "small-cnn", input = [3, 96, 96] }\nclasses = ["cat", "plane", "ship"]\n' });
  const send = dry => async () => {
    const job = await post("runs", { file: text.value, dry });
    notice(dry ? "Asking every device what it would train." : "The run is being checked.");
    watchJob(job, { done: now => dry ? now.lines.join("\n") : now.lines[now.lines.length - 1] || "The run was started." });
  };
  ask("Start a run", [h("p", {}, "Paste a run file. coordinator new writes one for your data; tasks with code of their own are started in a terminal."),
    h("label", { for: "run-file" }, "Run file"), text], [["Start", send(false), true], ["Dry run", send(true), false]]);
}

