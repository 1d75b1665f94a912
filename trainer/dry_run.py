"""A dry run: prints the resolved recipe, its sizes and its output paths, and checks tasks and services; loads and
writes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import orjson
import yaml

from .checkpoints import resumable
from .output_files import POLICY, holds_a_run
from .recipe.recipe import as_yaml, read_launch
from .recipe.validation import of_live
from .sweep import planned
from .train import check_live, checked


def run(files: Sequence[str], overrides: Sequence[str], *, resume: bool, overwrite: bool, as_json: bool) -> None:
    """Print the recipe on standard output and the rest on standard error; or all of it as one JSON object.

    Raises:
        UsageError: the recipe cannot run, as far as this is known without loading anything.
    """
    recipe, tree = checked(files, overrides)
    if recipe.live:
        check_live(recipe, recipe.live)
    text = as_yaml(recipe, tree)
    taken = holds_a_run(recipe.output)
    if resume:
        resumable(recipe.output, text)
    sizes = of_live(recipe, read_launch()) if recipe.live else []
    if as_json:
        told = {"output": str(recipe.output), "holds_a_run": taken, "sizes": sizes, "recipe": yaml.safe_load(text)}
        print(orjson.dumps(told, option=orjson.OPT_INDENT_2).decode())
        return
    print(text, end="")
    for line in sizes:
        print(line, file=sys.stderr)
    needs = " (it holds a run: pass --overwrite or --resume)" if taken and not (resume or overwrite) else ""
    print(f"would write {recipe.output / POLICY}{needs}; nothing was loaded or written", file=sys.stderr)


def sweep(files: Sequence[str], overrides: Sequence[str], sweeps: Sequence[str], *, as_json: bool) -> None:
    """Print the folder and the values of every run.

    Raises:
        UsageError: a run has a mistake.
    """
    folder, runs = planned(files, overrides, sweeps)
    if as_json:
        each = [{"output": str(run.folder), "values": run.combination.values} for run in runs]
        print(orjson.dumps({"output": str(folder), "runs": each}, option=orjson.OPT_INDENT_2).decode())
        return
    for run in runs:
        print(f"{run.folder}  {' '.join(run.combination.overrides)}")
