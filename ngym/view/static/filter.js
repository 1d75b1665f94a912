// The filter box: it suggests names and values, and reports what is wrong with a term.
import { clear, el } from "./dom.js";
import { toggleHelp } from "./keys.js";
import { safeLine } from "./safetext.js";

const NUMBERS = [
  "reward",
  "task",
  "rollout",
  "turns",
  "tool_calls",
  "tool_errors",
  "tokens",
  "input_tokens",
  "seconds",
  "advantage",
  "group_mean",
  "attempt",
  "policy_version",
];
const VALUES = {
  status: ["ok", "truncated", "unscored", "failed"],
  failure: [
    "config",
    "connect",
    "timeout",
    "model_error",
    "context_length",
    "tool_error",
    "agent_error",
    "verify_error",
    "judge_error",
    "cancelled",
  ],
  stop: ["answer", "max_steps", "context", "length", "user_done"],
};
const UNFINISHED = /[:<>=]$/; // a term that waits for its value
const NAME = /^[^\s":<>=!]+$/; // a field with another one is written in quotes
const PAUSE_MS = 350;
const MOST = 12;

/** run() -> the run; onFilter(q) after a pause in the typing, or at Enter. -> {element, focus(), show(q), problem(text), close()} */
export function filterBox(run, onFilter) {
  const input = el("input", {
    type: "search",
    class: "filter-input",
    placeholder: "Filter: reward<0.5 status:failed or any text",
    spellcheck: "false",
    autocomplete: "off",
    role: "combobox",
    "aria-label": "Filter",
    "aria-expanded": "false",
    "aria-controls": "filter-suggestions",
    "aria-autocomplete": "list",
  });
  const list = el("ul", { class: "popover suggestions", id: "filter-suggestions", role: "listbox", hidden: true });
  const problem = el("div", { class: "filter-problem", role: "alert" });
  const help = el(
    "button",
    {
      type: "button",
      class: "button quiet icon",
      title: "How to filter, and keys (?)",
      "aria-label": "Help with the filter",
      on: { click: toggleHelp },
    },
    "?",
  );
  let timer = 0;
  let marked = -1;
  let applied = "";

  const apply = () => {
    clearTimeout(timer);
    const q = input.value.trim();
    if (q === applied) return;
    applied = q;
    onFilter(q);
  };
  const hide = () => {
    list.hidden = true;
    marked = -1;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  };
  let offered = [];
  const choose = (text) => {
    clearTimeout(timer);
    replaceWord(input, text);
    hide();
    if (UNFINISHED.test(text)) suggest();
    else apply();
  };
  const suggest = () => {
    offered = suggestionsFor(wordAt(input).text, run());
    clear(list).append(
      ...offered.map((text, i) =>
        el(
          "li",
          {
            role: "option",
            id: `suggestion-${i}`,
            "aria-selected": "false",
            on: {
              pointerdown: (event) => {
                event.preventDefault();
                choose(text);
              },
            },
          },
          safeLine(text),
        ),
      ),
    );
    marked = -1;
    list.hidden = offered.length === 0;
    input.setAttribute("aria-expanded", String(!list.hidden));
  };
  const mark = (step) => {
    marked = (marked + step + list.children.length) % list.children.length;
    [...list.children].forEach((item, i) => item.setAttribute("aria-selected", String(i === marked)));
    input.setAttribute("aria-activedescendant", `suggestion-${marked}`);
  };

  input.addEventListener("input", () => {
    suggest();
    clearTimeout(timer);
    timer = setTimeout(() => UNFINISHED.test(input.value) || apply(), PAUSE_MS);
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" && list.hidden) suggest();
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") mark(event.key === "ArrowDown" ? 1 : marked < 0 ? 0 : -1);
    else if (event.key === "Enter" && marked >= 0) choose(offered[marked]);
    else if (event.key === "Enter") {
      hide();
      apply();
    } else if (event.key === "Escape" && !list.hidden) hide();
    else if (event.key === "Escape") input.blur();
    else return;
    event.preventDefault();
  });
  input.addEventListener("blur", hide);
  return {
    element: el("div", { class: "filter" }, el("div", { class: "filter-line" }, input, help), list, problem),
    focus: () => input.focus(),
    problem: (text) => (problem.textContent = text),
    close: () => clearTimeout(timer),
    show(q) {
      applied = q;
      if (document.activeElement !== input || input.value.trim() !== q) input.value = q;
    },
  };
}

/** A value as the filter's language has it: in quotes where it is more than one word. */
export function filterValue(name) {
  return name === null || (/^[\w.-]+$/.test(name) && name !== "null") ? String(name) : `"${name.replace(/[\\"]/g, "\\$&")}"`;
}

/** Names that begin like the word, or values once the name is there. */
function suggestionsFor(word, run) {
  const bare = word.replace(/^-/, "");
  const sign = word.slice(0, word.length - bare.length);
  const [name, value] = bare.split(":");
  if (value !== undefined) {
    const known = name === "agent" ? (run.environments ?? []) : Object.hasOwn(VALUES, name) ? VALUES[name] : [];
    return known.filter((one) => one.startsWith(value) && one !== value).map((one) => `${sign}${name}:${filterValue(one)}`);
  }
  if (/[<>=]/.test(bare)) return [];
  const names = [...Object.keys(VALUES), "agent", ...(run.fields ?? []).map((name) => (NAME.test(name) ? name : `"${name}"`))].map((one) => `${one}:`);
  const all = [...NUMBERS.slice(0, 1).map((one) => `${one}<`), ...names, ...NUMBERS.slice(1).map((one) => `${one}>`)];
  return bare === ""
    ? []
    : all
        .filter((one) => one.startsWith(bare))
        .slice(0, MOST)
        .map((one) => sign + one);
}

function wordAt(input) {
  const before = input.value.slice(0, input.selectionStart ?? input.value.length);
  const start = before.lastIndexOf(" ") + 1;
  return { start, end: before.length, text: before.slice(start) };
}

function replaceWord(input, text) {
  const { start, end } = wordAt(input);
  const space = UNFINISHED.test(text) ? "" : " ";
  input.value = input.value.slice(0, start) + text + space + input.value.slice(end).trimStart();
  input.setSelectionRange(start + text.length + space.length, start + text.length + space.length);
}
