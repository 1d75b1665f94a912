"""`ng_train`: runs a training recipe."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import click
import orjson
from click.shell_completion import CompletionItem

from ngym.cli.shell.completion_names import is_value, keys, services
from ngym.cli.shell.main import command, on_option
from ngym.config.shipped_files import RECIPES
from ngym.errors import ConfigError, UsageError
from ngym.extras import require

if TYPE_CHECKING:
    from ngym.config.service_config import Config, Stanza

EXIT_CODES = """\
Exit codes: 0    the policy is saved (with --sweep: each run's is)
            1    training failed, or trained nothing; with --sweep: some runs failed, and the table shows which
            2    the recipe, its data or its output folder is wrong; the lines say where
            130  interrupted; --resume continues after the last checkpoint"""


def _recipes(ctx: click.Context, parameter: click.Parameter, prefix: str) -> list[CompletionItem]:
    """The shipped recipes; after one, or after the first letters of a word, keys; else files."""
    from ngym.cli.shell.completion_names import of_recipe

    known = list(of_recipe())
    names = sorted(path.name for path in RECIPES.glob("*.yaml"))
    items = [CompletionItem(name) for name in names if name.startswith(prefix)]
    if is_value(known, ctx, parameter):
        items = []
    elif prefix or ctx.params.get("recipe"):
        items += keys(known, ctx, parameter, prefix)
    return items or [CompletionItem(prefix, type="file")]


def _keys(ctx: click.Context, parameter: click.Parameter, prefix: str) -> list[CompletionItem]:
    from ngym.cli.shell.completion_names import of_recipe

    return keys(list(of_recipe()), ctx, parameter, prefix)


@command("ng_train", epilog=EXIT_CODES)
@click.argument("recipe", nargs=-1, metavar="RECIPE... [KEY=VALUE]...", shell_complete=_recipes)
@click.option(
    "--environment", metavar="NAME", shell_complete=services("gym_server"),
    help="Train on this gym server of global_config.yaml, with grpo.yaml or the RECIPE.",
)  # fmt: skip
@click.option(
    "--sweep", "sweeps", multiple=True, metavar="KEY=V,V", shell_complete=_keys,
    help="Run every combination of these values.",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="Continue after the last checkpoint of the run in the output folder.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier run in the same output folder; it is kept in .old.")
@on_option("Train here, or with the ranks of `trainer` on the Ray cluster that this machine is a node of.")
@click.option("--dry-run", is_flag=True, help="Check and show the resolved recipe (with --sweep: the runs), and stop.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end; the rest goes to standard error.")
@click.pass_context
def main(
    ctx: click.Context,
    recipe: tuple[str, ...],
    environment: str | None,
    sweeps: tuple[str, ...],
    resume: bool,
    overwrite: bool,
    on: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train a policy with a recipe: a YAML file, or several of which later ones win, then overrides.

    --environment NAME fills in the recipe's agent, tasks, services and output, and prints the whole command.

    \b
    Examples: ng_train sft.yaml
              ng_train sft.yaml output=runs/mine optimizer.lr=2e-3
              ng_train grpo.yaml model.path=runs/sft/policy        (live rollouts, weights pushed)
              ng_train grpo.yaml data.path=rollouts.jsonl          (from a finished file)
              ng_train --environment my_env model.path=Qwen/Qwen3-0.6B
              ng_train dpo.yaml model.path=runs/sft/policy data.path=pairs.jsonl
              ng_train grpo.yaml --sweep optimizer.lr=1e-4,3e-4 --sweep seed=0,1        (four runs and a table)
              torchrun --no-python --nproc-per-node 2 ng_train sft.yaml
              ng_train --on ray grpo.yaml model.path=runs/sft/policy trainer.ranks=2
    """
    files = [argument for argument in recipe if "=" not in argument]
    overrides = [argument for argument in recipe if "=" in argument]
    if environment is not None:
        files, overrides = of_environment(environment, files, overrides)
        click.echo(f"the same as: ng_train {shlex.join([*files, *overrides])}", err=True)
    if not recipe and environment is None:
        raise click.UsageError(
            "Missing argument 'RECIPE...'; to train on your own environment: --environment NAME", ctx
        )
    if resume and overwrite:
        raise UsageError("--resume keeps what the run has, --overwrite removes it; give one of the two")
    from ngym.trainer import run_folder, sweep, train

    if dry_run and sweeps:
        sweep.dry_run(files, overrides, sweeps, as_json=as_json)
        return
    if dry_run:
        on_ray = on != "local"
        train.dry_run(files, overrides, resume=resume, overwrite=overwrite, as_json=as_json, on_ray=on_ray)
        return
    if on != "local":
        require("ray", "ng_train --on ray", "ray")
        if sweeps:
            raise UsageError("--sweep runs on one machine; submit its runs one by one, or leave --on out")
    require("train", "ng_train", "torch", "transformers", "deepspeed")  # before any service starts
    with _all_to_stderr() if as_json else nullcontext():
        if on != "local":
            from ngym.trainer import ray_launcher

            output = ray_launcher.main(files, overrides, on, overwrite=overwrite, resume=resume)
        elif sweeps:
            output = sweep.main(files, overrides, sweeps, overwrite=overwrite, resume=resume)
        else:
            output = train.main(files, overrides, overwrite=overwrite, resume=resume)
    if as_json:
        from ngym.trainer.recipe.recipe import read_launch

        if read_launch().rank == 0:
            click.echo(orjson.dumps((sweep if sweeps else run_folder).summary(output)))


CONFIG = "global_config.yaml"
TRAINABLE = ("models/vllm", "models/sglang", "models/transformers")
PRETRAINED = ("optimizer.lr=1e-6", "schedule.warmup_steps=0")  # grpo.yaml's own are for a tiny policy


def of_environment(name: str, files: list[str], overrides: list[str]) -> tuple[list[str], list[str]]:
    """The recipe and the overrides that train on a gym server of the config; those that are given win.

    Raises:
        ConfigError: there is no such gym server, no agent for it, or no task.
        UsageError: it is not known which policy to train.
    """
    from ngym.config.service_config import load_config

    values = {override.partition("=")[0]: override.partition("=")[2] for override in overrides}
    services = values.get("rollouts.services", CONFIG)
    config = load_config([Path(services)])
    gym = config.stanza(name)
    if gym.kind != "gym_server":
        raise ConfigError(f"{gym.where}: {name!r} is a {gym.kind}, not a gym_server")
    agents = [each for each in config.services.values() if each.kind == "agent" and each.options.get("gym") == name]
    if not agents:
        stanza = f"{name}_agent: {{kind: agent, app: agents/simple, gym: {name}, model: policy}}"
        raise ConfigError(f"{gym.where}: no agent uses {name!r}; add a stanza such as `{stanza}`")
    agent = next((each for each in agents if each.name == values.get("rollouts.agent")), agents[0])
    tasks = Path(values.get("rollouts.tasks") or _tasks(config, gym))
    own = {"rollouts.agent": agent.name, "rollouts.tasks": str(tasks), "rollouts.services": services}
    own |= _policy(config, agent, values) | {"output": f"runs/{name}"}
    if not tasks.with_name("validation.jsonl").is_file():
        own["evaluation"] = "null"
    extra = () if files else PRETRAINED
    added = [f"{key}={value}" for key, value in own.items() if key not in values]
    added += [override for override in extra if override.partition("=")[0] not in values]
    return files or ["grpo.yaml"], [*added, *overrides]


def _tasks(config: Config, gym: Stanza) -> Path:
    """Its train.jsonl, else its example.jsonl."""
    from ngym.config.shipped_files import app_file

    if gym.app is None:
        raise ConfigError(f"{gym.where}: {gym.name!r} runs elsewhere; name its tasks with rollouts.tasks=FILE")
    data = app_file(gym.app, config.root, gym.where).parent / "data"
    for file in (data / "train.jsonl", data / "example.jsonl"):
        if file.is_file():
            return Path(os.path.relpath(file))
    raise ConfigError(f"{gym.where}: {data} has no train.jsonl; write tasks there, or name them: rollouts.tasks=FILE")


def _policy(config: Config, agent: Stanza, values: Mapping[str, str]) -> dict[str, str]:
    """The policy's service and its weights. A server whose weights cannot change is replaced by models/vllm."""
    policy = config.stanza(str(agent.options.get("model")))
    own = {"rollouts.policy": policy.name}
    is_trainable = policy.app is not None and policy.app.endswith(TRAINABLE)
    if is_trainable and isinstance(policy.options.get("model"), str):
        return own | {"model.path": policy.options["model"]}
    if "model.path" not in values:
        raise UsageError(
            f"{policy.where}: the weights of {policy.name!r} ({policy.app or 'an external service'}) cannot be trained; "
            "name a model: model.path=FOLDER or model.path=Qwen/Qwen3-0.6B"
        )
    return own | {"rollouts.policy_app": TRAINABLE[0]}


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
