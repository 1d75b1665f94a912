"""Checks of batch sizes against the number of ranks, and the arithmetic that a run begins with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .objective import Refusal
from .recipe import Launch, Recipe

if TYPE_CHECKING:
    from ..data.samples import Sample


def impossible(recipe: Recipe, launch: Launch) -> list[Refusal]:
    """Settings that cannot work, each with its key in the recipe."""
    together = recipe.engine.together
    if launch.ranks % together:
        key = "engine.sequence_parallel" if recipe.engine.sequence_parallel > 1 else "engine.tensor_parallel"
        return [Refusal(key, f"{launch.ranks} ranks cannot form groups of {together}; start a multiple of {together}")]
    live = recipe.live
    if live is None:
        assert recipe.batch_size is not None
        key, samples = "batch_size", recipe.batch_size
    else:
        rollouts, updates = live.tasks_per_step * live.group_size, live.updates_per_step
        if updates > rollouts:
            reason = f"{updates} optimizer steps cannot split {rollouts} rollouts; set it to {rollouts} or less"
            return [Refusal("rollouts.updates_per_step", reason)]
        key, samples = "rollouts.tasks_per_step", rollouts // updates
    ranks = launch.ranks // together
    if samples >= ranks:
        return []
    reason = f"an optimizer step has {samples} samples for {ranks} ranks, and some ranks would be idle; raise it"
    return [Refusal(key, f"{reason}, or start fewer ranks")]


def of_file(recipe: Recipe, samples: Sequence[Sample], steps: int, launch: Launch) -> list[str]:
    """The sizes of a run on these samples, one per line. steps: optimizer steps."""
    assert recipe.batch_size is not None and recipe.epochs is not None
    tokens = [sample.tokens for sample in samples]
    mean, count = sum(tokens) / len(tokens), min(recipe.batch_size, len(tokens))
    each_epoch = math.ceil(len(tokens) / recipe.batch_size)
    seen = steps // each_epoch * len(tokens) + min(steps % each_epoch * recipe.batch_size, len(tokens))
    every = each_epoch * recipe.epochs
    run = f"{recipe.epochs:,} x {each_epoch:,}" if steps == every else f"max_steps, of {every:,}"
    return [
        f"data         {len(tokens):,} samples, {sum(tokens):,} tokens: {mean:,.0f} each, at most {max(tokens):,}",
        f"step         {count:,} samples{_shared(count, recipe, launch)}",
        *_micro_batches(recipe, count * mean, max(tokens), launch),
        f"run          {steps:,} steps ({run}): {seen:,} samples, about {seen * mean:,.0f} tokens",
        *_rates(recipe, steps),
    ]


def of_live(recipe: Recipe, launch: Launch) -> list[str]:
    """The sizes of a live run, one per line."""
    live, steps = recipe.live, recipe.max_steps
    assert live is not None and steps is not None
    rollouts, updates = live.tasks_per_step * live.group_size, live.updates_per_step
    part = math.ceil(rollouts / updates)
    collected = f"{live.tasks_per_step:,} tasks x {live.group_size:,} rollouts = {rollouts:,} rollouts"
    trained = f"{updates:,} optimizer step{'s' if updates > 1 else ''} of {part:,}{_shared(part, recipe, launch)}"
    return [
        f"step         {collected}, in {trained}",
        f"micro-batch  at most {recipe.micro_batch_tokens:,} tokens on a rank, as many as the rollouts need",
        f"run          {steps:,} steps: {steps * updates:,} optimizer steps, {steps * rollouts:,} rollouts",
        *_rates(recipe, steps),
    ]


def _shared(samples: int, recipe: Recipe, launch: Launch) -> str:
    if launch.ranks == 1:
        return ""
    together = recipe.engine.together
    groups = launch.ranks // together
    each = (
        f"{samples / groups:,.0f}" if samples % groups == 0 else f"{samples // groups:,} or {samples // groups + 1:,}"
    )
    return f", {each} on each of {groups} " + ("ranks" if together == 1 else f"groups of {together} ranks")


def _micro_batches(recipe: Recipe, tokens: float, longest: int, launch: Launch) -> Iterator[str]:
    """tokens: of an optimizer step, on average."""
    budget, mine = recipe.micro_batch_tokens, tokens * recipe.engine.tensor_parallel / launch.ranks
    count = math.ceil(mine / budget)
    yield f"micro-batch  at most {budget:,} tokens on a rank: about {count:,} in a step, of {mine / count:,.0f} tokens"
    if longest > budget * recipe.engine.sequence_parallel:
        yield f"             micro_batch_tokens is below the longest sample: one of more, up to {longest:,}, is alone"


def _rates(recipe: Recipe, steps: int) -> Iterator[str]:
    schedule, optimizer = recipe.schedule, recipe.optimizer
    rates = f"{optimizer.name} {optimizer.lr:.3g}"
    if optimizer.name == "muon":
        rates = f"muon {optimizer.muon_lr:.3g} for matrices, adamw {optimizer.lr:.3g} for the rest"
    warm = schedule.warmup(steps)
    up = f", up to it in {warm:,} steps" if warm else ""
    after = "constant" if schedule.name == "constant" else f"{schedule.name}, down to {schedule.final:.3g} of it"
    yield f"rate         {rates}{up}; {after}"
    if warm > steps:
        yield f"             the run ends in its warm-up: schedule.warmup_steps is {warm:,}"
