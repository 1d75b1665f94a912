"""Batches from a finished JSONL file: created by a script if needed, read, filtered by length, and shuffled each epoch."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ngym.config.yaml_tree import COMMAND_LINE, ConfigTree
from ngym.did_you_mean import near_file
from ngym.errors import ConfigError, UsageError
from ngym.files.atomic import file_digest
from ngym.runtime.event_loop import await_exit

from ..recipe.objective import find_path
from ..recipe.recipe import DataOptions, Recipe
from ..seeds import seeded_random
from .samples import Batch, RolloutSample, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..algorithms import Algorithm
    from ..engine.engine import Engine

Say = Callable[[str], None]
TOO_LONG = "are longer than a teacher's context (with its hint)"


def check(data: DataOptions, tree: ConfigTree) -> None:
    """Raise ConfigError if neither the file nor a script that creates it exists.

    The script of a recipe writes the recipe's own file. It does not write, in place of a misspelled file, other data
    than the user named: with a `data.path` from elsewhere, `data.made_by` is from there or the command line, too.
    """
    if find_path(data.path) is not None:
        return
    path, script = (tree.where(key).partition(":")[0] for key in ("data.path", "data.made_by"))
    if not data.made_by or script not in (path, COMMAND_LINE):
        raise ConfigError(
            f"{tree.where('data.path')}: data.path: there is no {data.path}{near_file(Path(data.path))}; "
            "name a JSONL file, or data.made_by with the script that writes it"
        )


def make(data: DataOptions, say: Say) -> None:
    """Run the script that creates the file, if it is missing."""
    if find_path(data.path) is not None:
        return
    say(f"making {data.path}")
    with _without_warnings():
        process = subprocess.Popen([sys.executable, *data.made_by, "--output", data.path])
    with process:
        try:
            code = await_exit(process)
        except BaseException:
            process.kill()
            raise
    if code != 0:
        raise UsageError(f"data.made_by: {' '.join(data.made_by)} failed with exit code {code}")


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Processes that start meanwhile block a scheduler's warning of the time limit (SIGUSR1), which may go to every process
    of the job: the trainer ends the run. Not by Popen's `preexec_fn`: this process has threads, and the fork may hang.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def digest(path: str) -> str:
    return file_digest(find_path(path) or Path(path))


def prepare_samples(
    data: DataOptions,
    algorithm: Algorithm,
    tokenizer: PreTrainedTokenizerBase,
    learner: Engine,
    budget: int,
    say: Say,
    limit: int | None = None,
    drops_truncated: bool = False,
    teachers: bool = False,
) -> list[Sample]:
    """The samples of the file that fit and have a learning signal; reports what is left out.

    limit: the first samples only. drops_truncated: the algorithm leaves out truncated rollouts. teachers: it has
    teachers, which need no learning signal and may be too small for a sample.

    Raises:
        UsageError: no sample is left, or a sample has a token that the model does not have.
    """
    dataset = algorithm.samples(find_path(data.path) or Path(data.path), tokenizer)[:limit]
    bound = min(data.max_tokens or learner.policy.context, learner.policy.context)
    in_bound = [sample for sample in dataset if sample.longest <= bound]
    if len(in_bound) < len(dataset):
        say(f"{len(dataset) - len(in_bound):,} of {len(dataset):,} samples are longer than {bound} tokens: left out")
    if not dataset:
        raise UsageError(f"{data.path}: no sample to train on: the file has no rows")
    if not in_bound:
        raise UsageError(f"{data.path}: no sample to train on: all are longer than {bound} tokens (data.max_tokens)")
    _check_ids(in_bound, learner.policy.vocabulary, data.path)
    samples = algorithm.prepare(in_bound, learner, budget)
    count = sum(isinstance(sample, RolloutSample) and sample.truncated for sample in in_bound) if drops_truncated else 0
    if count:
        say(f"{count:,} of {len(in_bound):,} rollouts are truncated (algorithm.shaping.drop_truncated): left out")
    if len(samples) < len(in_bound) - count:
        reason = TOO_LONG if teachers else "have no learning signal"
        say(f"{len(in_bound) - count - len(samples):,} of {len(in_bound):,} samples {reason}: left out")
    if not samples and teachers and count < len(in_bound):
        raise UsageError(f"{data.path}: no sample to train on: {len(in_bound) - count:,} {TOO_LONG}")
    if not samples:
        truncated = ", or the rollout is truncated (algorithm.shaping.drop_truncated)" if count else ""
        raise UsageError(
            f"{data.path}: no sample has a learning signal: in every group all rewards are equal, or only one rollout has a "
            f"reward{truncated}"
        )
    return samples


def _check_ids(samples: Sequence[Sample], vocabulary: int, path: str) -> None:
    for sample in samples:
        largest = max((max(segment.token_ids) for segment in sample.segments), default=0)
        if largest >= vocabulary:
            raise UsageError(
                f"{path}: a sample has the token id {largest}, but the model has only {vocabulary} tokens; train the model "
                "(or one with its tokenizer) that wrote these rows"
            )


def steps(samples: Sequence[Sample], recipe: Recipe) -> int:
    """The number of optimizer steps that the recipe takes on them."""
    assert recipe.batch_size is not None and recipe.epochs is not None
    count = math.ceil(len(samples) / recipe.batch_size) * recipe.epochs
    return min(count, recipe.max_steps or count)


def batches(samples: Sequence[Sample], recipe: Recipe, done: int) -> Iterator[Batch]:
    """The batches after the first `done`, each an optimizer step."""
    assert recipe.batch_size is not None and recipe.epochs is not None
    parts = epochs(samples, recipe.batch_size, recipe.epochs, recipe.seed)
    of_epoch = math.ceil(len(samples) / recipe.batch_size)
    numbered = islice(enumerate(parts, 1), done, steps(samples, recipe))
    return (Batch([part], {"epoch": round(number / of_epoch, 4)}) for number, part in numbered)


def in_turn(batches: Iterator[Batch], algorithm: Algorithm, learner: Engine, budget: int) -> Iterator[Batch]:
    """Prepare each batch again when its turn comes: the critic's values have changed since the start of the run."""
    for batch in batches:
        updates = [algorithm.prepare(update, learner, budget) for update in batch.updates]
        yield Batch([update for update in updates if update], batch.values)


def epochs(samples: Sequence[Sample], batch_size: int, count: int, seed: int) -> Iterator[list[Sample]]:
    """Shuffles again for each epoch; the last batch of an epoch may be smaller."""
    for epoch in range(count):
        order = list(range(len(samples)))
        seeded_random(seed, "epoch", epoch).shuffle(order)
        for start in range(0, len(order), batch_size):
            yield [samples[index] for index in order[start : start + batch_size]]
