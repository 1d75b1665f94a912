// Reads the training runs and their metrics piece by piece, and again while the page is visible.
import { TrainingRunData } from "./run_data.js";

const TRAINING_EVERY_MS = 2000;
const TRAINING_IDLE_MS = 15_000; // where no run grows: one may be resumed
const TRAINING_COLOURS = 8;
const TRAINING_DASHES = [[], [6, 3], [2, 2]]; // of the first eight runs, of the next, ...

/** `changed()` is called after every piece; `runs` is null until the first list came. */
export class TrainingFeed {
  #api;
  #changed;
  #timer = null;
  #control = new AbortController();
  #underway = null;
  #awake = () => !document.hidden && this.refresh();

  constructor(api, changed) {
    this.#api = api;
    this.#changed = changed;
    this.runs = null;
    this.wanted = new Set();
    this.error = null;
    document.addEventListener("visibilitychange", this.#awake);
  }

  /** Read these runs, too. */
  want(ids) {
    this.wanted = new Set(ids);
    return this.refresh();
  }

  /** Read what is new; one reading at a time. */
  async refresh() {
    clearTimeout(this.#timer);
    this.#underway ??= this.#read().finally(() => (this.#underway = null));
    await this.#underway;
    if (this.#control.signal.aborted || document.hidden || this.#api.packed) return;
    const grows = this.error || this.runs.some((run) => run.growing);
    this.#timer = setTimeout(() => this.refresh(), grows ? TRAINING_EVERY_MS : TRAINING_IDLE_MS);
  }

  close() {
    clearTimeout(this.#timer);
    this.#control.abort();
    document.removeEventListener("visibilitychange", this.#awake);
  }

  async #read() {
    try {
      const { runs } = await this.#api.training(this.#control.signal);
      this.#listed(runs);
      this.error = null;
      this.#changed();
      for (let behind = this.#behind(); behind.length; behind = this.#behind()) for (const run of behind) await this.#readPiece(run);
    } catch (error) {
      if (error.name === "AbortError") return;
      this.error = error;
      this.#changed();
    }
  }

  #listed(infos) {
    const known = new Map((this.runs ?? []).map((run) => [run.id, run]));
    this.runs = infos.map((info, place) => {
      const run = known.get(info.id) ?? { id: info.id, data: new TrainingRunData(), cursor: null, read: false, config: null, samples: null };
      run.read &&= !(info.growing || info.steps !== run.data.lastStep);
      return Object.assign(run, info, { colour: place % TRAINING_COLOURS, dash: TRAINING_DASHES[Math.floor(place / TRAINING_COLOURS) % TRAINING_DASHES.length] });
    });
  }

  #behind() {
    return this.runs.filter((run) => this.wanted.has(run.id) && !run.read);
  }

  async #readPiece(run) {
    const { signal } = this.#control;
    const answer = await this.#api.trainingMetrics(run.id, run.cursor, signal);
    run.data.add(answer);
    run.cursor = answer.next;
    run.read = !answer.more;
    if (run.read) {
      run.config ??= await this.#api.trainingConfig(run.id, signal);
      run.samples ??= await this.#api.trainingSamples(run.id, signal);
    }
    this.#changed();
  }
}
