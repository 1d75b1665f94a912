"""Services that are killed during a live run with vLLM: the run continues, and failures are not rewards."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from trainer_service import metrics_of, train
from waiting import descendants

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
STEPS = 10
TASKS, GROUP = 8, 8


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's policy: it can call its calculator."""
    folder = tmp_path_factory.mktemp("sft")
    process = train(folder, ["sft.yaml", "output=run"])
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return folder / "run" / "policy"


def kill(trainer_pid: int, name: str) -> None:
    """One process of this name below the trainer: a service (`ng:NAME`), or vLLM's engine."""

    def is_it(process: psutil.Process) -> bool:
        is_engine = name == "engine" and "EngineCore" in " ".join(process.cmdline())
        return is_engine or process.name() == f"ng:{name}"[:15]

    found = descendants(psutil.Process(trainer_pid), is_it)
    assert found, f"no process of {name}"
    found[0].kill()


def wait_for_step(folder: Path, process: subprocess.Popen[str], step: int) -> None:
    deadline = time.monotonic() + 600
    path = folder / "run" / "metrics.jsonl"
    while not path.exists() or path.read_bytes().count(b'"loss"') < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("lag", [0, 2])
def test_each_kind_of_service_may_die_and_so_may_the_trainer(
    policy: Path, root: Path, tmp_path: Path, lag: int
) -> None:
    words = [
        "grpo.yaml",
        "output=run",
        f"model.path={policy}",
        f"rollouts.services={root / 'global_config.yaml'}",
        f"rollouts.tasks_per_step={TASKS}",
        f"rollouts.group_size={GROUP}",
        f"rollouts.max_lag={lag}",
        f"max_steps={STEPS}",
        "checkpoint.every=2",
        "evaluation=null",
        "optimizer.lr=3e-5",  # so that with a lag, too, the policy is nearly the one that sampled
    ]
    process = train(tmp_path, words)
    for step, name in ((1, "calculator"), (3, "calculator_agent"), (5, "engine")):
        wait_for_step(tmp_path, process, step)
        kill(process.pid, name)
    wait_for_step(tmp_path, process, 7)
    process.kill()
    process.communicate()
    resumed = train(tmp_path, [*words, "--resume"])
    output, _ = resumed.communicate(timeout=600)
    assert resumed.returncode == 0, output

    steps = metrics_of(tmp_path)
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    for row in steps:
        assert row["lag"] <= lag
        assert row["num_valid_samples"] + row["num_unscored"] + row["num_failed"] == TASKS * GROUP
        # the policy can call its calculator: a step of zeros would be failures in disguise
        assert row["reward/mean"] > 0 and row["num_unscored"] == 0
        assert row["token_mult_prob_error"] < 1.05
    rows = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text("utf-8").splitlines()]
    assert len({row["ng"]["rollout_id"] for row in rows}) == len(rows)
    assert all("failure" not in row and row["reward"] is not None for row in rows)
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False).stdout.split()
    assert not left, f"{left} of {sys.argv}"
