// Keyboard shortcuts. A page names its keys; `?` shows them all. No key acts during typing.
import { button, clear, el } from "./dom.js";

const ALWAYS = [
  ["?", "this help", () => toggleHelp()],
  ["g", "the list of runs", () => (location.hash = "#/")],
];
const LANGUAGE = [
  ["reward<0.5 reward>=0.2", "numbers: reward, tokens, turns, tool_calls, seconds, task, advantage … with : < <= > >="],
  ["status:failed", "ok, truncated, unscored, failed"],
  ["failure:timeout", "the class of a failure"],
  ["status:failed,truncated", "one of several"],
  ["stop:max_steps", "why it stopped: answer, max_steps, context, length, user_done"],
  ["agent:math_agent", "one environment's agent"],
  ["level:3", "any other scalar field of the row; component.NAME<0.5 a part of the reward"],
  ["reward:null", "a value that is not known"],
  ["-stop:answer", "a minus: rows for which it does not hold"],
  ['boxed "let me think"', "any other word or quotation: rows whose whole text holds it"],
];
let current = [];
const dialog = el("dialog", { class: "help", "aria-label": "Help" });

/** keys: [[key, what it does, action]]; they hold until the next call. */
export function pageKeys(keys) {
  current = keys;
}

export function listenForKeys() {
  document.body.append(dialog);
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || writes(event.target)) return;
    if (dialog.open && event.key !== "?") return;
    const found = [...current, ...ALWAYS].find(([keys]) => keys.split(" ").includes(event.key));
    if (!found || (event.key === "Enter" && event.target.closest("a, button, summary, select"))) return;
    event.preventDefault();
    found[2](event.key);
  });
}

export function toggleHelp() {
  if (dialog.open) return dialog.close();
  const keys = [...current, ...ALWAYS].map(([names, what]) => [names.split(" ").map((name) => el("kbd", null, SHOWN[name] ?? name)), what]);
  const terms = LANGUAGE.map(([term, what]) => [el("code", null, term), what]);
  clear(dialog).append(
    el("h2", null, "Keys"),
    list(keys),
    el("h2", null, "The filter"),
    el("p", { class: "muted" }, "Separate terms by spaces; a row must match all of them."),
    list(terms),
    button("Close", () => dialog.close()),
  );
  dialog.showModal();
}

const SHOWN = { ArrowUp: "↑", ArrowDown: "↓", Escape: "esc", Backspace: "⌫" };

function list(pairs) {
  return el(
    "dl",
    { class: "pairs" },
    pairs.map(([term, what]) => [el("dt", null, term), el("dd", null, what)]),
  );
}

function writes(target) {
  return target instanceof Element && target.closest("input:not([type=checkbox]), textarea, select, [contenteditable]") !== null;
}
