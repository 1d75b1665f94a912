"""Metrics of a step: names, units, and their log."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import orjson

from ..recipe.recipe import read_launch
from .display import display
from .sinks import Sinks

MEASURED = {
    "step": "Batches trained, counted from 1; 0 is before the first.",
    "loss": "The minimized loss, a mean over the optimizer steps of the batch.",
    "lr": "The learning rate of the last optimizer step.",
    "grad_norm": "Norm of the gradient before clipping.",
    "skipped_steps": "Optimizer steps so far whose loss or gradient was not finite.",
    "global_valid_toks": "Trained tokens of the batch, over all ranks.",
    "global_valid_seqs": "Samples of the batch, over all ranks.",
    "tokens_per_s": "Tokens of the batch, prompts included, per second of training.",
    "time/train": "Seconds of forward, backward and optimizer steps.",
    "time/elapsed": "Seconds since the start of this process.",
    # live rollouts
    "time/generation": "Seconds that the step waited for rollouts.",
    "time/logprob": "Seconds for the trainer's own logprobs of the rollouts before training, and for advantages.",
    "time/weight_sync": "Seconds of the push, including its proof.",
    "policy_version": "Pushes so far.",
    "lag": "Trainer's version minus the oldest version in a sample; the maximum of the step.",
    "lag/mean": "The same, a mean over rollouts.",
    "stale_dropped": "Rollouts collected again because weights from before the last push sampled part of them.",
    "num_equal_groups": "Groups without a learning signal, replaced by dynamic sampling.",
    # rollouts, live or from a file
    "reward/mean": "Mean reward of the scored rollouts of the batch.",
    "reward/std": "Standard deviation of these rewards.",
    "reward/{environment}/mean": "The mean of each of several environments.",
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
    "token_mult_prob_error": "Mean of exp |log p of the trainer - log p of the sampler|; 1 where they agree.",
    "mismatch_kl": "KL of sampler and trainer, by the estimator k3.",
    "kl_penalty": "KL to the reference, by the recipe's estimator.",
    "entropy": "Exact entropy of the distributions that were sampled from; with `loss.entropy_coef`.",
    "sampling_importance_ratio": "Mean importance weight of the correction.",
    "is_oob_ratio": "Share of tokens whose weight was outside the bounds.",
    "is_dropped_ratio": "Share of tokens whose weight became 0.",
    "is_dropped_sequences": "Share of rollouts whose weights all became 0.",
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
    "rewards/chosen": "DPO: beta times the gain in log p of the chosen side.",
    "rewards/rejected": "DPO: the same of the rejected side.",
    "rewards/margins": "DPO: the difference of both.",
    "rewards/accuracies": "DPO: share of pairs in which the chosen side gained more.",
    "logps/chosen": "DPO: log p of the chosen side, a sum over its tokens.",
    "logps/rejected": "DPO: log p of the rejected side.",
    # held-out tasks and files
    "time/eval": "Seconds of an evaluation.",
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
        self,
        file: Path,
        steps: int,
        shown: bool,
        history: Sequence[dict[str, float]] = (),
        sinks: Sinks | None = None,
    ) -> None:
        self._path = file if shown else Path(os.devnull)
        self._steps = steps
        self._shown = shown
        self._sinks = sinks or Sinks()
        self._stack = ExitStack()
        self._began = time.monotonic()
        self.history = list(history)

    def __enter__(self) -> Self:
        alone = read_launch().ranks == 1
        self._rows = self._stack.enter_context(_Rows(self._path))
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
        self._say(text)

    def say(self, text: str) -> None:
        """Print a line between steps."""
        self._say(text)

    def _record(self, step: int, values: dict[str, float]) -> None:
        elapsed = time.monotonic() - self._began
        row = {"step": step, **values, "time/elapsed": round(elapsed, 3)}
        self.history.append(row)
        if problem := self._rows.append(orjson.dumps(row) + b"\n"):
            self._say(problem)
        for line in self._sinks.put(step, values):
            self._say(line)

    def _close_sinks(self) -> None:
        for line in self._sinks.close():
            self._say(line)

    def _say(self, text: str) -> None:
        self._display.say(text)


class _Rows:
    """A file to which each row is appended whole or not at all; a full disk loses rows but does not end the run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._said = False

    def __enter__(self) -> Self:
        self._file = self._path.open("ab", buffering=0)
        self._size = self._end = os.fstat(self._file.fileno()).st_size
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, row: bytes) -> str | None:
        """Append a row; returns a message when rows are lost, once."""
        try:
            if self._end != self._size:
                os.ftruncate(self._file.fileno(), self._size)  # remove the rest of a partial write
                self._end = self._size
            self._end += self._file.write(row)
            if self._end != self._size + len(row):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._size = self._end
        except OSError as error:
            if not self._said:
                self._said = True
                return f"{self._path}: entries are lost: {error.strerror}; training continues"
        return None
