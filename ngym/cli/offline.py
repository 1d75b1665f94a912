"""`make offline`: trains a policy on finished rollouts: collect, export preference pairs, DPO, compare."""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import fmean

import click

from ngym.cli.shell.main import command, writing
from ngym.cli.shell.walkthrough import Walkthrough
from ngym.config.shipped_files import RECIPES, shipped_path

QUICKSTART = Path("runs/quickstart/sft/policy")
CONFIG = """\
# Written by make offline. `ng_run --config {file}` starts these three services.
policy: {{kind: model, app: models/vllm, model: {policy}, bundle_tokens: true}}
calculator: {{kind: gym_server, app: gym_servers/calculator}}
calculator_agent: {{kind: agent, app: agents/simple, gym: calculator, model: policy, max_steps: 4}}
"""
STEPS = 6
HELD_OUT_REPEATS = 2


@command("offline")
@click.option(
    "--folder", type=click.Path(path_type=Path), default="runs/offline", show_default=True, help="The output folder."
)
@click.option(
    "--policy",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="The initial policy.  [default: that of ng_quickstart, else a new one]",
)
@click.option("--tasks", type=click.IntRange(2, 512), default=512, show_default=True, help="Training tasks.")
@click.option("--repeats", type=click.IntRange(2), default=8, show_default=True, help="Rollouts of each task.")
@click.option("--seed", type=int, default=0, show_default=True)
def main(folder: Path, policy: Path | None, tasks: int, repeats: int, seed: int) -> None:
    """Improve a policy by DPO on pairs of its own rollouts, and compare both policies on held-out tasks.

    Takes about three minutes on two cores. Replaces what is in the folder.
    """
    started = time.monotonic()
    walk = Walkthrough(STEPS)
    folder.mkdir(parents=True, exist_ok=True)
    data = shipped_path("data/calculator")
    config, rollouts, pairs = folder / "global_config.yaml", folder / "rollouts.jsonl", folder / "pairs.jsonl"

    walk.step("the initial policy: it can call the calculator, but prefers to guess")
    policy = policy or _quickstarts_or_new(folder, seed, walk)
    with writing(config):
        config.write_text(CONFIG.format(file=config, policy=os.path.relpath(policy, folder)), encoding="utf-8")

    def collect(source: Path, output: Path, *more: str) -> None:
        arguments = ("--config", str(config), "--agent", "calculator_agent", "--input", str(source))
        walk.ng("collect_rollouts", *arguments, "--output", str(output), "--overwrite", *more)

    held_out, before, after = data / "validation.jsonl", folder / "before.jsonl", folder / "after.jsonl"
    walk.step("its reward on held-out tasks")
    collect(held_out, before, "--repeats", str(HELD_OUT_REPEATS))
    walk.step(f"{repeats} rollouts of each of {tasks} training tasks")
    collect(data / "train.jsonl", rollouts, "--limit", str(tasks), "--repeats", str(repeats))
    walk.step("pairs of a better and a worse rollout of the same task")
    walk.ng(
        *("export", "--format", "preferences", "--input", str(rollouts), "--output", str(pairs)),
        *("--pairs", "best-worst", "--max-pairs", str(repeats // 2), "--overwrite"),
    )
    walk.step("direct preference optimisation")
    what = (f"model.path={policy}", f"data.path={pairs}", f"output={folder / 'dpo'}", f"seed={seed}")
    walk.ng("train", str(RECIPES / "dpo.yaml"), *what, "--overwrite")
    walk.step("the reward of the new policy on the held-out tasks")
    collect(held_out, after, "--repeats", str(HELD_OUT_REPEATS), "policy.model=dpo/policy")

    click.secho(f"\nheld-out reward {_mean_reward(before)} -> {_mean_reward(after)}", bold=True)
    click.echo(
        f"Done in {time.monotonic() - started:.0f} s. Everything is in {folder}; the policy is {folder}/dpo/policy."
    )


def _quickstarts_or_new(folder: Path, seed: int, walk: Walkthrough) -> Path:
    if QUICKSTART.is_dir():
        click.echo(f"using {QUICKSTART}")
        return QUICKSTART

    output = folder / "sft"
    walk.ng("train", str(RECIPES / "sft.yaml"), f"output={output}", f"seed={seed}", "--overwrite")
    return output / "policy"


def _mean_reward(rollouts: Path) -> str:
    """The mean reward of the scored rollouts, and the share of unscored ones if there are any."""
    from ngym.files.jsonl import read

    rewards = [line.row["reward"] for line in read(rollouts)]
    scored = [reward for reward in rewards if reward is not None]
    mean = f"{fmean(scored):.3f}" if scored else "-"
    return mean if len(scored) == len(rewards) else f"{mean} ({1 - len(scored) / len(rewards):.1%} unscored)"


if __name__ == "__main__":
    main()
