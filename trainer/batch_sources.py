"""Sources of a run's batches: a finished file, or live rollouts. Both can resume after any batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ngym.errors import NgymError, UsageError
from ngym.schema import Json

from .data import offline
from .recipe.algorithms import PolicyGradientOptions
from .recipe.recipe import DataOptions, Recipe, read_launch
from .recipe.validation import of_file, of_live

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .algorithms import Algorithm
    from .data.samples import Batch, Sample
    from .engine.engine import Engine
    from .evaluation.live_eval import Evaluation
    from .online.services import Services
    from .reporting.metrics import Metrics

Say = Callable[[str], None]


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
        self._digest = offline.digest(recipe.data)
        self._samples = offline.prepared(recipe.data, algorithm, tokenizer, learner, recipe.micro_batch_tokens, say)
        self.steps = offline.steps(self._samples, recipe)
        for line in of_file(recipe, self._samples, self.steps, read_launch()):
            say(line)
        self._held_out = _held_out(parts, say)

    def batches(self, metrics: Metrics, done: int, state: Json | None) -> Iterator[Batch]:
        """The batches after the first `done`. state: the result of `state()` at that point; None at the beginning.

        Raises:
            UsageError: the file differs from that of the state.
        """
        recipe, learner, algorithm, _ = self._parts
        if state is not None and state["digest"] != self._digest:
            assert recipe.data is not None
            raise UsageError(
                f"{recipe.data.path}: changed since the run began with it: sha256 {state['digest'][:12]} then, "
                f"{self._digest[:12]} now; restore the file, or begin a new run"
            )
        batches = offline.batches(self._samples, recipe, done)
        if algorithm.asks.values:
            batches = offline.in_turn(batches, algorithm, learner, recipe.micro_batch_tokens)
        batches = checked(self._parts, batches, sampled=done == 0)
        if recipe.evaluation is None or not self._held_out:
            return batches
        from .evaluation.heldout_loss import HeldOutData

        every = recipe.evaluation.every
        held_out = HeldOutData(self._held_out, algorithm, learner, recipe.micro_batch_tokens, every, metrics.note)
        return held_out.evaluated(batches, done)

    def state(self) -> Json | None:
        """The state on which the batches after the last trained one depend, as JSON."""
        return {"digest": self._digest}


def _held_out(parts: Parts, say: Say) -> list[Sample]:
    """The held-out samples of a run on a file, prepared with the policy that the run starts from."""
    recipe, learner, algorithm, tokenizer = parts
    if recipe.evaluation is None or recipe.data is None:
        return []
    if recipe.evaluation.data is None:
        say("evaluation.tasks need live rollouts, and this run trains on a file: evaluation is off")
        return []
    data = DataOptions(path=recipe.evaluation.data, max_tokens=recipe.data.max_tokens)
    budget, limit = recipe.micro_batch_tokens, recipe.evaluation.limit
    return offline.prepared(data, algorithm, tokenizer, learner, budget, lambda text: say(f"held-out: {text}"), limit)


class LiveSource:
    """Live rollouts, with the methods of FileSource.

    Args:
        services: on rank 0; None elsewhere.
    """

    def __init__(self, parts: Parts, services: Services | None, say: Say) -> None:
        from .online.live_batches import Live
        from .weights.publisher import Colocated, Publisher, probe_ids, pusher_of
        from .weights.push import check_transport

        recipe, learner, algorithm, tokenizer = parts
        options = recipe.live
        assert options is not None and recipe.max_steps is not None
        self.steps = recipe.max_steps
        self._parts = parts
        self._services = services
        self._pusher = None
        if services is not None:
            check_transport(options.transport)
            reached = services.reached
            self._pusher = pusher_of(recipe, reached.peers.urls[options.policy], reached.token)
        for line in of_live(recipe, read_launch()):
            say(line)
        pushed = learner.adapter if options.transport == "lora" else learner.weights
        colocated = Colocated(learner, self._pusher) if options.colocated else None
        publisher = Publisher(learner, self._pusher, probe_ids(tokenizer), pushed, colocated)
        self._live = Live(recipe, algorithm, learner, publisher, services)
        self._say = say

    def batches(self, metrics: Metrics, done: int, state: Json | None) -> Iterator[Batch]:
        from .evaluation.live_eval import KEPT, Evaluation

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
                recipe.output / KEPT,
                done,
            )
        try:
            at_hand = self._live.open(state)
            if at_hand:
                self._say(f"{at_hand:,} rollouts were collected before and are used again")
            yield from checked(self._parts, self._live.batches(done, evaluation))
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
    from .weights.publisher import pusher_of

    if services is None or recipe.live is None:
        return
    reached = services.reached
    pusher = pusher_of(recipe, reached.peers.urls[recipe.live.policy], reached.token)
    pusher.prepare()
    pusher.sleep()
    pusher.finish()


def checked(parts: Parts, batches: Iterator[Batch], *, sampled: bool = True) -> Iterator[Batch]:
    """Check rollouts before they are trained: a wrong sampler or temperature would otherwise go unnoticed.

    sampled: the current policy sampled them. A resumed run on a file has moved away from that policy, as intended.
    """
    from .algorithms.policy_gradient import PolicyGradient
    from .engine import checks

    if not isinstance(parts.algorithm, PolicyGradient) or not isinstance(parts.recipe.algorithm, PolicyGradientOptions):
        return batches
    bound = parts.recipe.algorithm.max_mismatch
    sampler_N = parts.algorithm.sampler_N if sampled else None
    return checks.checked(batches, parts.learner, parts.recipe.micro_batch_tokens, sampler_N, bound)


def temperature(recipe: Recipe) -> float:
    """The sampling temperature of the rollouts, by which the logits are divided."""
    return recipe.algorithm.temperature if isinstance(recipe.algorithm, PolicyGradientOptions) else 1.0
