"""`ng_train`: runs a training recipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout

import click
import orjson
from click.shell_completion import CompletionItem

from ngym.cli.shell.completion_names import is_value, keys
from ngym.cli.shell.main import command
from ngym.config.shipped_files import RECIPES
from ngym.errors import UsageError
from ngym.extras import require

EXIT_CODES = """\
Exit codes: 0    the policy is saved (with --sweep: each run's is)
            1    training failed; with --sweep: some runs failed, and the table shows which
            2    the recipe, its data or its output folder is wrong; the lines say where
            130  interrupted; --resume continues after the last checkpoint"""


def _recipes(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """The shipped recipes; after one, or once a word has begun, keys; else files."""
    from ngym.cli.shell.completion_names import of_recipe

    known = list(of_recipe())
    names = sorted(path.name for path in RECIPES.glob("*.yaml"))
    found = [CompletionItem(name) for name in names if name.startswith(begun)]
    if is_value(known, ctx, parameter):
        found = []
    elif begun or ctx.params.get("recipe"):
        found += keys(known, ctx, parameter, begun)
    return found or [CompletionItem(begun, type="file")]


def _keys(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    from ngym.cli.shell.completion_names import of_recipe

    return keys(list(of_recipe()), ctx, parameter, begun)


@command("ng_train", epilog=EXIT_CODES)
@click.argument("recipe", nargs=-1, required=True, metavar="RECIPE... [KEY=VALUE]...", shell_complete=_recipes)
@click.option(
    "--sweep", "sweeps", multiple=True, metavar="KEY=V,V", shell_complete=_keys,
    help="Run every combination of these values.",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="Continue after the last checkpoint of the run in the output folder.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier run in the same output folder; it is kept in .old.")
@click.option("--dry-run", is_flag=True, help="Check and show the resolved recipe (with --sweep: the runs), and stop.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end; the rest goes to standard error.")
def main(
    recipe: tuple[str, ...], sweeps: tuple[str, ...], resume: bool, overwrite: bool, dry_run: bool, as_json: bool
) -> None:
    """Train a policy with a recipe: a YAML file, or several of which later ones win, then overrides.

    \b
    Examples: ng_train sft.yaml
              ng_train sft.yaml output=runs/mine optimizer.lr=2e-3
              ng_train grpo.yaml model.path=runs/sft/policy        (live rollouts, weights pushed)
              ng_train grpo.yaml data.path=rollouts.jsonl          (from a finished file)
              ng_train dpo.yaml model.path=runs/sft/policy data.path=pairs.jsonl
              ng_train grpo.yaml --sweep optimizer.lr=1e-4,3e-4 --sweep seed=0,1        (four runs and a table)
              torchrun --no-python --nproc-per-node 2 ng_train sft.yaml
    """
    files = [argument for argument in recipe if "=" not in argument]
    overrides = [argument for argument in recipe if "=" in argument]
    if resume and overwrite:
        raise UsageError("--resume keeps what the run has, --overwrite removes it; give one of the two")
    if dry_run and sweeps:
        from ngym.trainer import dry_run as dry

        dry.sweep(files, overrides, sweeps, as_json=as_json)
        return
    if dry_run:
        from ngym.trainer import dry_run as dry

        dry.run(files, overrides, resume=resume, overwrite=overwrite, as_json=as_json)
        return
    require("train", "ng_train", "torch", "transformers", "deepspeed")  # before any service starts
    with _all_to_stderr() if as_json else nullcontext():
        if sweeps:
            from ngym.trainer import sweep

            output = sweep.main(files, overrides, sweeps, overwrite=overwrite, resume=resume)
        else:
            from ngym.trainer import train

            output = train.main(files, overrides, overwrite=overwrite, resume=resume)
    if as_json:
        from ngym.trainer import summary
        from ngym.trainer.recipe.recipe import read_launch

        if read_launch().rank == 0:
            click.echo(orjson.dumps(summary.of_sweep(output) if sweeps else summary.of_run(output)))


@contextmanager
def _all_to_stderr() -> Iterator[None]:
    """Redirect standard output to standard error while the block runs, also for C libraries and child processes."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
