"""From a recipe to a saved policy: read it, make the data if need be, load, train, save."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import yaml

from ngym.config import Tree
from ngym.errors import ConfigError, UsageError

from .config import Recipe, find, read_launch, read_recipe
from .samples import Sample

POLICY = "policy"
METRICS = "metrics.jsonl"
RESOLVED = "recipe.yaml"


def main(files: Sequence[str], overrides: Sequence[str], *, overwrite: bool, dry_run: bool) -> None:
    """Run a recipe; see `ng_train --help`.

    Raises:
        UsageError: the recipe, its data or the place of its output is wrong.
    """
    recipe, tree = read_recipe(files, overrides)
    if dry_run:
        print(_as_yaml(recipe), end="")
        return
    _check_data(recipe, tree)
    if read_launch().rank == 0:
        _claim(recipe.output, overwrite)
        (recipe.output / RESOLVED).write_text(_as_yaml(recipe), encoding="utf-8")
    _run(recipe)


def _run(recipe: Recipe) -> None:
    """torch, transformers and deepspeed are imported from here on: seconds that a wrong recipe need not wait for."""
    # On a CPU the threads of torch spin while they wait; where anything else runs, that makes two slower than one.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    launch = read_launch()
    _say("loading torch, transformers and deepspeed")
    from . import engine, loop, model, optimizer
    from .algorithms.sft import Sft
    from .metrics import Metrics

    algorithm = Sft()
    with ExitStack() as stack:
        stack.enter_context(engine.joined(launch))
        if launch.rank == 0:
            _make_data(recipe)
        engine.wait_for_all()

        tokenizer = model.load_tokenizer(recipe.model)
        policy = model.load_policy(recipe.model, tokenizer, recipe.seed)
        samples = _samples(recipe, algorithm.samples(_data_file(recipe), tokenizer), policy.context)
        steps = math.ceil(len(samples) / recipe.batch_size) * recipe.epochs
        steps = min(steps, recipe.max_steps or steps)
        tokens = sum(sample.tokens for sample in samples)
        _say(f"{len(samples):,} samples of {tokens:,} tokens; {steps:,} steps of {recipe.batch_size} samples")

        learner = engine.Engine(policy, launch, recipe.engine, recipe.optimizer)
        with Metrics(recipe.output / METRICS, steps, shown=launch.rank == 0) as metrics:
            loop.train(
                learner,
                algorithm,
                islice(loop.epochs(samples, recipe.batch_size, recipe.epochs, recipe.seed), steps),
                recipe.micro_batch_tokens,
                lambda step: optimizer.schedule(step, steps, recipe.schedule),
                metrics.log,
            )
        learner.save(recipe.output / POLICY, tokenizer)
    _say(f"policy saved in {recipe.output / POLICY}, metrics in {recipe.output / METRICS}")


def _samples(recipe: Recipe, samples: list[Sample], context: int) -> list[Sample]:
    """Those that fit; what is left out is said."""
    bound = min(recipe.data.max_tokens or context, context)
    kept = [sample for sample in samples if sample.longest <= bound]
    if len(kept) < len(samples):
        _say(f"{len(samples) - len(kept):,} of {len(samples):,} samples are longer than {bound} tokens: left out")
    if not kept:
        raise UsageError(f"{recipe.data.path}: no sample to train on; data.max_tokens is {bound}")
    return kept


def _check_data(recipe: Recipe, tree: Tree) -> None:
    if find(recipe.data.path) is None and not recipe.data.made_by:
        raise ConfigError(
            f"{tree.where('data.path')}: data.path: there is no {recipe.data.path}; "
            "name a JSONL file, or data.made_by with the script that writes it"
        )


def _data_file(recipe: Recipe) -> Path:
    return find(recipe.data.path) or Path(recipe.data.path)


def _make_data(recipe: Recipe) -> None:
    if find(recipe.data.path) is not None:
        return
    _say(f"making {recipe.data.path}")
    done = subprocess.run([sys.executable, *recipe.data.made_by, "--output", recipe.data.path], check=False)
    if done.returncode != 0:
        raise UsageError(f"data.made_by: {' '.join(recipe.data.made_by)} ended with exit code {done.returncode}")


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
