"""From a recipe to a saved policy: read it, find its samples in a file or live, load, train, save."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import yaml

from ngym.errors import UsageError

from . import offline
from .config import DpoOptions, Launch, Recipe, read_launch, read_recipe
from .rl import GrpoOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .algorithms import Algorithm
    from .engine import Engine
    from .metrics import Metrics
    from .samples import Batch
    from .services import Services

POLICY = "policy"
METRICS = "metrics.jsonl"
RESOLVED = "recipe.yaml"
SKIPPED = "skipped"
CURVE = "curve.png"


def main(files: Sequence[str], overrides: Sequence[str], *, overwrite: bool, dry_run: bool) -> None:
    """Run a recipe; see `ng_train --help`.

    Raises:
        UsageError: the recipe, its data or the place of its output is wrong.
    """
    recipe, tree = read_recipe(files, overrides)
    if dry_run:
        print(_as_yaml(recipe), end="")
        return
    if recipe.data is not None:
        offline.check(recipe.data, tree)
    launch = read_launch()
    if launch.rank == 0:
        _claim(recipe.output, overwrite)
        (recipe.output / RESOLVED).write_text(_as_yaml(recipe), encoding="utf-8")
    _run(recipe, launch)


def _run(recipe: Recipe, launch: Launch) -> None:
    """torch, transformers and deepspeed are imported from here on: seconds that a wrong recipe need not wait for."""
    # On a CPU the threads of torch spin while they wait; where anything else runs, that makes two slower than one.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with ExitStack() as stack:
        services = stack.enter_context(_services(recipe)) if recipe.live and launch.rank == 0 else None
        _say("loading torch, transformers and deepspeed")
        from . import engine, loop, model, optimizer
        from .guard import Guard
        from .metrics import Metrics

        stack.enter_context(engine.joined(launch))
        if recipe.data is not None and launch.rank == 0:
            offline.make(recipe.data, _say)
        engine.wait_for_all()

        tokenizer = model.load_tokenizer(recipe.model)
        policy = model.load_policy(recipe.model, tokenizer, recipe.seed, _temperature(recipe))
        if isinstance(recipe.algorithm, GrpoOptions):
            policy.eval()  # no dropout: the ratio to the policy that sampled must come from the weights alone
        learner = engine.Engine(policy, launch, recipe.engine, recipe.optimizer)
        algorithm = _algorithm(recipe, learner, tokenizer)
        found = Parts(recipe, learner, algorithm, tokenizer)
        source = _live(found, services) if recipe.live else _file(found)
        shown = launch.rank == 0
        with Metrics(recipe.output / METRICS, source.steps, shown) as metrics:
            loop.train(
                learner,
                algorithm,
                source.batches(metrics),
                recipe.micro_batch_tokens,
                lambda step: optimizer.schedule(step, source.steps, recipe.schedule),
                Guard(recipe.output / SKIPPED if shown else None, recipe.max_skipped),
                metrics.log,
            )
        learner.save(recipe.output / POLICY, tokenizer)
        if shown:
            _draw(metrics, recipe.output / CURVE)
    _say(f"policy saved in {recipe.output / POLICY}, metrics in {recipe.output / METRICS}")


class Parts(NamedTuple):
    """What a run is made of."""

    recipe: Recipe
    learner: Engine
    algorithm: Algorithm
    tokenizer: PreTrainedTokenizerBase


class Source(NamedTuple):
    """Where batches come from. steps: how many there will be."""

    steps: int
    batches: Callable[[Metrics], Iterator[Batch]]


def _file(parts: Parts) -> Source:
    recipe, learner, algorithm, tokenizer = parts
    assert recipe.data is not None
    samples = offline.prepared(recipe.data, algorithm, tokenizer, learner, recipe.micro_batch_tokens, _say)
    steps = offline.steps(samples, recipe)
    tokens = sum(sample.tokens for sample in samples)
    _say(f"{len(samples):,} samples of {tokens:,} tokens; {steps:,} steps of {recipe.batch_size} samples")
    return Source(steps, lambda metrics: _checked(parts, offline.batches(samples, recipe)))


def _live(parts: Parts, services: Services | None) -> Source:
    from .evaluation import Evaluation
    from .live import Live
    from .publish import Publisher, probe_ids
    from .push import Pusher

    recipe, learner, algorithm, tokenizer = parts
    options, temperature = recipe.live, _temperature(recipe)
    assert options is not None and recipe.max_steps is not None
    steps = recipe.max_steps
    pusher = None
    if services is not None:
        reached = services.reached
        pusher = Pusher(reached.peers.urls[options.policy], reached.token)
    rollouts = options.tasks_per_step * options.group_size
    _say(
        f"{steps:,} steps of {options.tasks_per_step} tasks x {options.group_size} rollouts = {rollouts:,} rollouts, "
        f"{options.updates_per_step} optimiser steps each"
    )

    def batches(metrics: Metrics) -> Iterator[Batch]:
        publisher = Publisher(learner, pusher, probe_ids(tokenizer))
        evaluation = None
        if recipe.evaluation is not None and services is not None:
            evaluation = Evaluation(recipe.evaluation, options, temperature, services, metrics.note)
        live = Live(
            options,
            temperature,
            recipe.seed,
            recipe.micro_batch_tokens,
            algorithm,
            learner,
            publisher,
            services,
            evaluation,
        )
        try:
            yield from _checked(parts, live.batches(steps))
        finally:
            if pusher is not None:
                pusher.finish()

    return Source(steps, batches)


def _checked(parts: Parts, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Rollouts are checked before they are trained: an algorithm of ratios goes wrong in silence."""
    from . import checks
    from .algorithms.grpo import Grpo

    if not isinstance(parts.algorithm, Grpo) or not isinstance(parts.recipe.algorithm, GrpoOptions):
        return batches
    bound = parts.recipe.algorithm.max_mismatch
    return checks.checked(batches, parts.learner, parts.recipe.micro_batch_tokens, parts.algorithm.sampler_N, bound)


def _algorithm(recipe: Recipe, learner: Engine, tokenizer: PreTrainedTokenizerBase) -> Algorithm:
    from . import model
    from .algorithms.dpo import Dpo
    from .algorithms.grpo import Grpo
    from .algorithms.sft import Sft

    options = recipe.algorithm
    if isinstance(options, DpoOptions):
        return Dpo(options)
    if not isinstance(options, GrpoOptions):
        return Sft()
    reference = None
    if options.kl.coef > 0:
        reference = model.load_policy(recipe.model, tokenizer, recipe.seed, options.temperature).to(learner.device)
        reference.eval().requires_grad_(False)
    return Grpo(options, 1 if recipe.live and recipe.live.updates_per_step == 1 else None, reference)


def _services(recipe: Recipe) -> Services:
    """Those of the recipe's config, or of a running ng_run; they begin to start now, while torch is imported."""
    from .services import Services, running, started

    options = recipe.live
    assert options is not None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started is stopped
    if options.services is None:
        return Services(partial(running, Path.cwd(), options.agent, options.policy))
    if recipe.model.path is None:
        raise UsageError("live rollouts are sampled by a policy that exists; set model.path")
    file = Path(options.services)
    return Services(partial(started, file, options.agent, options.policy, recipe.model.path, _say))


def _temperature(recipe: Recipe) -> float:
    return recipe.algorithm.temperature if isinstance(recipe.algorithm, GrpoOptions) else 1.0


def _draw(metrics: Metrics, image: Path) -> None:
    from .curves import as_png, as_text, curves

    shown = curves(metrics.history)
    if shown:
        _say(as_text(shown))
        as_png(shown, image)


def _claim(output: Path, overwrite: bool) -> None:
    """The run's folder, without an earlier run's results."""
    earlier = [output / METRICS, output / POLICY]
    if any(path.exists() for path in earlier) and not overwrite:
        raise UsageError(f"{output}: holds an earlier run; choose another output=FOLDER, or pass --overwrite")
    output.mkdir(parents=True, exist_ok=True)
    (output / METRICS).unlink(missing_ok=True)


def _as_yaml(recipe: Recipe) -> str:
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def _say(text: str) -> None:
    if read_launch().rank == 0:
        print(text, flush=True)
