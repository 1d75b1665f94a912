"""The training loop of every algorithm, and the sources of its batches: a finished file, or live rollouts.

    batch -> updates -> plan -> this rank's micro-batches -> scores -> loss -> backward ... -> step -> metrics

Both sources can resume after any batch.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import torch

from ngym.errors import NgymError, UsageError
from ngym.schema import Json
from ngym.telemetry import tracing

from .algorithms import Algorithm, StepLoss
from .algorithms.policy_gradient import PolicyGradient
from .data import file_batches
from .data.samples import Batch, Sample
from .engine import sanity_checks
from .engine.engine import Engine, Update
from .losses.policy_loss import Mean, Totals, detach_totals, log_values, measure
from .model.packing import pack
from .recipe.algorithms import PolicyGradientOptions
from .recipe.recipe import DataOptions, Recipe, read_launch
from .recipe.recipe_reader import file_run_sizes, live_run_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .evaluation.live_eval import Evaluation
    from .online.services import Services
    from .reporting.metrics import Metrics

TRACED = ("loss", "grad_norm", "lr", "global_valid_toks", "global_valid_seqs")  # recorded on the span of a step
# These compare the policy with its sampler. Only the first update reports them: later the two differ by design.
BEFORE_TRAINING = frozenset({"token_mult_prob_error", "mismatch_kl"})
Say = Callable[[str], None]


class Step(NamedTuple):
    """One optimizer step. means: the algorithm's metrics over its samples, including `loss`."""

    means: dict[str, float]
    update: Update


def train(
    engine: Engine,
    algorithm: Algorithm,
    batches: Iterable[Batch],
    budget: int,
    lr_multiplier: Callable[[int], float],
    guard: sanity_checks.NanGuard,
    report: Callable[[int, dict[str, float]], None],
    done: int = 0,
) -> None:
    """Train each batch: one optimizer step on each of its updates.

    Args:
        budget: tokens that a rank computes at once.
        lr_multiplier: step (from 0) -> multiplier of the learning rates.
        guard: checks every optimizer step and counts the skipped ones.
        report: called after each batch (from 1) with its metrics.
        done: number of batches that were trained before.

    Raises:
        NotFinite: losses or gradients are not finite, several times in a row.
    """
    for number, batch in enumerate(batches, done + 1):
        began = time.monotonic()
        steps: list[Step] = []
        with tracing.span("train step") as span:
            for samples in batch.updates:
                step = take_step(engine, algorithm, samples, budget, lr_multiplier(number - 1))
                if guard.check_step(number, samples, step.means.get("loss", 0.0), step.update):
                    steps.append(step)
            values = _values(batch, steps, guard.skipped, time.monotonic() - began)
            values |= engine.scaling() | engine.peak_memory()
            span.set("ngym.step", number)
            for name in TRACED:
                span.set(f"ngym.{name}", values.get(name))
        report(number, {**batch.values, **values})


def take_step(
    engine: Engine, algorithm: Algorithm, samples: Sequence[Sample], budget: int, lr_multiplier: float
) -> Step:
    """One optimizer step. Every rank gets all samples and computes its share of them.

    If a float16 gradient overflows, the step is computed again with a lower loss scale.
    """
    step_loss = algorithm.step_loss(samples)
    while (step := _compute_step(engine, algorithm, step_loss, samples, budget, lr_multiplier)).update.overflowed:
        pass
    return step


def _compute_step(
    engine: Engine,
    algorithm: Algorithm,
    step_loss: StepLoss,
    samples: Sequence[Sample],
    budget: int,
    lr_multiplier: float,
) -> Step:
    micro_batches = engine.micro_batches(samples, budget)
    losses: list[tuple[float, Totals]] = []
    for index, batch in enumerate(micro_batches):
        # A rank without work computes something with count 0: the ranks' collectives must match.
        weight = 1.0 if batch else 0.0
        packed = pack(batch or samples[:1], engine.device)
        loss = step_loss.loss(engine.scores(packed, algorithm.asks), packed)
        # A loss that is not finite on one rank must make the gradient not finite on all ranks.
        poison = torch.where(loss.sum.detach().isfinite(), 1.0, math.nan)
        engine.backward(weight * poison * loss.sum, step_loss.divisor, last=index == len(micro_batches) - 1)
        losses.append((weight, detach_totals(loss.totals)))
    update = engine.step(lr_multiplier)
    return Step(step_loss.derived(_means(engine, losses), bins=False), update)


def _means(engine: Engine, micro_batches: Sequence[tuple[float, Totals]]) -> dict[str, float]:
    """Each metric over all micro-batches and ranks; the names are the same on every rank. Read only now, because a GPU
    would be idle between a micro-batch's forward and its backward.
    """
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for weight, totals in micro_batches:
        for name, mean in measure(totals).items():
            sums[name][0] += weight * mean.total
            sums[name][1] += weight * mean.count
    names = sorted(sums)
    flat = engine.all_reduce([value for name in names for value in sums[name]])
    return log_values(
        {name: Mean(*pair) for name, pair in zip(names, zip(flat[::2], flat[1::2], strict=True), strict=True)}
    )


def _values(batch: Batch, steps: Sequence[Step], skipped: int, seconds: float) -> dict[str, float]:
    """The metrics of a batch: means over its optimizer steps."""
    samples = [sample for update in batch.updates for sample in update]
    names = dict.fromkeys(name for step in steps for name in step.means)
    means = {name: fmean(step.means[name] for step in steps if name in step.means) for name in names}
    means |= {name: value for step in steps[:1] for name, value in step.means.items() if name in BEFORE_TRAINING}
    if steps:
        means |= {"lr": steps[-1].update.lr, "grad_norm": fmean(step.update.grad_norm for step in steps)}
        of_critic = [norm for step in steps if (norm := step.update.critic_grad_norm) is not None]
        means |= {"critic_grad_norm": fmean(of_critic)} if of_critic else {}
    return {
        **means,
        "global_valid_toks": sum(sample.trained for sample in samples),
        "global_valid_seqs": len(samples),
        "skipped_steps": skipped,
        "tokens_per_s": sum(sample.tokens for sample in samples) / seconds,
        "time/train": seconds,
    }


class Parts(NamedTuple):
    """The parts of a run."""

    recipe: Recipe
    learner: Engine
    algorithm: Algorithm
    tokenizer: PreTrainedTokenizerBase


class FileSource:
    """A finished file: the next batch depends on the file, the seed and the number of batches so far.

    steps: how many batches there are, including those before a resumption.
    """

    def __init__(self, parts: Parts, say: Say) -> None:
        recipe, learner, algorithm, tokenizer = parts
        assert recipe.data is not None
        self._parts = parts
        self._digest = file_batches.digest(recipe.data.path)
        evaluated = recipe.evaluation.data if recipe.evaluation else None
        self._held_out_digest = {evaluated: file_batches.digest(evaluated)} if evaluated is not None else {}
        options = recipe.algorithm
        drops = isinstance(options, PolicyGradientOptions) and options.shaping.drop_truncated
        teachers, budget = _has_teachers(recipe), recipe.micro_batch_tokens
        self._samples = file_batches.prepare_samples(
            recipe.data, algorithm, tokenizer, learner, budget, say, drops_truncated=drops, teachers=teachers
        )
        self.steps = file_batches.steps(self._samples, recipe)
        for line in file_run_sizes(recipe, self._samples, self.steps, read_launch()):
            say(line)
        self._held_out = _held_out(parts, say)

    def check(self, state: Json | None) -> None:
        """
        Raises:
            UsageError: the file, or the held-out one of the same name, differs from that of the state.
        """
        if state is None:
            return
        data = self._parts.recipe.data
        assert data is not None
        before = {data.path: state["digest"], **state.get("held_out", {})}  # an older checkpoint has no held_out
        for path, now in {data.path: self._digest, **self._held_out_digest}.items():
            if (old := before.get(path, now)) != now:
                raise UsageError(
                    f"{path}: changed since the run began with it: sha256 {old[:12]} then, {now[:12]} now; restore the "
                    "file, or begin a new run"
                )

    def batches(self, metrics: Metrics, done: int, state: Json | None) -> Iterator[Batch]:
        """The batches after the first `done`. state: the result of `state()` at that point; None at the beginning.

        Raises:
            UsageError: a file differs from that of the state.
        """
        recipe, learner, algorithm, _ = self._parts
        self.check(state)
        batches = file_batches.batches(self._samples, recipe, done)
        if algorithm.asks.values:
            batches = file_batches.in_turn(batches, algorithm, learner, recipe.micro_batch_tokens)
        batches = check_rollouts(self._parts, batches, sampled=done == 0)
        if recipe.evaluation is None or not self._held_out:
            return batches
        from .evaluation.heldout_loss import HeldOutData

        interval = recipe.evaluation.every
        held_out = HeldOutData(self._held_out, algorithm, learner, recipe.micro_batch_tokens, interval, metrics.note)
        return held_out.evaluate_between(batches, done)

    def state(self) -> Json | None:
        """The state on which the batches after the last trained one depend, as JSON."""
        return {"digest": self._digest, "held_out": self._held_out_digest}


def _has_teachers(recipe: Recipe) -> bool:
    return isinstance(recipe.algorithm, PolicyGradientOptions) and recipe.algorithm.teacher is not None


def _held_out(parts: Parts, say: Say) -> list[Sample]:
    """The held-out samples of a run on a file, prepared with the policy that the run starts from."""
    recipe, learner, algorithm, tokenizer = parts
    if recipe.evaluation is None or recipe.data is None:
        return []
    if recipe.evaluation.data is None:
        say("evaluation.tasks need live rollouts, and this run trains on a file: evaluation is off")
        return []
    data = DataOptions(path=recipe.evaluation.data, max_tokens=recipe.data.max_tokens)
    budget, limit, teachers = recipe.micro_batch_tokens, recipe.evaluation.limit, _has_teachers(recipe)
    return file_batches.prepare_samples(
        data, algorithm, tokenizer, learner, budget, lambda text: say(f"held-out: {text}"), limit, teachers=teachers
    )


class LiveSource:
    """Live rollouts, with the methods of FileSource.

    Args:
        services: on rank 0; None elsewhere.
    """

    def __init__(self, parts: Parts, services: Services | None, say: Say) -> None:
        from .online.live_batches import LiveBatches
        from .online.services import HeadMembership
        from .weights.colocated_phases import ColocatedPhases
        from .weights.push import check_transport
        from .weights.weight_sync import WeightSync, probe_ids, pusher_of

        recipe, learner, algorithm, tokenizer = parts
        options = recipe.live
        assert options is not None and recipe.max_steps is not None
        self.steps = recipe.max_steps
        self._parts = parts
        self._services = services
        self._pusher = None
        if services is not None:
            check_transport(options.transport)
            ready = services.ready
            self._pusher = pusher_of(recipe, partial(services.addresses, options.policy), ready.token, say)
            self._pusher.prepare()  # a refused transport ends the run before it replaces an earlier one
        for line in live_run_sizes(recipe, read_launch()):
            say(line)
        weights = learner.adapter if options.transport == "lora" else learner.weights
        colocated = ColocatedPhases(learner, self._pusher) if options.colocated else None
        membership = None
        if services is not None and colocated is None and services.ready.peers.head_url is not None:
            membership = HeadMembership(services, options.policy, say)
        weight_sync = WeightSync(learner, self._pusher, probe_ids(tokenizer), weights, colocated, membership)
        self._live = LiveBatches(recipe, algorithm, learner, weight_sync, services, say)
        self._say = say

    def check(self, state: Json | None) -> None:
        """Raise UsageError if a resumed run has other tasks than before."""
        self._live.check(state)

    def batches(self, metrics: Metrics, done: int, state: Json | None) -> Iterator[Batch]:
        from .evaluation.live_eval import EVAL_ROLLOUTS, Evaluation

        recipe = self._parts.recipe
        evaluation = None
        if recipe.evaluation is not None and recipe.live is not None and self._services is not None:
            evaluation = Evaluation(
                recipe.evaluation,
                recipe.live,
                temperature(recipe),
                self._services,
                metrics.note,
                recipe.seed,
                recipe.output / EVAL_ROLLOUTS,
                done,
                self._say,
            )
        try:
            at_hand = self._live.open(state)
            if at_hand:
                self._say(f"{at_hand:,} rollouts were collected before and are used again")
            yield from check_rollouts(self._parts, self._live.batches(done, evaluation, metrics.say))
        except BaseException:
            with suppress(NgymError):  # the error that ended the run matters more than those of closing
                self._close(evaluation)
            raise
        else:
            self._close(evaluation)
        finally:
            if self._pusher is not None:
                self._pusher.finish()

    def _close(self, evaluation: Evaluation | None) -> None:
        try:
            self._live.close()
        finally:
            if evaluation is not None:
                evaluation.close()

    def state(self) -> Json | None:
        return self._live.state()


def make_room(recipe: Recipe, services: Services | None) -> None:
    """Put servers on the trainer's GPUs to sleep before anything is loaded there.

    services: on rank 0; None elsewhere.
    """
    from .weights.weight_sync import pusher_of

    if services is None or recipe.live is None:
        return
    ready = services.ready
    pusher = pusher_of(recipe, partial(services.addresses, recipe.live.policy), ready.token)
    pusher.prepare()
    pusher.sleep()
    pusher.finish()


def check_rollouts(parts: Parts, batches: Iterator[Batch], *, sampled: bool = True) -> Iterator[Batch]:
    """Check rollouts before they are trained: a wrong sampler or temperature would otherwise go unnoticed.

    sampled: the current policy sampled them. A resumed run on a file has moved away from that policy, as intended.
    """
    if not isinstance(parts.algorithm, PolicyGradient) or not isinstance(parts.recipe.algorithm, PolicyGradientOptions):
        return batches
    bound = parts.recipe.algorithm.max_mismatch
    sampler_N = parts.algorithm.sampler_N if sampled else None
    return sanity_checks.check_batches(batches, parts.learner, parts.recipe.micro_batch_tokens, sampler_N, bound)


def temperature(recipe: Recipe) -> float:
    """The sampling temperature of the rollouts, by which the logits are divided."""
    return recipe.algorithm.temperature if isinstance(recipe.algorithm, PolicyGradientOptions) else 1.0
