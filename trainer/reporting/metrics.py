"""Metrics of a step: names, units, their log, and the display of a run."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Self

import orjson

from ngym.files.row_log import LossyRowLog
from ngym.runtime.live_region import (
    SHORTEST_BAR,
    Screen,
    Size,
    bar,
    clock,
    is_live,
    pack_facts,
    sanitize,
    sparkline,
    terminal,
)

from ..recipe.recipe import read_launch
from .sinks import Sinks

if TYPE_CHECKING:
    from rich.text import Text

PLAIN_INTERVAL_S = 2.0
TICK_S = 0.5
LABEL = 10
CURVE = 40
MAX_MEANS = 8 * CURVE
MAX_HELD_OUT = 3
MAIN = {"reward/mean": "reward", "loss": "loss"}  # drawn as curves, next to the held-out metrics
# metric -> how it is shown, if a step has it
SHOWN = {
    "reward/mean": "reward {:.3f}",
    "frac_unscored": "unscored {:.1%}",
    "loss": "loss {:.4f}",
    "epoch": "epoch {:.2f}",
    "lr": "lr {:.1e}",
    "grad_norm": "grad {:.2f}",
    "loss_scale": "loss scale {:,.0f}",
    "overflow_retries": "overflows {:.0f}",
    "lag": "lag {:.0f}",
    "completions/mean_length": "length {:.0f}",
    "completions/max_length": "longest {:.0f}",
    "completions/clipped_ratio": "cut off {:.0%}",
    "kl_penalty": "kl {:.4f}",
    "explained_variance": "critic explains {:.0%}",
    "clip_ratio/region_mean": "clipped {:.1%}",
    "token_mult_prob_error": "mismatch {:.4f}",
    "mismatch_kl": "mismatch kl {:.1e}",
    "approx_entropy": "entropy {:.2f}",
    "tokens_per_s": "{:,.0f} tokens/s",
}
TIMES = {
    "time/generation": "sampling {:.1f} s",
    "time/logprob": "logprobs {:.1f} s",
    "time/train": "training {:.1f} s",
    "time/weight_sync": "push {:.2f} s",
}
# not shown for short offline steps, which have no other parts
ONLY_LIVE = ("time/train",)
Values = dict[str, float]
MEASURED = {
    "step": "Batches trained, counted from 1; 0 is before the first.",
    "epoch": "From a file: passes over it so far, such as 1.5.",
    "loss": "The minimized loss, a mean over the optimizer steps of the batch.",
    "lr": "The learning rate of the last optimizer step.",
    "grad_norm": "Norm of the gradient before clipping.",
    "skipped_steps": "Optimizer steps so far whose loss or gradient was not finite.",
    "loss_scale": "With fp16: the loss scale after the step.",
    "overflow_retries": "With fp16: how often a step was computed again with half the loss scale, so far.",
    "global_valid_toks": "Trained tokens of the batch, over all ranks.",
    "global_valid_seqs": "Samples of the batch, over all ranks.",
    "tokens_per_s": "Tokens of the batch, prompts included, per second of training.",
    "time/train": "Seconds of forward, backward and optimizer steps.",
    "time/elapsed": "Seconds since the start of this process.",
    "memory/peak_rss": "GiB of memory of a rank's process, its largest so far; the maximum over ranks.",
    "memory/peak_gpu": "GiB that PyTorch allocated on a GPU, the largest since the last step; the maximum over ranks.",
    # live rollouts
    "time/generation": "Seconds that the step waited for rollouts.",
    "time/logprob": "Seconds for the trainer's own logprobs of the rollouts before training, and for advantages.",
    "time/weight_sync": "Seconds of the push, including its proof.",
    "weight_sync/bytes": "Bytes of weights that each server got in the push; with `delta`, of its files.",
    "policy_version": "Pushes so far.",
    "lag": "Trainer's version minus the oldest version in a sample; the maximum of the step.",
    "lag/mean": "The same, a mean over rollouts.",
    "stale_dropped": "Rollouts collected again because weights from before the last push sampled part of them.",
    "num_equal_groups": "Groups without a learning signal, replaced by dynamic sampling.",
    # rollouts, live or from a file
    "reward/mean": "Mean reward of the scored rollouts of the batch.",
    "reward/std": "Standard deviation of these rewards.",
    "reward/{environment}/mean": "The mean of each of several environments.",
    "reward_component/{name}": "Mean of a component of the reward, over the rollouts that have it.",
    "frac_reward_zero_std": "Share of groups whose rewards are all equal.",
    "num_valid_samples": "Scored rollouts.",
    "num_unscored": "Rollouts with the reward null.",
    "frac_unscored": "Their share of all rollouts that did not fail; `reward/mean` covers the others.",
    "num_failed": "Rollouts that failed.",
    "completions/mean_length": "Sampled tokens of a rollout.",
    "completions/max_length": "The same of the longest rollout.",
    "completions/clipped_ratio": "Share of rollouts that were cut off.",
    "num_turns": "Model calls of a rollout.",
    "tool_calls": "Tool calls of a rollout.",
    "tool_errors": "Tool calls that were answered with an error.",
    "approx_entropy": "Mean of -log p of the sampled tokens, by the sampler.",
    "tasks/{environment}/epoch": "Without a curriculum: how often each of its tasks was drawn.",
    "tasks/{environment}/solved": "Curriculum: share of tasks that are always solved.",
    "tasks/{environment}/unsolved": "Share of tasks that are never solved.",
    "tasks/{environment}/mixed": "Share of tasks that are sometimes solved.",
    "tasks/{environment}/unseen": "Share of tasks that were not drawn yet.",
    "tasks/{environment}/effective": "The effective number of tasks in the draw: as many equally weighted ones.",
    # the policy's loss
    "actor_loss": "The surrogate alone, without KL and entropy.",
    "probs_ratio": "Mean ratio of the current to the earlier probability.",
    "probs_ratio_clamped": "The same after clipping.",
    "clip_ratio/low_mean": "Share of tokens whose ratio was clipped from below.",
    "clip_ratio/high_mean": "Share of tokens whose ratio was clipped from above.",
    "clip_ratio/region_mean": "Both.",
    "token_mult_prob_error": "Mean of exp |log p of the trainer - log p of the sampler|; 1 where they agree. From a file: "
    "with anchor trainer, of the trainer at the start of the run; with anchor sampler, of the current one, so that only "
    "step 1 compares trainer and engine, and later steps show how far the policy has moved.",
    "mismatch_kl": "KL of sampler and trainer, by the estimator k3.",
    "kl_penalty": "KL to the reference, by the recipe's estimator.",
    "entropy": "Exact entropy of the distributions that were sampled from; with `loss.entropy_coef`.",
    "sampling_importance_ratio": "Mean importance weight of the correction.",
    "is_oob_ratio": "Share of tokens whose weight was outside the bounds.",
    "is_dropped_ratio": "Share of tokens whose weight became 0.",
    "is_dropped_sequences": "Share of rollouts whose weights all became 0.",
    "teacher_divergence": "Distillation with teacher.beta: mean divergence from the teacher, over sampled tokens.",
    "teacher_kl": "Distillation: mean of log p of the policy - log p of the teacher, over sampled tokens.",
    "teacher_tokens": "Distillation: tokens that the teacher scored for an optimizer step, prompts included.",
    "teacher_too_long": "Distillation, live: rollouts that train nothing because a teacher's context is too small.",
    # the critic's
    "value_loss": "Half the squared error of the critic, clipped.",
    "value_clip_ratio": "Share of values for which the clipped error was the larger one.",
    "values": "Mean value.",
    "returns": "Mean of the values' targets.",
    "explained_variance": "Share of the returns' variance that the critic explained before the step.",
    "critic_grad_norm": "Norm of the critic's own gradient; ZeRO 0.",
    # preferences
    "preference_loss": "DPO: the loss of the pairs without `sft_weight`.",
    "sft_loss": "DPO: the negative log-likelihood of the chosen side, a mean over its tokens.",
    "rewards/chosen": "DPO: beta times the gain in log p of the chosen side; KTO: of answers with the label true. "
    "Reward models: mean score of the chosen side, or of the label true.",
    "rewards/rejected": "DPO: the same of the rejected side; KTO: of answers with the label false. "
    "Reward models: mean score of these.",
    "kl": "KTO: the mean gain in log p of mismatched answers, at least 0.",
    "rewards/margins": "DPO: the difference of both.",
    "rewards/accuracies": "DPO: share of pairs in which the chosen side gained more. Reward models: has the higher "
    "score; with labels, share of scores with the right sign.",
    "logps/chosen": "DPO: log p of the chosen side, a sum over its tokens.",
    "logps/rejected": "DPO: log p of the rejected side.",
    # held-out tasks and files
    "time/eval": "Seconds of an evaluation.",
    "length_correlation": "Reward models: correlation of score and tokens of the answer, over the step.",
    "calibration_error": "Reward models: mean of abs(accuracy - confidence) over bins of confidence, weighted by share.",
    "val/calibration/{bin}/accuracy": "Reward models, held-out: share that is right, in a bin of confidence.",
    "val/calibration/{bin}/confidence": "Mean confidence there.",
    "val/calibration/{bin}/share": "The bin's share of all.",
    "val/accuracy": "Mean of avg@k over the environments.",
    "val/{metric}": "On a held-out file: each of the algorithm's own metrics.",
    "val/perplexity": "On a held-out file, SFT: exp of the loss.",
    "eval/{environment}/avg@{k}": "Mean reward of k sampled attempts at each held-out task.",
    "eval/{environment}/pass@{k}": "Unbiased chance that one of k attempts gets the whole reward.",
    "eval/{environment}/greedy": "Mean reward without sampling.",
    "eval/{environment}/{name}/low": "Lower end of the 95 % interval over tasks of any of these three.",
    "eval/{environment}/{name}/high": "Its upper end.",
    "eval/{environment}/{name}/count": "Attempts that were scored.",
    "eval/{environment}/{name}/failed": "Attempts that failed.",
    "eval/{environment}/{name}/unscored": "Attempts with the reward null.",
}


class Display:
    """Receives each step, and the messages between steps. This one shows nothing."""

    def step(self, step: int, values: Values) -> None: ...
    def say(self, text: str) -> None: ...


@contextmanager
def display(steps: int, history: Sequence[Values], shown: bool, alone: bool) -> Iterator[Display]:
    """The display that suits the terminal.

    Args:
        history: the rows of the metrics; the list grows.
        alone: no other rank writes to the same terminal.
    """
    if not shown:
        yield Display()
    elif alone and is_live(sys.stdout):
        with terminal() as screen, _drawing(LiveDisplay(screen, steps, history)) as live:
            yield live
    else:
        lines = Lines(steps)
        try:
            yield lines
        finally:
            lines.end()


class Lines(Display):
    """A line for each step of live rollouts, else every few seconds, and always for the last step."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._clock = Clock(steps)
        self._printed_at = float("-inf")
        self._pending = ""

    def step(self, step: int, values: Values) -> None:
        self._clock.step(step)
        left_s = self._clock.left_s
        remaining = "" if left_s is None else f"  {left_s:.0f} s left"
        self._pending = f"step {step}/{self._steps}  {line(values)}{remaining}"
        now = time.monotonic()
        if _is_live(values) or step in (1, self._steps) or now - self._printed_at >= PLAIN_INTERVAL_S:
            self._printed_at = now
            self.end()

    def say(self, text: str) -> None:
        print(sanitize(text), flush=True)

    def end(self) -> None:
        """Print the last step if it was not printed yet."""
        if self._pending:
            self.say(self._pending)
            self._pending = ""


class LiveDisplay(Display):
    """A bar, the reward and its components, the held-out metrics, and the share of time of each part."""

    def __init__(self, screen: Screen, steps: int, history: Sequence[Values]) -> None:
        self._screen = screen
        self._steps = steps
        self._history = history
        self._clock = Clock(steps)
        self._values: Values = {}
        self._next_row = 0  # number of rows of the history that are in the curves
        self._curves: dict[str, Curve] = {}

    def step(self, step: int, values: Values) -> None:
        self._clock.step(step)
        self._values = values
        self.draw()

    def say(self, text: str) -> None:
        self._screen.say(text)

    def draw(self) -> None:
        self._screen.show(self.picture)

    def end(self) -> None:
        """Leave one line with the final state."""
        main = next((form.format(self._values[name]) for name, form in SHOWN.items() if name in self._values), "")
        summary = f"step {self._clock.at}/{self._steps} in {clock(self._clock.elapsed_s)}  {main}" if main else ""
        self._screen.close()
        if summary:
            self._screen.say(summary)

    def picture(self, size: Size) -> list[Text]:
        from rich.text import Text

        self._read_new_rows()
        main = "reward/mean" if "reward/mean" in self._values else "loss"
        held_out = [name for name in self._curves if _is_held_out(name)][:MAX_HELD_OUT]
        names = [main, *held_out]
        curves = [_curve(name, self._curves[name], size) for name in names if name in self._curves]
        figures = {name: form for name, form in SHOWN.items() if name in self._values and name not in names}
        facts = [form.format(self._values[name]) for name, form in figures.items()]
        lines = [Text(line, "dim") for line in pack_facts(facts, size.width)]
        shares = [Text(line, "dim") for line in pack_facts(_time_shares(self._values), size.width)]
        return [self._bar(size), *curves, *lines, *shares]

    def _bar(self, size: Size) -> Text:
        from rich.text import Text

        at, left_s = self._clock.at, self._clock.left_s
        count = f"step {at:,}/{self._steps:,}  {clock(self._clock.elapsed_s)}"
        if left_s is not None:
            count += f"  {clock(left_s)} to go"
        bar_text = bar(at, self._steps, size.width - len(count) - 2)
        return Text(count).append("  ").append(bar_text) if bar_text else Text(count)

    def _read_new_rows(self) -> None:
        """Read only new rows, so that the cost of a frame does not depend on the length of the history."""
        rows = self._history[self._next_row :]
        self._next_row += len(rows)
        for row in rows:
            for name, value in row.items():
                if (name in MAIN or _is_held_out(name)) and value is not None and math.isfinite(value):
                    self._curves.setdefault(name, Curve()).add(value)


def _curve(name: str, curve: Curve, size: Size) -> Text:
    from rich.text import Text

    text = Text(f"{MAIN.get(name, 'held-out'):<{LABEL}}{curve.last:<8.4g}", "bold")
    tail = f"  from {curve.first:.4g}" + ("" if name in MAIN else f"  {name.removeprefix('eval/')}")
    room = size.width - len(text) - len(tail)
    if room < SHORTEST_BAR:
        room, tail = size.width - len(text), ""
    return text.append(sparkline(curve.means, min(CURVE, room)), "cyan").append(tail, "dim")


class Curve:
    """All values of a metric as a few means, each over the same number of neighbors."""

    def __init__(self) -> None:
        self.first = self.last = math.nan
        self._means: list[float] = []
        self._group_size = 1  # number of values in a mean
        self._open: list[float] = []  # values of the next mean

    @property
    def means(self) -> list[float]:
        return [*self._means, fmean(self._open)] if self._open else self._means

    def add(self, value: float) -> None:
        self.first = value if math.isnan(self.first) else self.first
        self.last = value
        self._open.append(value)
        if len(self._open) < self._group_size:
            return
        self._means.append(fmean(self._open))
        self._open = []
        if len(self._means) == MAX_MEANS:
            self._means = [fmean(pair) for pair in zip(self._means[::2], self._means[1::2], strict=True)]
            self._group_size *= 2


class Clock:
    """Elapsed and remaining time. at: the last step."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._started_at = time.monotonic()
        self._resumed_at: int | None = None  # number of steps before a resumption
        self.at = 0
        self.left_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_at

    def step(self, step: int) -> None:
        if self._resumed_at is None:
            self._resumed_at = step - 1
        self.at = step
        self.left_s = self.elapsed_s / (step - self._resumed_at) * (self._steps - step)


@contextmanager
def _drawing(live: LiveDisplay) -> Iterator[LiveDisplay]:
    """Redraws a few times a second: a step may take minutes, and the terminal may change."""
    over = threading.Event()

    def draw() -> None:
        while not over.wait(TICK_S):
            live.draw()

    thread = threading.Thread(target=draw, name="display", daemon=True)
    thread.start()
    try:
        yield live
    finally:
        over.set()
        thread.join()
        live.end()


def line(values: Values) -> str:
    """A step's metrics in one line."""
    live = _is_live(values)
    formats = (SHOWN | TIMES).items()
    return "  ".join(
        form.format(values[name]) for name, form in formats if name in values and (live or name not in ONLY_LIVE)
    )


def _is_live(values: Values) -> bool:
    return "time/generation" in values


def _time_shares(values: Values) -> list[str]:
    """The share of a step's time for each part: `sampling 62 %`, and the step's duration."""
    times = {form.partition(" ")[0]: values[name] for name, form in TIMES.items() if name in values}
    total = sum(times.values())
    if len(times) < 2 or not total:
        return []
    return [f"a step {total:.1f} s:", *(f"{name} {100 * seconds / total:.0f} %" for name, seconds in times.items())]


def _is_held_out(name: str) -> bool:
    return name == "val/loss" or (name.startswith("eval/") and name.rpartition("/")[2].startswith("avg@"))


class Metrics:
    """The log of one run.

    Args:
        file: metrics.jsonl, appended to.
        steps: total number of steps.
        shown: False on all ranks but one, which log nothing.
        history: the rows that the file already holds.
        sinks: receive every entry too, and are closed at the end.
    """

    def __init__(
        self, file: Path, steps: int, shown: bool, history: Sequence[dict[str, float]] = (), sinks: Sinks | None = None
    ) -> None:
        self._path = file if shown else Path(os.devnull)
        self._steps = steps
        self._shown = shown
        self._sinks = sinks or Sinks()
        self._stack = ExitStack()
        self._started_at = time.monotonic()
        self.history = list(history)

    def __enter__(self) -> Self:
        alone = read_launch().ranks == 1
        self._rows = self._stack.enter_context(LossyRowLog(self._path))
        self._display = self._stack.enter_context(display(self._steps, self.history, self._shown, alone))
        self._stack.callback(self._close_sinks)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def log(self, step: int, values: dict[str, float]) -> None:
        """Record a finished step, counted from 1."""
        self._record(step, values)
        self._display.step(step, values)

    def note(self, step: int, values: dict[str, float], text: str) -> None:
        """Record metrics that are computed after a step, and print a line."""
        self._record(step, values)
        self.say(text)

    def say(self, text: str) -> None:
        """Print a line between steps."""
        self._display.say(text)

    def _record(self, step: int, values: dict[str, float]) -> None:
        elapsed = time.monotonic() - self._started_at
        row = {"step": step, **values, "time/elapsed": round(elapsed, 3)}
        self.history.append(row)
        if problem := self._rows.append(orjson.dumps(row) + b"\n"):
            self.say(problem)
        for line in self._sinks.put(step, values):
            self.say(line)

    def _close_sinks(self) -> None:
        for line in self._sinks.close():
            self.say(line)
