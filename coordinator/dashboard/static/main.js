// The life of the page: signing in, which view is shown, the stream of events, the theme, the keyboard.

import { ApiError, get, listen, post } from "./api.js";
import { compare } from "./compare.js";
import { device } from "./device.js";
import { devices } from "./devices.js";
import { h, morph } from "./dom.js";
import { ago } from "./format.js";
import { logs } from "./logs.js";
import { headline, overview } from "./overview.js";
import { run } from "./run.js";
import { settings } from "./settings.js";
import { state, takeEvent, takeLive } from "./state.js";

const main = document.getElementById("main"), liveMark = document.getElementById("live");
const VIEWS = { "": overview, run, devices, compare, logs, settings };
let view = null, place = null, number = 0, drawing = false, reloadAt = 0, reloadTimer = 0;

// ---- which view

function read() {
  const [path, search] = (location.hash.slice(1) || "/").split("?");
  const [, first = "", second = ""] = path.split("/");
  let name = second;
  try { name = decodeURIComponent(second); } catch { /* as it is */ }
  const chosen = first === "devices" && name ? device : VIEWS[first] || overview;
  return { view: chosen, nav: first || "overview", name, params: new URLSearchParams(search || "") };
}

async function show(focus) {
  const now = ++number;
  place = read();
  const wanted = place.view;
  for (const link of document.querySelectorAll("[data-nav]")) {
    if (link.dataset.nav === place.nav) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  try {
    wanted.reload = () => reload(0);
    wanted.refresh = draw;
    if (wanted.load) await wanted.load(place);
    if (now !== number) return;
    view = wanted;
    main.replaceChildren();
    render();
  } catch (error) {
    if (now === number) failed(error);
  }
  if (focus) { scrollTo(0, 0); const title = main.querySelector("h1"); if (title) title.focus({ preventScroll: true }); }
}

function failed(error) {
  if (error instanceof ApiError && error.status === 401) { signedOut(); return; }
  view = null;
  const back = error.code === "unknown_device" ? h("a", { href: "#/devices" }, "All devices") : error.code === "unknown_run" ? h("a", { href: "#/run" }, "All runs") : h("a", { href: "#/" }, "Overview");
  if (error instanceof ApiError) morph(main, [h("h1", { tabindex: "-1" }, error.status === 404 ? "Not found" : "This did not work"), h("p", { class: "lead" }, error.message), h("p", {}, back)]);
  else throw error;
}

function render() {
  if (!view || !state.live) return;
  morph(main, view.render());
  document.title = `${view.title()} · fedfit`;
  document.getElementById("foot").textContent = `Federation ${state.live.federation}, fedfit ${state.live.version}. Times are those of this browser.`;
}

function draw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => { drawing = false; render(); });
}

// Load what the view shows again: at once, further ones at most every 250 ms, in a large fleet every second.
function reload(wait) {
  const pause = wait === 0 ? 0 : state.live.fleet.total > 200 ? 1000 : 250;
  const due = Math.max(0, reloadAt + pause - performance.now());
  clearTimeout(reloadTimer);
  reloadTimer = setTimeout(async () => {
    reloadAt = performance.now();
    const now = number, wanted = view;
    if (!wanted || !wanted.load) return;
    try { await wanted.load(place); if (now === number) draw(); } catch (error) { if (error.status === 401) signedOut(); else if (error.status === 404 && now === number) failed(error); }
  }, due);
}

// ---- how things stand

async function refetch() {
  try { takeLive(await get("live")); draw(); } catch (error) { if (error.status === 401) signedOut(); }
}

let said = "", saidAt = -Infinity;
function announce() {
  const sentence = headline(state.live.run);
  if (sentence === said || performance.now() - saidAt < 15000) return;
  saidAt = performance.now();
  said = sentence;
  document.getElementById("announce").textContent = sentence;
}

function heard(kind, data) {
  if (kind === "resync") refetch(); else takeEvent(kind, data);
  draw();
  if (view && view.events.includes(kind)) reload(250);
}

function connected(is) {
  const before = state.connected;
  state.connected = is;
  if (is && !before) state.heard = performance.now();
  mark();
}

function mark() {
  const silent = (performance.now() - state.heard) / 1000;
  liveMark.classList.toggle("stale", !state.connected);
  liveMark.textContent = state.connected ? "Live" : `Last update ${ago(silent)} ago`;
}

// ---- signing in

function signedOut() {
  number++;
  view = null;
  state.session = null;
  document.getElementById("nav").hidden = true;
  liveMark.textContent = "";
  const wrong = h("p", { class: "wrong", role: "alert" });
  const field = h("input", { id: "secret", autocomplete: "off", spellcheck: "false" });
  morph(main, [h("div", { class: "signin" }, h("h1", { tabindex: "-1" }, "Open the page of your fleet"),
    h("p", { class: "lead" }, "This browser is not signed in. On the server, print a link and open it:"), h("pre", { tabindex: "0" }, "coordinator page link"),
    h("form", { onsubmit: async event => {
      event.preventDefault();
      try { await signIn(field.value.trim().replace(/^.*#t=/, "")); } catch (error) { wrong.textContent = error.message; }
    } }, h("label", { for: "secret" }, "Or paste a link or a token here"), field, h("button", { type: "submit", class: "main" }, "Sign in")), wrong)]);
  document.title = "Sign in · fedfit";
  return wrong;
}

async function signIn(token) {
  state.session = await post("session", { token });
  await begin();
}

let listening = false;
async function begin(live = get("live")) {
  takeLive(await live);
  document.getElementById("nav").hidden = false;
  if (!listening) { listening = true; listen(heard, connected, checkSession); }
  await show(false);
}

async function checkSession() {
  try { state.session = await get("session"); await refetch(); } catch (error) { if (error.status === 401) signedOut(); }
}

// ---- theme and keyboard

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.getElementById("theme").textContent = dark ? "Light" : "Dark";
}

function themes() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem("fedfit-theme"); } catch { /* private browsing */ }
  setTheme(chosen ? chosen === "dark" : system.matches);
  system.addEventListener("change", () => { if (!chosen) setTheme(system.matches); });
  document.getElementById("theme").onclick = () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("fedfit-theme", chosen); } catch { /* for this visit only */ }
    setTheme(chosen === "dark");
  };
}

addEventListener("keydown", event => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || /INPUT|SELECT|TEXTAREA/.test(document.activeElement.tagName)) return;
  event.preventDefault();
  const find = () => { const field = document.getElementById("find"); if (field) field.focus(); return Boolean(field); };
  if (!find()) { location.hash = "#/devices"; const again = setInterval(() => { if (find()) clearInterval(again); }, 30); setTimeout(() => clearInterval(again), 3000); }
});
addEventListener("hashchange", () => { if (state.session) { if (location.hash.startsWith("#t=")) start(); else show(true); } });
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
addEventListener("online", refetch);
setInterval(() => { if (state.session && state.live) { mark(); announce(); draw(); } }, 1000);

async function start() {
  const link = /^#t=([\w-]+)$/.exec(location.hash);
  if (link) {
    history.replaceState(null, "", "#/");
    const before = state.session; // another one: it is signed in, and only what it shows is late
    try { await signIn(link[1]); return; } catch (error) { if (state.session === before) { signedOut().textContent = error.message; return; } }
  }
  try {
    const live = get("live"); // both at once: the first view is there sooner
    live.catch(() => null);
    state.session = await get("session");
    await begin(live);
  } catch (error) {
    if (error.status === 401) signedOut(); else if (error instanceof ApiError) { failed(error); setTimeout(start, 2000); } else throw error;
  }
}

themes();
start();
