"""The project in which the documentation's snippets run: a scripted policy, a run that serves it, and its rollouts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from documents import ROOT
from forked import ForkedCommand
from waiting import PATIENCE_S, wait_until

from ngym.cli.init import project

PORTS = {"8801": "policy", "8802": "counter", "8803": "counter_agent"}  # as the pages write them -> who has them
AGENTS = ("counter_agent", "calculator_agent", "my_env_agent", "worse_agent")
ENVIRONMENTS = ("my_env", "vowels", "stock")  # of the pages; as ng_init makes them
REPLIES = [
    {"turn": 1, "match": r"Bring it to (-?\d+)", "tool_calls": [{"name": "add", "arguments": '{"amount": {1}}'}]},
    {"turn": 1, "match": r"counter to (-?\d+)", "tool_calls": [{"name": "add", "arguments": '{"amount": {1}}'}]},
    {"turn": 1, "match": r"word '(\w+)'", "tool_calls": [{"name": "mirror", "arguments": {"word": "{1}"}}]},
    {"turn": 1, "contains": "coins", "tool_calls": [{"name": "calculator", "arguments": {"expression": "37+58"}}]},
    {"turn": 2, "text": "It is {tool_output}."},
]
TASKS = [
    {"responses_create_params": {"input": f"The counter starts at 0. Bring it to {n}."}, "target": n, "level": n % 2}
    for n in (3, 14, 15, 92)
]
FOLDERS = ("runs/sft/policy", "runs/quickstart/sft/policy", "runs/quickstart/grpo/policy", "runs/a", "runs/b")
TRAINED = ("runs/grpo", "runs/dapo", "runs/rates/a", "runs/rates/b", "runs/seed-0", "runs/seed-1")
ADDRESS = re.compile(r"\b(localhost|127\.0\.0\.1):(\d+)")
COPIES = ("rollouts.jsonl", "yesterday.jsonl", "today.jsonl", "runs/a/out.jsonl", "runs/b/out.jsonl")
TASK_FILES = ("tasks.jsonl", "held_out.jsonl", "my_math.jsonl", "my_tasks.jsonl", "part.00.jsonl")


@contextmanager
def world(folder: Path) -> Iterator[Path]:
    """The folder, with everything in it that the pages assume, while its services run."""
    _lay_out(folder)
    process = subprocess.Popen(
        ngym("run", *(word for name in AGENTS for word in ("--only", name)), "ngym.head.port=0"),
        cwd=folder,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    try:
        wait_until(lambda: process.poll() is not None or _ready(folder))
        _collect(folder)
        yield folder
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def ngym(*words: str) -> list[str]:
    return [sys.executable, "-m", "ngym", *words]


def environment() -> dict[str, str]:
    """Without what would colour or widen what commands print."""
    return os.environ | {
        "NO_COLOR": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "120",
        "PYTHONPATH": "",
    }


def copy_world(world: Path, folder: Path) -> Path:
    """A separate folder for a page; what it writes is seen by no other page."""
    shutil.copytree(world, folder, symlinks=True)
    return folder


def _lay_out(folder: Path) -> None:
    services = yaml.safe_load((ROOT / "global_config.yaml").read_text())
    for environment_name in ENVIRONMENTS:
        for name, text in project(environment_name).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        data = folder / "gym_servers" / environment_name / "data"
        shutil.copy(data / "example.jsonl", data / "train.jsonl")
        own_config = yaml.safe_load((folder / "global_config.yaml").read_text())
        services |= {name: stanza for name, stanza in own_config.items() if name != "policy"}
    services["policy"] = {"kind": "model", "app": "models/scripted", "tokens": True, "replies": REPLIES}
    services["worse"] = {"kind": "model", "app": "models/scripted", "tokens": True, "replies": [{"text": "No idea."}]}
    services["worse_agent"] = {**services["counter_agent"], "model": "worse"}
    (folder / "global_config.yaml").write_text(yaml.safe_dump(services, sort_keys=False))
    for name in ("bridges.yaml", "nemo_gym.yaml"):
        shutil.copy(ROOT / name, folder)
    (folder / "data").mkdir()
    for source in sorted((ROOT / "data").iterdir()):
        if source.is_dir():
            (folder / "data" / source.name).symlink_to(source)
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
    for name in TRAINED:
        _train(folder / name)
    (folder / "runs/rates/sweep.jsonl").touch()
    _train(folder / "runs/reward_model", calibration=0.75)
    for name in TASK_FILES:
        (folder / name).write_text("".join(json.dumps(task) + "\n" for task in TASKS))


def _train(folder: Path, calibration: float | None = None) -> None:
    """A run folder as ng_train leaves it. calibration: the confidence and the accuracy of a reward model."""
    folder.mkdir(parents=True)
    bins = {"confidence": calibration, "accuracy": calibration, "share": 1.0} if calibration else {}
    own = {f"val/calibration/0.7/{part}": value for part, value in bins.items()}
    entries = (
        {"step": n, "reward/mean": n / 4, "eval/counter_agent/avg@1": n / 4, "time/step": 1.0, **own} for n in range(4)
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (folder / "recipe.yaml").write_text("optimizer: {lr: 0.001}\n")


def _ready(folder: Path) -> bool:
    claimed = folder / ".ngym" / "head.json"
    return (
        claimed.is_file() and bool(claimed.read_text()) and all(each["status"] == "ready" for each in _servers(folder))
    )


def _servers(folder: Path) -> list[dict[str, Any]]:
    head = json.loads((folder / ".ngym" / "head.json").read_text())["url"]
    servers: list[dict[str, Any]] = httpx.get(f"{head}/servers", trust_env=False, timeout=PATIENCE_S).json()
    return servers


def replace_addresses(text: str, folder: Path) -> str:
    """The same with the ports that the run's services really have."""
    urls = {server["name"]: server["url"] for server in _servers(folder) if "url" in server}
    return ADDRESS.sub(
        lambda found: urls[PORTS[found[2]]].removeprefix("http://") if found[2] in PORTS else found[0], text
    )


def _collect(folder: Path) -> None:
    """out.jsonl: of each task two rollouts that are right and two that are not."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda each: _collect_into(folder, *each), (("counter_agent", "out"), ("worse_agent", "worse"))))
    rows = [json.loads(line) for line in (folder / "worse.jsonl").read_text().splitlines()]
    with (folder / "out.jsonl").open("a") as out:
        for row in rows:
            row["_ng_rollout_index"] += 2
            row["agent_ref"]["name"] = "counter_agent"
            out.write(json.dumps(row) + "\n")
    collected = (folder / "out.jsonl").read_text()
    for place, name in enumerate(COPIES):  # rollouts of their own
        (folder / name).write_text(
            collected.replace('"rollout_id": "', f'"rollout_id": "{place}-').replace(
                '"rollout_id":"', f'"rollout_id":"{place}-'
            )
        )
    run_to_end(
        ngym("export", "--format", "preferences", "--input", "out.jsonl", "--output", "preferences.jsonl"), folder
    )
    for left in folder.glob("worse*"):
        left.unlink()


def _collect_into(folder: Path, agent: str, name: str) -> None:
    run_to_end(
        ngym(
            "collect_rollouts",
            "--agent",
            agent,
            "--input",
            "tasks.jsonl",
            "--output",
            f"{name}.jsonl",
            "--repeats",
            "2",
        ),
        folder,
    )


def run_to_end(command: Sequence[str], folder: Path, stdin: str | None = None, timeout_s: float = 300) -> str:
    """The output of a command. AssertionError where it fails.

    `ng_train` runs in a process that is forked from one that has imported PyTorch.
    """
    if list(command[:4]) == ngym("train"):
        process = ForkedCommand(list(command[3:]), folder, environment())
        output, _ = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, f"{' '.join(command[-8:])}: exit code {process.returncode}\n{output[-4000:]}"
        return output
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, (
        f"{' '.join(command[-8:])}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    )
    return done.stdout
