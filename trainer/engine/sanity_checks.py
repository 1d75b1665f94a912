"""The checks of a run. A failed one ends it, or skips the step.

Before the first step, the samples must match the policy:

1. The policy reproduces its own logprobs with and without a graph (ratio 1). Dropout would break this.
2. The sampler's logprobs are the policy's: mean of exp |log p - log p of the sampler| is near 1. Another policy,
   temperature or precision would break this.
3. Every trainable parameter gets a gradient in the first optimizer step.

A step whose loss or gradient is not finite is skipped on every rank, and its batch is kept for inspection; several in a
row end the run. Weights are checked before they are saved, so that a step that was too large reaches neither a
checkpoint nor the policy. Steps without a learning signal are reported. Running out of memory ends the run, with what
was computed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import orjson
import torch
from torch import Tensor

from ngym.errors import NgymError
from ngym.files.atomic import write_whole

from ..data.samples import Batch, Sample
from ..model.packing import MicroBatch, pack
from ..model.policy import RewardModel
from .engine import Engine, Update

OWN_RATIO = 1e-3
EXPONENT = 20.0
NOT_SAVED = (
    "so they are not saved, and the last good checkpoint is kept. Train again with a lower optimizer.lr, or with "
    "optimizer.max_grad_norm, from the start or from the policy/ of that checkpoint"
)
TO_LOAD = (
    "engine.precision: bf16, engine.zero_stage, engine.offload, model.lora and the other keys in docs/gpus.md, section Train, "
    "save memory"
)
CPU_ALLOCATOR = "DefaultCPUAllocator"  # in the text of torch's RuntimeError
UNIFORM = 1e-5  # a logprob at least this far from log(1/V) is not from a uniform distribution


class CheckFailed(NgymError):
    """Training would go wrong from its first step."""


def check_batches(
    batches: Iterable[Batch],
    engine: Engine,
    budget: int,
    sampler_N: Callable[[MicroBatch], Tensor] | None,
    bound: float,
) -> Iterator[Batch]:
    """The batches; the first one that trains something is checked before and after. Every rank iterates.

    The sampler's logprobs are compared in the first batch that the current weights sampled: a resumed run with
    `max_lag` begins with rollouts of earlier ones.

    Args:
        sampler_N: the sampler's logprobs of a micro-batch; None if another policy sampled.
        bound: on the mean of exp |log p - log p of the sampler|.

    Raises:
        CheckFailed: with what is wrong and what to do.
    """
    first = True
    for batch in batches:
        samples = batch.updates[0] if batch.updates else []
        if first and samples:
            _check_determinism(engine, samples, budget)
        if sampler_N is not None and samples and not batch.values.get("lag"):
            _check_sampler(engine, samples, budget, sampler_N, bound)
            sampler_N = None
        if not first or not samples:
            yield batch
            continue
        first = False
        with engine.track_gradients() as names:
            yield batch
        trainable = [name for name, parameter in engine.policy.named_parameters() if parameter.requires_grad]
        if without := [name for name in trainable if name not in names]:
            raise CheckFailed(
                f"{len(without)} of {len(trainable)} trainable parameters got no gradient in the first step, among them "
                f"{without[0]}; they would stay as they are while the run seems to train"
            )


def _check_determinism(engine: Engine, samples: Sequence[Sample], budget: int) -> None:
    packed = pack(engine.micro_batches(samples, budget)[0] or samples[:1], engine.device)
    with torch.no_grad():
        before_N = engine.logprobs(packed)
    check_finite(before_N, engine)
    ratio = float(((engine.logprobs(packed).detach() - before_N).exp() - 1).abs().max())
    if not ratio < OWN_RATIO:
        raise CheckFailed(
            f"the policy does not reproduce its own logprobs: two passes over the same tokens differ by a ratio of "
            f"{ratio:.3g}. Something in the model draws random numbers (dropout?)"
        )


def _check_sampler(
    engine: Engine, samples: Sequence[Sample], budget: int, sampler_N: Callable[[MicroBatch], Tensor], bound: float
) -> None:
    total = count = 0.0
    for batch in engine.micro_batches(samples, budget):
        packed = pack(batch or samples[:1], engine.device)
        with torch.no_grad():
            difference_N = (engine.logprobs(packed) - sampler_N(packed)).clamp(-EXPONENT, EXPONENT)
        if batch:
            total += float(difference_N.abs().exp().sum())
            count += len(difference_N)
    total, count = engine.all_reduce([total, count])
    error = total / max(count, 1)
    if not error < bound:
        raise CheckFailed(
            f"token_mult_prob_error is {error:.3f} before the first step: the sampler's logprobs are not those of this policy "
            f"(bound: algorithm.max_mismatch = {bound:g}). Is model.path the policy that sampled, at algorithm.temperature? "
            "To learn from another policy's rollouts on purpose, raise the bound"
        )


class OutOfMemory(NgymError):
    """The memory of the GPU, or of the host, does not suffice."""


@contextmanager
def explain_out_of_memory(activity: Callable[[], str], remedy: str) -> Iterator[None]:
    """Raise OutOfMemory in place of torch's error of a failed allocation.

    Args:
        activity: returns what is computed at present.
        remedy: what to change.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and CPU_ALLOCATOR not in str(error):
            raise
        message = str(error)[max(0, str(error).find(CPU_ALLOCATOR)) :]
        reason = " ".join(
            re.split(r"(?<=\.)\s", message)[:3]
        )  # "CUDA out of memory. Tried to ... GPU 0 has a total ..."
        raise OutOfMemory(f"{activity()}: out of memory: {reason.rstrip('.')}. {remedy}") from error


def to_fit(budget: int) -> str:
    """Advice for a step that runs out of memory. budget: tokens that a rank computes at once."""
    return (
        f"A smaller micro_batch_tokens (now {budget:,}; a sample is never divided), engine.activation_checkpointing: true and "
        "the other keys in docs/gpus.md, section Train, save memory; --resume then continues from the newest checkpoint"
    )


class NotFinite(NgymError):
    """The loss, the gradient or the weights are not finite, or the network no longer depends on its input."""


def check_finite(logprobs_N: Tensor, engine: Engine) -> None:
    """Raise NotFinite unless the policy's logprobs are finite, which they may not be before any step in float16."""
    if bool(logprobs_N.isfinite().all()):
        return
    wider = ""
    if engine.dtype == "float16":
        wider = ": its activations may be larger than 65,504; set engine.precision to bf16 or fp32"
    raise NotFinite(f"the policy's logprobs after step {engine.steps} are not finite in {engine.dtype}{wider}")


class NothingTrained(NgymError):
    """No step of the run changed the weights."""


class NanGuard:
    """Counts the skipped optimizer steps, and checks the weights after the others.

    is_skipping: the last step was skipped, so the weights before it may be at fault.

    Args:
        folder: for the batches of skipped steps, one file each; None on all ranks but one.
        limit: this many skipped steps in a row end the run.
    """

    def __init__(self, folder: Path | None, limit: int) -> None:
        self.skipped = 0
        self._in_a_row = 0
        self._trained: Sequence[Sample] = ()
        self._folder = folder
        self._limit = limit

    def check_step(self, step: int, samples: Sequence[Sample], loss: float, update: Update) -> bool:
        """Whether the optimizer step was taken. The engine has skipped it if the gradient was not finite.

        Raises:
            NotFinite: too many steps in a row were skipped.
        """
        if math.isfinite(loss) and math.isfinite(update.grad_norm):
            self._in_a_row = 0
            self._trained = samples
            return True
        self.skipped += 1
        self._in_a_row += 1
        note = self._dump(step, samples)
        if self._in_a_row >= self._limit:
            scale, wider = "", ""
            if update.loss_scale is not None:
                scale = f" (loss scale {update.loss_scale:g})"
                wider = ", or set engine.precision to bf16 or fp32, whose numbers are larger than float16's 65,504"
            raise NotFinite(
                f"step {step}: the loss is {loss} and the gradient's norm {update.grad_norm}{scale}, {self._in_a_row} "
                f"optimizer steps in a row; the weights are unchanged since. Lower optimizer.lr{wider}{note}"
            )
        return False

    @property
    def is_skipping(self) -> bool:
        return self._in_a_row > 0

    def check(self, engine: Engine, budget: int) -> None:
        """Check the weights before they are saved. Every rank calls it.

        budget: tokens that a rank computes at once.

        Raises:
            NotFinite: the last steps were skipped, or a tensor is not finite or so large that its norm overflows
                float32, or the policy's logprobs are not finite, or exactly uniform: an overflow within the network
                ends in zeros. A reward model: its scores are not finite, or all 0.
        """
        if self.is_skipping:
            raise NotFinite(
                f"the last {self._in_a_row} optimizer steps were skipped, because their loss or gradient was not finite: the "
                f"weights may be what is wrong with them, {NOT_SAVED}"
            )
        overflown = [name for names in engine.all_gather(engine.nonfinite_parameters()) for name in names]
        if overflown:
            raise NotFinite(
                f"{overflown[0]}: not finite, or too large to compute with, after step {engine.steps}, {NOT_SAVED}"
            )
        if not self._trained:
            return
        packed = pack(engine.micro_batches(self._trained, budget)[0] or self._trained[:1], engine.device)
        with torch.no_grad():
            if isinstance(engine.policy, RewardModel):
                label, wrong = "the scores", _describe_wrong_scores(engine.values(packed))
            else:
                wrong = _describe_wrong(engine.logprobs(packed), engine.policy.vocabulary)
                label = "the policy's logprobs"
        if problem := next(filter(None, engine.all_gather(wrong)), ""):
            raise NotFinite(f"{label} after step {engine.steps} are {problem}, {NOT_SAVED}")

    def _dump(self, step: int, samples: Sequence[Sample]) -> str:
        if self._folder is None:
            return ""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step-{step:06}-{self.skipped}.jsonl"
        # an image, as bytes, is left out
        lines = (orjson.dumps(asdict(sample), default=lambda content: f"{len(content):,} bytes") for sample in samples)
        write_whole(path, b"".join(line + b"\n" for line in lines))
        return f", or look at the batch in {path}"


class NoSignalMonitor:
    """Reports steps that trained nothing because no rollout had a learning signal: the first time, and at the end."""

    def __init__(self) -> None:
        self._reported = False

    def observe(self, values: Mapping[str, float]) -> str:
        """The message about a step with these metrics, or ""."""
        if self._reported or values["global_valid_toks"]:
            return ""
        self._reported = True
        return f"nothing was trained: {_explain(values)}"

    def summary(self, history: Iterable[Mapping[str, float]]) -> str:
        """The message at the end, or "". history: the metrics of the run."""
        trained = [row["global_valid_toks"] > 0 for row in history if "global_valid_toks" in row]
        if all(trained):
            return ""
        return f"warning: {trained.count(False):,} of {len(trained):,} steps trained nothing"


def _explain(values: Mapping[str, float]) -> str:
    if not values.get("num_valid_samples", 1):
        counts = f"{values['num_failed']:,.0f} failed, {values['num_unscored']:,.0f} unscored"
        return f"no rollout has a reward ({counts})"
    if values.get("teacher_too_long"):
        return f"no rollout fits the teacher's context ({values['teacher_too_long']:,.0f} are too long)"
    if values.get("frac_reward_zero_std") == 1:
        return (
            f"in every group all rewards are equal (their mean is {values['reward/mean']:.3f}), so there is no learning "
            "signal. Use harder or easier tasks, a larger rollouts.group_size or a reward with more than two values"
        )
    return "no rollout is left to learn from"


def _describe_wrong_scores(scores_N: Tensor) -> str:
    """The defect of a reward model's scores; "" if they are right."""
    if not bool(scores_N.isfinite().all()):
        return "not finite"
    return "" if bool(scores_N.any()) else "all exactly 0"


def _describe_wrong(logprobs_N: Tensor, vocabulary: int) -> str:
    """The defect of a policy's logprobs; "" if they are right."""
    if not bool(logprobs_N.isfinite().all()):
        return "not finite"
    from_uniform = (logprobs_N + math.log(vocabulary)).abs()
    return "exactly uniform, whatever the prompt" if bool((from_uniform < UNIFORM).all()) else ""
