// Where did the seconds go? The parts of a rollout's time one after another, as the row sums them up.
import { el } from "./dom.js";
import { formatPercent, formatSeconds, isNumber } from "./format.js";
import { safeLine } from "./safetext.js";

const PARTS = [
  ["queue_s", "waiting", "var(--s7)"],
  ["model_s", "model", "var(--s0)"],
  ["tools_s", "tools", "var(--s2)"],
  ["verify_s", "verifier", "var(--s4)"],
];
const LEAST = 0.004; // of the whole: what is left over by rounding is no part

/** timings: {queue_s, model_s, tools_s, verify_s, total_s, ...}; total_s holds the others but the queue. */
export function waterfall(timings) {
  const known = PARTS.map(([key, name, colour]) => ({ name, colour, seconds: timings[key] }));
  const more = Object.keys(timings).filter((key) => key.endsWith("_s") && key !== "total_s" && !PARTS.some(([own]) => own === key));
  const parts = [...known, ...more.map((key) => ({ name: safeLine(key.slice(0, -2)), colour: "var(--s6)", seconds: timings[key] }))].filter(
    ({ seconds }) => isNumber(seconds),
  );
  const inside = parts.filter(({ name }) => name !== "waiting").reduce((sum, { seconds }) => sum + seconds, 0);
  const rest = isNumber(timings.total_s) ? timings.total_s - inside : 0;
  const whole = Math.max((timings.queue_s ?? 0) + Math.max(inside, timings.total_s ?? 0), 1e-9);
  if (rest > whole * LEAST) parts.push({ name: "other", colour: "var(--muted)", seconds: rest });
  let start = 0;
  const lines = parts.map(({ name, colour, seconds }) => {
    const bar = el("span", {
      class: "fall-bar",
      vars: { "--start": String(start / whole), "--share": String(seconds / whole), "--colour": colour },
    });
    start += seconds;
    return el(
      "div",
      { class: "fall-line", title: `${formatPercent(seconds / whole)} of ${formatSeconds(whole)}` },
      el("span", null, name),
      el("span", { class: "fall-track" }, bar),
      el("span", { class: "num" }, formatSeconds(seconds)),
    );
  });
  const total = el(
    "div",
    { class: "fall-line is-total" },
    el("span", null, "together"),
    el("span", null),
    el("span", { class: "num" }, formatSeconds(whole)),
  );
  return el("div", { class: "waterfall", role: "group", "aria-label": "Timings" }, lines, total);
}
