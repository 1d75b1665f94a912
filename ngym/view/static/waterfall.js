// Where did the seconds go? A lane for each thing that was called, a bar for each call; of a row that only has sums, the sums.
import { el } from "./dom.js";
import { formatPercent, formatSeconds, isNumber } from "./format.js";
import { safeLine } from "./safetext.js";

const WAITING = "waiting";
const PARTS = [
  ["queue_s", WAITING, "var(--s7)"],
  ["model_s", "model", "var(--s0)"],
  ["tools_s", "tools", "var(--s2)"],
  ["verify_s", "verifier", "var(--s4)"],
];
const OTHER = "var(--s6)";
const COLOURS = { model: "var(--s0)", tool: "var(--s2)", verify: "var(--s4)" };
const LEAST = 0.004; // of the whole: what is left over by rounding is no part

/**
 * timings: {queue_s, model_s, tools_s, verify_s, total_s, ...}; total_s holds the others but the queue.
 * spans: [[name, start, seconds], ...], counted from the end of the queue; or nothing.
 */
export function waterfall(timings, spans) {
  const lanes = hasSpans(spans) ? ofSpans(timings, spans) : ofSums(timings);
  const ends = lanes.flatMap(({ bars }) => bars.map(({ start, seconds }) => start + seconds));
  const whole = Math.max(waited(timings) + (isNumber(timings.total_s) ? timings.total_s : 0), ...ends, 1e-9);
  const total = el(
    "div",
    { class: "fall-line is-total" },
    el("span", null, "together"),
    el("span", null),
    el("span", { class: "num" }, formatSeconds(whole)),
  );
  return el("div", { class: "waterfall", role: "group", "aria-label": "Timings" }, lanes.map((lane) => laneLine(lane, whole)), total);
}

function laneLine({ name, colour, bars }, whole) {
  const seconds = bars.reduce((sum, bar) => sum + bar.seconds, 0);
  const drawn = bars.map((bar, place) =>
    el("span", {
      class: "fall-bar",
      title: bars.length > 1 ? `call ${place + 1} of ${bars.length}: ${formatSeconds(bar.seconds)}, after ${formatSeconds(bar.start)}` : null,
      vars: { "--start": String(bar.start / whole), "--share": String(bar.seconds / whole), "--colour": colour },
    }),
  );
  return el(
    "div",
    { class: "fall-line", title: `${name}: ${formatPercent(seconds / whole)} of ${formatSeconds(whole)}` },
    el("span", null, name),
    el("span", { class: "fall-track" }, drawn),
    el("span", { class: "num" }, formatSeconds(seconds)),
  );
}

function hasSpans(spans) {
  const isSpan = (span) => Array.isArray(span) && typeof span[0] === "string" && isNumber(span[1]) && isNumber(span[2]);
  return Array.isArray(spans) && spans.length > 0 && spans.every(isSpan);
}

/** In the order in which each was first called. */
function ofSpans(timings, spans) {
  const queue = waited(timings);
  const lanes = new Map();
  if (queue > 0) lanes.set("", { name: WAITING, colour: PARTS[0][2], bars: [{ start: 0, seconds: queue }] });
  for (const [name, start, seconds] of spans) {
    const [kind] = name.split(":", 1);
    const shown = safeLine(name.startsWith("tool:") ? name.slice(kind.length + 1) : name);
    if (!lanes.has(name)) lanes.set(name, { name: shown, colour: Object.hasOwn(COLOURS, kind) ? COLOURS[kind] : OTHER, bars: [] });
    lanes.get(name).bars.push({ start: queue + start, seconds });
  }
  return [...lanes.values()];
}

/** One after another, and what is in none of them. */
function ofSums(timings) {
  const known = PARTS.map(([key, name, colour]) => ({ name, colour, seconds: timings[key] }));
  const more = Object.keys(timings).filter((key) => key.endsWith("_s") && key !== "total_s" && !PARTS.some(([own]) => own === key));
  const parts = [...known, ...more.map((key) => ({ name: safeLine(key.slice(0, -2)), colour: OTHER, seconds: timings[key] }))].filter(
    ({ seconds }) => isNumber(seconds),
  );
  const inside = parts.filter(({ name }) => name !== WAITING).reduce((sum, { seconds }) => sum + seconds, 0);
  const rest = isNumber(timings.total_s) ? timings.total_s - inside : 0;
  if (rest > (waited(timings) + inside + rest) * LEAST) parts.push({ name: "other", colour: "var(--muted)", seconds: rest });
  let start = 0;
  return parts.map(({ name, colour, seconds }) => {
    const bar = { start, seconds };
    start += seconds;
    return { name, colour, bars: [bar] };
  });
}

function waited(timings) {
  return isNumber(timings.queue_s) ? timings.queue_s : 0;
}
