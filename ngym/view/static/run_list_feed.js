// The list of runs, requested every 2 s while one of them grows, seldom otherwise, and never in a hidden tab.

const EVERY_MS = 2000;
const SELDOM_MS = 5000; // a finished file may be written to again
const SILENT_MS = 15_000; // a server that is silent for so long is shown as unreachable
const TORN_BYTES = 1_000_000; // a last line that is still being written is not read yet

/** {state: {runs, title, error}, refresh(), onChange(f(state)) -> stop()}. `runs` is null until the first answer. */
export function followRuns(api) {
  const listeners = new Set();
  const state = { runs: null, title: "ngym", error: null };
  let timer = null;

  const refresh = async () => {
    clearTimeout(timer);
    try {
      Object.assign(state, await api.runs(AbortSignal.timeout(SILENT_MS)));
      state.error = null;
    } catch (error) {
      state.error = error;
    }
    const ends = isRefused(state) || document.hidden || api.packed;
    if (!ends) timer = setTimeout(refresh, state.error || state.runs.some((run) => run.growing) ? EVERY_MS : SELDOM_MS);
    for (const listener of [...listeners]) listener(state);
  };
  document.addEventListener("visibilitychange", () => !document.hidden && !api.packed && !isRefused(state) && refresh());
  return {
    state,
    refresh,
    onChange(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
}

/** Without its token the server answers nothing; it is asked again when the reader has given one. */
function isRefused({ error }) {
  return error?.status === 401;
}

/** Whether much of the file is not read yet. */
export function isIndexing(run) {
  return run.kind === "rollouts" && run.growing && !run.error && run.bytes - run.indexed_bytes > TORN_BYTES;
}
