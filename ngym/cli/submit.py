"""`ng_submit`: renders and submits a run for Slurm, KubeRay or SkyPilot."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ngym.cli.shell.main import COMMANDS, Command, command
from ngym.did_you_mean import did_you_mean
from ngym.errors import ConfigError, NgymError, UsageError

if TYPE_CHECKING:
    from ngym.cluster.target import Target

EXIT_CODES = """\
Exit codes: 0  submitted; with --dry-run, rendered
            1  the cluster's own command refused it
            2  the settings or the command are wrong, or the cluster's own command is not installed"""
LOGS = Path(".ngym") / "submit"
UNSET = re.compile(r"Environment variable '(\w+)' not found")


class ForwardingCommand(Command):
    """Options after the settings belong to the submitted command."""

    allow_interspersed_args = False


@command("ng_submit", epilog=EXIT_CODES, cls=ForwardingCommand)
@click.option("--dry-run", is_flag=True, help="Print what would be submitted; write and submit nothing.")
@click.argument("to", metavar="slurm|kuberay|skypilot", type=click.Choice(["slurm", "kuberay", "skypilot"]))
@click.argument("settings", type=click.Path(path_type=Path), metavar="SETTINGS")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[KEY=VALUE]... [COMMAND]...")
def main(dry_run: bool, to: str, settings: Path, words: tuple[str, ...]) -> None:
    """Run COMMAND on a cluster, with the machines that the YAML file SETTINGS describes.

    The command is what you would type here; it gets `--on ray`, and `--resume` if it continues. Slurm: one script with
    Ray over all nodes, run in this folder, which all nodes must see. kuberay: a RayJob, or without a command a
    RayCluster. skypilot: a task.

    \b
    Examples: ng_submit --dry-run slurm cluster.yaml ng_train grpo.yaml engine.zero_stage=2
              ng_submit slurm cluster.yaml nodes=4 time=04:00:00 ng_train grpo.yaml
              ng_submit kuberay cluster.yaml ng_train grpo.yaml
              ng_submit skypilot cluster.yaml ng_run
    """
    from ngym.cluster.target import read_target

    begin = next((index for index, word in enumerate(words) if "=" not in word), len(words))
    target = read_target(settings, words[:begin])
    run = words[begin:]
    if not run and to != "kuberay":
        raise UsageError("give the command to run, such as `ng_train grpo.yaml`, after the settings")
    {"slurm": _slurm, "kuberay": _kuberay, "skypilot": _skypilot}[to](target, run, dry_run)


def _slurm(target: Target, run: Sequence[str], dry_run: bool) -> None:
    from ngym.cluster.slurm import AFTER, render, submissions
    from ngym.cluster.target import secret_values

    _check_command(target, run)
    folder = Path.cwd()
    logs = folder / LOGS / target.name
    script = render(target, run, folder, logs)
    path = logs / "job.sh"
    commands = submissions(target, path)
    if dry_run:
        click.echo(script, nl=False)
        click.echo("\n".join(shlex.join(each) for each in commands), err=True)
        secret_values(target)  # fails as the submission would
        return
    secret_values(target)  # sbatch gives the job the variables that are set here
    _require_program("sbatch")
    logs.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    previous = ""
    for each in commands:
        words = [AFTER.format(previous=previous) if word == AFTER else word for word in each]
        previous = _output(words).strip().partition(";")[0]
        click.echo(f"job {previous}: logs in {logs}", err=True)
        click.echo(previous)


class CommandLine(NamedTuple):
    """A command of ngym as it runs on the cluster. params: its parameters by name."""

    command: Command
    words: list[str]
    params: dict[str, Any]


def _parse(run: Sequence[str]) -> CommandLine | None:
    """The command that would run; None for another program.

    Raises:
        UsageError, click.ClickException: there is no such command or option.
    """
    from ngym.cluster.target import on_ray

    name = run[0]
    if not name.startswith("ng_"):
        return None
    known = [f"ng_{each}" for each in COMMANDS]
    if name not in known:
        raise UsageError(f"{name}: no such command{did_you_mean(name, known)}")
    command: Command = import_module(COMMANDS[name.removeprefix("ng_")][0]).main
    words = on_ray(run)[1:]
    return CommandLine(command, words, command.make_context(name, list(words)).params)


def _check_command(target: Target, run: Sequence[str]) -> None:
    """Check the command's name, its options and its recipe: the job runs in this folder.

    Raises:
        UsageError, click.ClickException: they are wrong; in one line for each mistake.
    """
    name, parsed = run[0], _parse(run)
    if parsed is None:
        if not target.setup and shutil.which(name) is None:  # `setup` can bring it
            raise UsageError(f"{name}: no such command here; name one, such as ng_train")
        return
    called, words, params = parsed
    if params.get("overwrite") and name in ("ng_train", "ng_collect_rollouts"):
        raise UsageError(
            f"{name} --overwrite: a job that continues the run would begin it again; choose another output"
        )
    if name != "ng_train":
        return
    if params["sweeps"] and params["on"] != "local":
        raise UsageError("--sweep runs on one machine: submit ng_train --on local, or its runs one by one")
    if any(option.startswith(("--dependency", "-d")) for option in target.options):
        return  # an earlier job may make the model or the data
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            called.main([*words, "--dry-run"], prog_name=name, standalone_mode=False)
    except ConfigError as error:
        if (unset := UNSET.search(str(error))) is None:
            raise
        if not re.search(rf"\bexport\b[^;&|\n]*\b{unset[1]}=", target.setup):
            raise ConfigError(f"{error}; set it here, or in `setup` with `export {unset[1]}=...`") from error
        click.echo(f"the recipe is checked when the job starts: it needs {unset[1]}, which `setup` exports", err=True)


def _kuberay(target: Target, run: Sequence[str], dry_run: bool) -> None:
    from ngym.cluster.kuberay import render, secrets

    if run:
        _parse(run)
    apply = ["kubectl", "apply", "-f", "-"]
    if dry_run:
        click.echo(_yaml(render(target, run)), nl=False)
        click.echo(f"| {shlex.join(apply)}", err=True)
        secrets(target)  # fails as the submission would
        return
    _require_program("kubectl")
    click.echo(_output(apply, _yaml(render(target, run, secrets(target)))), nl=False)


def _skypilot(target: Target, run: Sequence[str], dry_run: bool) -> None:
    from ngym.cluster.skypilot import render
    from ngym.cluster.target import secret_values

    _parse(run)
    task = _yaml([render(target, run)])
    path = Path.cwd() / LOGS / target.name / "task.yaml"
    options = [word for name in ("RAY_AUTH_TOKEN", *target.secrets) for word in ("--secret", name)]
    launch = ["sky", "launch", "--yes", "--detach-run", "--cluster", target.name, *options, str(path)]
    if dry_run:
        click.echo(task, nl=False)
        click.echo(shlex.join(launch), err=True)
        secret_values(target)  # fails as the submission would
        return
    _require_program("sky")
    secret_values(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(task)  # `sky` opens it more than once: it cannot be a pipe
    # `sky` reads the values of secrets from its environment, and reports for minutes how it gets the machines
    token = {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    result = subprocess.run(launch, env=token | os.environ, check=False)
    if result.returncode:
        raise NgymError(f"sky failed ({result.returncode})")


def _yaml(documents: list[dict[str, Any]]) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Lines of text as a block."""

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    Dumper.ignore_aliases = lambda self, data: True  # type: ignore[method-assign]
    return yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=120)


def _require_program(program: str) -> None:
    if shutil.which(program) is None:
        raise UsageError(f"{program} is not installed here; --dry-run shows what it would get")


def _output(words: Sequence[str], text: str | None = None) -> str:
    result = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if result.returncode:
        raise NgymError(f"{words[0]} failed ({result.returncode}): {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout
