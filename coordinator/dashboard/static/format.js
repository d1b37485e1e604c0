// Numbers, sizes, durations and words as people read them.

export const STATES = {
  train: "training", evaluate: "evaluating", upload: "sending", fetch: "fetching", start: "starting", wait: "waiting",
  done: "done", idle: "idle", rests: "resting", offline: "offline", failed: "failed",
};
export const PHASES = {
  fetch: "fetch", start: "start", train: "train", evaluate: "evaluate", upload: "send", lost: "not connected", done: "done", wait: "wait",
};
export const WORKING = ["train", "evaluate", "upload", "fetch", "start", "wait", "done"];
export const METRICS = { accuracy: "Accuracy", "balanced-accuracy": "Balanced accuracy", "macro-f1": "Macro-F1", loss: "Loss" };

export const num = n => n == null ? "–" : n.toLocaleString("en-US");
export const plural = (n, one, many) => `${num(n)} ${n === 1 ? one : many || one + "s"}`;
export const score = v => v == null ? "–" : v.toFixed(3);
export const percent = v => v == null ? "–" : `${(100 * v).toFixed(1)} %`;

export function bytes(b) {
  if (b == null) return "–";
  if (b >= 1e10) return `${Math.round(b / 1e9)} GB`;
  if (b >= 1e9) return `${(b / 1e9).toFixed(1)} GB`;
  if (b >= 1e7) return `${Math.round(b / 1e6)} MB`;
  if (b >= 1e6) return `${(b / 1e6).toFixed(1)} MB`;
  return b >= 1e3 ? `${Math.round(b / 1e3)} kB` : `${b} B`;
}

export function ago(seconds) {
  const t = Math.max(0, seconds);
  if (t < 90) return `${Math.round(t)} s`;
  if (t < 5400) return `${Math.round(t / 60)} min`;
  return t < 172800 ? `${(t / 3600).toFixed(1)} h` : `${Math.round(t / 86400)} days`;
}

export function clock(secondsAgo) {
  const at = new Date(Date.now() - 1000 * secondsAgo);
  const time = at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
  return secondsAgo > 64800 ? `${at.toLocaleDateString([], { day: "numeric", month: "short" })} ${time}` : time;
}
