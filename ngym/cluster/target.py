"""The settings file of `ng_submit`: what a run gets on a cluster, and the command that runs there."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from ngym.config.yaml_tree import load_tree, parse
from ngym.did_you_mean import near_file
from ngym.errors import UsageError

NAME = r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$"  # as Kubernetes and Slurm accept it, with room for suffixes
ON_RAY = ("ng_run", "ng_train")  # the commands that have --on
RESUME = 'if "${command[@]}" --resume --dry-run > /dev/null 2>&1; then command+=(--resume); fi'


class Target(BaseModel):
    """Settings of a submitted run. nodes, gpus, cpus and memory_gb are those that the run gets for itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = Field(pattern=NAME, description="The name of the job, and of its folder of logs.")
    nodes: int = Field(default=1, ge=1, description="Machines with the resources below.")
    gpus: int = Field(default=0, ge=0, description="GPUs of each node.")
    cpus: int = Field(default=8, ge=1, description="Cores of each node.")
    memory_gb: int = Field(default=32, ge=1, description="Memory of each node, in GiB.")
    pool: str | None = Field(default=None, pattern=NAME, description="What stanzas with this `pool` run on.")
    setup: str = Field(default="", description="A shell line before everything else, such as that of a module.")
    secrets: tuple[str, ...] = Field(default=(), description="Environment variables that the run needs, by name.")
    time: str = Field(default="24:00:00", pattern=r"^(\d+-)?\d{1,2}:\d\d:\d\d$", description="Slurm: the time limit.")
    partition: str | None = Field(default=None, description="Slurm.")
    account: str | None = Field(default=None, description="Slurm.")
    chain: int = Field(
        default=0, ge=0, le=100, description="Slurm: jobs that continue, one after another; 0: the job is requeued."
    )
    options: tuple[str, ...] = Field(default=(), description="Slurm: further #SBATCH lines, such as --exclusive.")
    image: str | None = Field(default=None, description="A container image with ngym and the project.")
    workdir: str = Field(default="/workspace", description="Kubernetes: the project's folder in the image.")
    namespace: str = Field(default="default", pattern=NAME, description="Kubernetes.")
    claim: str | None = Field(default=None, description="Kubernetes: a PersistentVolumeClaim for workdir/runs.")
    accelerator: str | None = Field(default=None, description="SkyPilot: the kind of GPU, such as H100.")


def read_target(file: Path, overrides: Sequence[str]) -> Target:
    """The settings of a file and `key=value` overrides. ConfigError: one line per mistake."""
    if not file.exists():
        raise UsageError(f"{file}: no such settings file{near_file(file)}; docs/scale.md has examples")
    texts = [name for name, field in Target.model_fields.items() if field.annotation in (str, str | None)]
    target: Target = parse(Target, load_tree([file], overrides, texts=texts))
    for name in target.secrets:
        if not name.isidentifier():
            raise UsageError(f"{file}: secrets: {name!r} is not the name of a variable")
    return target


def secret_values(target: Target) -> dict[str, str]:
    """The variables that the settings name. UsageError if one is not set."""
    if missing := [name for name in target.secrets if name not in os.environ]:
        raise UsageError(f"secrets: not set here: {', '.join(missing)}")
    return {name: os.environ[name] for name in target.secrets}


def on_ray(command: Sequence[str]) -> list[str]:
    """The words of the command, on the cluster."""
    words = list(command)
    if words[0] not in ON_RAY or any(word == "--on" or word.startswith("--on=") for word in words):
        return words
    return [words[0], "--on", "ray", *words[1:]]


def shell_text(command: Sequence[str]) -> str:
    return shlex.join(on_ray(command))


def resume_line(command: Sequence[str]) -> str:
    """The line that adds --resume where an earlier job has begun the run. Another program could ignore the options, and
    do all its work twice.
    """
    return RESUME if command[0].startswith("ng_") else "# (not a command of ngym: it gets no --resume)"
