// The way to the coordinator: requests with the session's cookie, and one stream of events for all tabs of a browser.

import { state } from "./state.js";

export class ApiError extends Error {
  constructor(status, code, message) { super(message); this.status = status; this.code = code; }
}

async function request(method, path, body) {
  const headers = { Accept: "application/json" };
  if (method !== "GET") {
    headers["Content-Type"] = "application/json";
    if (state.session) headers["X-Fedfit-CSRF"] = state.session.csrf;
  }
  let response;
  try {
    response = await fetch(`api/v1/${path}`, { method, headers, credentials: "same-origin", cache: "no-store",
      body: method === "GET" ? undefined : JSON.stringify(body || {}) });
  } catch {
    throw new ApiError(0, "unreachable", "The coordinator does not answer.");
  }
  const answer = await response.json().catch(() => null);
  if (!response.ok) {
    const error = answer && answer.error || { code: "unknown", message: `The coordinator answered ${response.status}.` };
    throw new ApiError(response.status, error.code, error.message);
  }
  return answer;
}

export const get = (path, query) => request("GET", query ? `${path}?${new URLSearchParams(query)}` : path);
export const post = (path, body) => request("POST", path, body);
export const remove = path => request("DELETE", path);
export const part = text => encodeURIComponent(text);

const KINDS = ["run", "round", "fleet", "devices", "evaluation", "alerts", "log", "job", "resync", "bye"];

// Browsers allow six connections to a host: one tab holds the stream and passes it on. `hear(kind, data)` gets every
// event; `changed(connected)` hears when the stream is there and when it is not; `lost()` when it was refused.
export function listen(hear, changed, lost) {
  const channel = "BroadcastChannel" in self ? new BroadcastChannel("fedfit") : null;
  const tell = (kind, data) => { hear(kind, data); if (channel) channel.postMessage({ kind, data }); };
  if (channel) channel.onmessage = ({ data }) => {
    if (data.kind === "connected") changed(data.data); else hear(data.kind, data.data);
  };
  const connected = is => { changed(is); if (channel) channel.postMessage({ kind: "connected", data: is }); };
  let last = null;
  function open() {
    const source = new EventSource(last === null ? "api/v1/events" : `api/v1/events?since=${last}`);
    source.onopen = () => connected(true);
    source.onerror = () => {
      connected(false);
      if (source.readyState === EventSource.CLOSED) { source.close(); lost(); setTimeout(open, 2000); }
    };
    for (const kind of KINDS) source.addEventListener(kind, event => {
      if (event.lastEventId) last = event.lastEventId;
      if (kind === "bye") { source.close(); connected(false); setTimeout(open, 1000); return; }
      tell(kind, JSON.parse(event.data));
    });
  }
  if (channel && navigator.locks) {
    changed(true); // another tab may hold the stream; what is missing shows as its age
    navigator.locks.request("fedfit-stream", () => new Promise(() => open()));
  } else open();
}
