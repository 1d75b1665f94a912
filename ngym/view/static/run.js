// The page of a run: figures at the left, rollouts or tasks at the right; the address contains filter and order.
import { chosenKeys, columnChooser, rolloutColumns } from "./columns.js";
import { clear, el, link } from "./dom.js";
import { Figures } from "./figures.js";
import { filterBox } from "./filter.js";
import { formatCount, formatPercent, plural } from "./format.js";
import { isIndexing } from "./run_list_feed.js";
import { go, goInPlace, hrefOf } from "./router.js";
import { compareChoice, laterRun, quickFilters, runTabs, shareButton } from "./runbar.js";
import { safeLine } from "./safetext.js";
import { Table } from "./table.js";
import { fittingTaskColumns } from "./tasks.js";

const GONE = "ng_view has this run no longer; go back to the list of runs.";
const NONE_FITS = "No row fits this filter.";
const NONE_YET = "This run has no rollout yet; what comes is shown here.";
const places = new Map(); // the address -> where the reader stood in its table

/** #/r/{id} and #/r/{id}/tasks, with ?q=&sort= */
export function runPage(context, route) {
  const page = new RunPage(context, route);
  return {
    element: page.element,
    keys: page.keys(),
    update: (next) => page.update(next),
    again: () => page.again(),
    close: () => page.close(),
  };
}

class RunPage {
  #stop;
  #range = [0, 1];

  constructor(context, route) {
    this.context = context;
    this.id = route.path[1];
    this.isTasks = route.path[2] === "tasks";
    this.run = this.#found();
    this.figures = new Figures(context.api, this.run, (range) => this.#setRange(range));
    this.status = el("span", { class: "muted status-line", role: "status" });
    this.quick = el("div", { class: "quick", role: "toolbar", "aria-label": "Quick filters" });
    this.filter = filterBox(
      () => this.run,
      (q) => this.#to({ q }, this.q !== ""),
    );
    this.#read(route);
    this.table = new Table({
      label: this.isTasks ? "Tasks" : "Rollouts",
      columns: this.#columns(),
      sort: this.sort,
      fetchPage: this.#source(),
      hrefOf: (row, index) => this.#rowHref(row, index),
      onOpen: (row, index) => go(this.#rowHref(row, index)),
      onSort: (key, descends) => this.#to({ sort: this.#nextSort(descends ? [`-${key}`, key] : [key, `-${key}`]) }),
      onState: (pages) => this.#tell(pages),
      empty: () => (this.q ? NONE_FITS : NONE_YET),
      keep: places.get(location.hash),
    });
    this.chooser = this.isTasks
      ? null
      : columnChooser(
          () => ({ columns: rolloutColumns(this.run, this.#range), keys: chosenKeys(this.run) }),
          () => this.#setColumns(),
        );
    this.element = el(
      "main",
      { class: "page run-page" },
      this.figures.element,
      el(
        "section",
        { class: "listing" },
        el(
          "div",
          { class: "listing-head" },
          runTabs(this.id, this.isTasks),
          el("div", { class: "fill" }),
          laterRun(this.run, context.live.state.runs),
          compareChoice(this.id, context.live.state.runs),
          this.chooser?.element,
          shareButton(context.api, this.id, () => ({ q: this.q }), () => [this.run.name, this.q].filter(Boolean).join("-")),
        ),
        this.filter.element,
        this.quick,
        this.status,
        this.table.element,
      ),
    );
    context.crumbs([{ text: this.run.name, title: this.run.path }]);
    this.#stop = context.live.onChange(() => this.#grown());
    this.#showWords();
  }

  keys() {
    return [
      ["j ArrowDown", "next row", () => this.table.move(1)],
      ["k ArrowUp", "previous row", () => this.table.move(-1)],
      ["PageDown", "a page on", () => this.table.move(20)],
      ["PageUp", "a page back", () => this.table.move(-20)],
      ["Enter", "open the row", () => this.table.openSelected()],
      ["/", "write a filter", () => this.filter.focus()],
      ["w", "worst first", () => go(hrefOf(["r", this.id], { sort: "reward" }))],
      ["t", "rollouts or tasks", () => go(hrefOf(this.isTasks ? ["r", this.id] : ["r", this.id, "tasks"]))],
      ["Escape Backspace", "back", () => history.back()],
    ];
  }

  /** true: the page could apply the new address without a reload. */
  update(route) {
    if (hrefOf(route.path) !== hrefOf(this.#path)) return false;
    const [q, sort] = [this.q, this.sort];
    this.#read(route);
    if (q === this.q && sort === this.sort) return true;
    this.filter.problem("");
    this.table.setSource(this.#source(), this.sort);
    this.#showWords();
    return true;
  }

  /** The server answers again. */
  again() {
    this.table.again();
    this.figures.again();
  }

  close() {
    places.set(this.address, this.table.place);
    this.#stop();
    this.filter.close();
    this.figures.close();
    this.table.close();
  }

  get #path() {
    return this.isTasks ? ["r", this.id, "tasks"] : ["r", this.id];
  }

  #found() {
    const run = this.context.live.state.runs.find((one) => one.id === this.id);
    if (!run) throw new Error(`No run '${this.id}' is open; go back to the list of runs.`);
    return run;
  }

  #read({ params }) {
    this.q = params.get("q") ?? "";
    this.sort = params.get("sort") ?? (this.isTasks ? "-spread" : "");
    this.address = location.hash;
  }

  #to(change, inPlace = false) {
    (inPlace ? goInPlace : go)(hrefOf(this.#path, { q: this.q, sort: this.sort, ...change }));
  }

  /** One way, the other way, and the order of the file; tasks have none. */
  #nextSort([first, second]) {
    if (this.sort === first) return second;
    return this.sort === second && !this.isTasks ? "" : first;
  }

  #showWords() {
    this.filter.show(this.q);
    this.figures.show(this.q, this.isTasks ? "" : this.sort);
    clear(this.quick).append(...quickFilters(this.id, this));
  }

  #source() {
    const [{ api }, query] = [this.context, { q: this.q, sort: this.sort }];
    const call = this.isTasks ? api.tasks : api.rows;
    return (offset, limit, signal) => call(this.id, { ...query, offset, limit }, signal);
  }

  #columns() {
    if (this.isTasks) return fittingTaskColumns(this.#range, this.run);
    const keys = chosenKeys(this.run);
    return rolloutColumns(this.run, this.#range).filter((column) => keys.includes(column.key));
  }

  #setRange(range) {
    if (String(range) === String(this.#range)) return;
    this.#range = range;
    this.#setColumns();
  }

  #setColumns() {
    this.table.setColumns(this.#columns(), this.sort);
    this.chooser?.show();
  }

  #rowHref(row, index) {
    if (this.isTasks) return hrefOf(["r", this.id, "task", String(row.task)], { agent: row.agent });
    return hrefOf(["r", this.id, "row", row.row], { q: this.q, sort: this.sort, at: index });
  }

  #tell({ total, error, answer }) {
    this.filter.problem(error ? safeLine(error.message) : "");
    const told = [total === null ? "" : this.#count(total)];
    if (answer?.searching) told.push(`searching: ${formatPercent(answer.scanned)}`);
    if (answer?.note) told.push(answer.note);
    if (isIndexing(this.run)) told.push(`reading the file: ${formatPercent(this.run.indexed_bytes / this.run.bytes)}`);
    else if (this.run.growing) told.push("the file grows");
    this.status.textContent = error ? "" : told.filter(Boolean).join(" · ");
    const { head } = this.run;
    if (head && !error) this.status.append(" · ", link(head, "rollouts that run now", { target: "_blank", rel: "noreferrer" }));
  }

  #count(total) {
    if (this.isTasks) return plural(total, "task");
    return this.q ? `${formatCount(total)} of ${plural(this.run.rows + this.run.failures, "rollout")}` : plural(total, "rollout");
  }

  #grown() {
    const before = this.run;
    const now = this.context.live.state.runs.find((one) => one.id === this.id);
    if (!now) return this.filter.problem(GONE);
    this.run = now;
    const state = (run) => `${run.rows} ${run.failures} ${run.indexed_bytes} ${run.growing}`;
    if (state(before) === state(this.run)) return;
    const chips = (run) => JSON.stringify([run.tool_errors > 0, run.failure_classes]);
    if (chips(before) !== chips(now) && !this.quick.matches(":active")) clear(this.quick).append(...quickFilters(this.id, this));
    if (before.fields?.length !== this.run.fields?.length) this.#setColumns();
    this.table.refresh();
    this.figures.grown(this.run);
  }
}
