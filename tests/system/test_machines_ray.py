"""Ray over several machines, started as docs/scale.md says, when one falls silent: services, ranks, the command."""

from __future__ import annotations

import importlib.util
import json
import secrets
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from machines import Machine, Program, can_make_machines, kill, machines
from paths import ROOT
from vllm_service import write_checkpoint
from waiting import wait_until

pytestmark = [
    pytest.mark.soak,  # Ray gives up a node whose daemon waits for a processor for nine seconds
    pytest.mark.skipif(not can_make_machines(), reason="needs root, and namespaces of Linux"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
HEALTH = {  # a node is dead after nine seconds of silence, not after 65
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
PATIENCE_S = 120.0  # of a node that is given up, and of services that start elsewhere
TASKS = 60
HEAD_PORT = 6379
COUNTS = {"match": r"Bring it to (\d+)", "turn": 1, "tool_calls": [{"name": "add", "arguments": '{"amount": {1}}'}]}


class Cluster:
    """Ray on each machine: the head without room for services, and a worker on each other one."""

    def __init__(self, nodes: list[Machine], folder: Path) -> None:
        self.nodes, self.folder = nodes, folder
        self._token = secrets.token_hex(32)

    @property
    def environment(self) -> dict[str, str]:
        return {**HEALTH, "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}

    def start(self) -> None:
        head, *workers = self.nodes
        self._start(head, "--head", f"--port={HEAD_PORT}", "--include-dashboard=false", "--num-cpus=0")
        starting = [self._ray(node, *self._worker(node)) for node in workers]
        assert [program.wait(PATIENCE_S) for program in starting] == [0] * len(workers), self.logs()

    def add(self, node: Machine) -> None:
        """Start Ray on a machine again."""
        self._start(node, *self._worker(node))

    def _worker(self, node: Machine) -> list[str]:
        resources = json.dumps({"workers": 1, node.name: 1})
        return [f"--address={self.nodes[0].address}:{HEAD_PORT}", "--num-cpus=2", f"--resources={resources}"]

    def _start(self, node: Machine, *words: str) -> None:
        assert self._ray(node, *words).wait(PATIENCE_S) == 0, self.logs()

    def _ray(self, node: Machine, *words: str) -> Program:
        """`ray start` in the background, after the token was copied."""
        copy = f'mkdir -p ~/.ray && echo -n {self._token} > ~/.ray/auth_token && exec "$@"'
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, "--object-store-memory=80000000"]
        return self._popen(node, f"ray-{node.name}", "sh", "-c", copy, "sh", *start)

    def ng(self, node: Machine, name: str, *words: str) -> Program:
        """A command of ngym there, with its output in NAME.log."""
        return self._popen(node, name, sys.executable, "-P", "-m", "ngym", *words)

    def _popen(self, node: Machine, name: str, *words: str) -> Program:
        with (self.folder / f"{name}.log").open("w") as log:
            return node.popen(*words, cwd=self.folder, env=self.environment, stdout=log, stderr=log)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def logs(self) -> str:
        return "\n".join(f"{file.name}:\n{file.read_text()}" for file in sorted(self.folder.glob("*.log")))

    def configure(self, **services: dict[str, Any]) -> None:
        settings = {"ready_timeout_s": PATIENCE_S, "model_ready_timeout_s": PATIENCE_S}
        (self.folder / "global_config.yaml").write_text(yaml.safe_dump({"ngym": settings, **services}))

    def wait_for_line(self, name: str, text: str, program: Program) -> None:
        wait_until(lambda: text in self.log(name) or program.poll() is not None, PATIENCE_S)
        assert text in self.log(name), self.logs()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("project")
    with machines(4, shared=[folder], debian=True) as nodes:
        cluster = Cluster(nodes, folder)
        cluster.start()
        yield cluster


@pytest.fixture
def project(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, with all machines connected and an empty folder."""
    yield cluster
    for entry in cluster.folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def programs_of(node: Machine, folder: Path) -> str:
    """The programs of a machine that belong to services or ranks."""
    listed = node.run("ps", "ax", "-o", "args", cwd=folder).stdout.splitlines()
    return "\n".join(line for line in listed if "ngym" in line or "ray::Host" in line or "ray::Rank" in line)


def test_a_collection_continues_without_a_machine_that_falls_silent(project: Cluster) -> None:
    """Each rollout is there once and scored, and nothing is left on the machine when it comes back."""
    room = {"pool": "workers", "resources": {"cpus": 0.2}}
    model = {"kind": "model", "app": "models/scripted", "latency_s": 0.2, "replies": [COUNTS, {"text": "done"}], **room}
    gym = {"kind": "gym_server", "app": "gym_servers/counter", "replicas": "per_node", **room}
    project.configure(policy=model, counter=gym, agent={"kind": "agent", "app": "agents/simple", "gym": "counter",
                                                        "model": "policy", "pool": "workers"})  # fmt: skip
    with (ROOT / "gym_servers" / "counter" / "data" / "example.jsonl").open() as examples:
        example = json.loads(next(examples))
    asked = example["responses_create_params"]
    tasks = [
        {**example, "responses_create_params": {**asked, "input": f"Bring it to {count}."}, "target": count}
        for count in range(TASKS)
    ]
    (project.folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    head, *workers = project.nodes
    run = project.ng(head, "run", "run", "--on", "ray")
    try:
        project.wait_for_line("run", "ready in", run)
        words = ["--agent", "agent", "--input", "tasks.jsonl", "--output", "out.jsonl", "--repeats", "8"]
        collection = project.ng(head, "collect", "collect_rollouts", *words, "--concurrency", "16")
        output = project.folder / "out.jsonl"
        wait_until(lambda: output.exists() and output.read_text().count("\n") > 20, PATIENCE_S)
        lost = next(node for node in workers if f"http://{node.address}:" in policy_line(project))
        lost.cut()
        assert collection.wait(PATIENCE_S) == 0, project.logs()
        lost.connect()
        project.wait_for_line("run", f"its node was lost: {lost.address} (", run)
        rows = [json.loads(line) for line in output.read_text().splitlines()]
        rollouts = Counter((row["_ng_task_index"], row["_ng_rollout_index"]) for row in rows)
        assert len(rollouts) == len(rows) == 8 * len(tasks)
        assert {row["reward"] for row in rows} == {1.0}
        wait_until(lambda: not programs_of(lost, project.folder), PATIENCE_S)
    finally:
        kill(run)
    wait_until(lambda: not any(programs_of(node, project.folder) for node in project.nodes), PATIENCE_S)
    project.add(lost)


def policy_line(project: Cluster) -> str:
    return next(filter(is_ready, project.log("run").splitlines()))


def is_ready(line: str) -> bool:
    return line.startswith("policy ") and " ready " in line


def test_a_command_whose_own_machine_was_cut_off_ends_and_says_so(project: Cluster) -> None:
    project.configure(counter={"kind": "gym_server", "app": "gym_servers/counter", "pool": "node3"})
    own, other = project.nodes[1:3]
    run = project.ng(own, "run", "run", "--on", "ray")
    try:
        project.wait_for_line("run", "ready in", run)
        own.cut()
        wait_until(lambda: not programs_of(other, project.folder), PATIENCE_S)  # Ray has given up the command's node
        own.connect()
        assert run.wait(PATIENCE_S) == 1, project.logs()
        assert f"this machine ({own.address}) is no longer a node of the Ray cluster" in project.log("run")
    finally:
        kill(run)
    project.add(own)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_replica_on_two_machines_starts_again_without_one_that_falls_silent(project: Cluster) -> None:
    """Their own names are 127.0.1.1 in their hosts files, where gloo would listen."""
    model = str(write_checkpoint(project.folder / "policy"))
    engine = {"tensor_parallel_size": 2, "max_model_len": 1024}
    stanza = {"kind": "model", "app": "models/vllm", "model": model, "nodes": 2, "pool": "workers", "engine": engine}
    project.configure(policy={**stanza, "resources": {"cpus": 1}, "threads": 1, "kv_cache_mb": 64})
    run = project.ng(project.nodes[0], "run", "run", "--on", "ray")
    try:
        project.wait_for_line("run", "ready in", run)
        lost = next(
            node
            for node in project.nodes[1:]
            if f"http://{node.address}:" not in policy_line(project) and programs_of(node, project.folder)
        )
        lost.cut()
        wait_until(
            lambda: sum(map(is_ready, project.log("run").splitlines())) == 2 or run.poll() is not None, PATIENCE_S
        )
        assert run.poll() is None, project.logs()
        lost.connect()
        wait_until(lambda: not programs_of(lost, project.folder), PATIENCE_S)
    finally:
        kill(run)
    project.add(lost)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_live_training_continues_without_the_machine_of_its_policy(project: Cluster) -> None:
    """The rank and the environment are on node2, the policy on node3 or node4; it moves to the other one of them."""
    model = str(write_checkpoint(project.folder / "policy"))
    room = {"pool": "workers", "resources": {"cpus": 1.9}}
    vllm = {"kind": "model", "app": "models/vllm", "model": model, "threads": 1, "kv_cache_mb": 64, **room}
    gym = {"kind": "gym_server", "app": "gym_servers/letters", "pool": "node2"}
    agent = {"kind": "agent", "app": "agents/simple", "gym": "letters", "model": "policy", "pool": "node2"}
    project.configure(policy=vllm, letters=gym, letters_agent=agent)
    words = ["letters.yaml", "output=run", "max_steps=12", "model.from_scratch=null", "model.tokenizer=null"]
    words += [f"model.path={model}", "rollouts.policy_app=null", "trainer.pool=node2", "checkpoint.every=2"]
    words += [f"rollouts.tasks={ROOT}/data/letters/train.jsonl", "optimizer.lr=1e-2"]
    driver = project.ng(project.nodes[0], "train", "train", "--on", "ray", *words)
    try:
        wait_until(lambda: len(metrics(project)) >= 3 or driver.poll() is not None, PATIENCE_S)
        assert driver.poll() is None, project.logs()
        lost = next(node for node in project.nodes[2:] if programs_of(node, project.folder))
        lost.cut()
        assert driver.wait(2 * PATIENCE_S) == 0, project.logs()
    finally:
        kill(driver)
    lost.connect()
    wait_until(lambda: not programs_of(lost, project.folder), PATIENCE_S)
    project.add(lost)
    assert f"its node was lost: {lost.address} (" in project.log("train")
    rows = metrics(project)
    assert [row["policy_version"] for row in rows] == list(range(1, 13))
    assert all(row["token_mult_prob_error"] < 1.001 and row["lag"] == 0 for row in rows)
    rollouts = [json.loads(line) for line in (project.folder / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert len({row["ng"]["rollout_id"] for row in rollouts}) == len(rollouts)


def metrics(project: Cluster) -> list[dict[str, Any]]:
    file = project.folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.parametrize("way", ["cut", "power_off"])
def test_ranks_continue_elsewhere_without_the_machine_of_rank_0(project: Cluster, way: str) -> None:
    """Rank 0 still runs, and holds the run's folder, on a machine that is only cut off. `power_off` has to be last."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    words = ["sft.yaml", "output=run", "max_steps=400", "epochs=400", "checkpoint.every=5", "trainer.pool=workers"]
    words += [f"data.made_by=[{ROOT}/data/calculator/generate.py,demonstrations,--count,64,--seed,0]"]
    words += [f"model.from_scratch.{key}={value}" for key, value in shape.items()]
    driver = project.ng(project.nodes[0], "train", "train", "--on", "ray", *words)
    try:
        checkpoints = project.folder / "run" / "checkpoints"
        wait_until(lambda: list(checkpoints.glob("step-*")) or driver.poll() is not None, PATIENCE_S)
        lost = next(node for node in project.nodes[1:] if "ray::Rank" in programs_of(node, project.folder))
        getattr(lost, way)()
        project.wait_for_line("train", f"rank 0 on {lost.address} ended (its node was lost)", driver)
        project.wait_for_line("train", "resuming after step", driver)
        assert driver.wait(PATIENCE_S) == 0, project.logs()
    finally:
        kill(driver)
    steps = [json.loads(line)["step"] for line in (project.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 401))
    if way == "cut":
        lost.connect()
        wait_until(lambda: not programs_of(lost, project.folder), PATIENCE_S)
        project.add(lost)
