"""`ng_quickstart`: from nothing to a policy that has learned to use its tool; every step is a command shown on the screen."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click

from ngym.cli.main import command
from ngym.cli.steps import ng, python, step
from ngym.schema import Json

CONFIG = """\
# Written by ng_quickstart. `ng_run --config {file}` starts these three services.
policy: {{kind: model, app: models/vllm, model: sft/policy}}
calculator: {{kind: gym_server, app: gym_servers/calculator}}
calculator_agent: {{kind: agent, app: agents/simple, gym: calculator, model: policy, max_steps: 4}}
"""
STEPS = 5
NEXT = """\
What to try next{activate}
  ng_run --config {config}
      the same services, with a status page; then in a second terminal, from the folder {folder}:
  ng_collect_rollouts --agent calculator_agent --input {tasks} --output more.jsonl --repeats 16 --temperature 0.7
  ng_init my_env
      an environment of your own: two functions and a stanza"""


@command("ng_quickstart")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default="runs/quickstart",
    show_default=True,
    help="Where everything goes.",
)
@click.option(
    "--tasks", "limit", type=click.IntRange(1, 256), default=32, show_default=True, help="Held-out tasks to run."
)
@click.option("--repeats", type=click.IntRange(1), default=8, show_default=True, help="Rollouts of each task.")
@click.option("--seed", type=int, default=0, show_default=True)
def main(folder: Path, limit: int, repeats: int, seed: int) -> None:
    """Make a tiny policy, serve it with vLLM, collect scored rollouts, and improve it by reinforcement learning.

    Takes about two minutes on two cores. What is in the folder is made anew.

    \b
    Example: ng_quickstart --repeats 16
    """
    from ngym.config import shipped

    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    data = shipped() / "data" / "calculator"
    config, demonstrations, rollouts = (
        folder / "global_config.yaml",
        folder / "demonstrations.jsonl",
        folder / "rollouts.jsonl",
    )
    config.write_text(CONFIG.format(file=config))
    tasks = data / "validation.jsonl"

    step(1, STEPS, "word problems, and demonstrations of how (and how not) to solve them")
    python(str(data / "generate.py"), "demonstrations", "--output", str(demonstrations), "--seed", str(seed))
    step(2, STEPS, "supervised fine-tuning: a policy that can call the calculator, but prefers to guess")
    recipe = shipped() / "trainer" / "recipes" / "sft.yaml"
    ng("train", str(recipe), f"data.path={demonstrations}", f"output={folder / 'sft'}", f"seed={seed}", "--overwrite")
    step(3, STEPS, f"vLLM serves the policy; {repeats} rollouts of each of {limit} held-out tasks")
    where = ("--config", str(config), "--agent", "calculator_agent", "--input", str(tasks), "--output", str(rollouts))
    ng("collect_rollouts", *where, "--limit", str(limit), "--repeats", str(repeats), "--overwrite")
    step(4, STEPS, "three of the rollouts")
    from ngym.transcript import transcript

    for row in _telling(rollouts):
        click.echo(transcript(row) + "\n")
    step(5, STEPS, "reinforcement learning: vLLM samples, the services score, DeepSpeed trains, new weights are pushed")
    services = f"rollouts.services={config}"
    policy = f"model.path={folder / 'sft' / 'policy'}"
    grpo = shipped() / "trainer" / "recipes" / "grpo.yaml"
    ng("train", str(grpo), policy, services, f"output={folder / 'grpo'}", f"seed={seed}", "--overwrite")
    click.echo(
        f"\nDone in {time.monotonic() - started:.0f} s. Everything is in {folder}: both policies (Hugging Face folders), {rollouts.name}, logs.\n"
    )
    bin_folder = Path(sys.executable).parent
    activate = "" if shutil.which("ng_run") else f" (after `. {os.path.relpath(bin_folder / 'activate')}`)"
    click.echo(NEXT.format(activate=activate, config=config, folder=folder, tasks=tasks))


def _telling(rollouts: Path) -> list[Json]:
    """A rollout that used the tool and was right, one that guessed wrong, and the longest of the others."""
    rows = list(_rows(rollouts))
    right = next((row for row in rows if row["reward"] == 1 and row["ng"]["tool_calls"]), None)
    wrong = next((row for row in rows if row["reward"] == 0 and not row["ng"]["tool_calls"]), None)
    others = sorted(
        (row for row in rows if row is not right and row is not wrong), key=lambda row: -row["ng"]["tool_calls"]
    )
    chosen = [row for row in (right, wrong) if row is not None]
    return (chosen + [row for row in others if row["reward"] == 0] + others)[:3]


def _rows(path: Path) -> Iterator[Json]:
    import orjson

    with path.open("rb") as file:
        for line in file:
            yield orjson.loads(line)
