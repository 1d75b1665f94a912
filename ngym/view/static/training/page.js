// The training page: live curves, last values, differences of the recipes, and rollouts of a step.
import { clear, el, released } from "../dom.js";
import { plural } from "../format.js";
import { safeLine } from "../safetext.js";
import { TrainingBoard } from "./chart_board.js";
import { TrainingSettings, trainingControls } from "./controls.js";
import { TrainingFeed } from "./run_feed.js";
import { trainingStepBar } from "./step_values.js";
import { configTable, lastValuesTable, samplesList } from "./tables.js";

const NO_RUNS = "No training run is open here. Give ng_view a folder that ng_train wrote: it holds metrics.jsonl.";

/** The page into `container`; params are those of the address. -> what ends it */
export function render(container, params, api) {
  const page = new TrainingPage(container, new URLSearchParams(params), api);
  return () => page.close();
}

class TrainingPage {
  #said = ""; // what the tables show
  #allKeys = false;

  constructor(container, params, api) {
    this.settings = new TrainingSettings(params);
    this.controls = trainingControls(this.settings, (what) => this.#chosen(what));
    this.board = new TrainingBoard(container, this.settings, (values) => this.controls.change("draw", values));
    this.content = el("div", { class: "training-content" });
    this.step = el("div", { class: "training-step", hidden: true });
    clear(container).append(this.controls.element, this.content, this.step, this.board.tip);
    this.feed = new TrainingFeed(api, () => this.#came());
    this.feed.refresh();
  }

  close() {
    this.feed.close();
    this.board.close();
  }

  get #shown() {
    return (this.feed.runs ?? []).filter((run, place) => this.settings.shows(run, place));
  }

  /** Something came from the server. */
  #came() {
    const { runs, error } = this.feed;
    this.#tellStatus();
    if (error && !this.#shown.some((run) => run.data.count)) return this.#put(el("p", { class: "problem", role: "alert" }, safeLine(error.message)));
    if (!runs) return;
    if (!runs.length) return this.#put(el("p", { class: "empty" }, NO_RUNS));
    this.controls.runs(runs);
    const wanted = this.#shown.map((run) => run.id);
    if (wanted.some((id) => !this.feed.wanted.has(id))) this.feed.want(wanted);
    this.#show();
  }

  #tellStatus() {
    const { runs, error } = this.feed;
    const reading = this.#shown.filter((run) => run.config === null && run.data.count);
    const live = runs?.some((run) => run.growing) ? "live" : "";
    const steps = reading.reduce((sum, run) => sum + run.data.count, 0);
    this.controls.status.textContent = error ? safeLine(error.message) : reading.length ? `reading: ${plural(steps, "step")}` : live;
  }

  /** The reader chose something. */
  #chosen(what) {
    this.controls.runs(this.feed.runs ?? []);
    if (what === "runs") this.feed.want(this.#shown.map((run) => run.id));
    if (this.feed.runs?.length) this.#show();
  }

  #show() {
    const { tab, picked } = this.settings;
    if (tab === "charts") this.#showBoard();
    else this.#showTable();
    if (this.step.matches(":active")) {
      released(this.step).then(() => this.#show());
      return;
    }
    const shows = picked !== null && (tab === "charts" || tab === "samples");
    this.step.hidden = !shows;
    if (shows) trainingStepBar(this.step, this.#shown, picked, (step) => this.controls.change("draw", { picked: step }));
  }

  #showBoard() {
    this.#said = "";
    if (this.content.firstChild !== this.board.element) this.#put(this.board.element);
    this.board.show(this.#shown);
  }

  /** Rebuilt only if its text changes, so that a selection stays. */
  #showTable() {
    const { tab, picked, find } = this.settings;
    const runs = this.#shown;
    const versions = runs.map((run) => [run.id, tab === "config" || run.data.version, run.config !== null, run.samples !== null]);
    const said = JSON.stringify([tab, picked, find, this.#allKeys, versions]);
    if (said === this.#said) return;
    const wanted = (name) => this.settings.finds(name);
    if (tab === "values") this.#put(lastValuesTable(runs, wanted));
    if (tab === "samples") this.#put(samplesList(runs, picked));
    if (tab === "config") this.#put(runs.length > 1 && this.#keysBox(), configTable(runs, this.#allKeys, wanted));
    this.#said = said;
  }

  #put(...nodes) {
    this.#said = "";
    clear(this.content).append(...nodes.filter(Boolean));
  }

  #keysBox() {
    const box = el("input", { type: "checkbox", checked: this.#allKeys, on: { change: () => {
      this.#allKeys = box.checked;
      this.#show();
    } } });
    return el("label", { class: "training-all" }, box, "also what is the same");
  }
}
