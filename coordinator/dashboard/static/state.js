// What the page knows: the session, the newest sections of the overview, and when each of them came.

export const state = {
  session: null, // {name, role, csrf}
  live: null, // as GET live
  at: {}, // section -> when it came, in milliseconds
  connected: false,
  heard: 0, // when the newest answer or event came
};

export const age = section => (performance.now() - (state.at[section] || 0)) / 1000; // seconds
export const mayOperate = () => state.session !== null && state.session.role === "operate";

export function takeLive(live) {
  state.live = live;
  for (const section of ["run", "curve", "fleet", "round", "alerts"]) state.at[section] = performance.now();
  state.heard = performance.now();
}

const SECTIONS = { run: "run", round: "round", fleet: "fleet", alerts: "alerts", evaluation: "curve" };

export function takeEvent(kind, data) {
  state.heard = performance.now();
  const section = SECTIONS[kind];
  if (section && state.live) {
    state.live[section] = data[kind];
    state.at[section] = performance.now();
  }
}
