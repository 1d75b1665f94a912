// The bar above the table of a run: its parts, another run to compare it with, and the most useful filters.
import { button, el, link } from "./dom.js";
import { filterValue } from "./filter.js";
import { formatCount } from "./format.js";
import { go, hrefOf } from "./router.js";
import { safeLine } from "./safetext.js";

const SAVED_MS = 4000;

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

/** A link to the last run of the same folder that was written after this one; null if there is none. */
export function laterRun(run, runs) {
  const folder = (path) => path.slice(0, path.lastIndexOf("/") + 1);
  const later = runs
    .filter((one) => one.kind === "rollouts" && one.id !== run.id && folder(one.path) === folder(run.path) && one.modified > run.modified)
    .sort((a, b) => b.modified - a.modified);
  return later.length ? link(hrefOf(["compare", run.id, later[0].id]), `Later here: ${safeLine(later[0].name)}`, { class: "button quiet later", title: "Compare with the last run of this folder" }) : null;
}

/** A button that saves what is seen as one file to send; null in such a file. query: {row} or {q}; name: of the file, without its end. */
export function shareButton(api, id, query, name) {
  if (api.packed) return null;
  const made = button("Share", async () => {
    made.disabled = true;
    try {
      const href = URL.createObjectURL(new Blob([await api.report(id, query())], { type: "text/html" }));
      el("a", { href, download: `${safeLine(name()).replace(/[^\w.-]+/g, "-")}.html` }).click();
      setTimeout(() => URL.revokeObjectURL(href), SAVED_MS);
      made.textContent = "Saved";
    } catch (error) {
      made.textContent = safeLine(error.message);
    }
    made.disabled = false;
    setTimeout(() => (made.textContent = "Share"), SAVED_MS);
  });
  made.title = "Save it as one HTML file to send, which needs no server";
  return made;
}

/** Chips; that of the present filter and order is pressed. */
export function quickFilters(id, { isTasks, q, sort, run }) {
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
    run.tool_errors > 0 &&
      chip(`Tool errors ${formatCount(run.tool_errors)}`, rollouts, { q: "tool_errors>0" }, "Rollouts with tool calls that failed"),
    ...(run.failure_classes ?? []).map(({ class: name, count }) =>
      chip(safeLine(`${name} ${formatCount(count)}`), rollouts, { q: `failure:${filterValue(name)}` }, "Attempts that failed so"),
    ),
    chip("Rollouts disagree", ["r", id, "tasks"], { sort: "-spread" }, "Tasks whose own rollouts got different rewards"),
    chip("Got easier", ["r", id, "tasks"], { sort: "-trend" }, "Tasks whose reward rose most over the versions of the weights"),
    chip("Got harder", ["r", id, "tasks"], { sort: "trend" }, "Tasks whose reward fell most over the versions of the weights"),
  ].filter(Boolean);
}
