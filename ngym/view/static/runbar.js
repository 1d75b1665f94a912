// The bar above the table of a run: its parts, another run to compare it with, and the most useful filters.
import { button, el, link } from "./dom.js";
import { go, hrefOf } from "./router.js";
import { safeLine } from "./safetext.js";

export function runTabs(id, isTasks) {
  const tab = (text, path, now) => link(hrefOf(path), text, { class: "tab", "aria-current": now ? "page" : null });
  return el(
    "nav",
    { class: "tabs", "aria-label": "Parts of the run" },
    tab("Rollouts", ["r", id], !isTasks),
    tab("Tasks", ["r", id, "tasks"], isTasks),
  );
}

/** null where no other run is open. */
export function compareChoice(id, runs) {
  const others = runs.filter((run) => run.kind === "rollouts" && run.id !== id);
  if (!others.length) return null;
  const select = el(
    "select",
    { "aria-label": "Compare with another run" },
    el("option", { value: "" }, "Compare with …"),
    others.map((run) => el("option", { value: run.id }, safeLine(run.name))),
  );
  select.addEventListener("change", () => select.value && go(hrefOf(["compare", id, select.value])));
  return select;
}

/** Chips; that of the present filter and order is pressed. */
export function quickFilters(id, { isTasks, q, sort }) {
  const chip = (text, path, query, title) => {
    const on = isTasks === (path.length === 3) && q === (query.q ?? "") && sort === (query.sort ?? "");
    return button(text, () => go(hrefOf(path, query)), { class: "chip", title, "aria-pressed": String(on) });
  };
  const rollouts = ["r", id];
  return [
    chip("All", rollouts, {}, "In the order of the file"),
    chip("Worst", rollouts, { sort: "reward" }, "Lowest reward first (w)"),
    chip("Best", rollouts, { sort: "-reward" }, "Highest reward first"),
    chip("Failed", rollouts, { q: "status:failed" }, "Attempts that ended in a failure"),
    chip("Truncated", rollouts, { q: "status:truncated" }, "Cut off: too many steps, or too long"),
    chip("Unscored", rollouts, { q: "status:unscored" }, "The verifier gave no reward"),
    chip("Rollouts disagree", ["r", id, "tasks"], { sort: "-spread" }, "Tasks whose own rollouts got different rewards"),
  ];
}
