"""`ng_train`: run a training recipe."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

import click

from ngym.cli.main import command
from ngym.errors import UsageError

PACKAGE = "_ngym_trainer"


@command("ng_train")
@click.argument("recipe", nargs=-1, required=True, metavar="RECIPE... [KEY=VALUE]...")
@click.option("--sweep", "sweeps", multiple=True, metavar="KEY=V,V", help="Run every combination of these values.")
@click.option("--resume", is_flag=True, help="Go on after the last checkpoint of the run in the output folder.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier run in the same output folder.")
@click.option("--dry-run", is_flag=True, help="Print the resolved recipe (with --sweep: the runs) and stop.")
def main(recipe: tuple[str, ...], sweeps: tuple[str, ...], resume: bool, overwrite: bool, dry_run: bool) -> None:
    """Train a policy as a recipe says: a YAML file, or several of which later ones win, then overrides.

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
    if sweeps:
        trainer("sweep").main(files, overrides, sweeps, overwrite=overwrite, resume=resume, dry_run=dry_run)
    else:
        trainer("program").main(files, overrides, overwrite=overwrite, resume=resume, dry_run=dry_run)


def trainer(module: str) -> ModuleType:
    """A module of the trainer: a package under a private name, so that `trainer` never becomes an import name."""
    if PACKAGE not in sys.modules:
        from ngym.config import shipped

        folder = shipped() / "trainer"
        spec = importlib.util.spec_from_file_location(
            PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        if spec is None or spec.loader is None or not folder.is_dir():
            raise UsageError(f"{folder}: the trainer is not there; install ngym again")
        package = importlib.util.module_from_spec(spec)
        sys.modules[PACKAGE] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{PACKAGE}.{module}")
