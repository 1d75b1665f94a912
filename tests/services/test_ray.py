"""Services on a real Ray cluster: three nodes of this machine with addresses of their own and pretended GPUs."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import yaml
from vllm_service import write_checkpoint
from waiting import PATIENCE_S, until, wait_until

from ngym.config.service_config import load_config
from ngym.errors import ConfigError, NgymError, UsageError
from ngym.supervise.head_file import http_get
from ngym.supervise.service import ReplicaState
from ngym.supervise.supervisor import Supervisor

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ngym[ray]'")
from ray.cluster_utils import Cluster

from ngym.cluster import ray_membership, ray_placement
from ngym.cluster.ray_placement import RayPlacer, RayProcess

NODE = {"num_cpus": 2, "num_gpus": 2, "resources": {"workers": 1}}
SEES = """
import os
from ngym import VerifyRequest, gym_server

async def verify(task: VerifyRequest) -> float:
    return 1.0

app = gym_server(verify=verify)
app.add_api_route("/gpus", lambda: os.environ.get("CUDA_VISIBLE_DEVICES"), methods=["GET"])
app.add_api_route("/cores", lambda: os.environ.get("NGYM_CPUS"), methods=["GET"])
print("a line of its own", flush=True)
"""


class Nodes:
    """A cluster: a head without room for services, and workers at 127.0.0.2, 127.0.0.3, ..."""

    def __init__(self) -> None:
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False},
        )
        self.workers: dict[str, Any] = {}

    def add(self, address: str) -> None:
        self.workers[address] = self.cluster.add_node(node_ip_address=address, **NODE)

    def kill(self, address: str) -> None:
        self.cluster.remove_node(self.workers.pop(address), allow_graceful=False)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    folder = tempfile.mkdtemp(dir="/tmp", prefix="ray")  # not pytest's: a socket's path is short
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "disabled")
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setenv("RAY_TMPDIR", folder)
        running = Nodes()
        for number in (2, 3):
            running.add(f"127.0.0.{number}")
        yield running
        ray.shutdown()
        for node in running.cluster.list_all_nodes():
            running.cluster.remove_node(node, allow_graceful=False)
    shutil.rmtree(folder, ignore_errors=True)


class Run:
    """A config with the gym server `sees`."""

    def __init__(self, folder: Path, nodes: Nodes) -> None:
        self._folder, self._nodes = folder, nodes
        self.events: list[ReplicaState] = []
        self.messages: list[str] = []

    def supervisor(
        self, others: Mapping[str, dict[str, Any]] = MappingProxyType({}), strict: bool = True, **keys: Any
    ) -> Supervisor:
        (self._folder / "sees.py").write_text(SEES)
        (self._folder / "refuses.py").write_text("import no_such_package")
        services = {"sees": {"kind": "gym_server", "app": "sees", **keys}, **others}
        settings = {"head": {"port": 0}, "require_token": True, "ready_timeout_s": 600 if "pool" in keys else 1}
        (self._folder / "c.yaml").write_text(yaml.safe_dump({"ngym": settings, **services}))
        engine = RayPlacer.connect(f"ray://{self._nodes.cluster.address}", self.messages.append)
        config = engine.reachable(load_config([self._folder / "c.yaml"]))
        return Supervisor(config, self.events.append, engine=engine, strict=strict)


@pytest.fixture
def run(tmp_path: Path, nodes: Nodes) -> Run:
    return Run(tmp_path, nodes)


async def test_services_get_nodes_and_gpus_move_when_a_node_dies_and_leave_nothing(run: Run, nodes: Nodes) -> None:
    async with run.supervisor(replicas=2, pool="workers", resources={"gpus": 1, "cpus": 0.5}) as stack:
        assert stack.run_token
        hosts = {urlsplit(state.url).hostname for state in stack.states}
        assert hosts <= set(nodes.workers)
        gpus = [
            json.loads((await http_get(f"{each.url}/gpus", PATIENCE_S, stack.run_token)).body) for each in stack.states
        ]
        assert sorted(gpus) == ["0", "1"] or len(hosts) == 2  # packed on one node: different GPUs
        for each in stack.states:
            assert (await http_get(f"{each.url}/cores", PATIENCE_S, stack.run_token)).body == b'"0.5"'
        log = stack.config.root / ".ngym" / "logs" / "sees-0.log"
        await until(lambda: "a line of its own" in log.read_text())
        commands = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
        assert not any(stack.run_token in command for command in commands)
        first = [state.pid for state in stack.states]

        async with stack.peers("test") as peers:
            assert (await peers["sees"].get("/health"))["status"] == "ok"
            died = str(urlsplit(stack.states[0].url).hostname)
            nodes.kill(died)
            await until(
                lambda: all(
                    state.status == "ready" and str(urlsplit(state.url).hostname) != died for state in stack.states
                )
            )
            assert "its node was lost" in "".join(event.detail for event in run.events)
            assert stack.urls["sees"] == [state.url for state in stack.states]
            assert (await peers["sees"].get("/health"))["status"] == "ok"  # the caller follows the head's map
        nodes.add("127.0.0.4")
        last = [state.pid for state in stack.states]
    await until(lambda: not any(psutil.pid_exists(pid) for pid in (*first, *last) if pid))
    assert all(state.status == "stopped" for state in stack.states)


async def test_each_node_has_a_replica_and_one_more_gets_room_and_gives_it_back(
    run: Run, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run.supervisor(replicas="per_node", pool="workers", resources={"cpus": 0.5}) as stack:
        assert sorted(str(urlsplit(state.url).hostname) for state in stack.states) == sorted(nodes.workers)
        engine, stanza = stack._engine, stack.config.services["sees"]
        assert engine is not None
        before = ray.available_resources()
        place = await engine.more(stack.config, stanza)
        assert place is not None and str(urlsplit(place.url).hostname) in nodes.workers
        await until(lambda: ray.available_resources()["CPU"] == before["CPU"] - 0.5)
        await place.stop_listening()
        await engine.release(place)
        await until(lambda: ray.available_resources() == before)

        async def bind(_: object) -> None:
            raise NgymError("a node of the Ray cluster cannot run a service: no ngym")

        monkeypatch.setattr(ray_placement._OnRay, "bind", bind)
        assert await engine.more(stack.config, stanza) is None  # the run goes on without it
        assert run.messages[-1].endswith("cannot run a service: no ngym")
        await until(lambda: ray.available_resources() == before)


async def test_a_gym_server_that_refuses_to_start_ends_a_strict_run_only(run: Run) -> None:
    room = {"pool": "workers", "resources": {"cpus": 0.5}}
    others = {"refuses": {"kind": "gym_server", "app": "refuses", **room}}
    async with run.supervisor(others, strict=False, **room) as stack:
        states = {state.name: state for state in stack.states}
        assert (states["sees"].status, states["refuses"].status) == ("ready", "failed")
        assert "No module named 'no_such_package'" in states["refuses"].detail
    with pytest.raises(ConfigError, match="No module named 'no_such_package'"):
        await run.supervisor(others, **room).__aenter__()
    assert [event.status for event in run.events if event.name == "sees"][-1] == "stopped"


@pytest.mark.soak
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
async def test_a_replica_on_two_nodes_spreads_and_starts_again_as_a_whole(nodes: Nodes, tmp_path: Path) -> None:
    stanza = {"kind": "model", "app": "models/vllm", "model": str(write_checkpoint(tmp_path / "policy")), "nodes": 2}
    stanza |= {"pool": "workers", "resources": {"cpus": 1}, "engine": {"tensor_parallel_size": 2}}
    settings = {"head": {"port": 0}, "ready_timeout_s": 600}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"ngym": settings, "policy": stanza}))
    engine = RayPlacer.connect(f"ray://{nodes.cluster.address}")
    config = engine.reachable(load_config([tmp_path / "c.yaml"]))
    async with Supervisor(config, engine=engine) as stack:
        first = stack.states[0]
        assert len(set(first.node.split(", "))) == 2
        other = next(address for address in nodes.workers if not first.url.startswith(f"http://{address}:"))
        nodes.kill(other)
        nodes.add("127.0.0.5")
        await until(lambda: stack.states[0].restarts == 1 and stack.states[0].status == "ready")
        assert "127.0.0.5" in stack.states[0].node and stack.states[0].url == first.url
        async with stack.peers("test") as peers:
            answer = await peers["policy"].post("/v1/responses", {"input": "hello", "max_output_tokens": 4})
        assert answer["usage"]["output_tokens"] == 4
        before = ray.available_resources()
        one = await engine.more(config, config.services["policy"])  # each node has room for one more
        assert one is not None
        await until(lambda: ray.available_resources().get("CPU", 0) == before["CPU"] - 2)
        await engine.release(one)
        await until(lambda: ray.available_resources() == before)


async def test_what_the_cluster_has_no_room_for_is_refused(run: Run) -> None:
    """Two nodes with two GPUs each have no room for a process with three."""
    with pytest.raises(ConfigError, match=r"gpu: 3 asked, \d free of 4; ") as caught:
        await run.supervisor(resources={"gpus": 3}).__aenter__()
    most = r"; sees needs cpu 0\.1, gpu 3 on one node, and 127\.0\.0\.\d has the most free: cpu \d(\.\d)?, gpu \d$"
    assert re.search(most, str(caught.value)) and "\n" not in str(caught.value) and not run.events
    assert run.messages and run.messages[0].startswith("waiting for room on the cluster")


async def test_a_cluster_that_is_not_there_is_one_line(nodes: Nodes) -> None:
    with pytest.raises(UsageError, match="no Ray cluster to join") as caught:
        RayPlacer.connect("ray://127.0.0.1:9")
    assert "\n" not in str(caught.value)


def test_a_wrong_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The errors of ray.init with a wrong token, and with a file of tokens that is not there."""
    refusal = ConnectionError("Failed to connect to Ray cluster at 127.0.0.1:6379")
    refusal.__cause__ = RuntimeError(
        "Last connection error: ...\nAuthenticationError: RPC error: InvalidAuthToken: ..."
    )
    absent = ray.exceptions.AuthenticationError("RAY_AUTH_TOKEN_PATH is set but file cannot be opened")
    for error, message in ((refusal, "the Ray cluster refuses the token"), (absent, "no token for the Ray cluster")):

        def init(error: Exception = error, **_: Any) -> None:
            raise error

        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr(ray, "init", init)
        with pytest.raises(UsageError, match=f"^--on ray: {message}") as caught:
            RayPlacer.connect("ray")
        assert "RAY_AUTH_TOKEN_PATH to that of the cluster" in str(caught.value) and "\n" not in str(caught.value)


async def test_the_last_lines_of_a_process_are_copied_after_its_end(tmp_path: Path) -> None:
    """The actor answers that the process has ended before all of its output was asked for."""
    chunks = [b"Traceback\n", b"RuntimeError: the reason\n", b""]

    async def output() -> bytes:
        for _ in range(3):
            await asyncio.sleep(0)
        return chunks.pop(0)

    async def exit_code() -> int:
        return 1

    host = SimpleNamespace(output=SimpleNamespace(remote=output), exit_code=SimpleNamespace(remote=exit_code))
    log = tmp_path / "log"
    process = RayProcess(host, 1, os.open(log, os.O_WRONLY | os.O_CREAT))
    assert await process.exit_code == 1 and len(chunks) == 3
    await process.drain()
    assert log.read_text() == "Traceback\nRuntimeError: the reason\n"


async def test_output_that_cannot_be_written_is_still_read() -> None:
    """Without a reader, the process would wait as soon as its pipe was full."""
    chunks = [b"step 1\n", b"step 2\n", b""]

    async def output() -> bytes:
        return chunks.pop(0)

    async def exit_code() -> int:
        await until(lambda: not chunks)
        return 0

    host = SimpleNamespace(output=SimpleNamespace(remote=output), exit_code=SimpleNamespace(remote=exit_code))
    process = RayProcess(host, 1, os.open("/dev/full", os.O_WRONLY))
    assert await process.exit_code == 0
    await process.drain()


@pytest.mark.soak
def test_ranks_start_again_from_the_last_checkpoint_when_one_is_lost(nodes: Nodes, tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    root = Path(__file__).resolve().parents[2]
    words = ["sft.yaml", "trainer.ranks=2", "checkpoint.every=5", "output=run", "max_steps=60", "epochs=4"]
    words += [f"data.made_by=[{root}/data/calculator/generate.py,demonstrations,--count,600,--seed,0]"]
    words += [f"model.from_scratch.{key}={value}" for key, value in shape.items()]
    command = [sys.executable, "-m", "ngym", "train", "--on", f"ray://{nodes.cluster.address}", *words]
    with (tmp_path / "out").open("w") as output:
        driver = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT)
    checkpoints = tmp_path / "run" / "checkpoints"
    wait_until(lambda: len(list(checkpoints.glob("step-00000[1-9]"))) or driver.poll() is not None, patience_s=600)
    ranks = [
        each
        for each in psutil.process_iter(["cmdline"])
        if words == (each.info["cmdline"] or [])[-len(words) :] and each.pid != driver.pid
    ]
    assert len(ranks) == 2, (tmp_path / "out").read_text()
    ranks[0].kill()
    assert driver.wait(600) == 0, (tmp_path / "out").read_text()
    text = (tmp_path / "out").read_text()
    assert re.search(r"rank [01] on 127\.0\.0\.\d+ ended \(killed by SIGKILL", text) and "resuming after step" in text
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 61))


async def test_a_node_that_does_not_answer_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before Ray gives it up."""
    checks, said = Counter[str](), list[str]()
    answers = ray_membership.Address.answers

    async def counted(address: ray_membership.Address) -> bool:
        checks[address.host] += 1
        return await answers(address)

    monkeypatch.setattr(ray_membership.Address, "answers", counted)
    monkeypatch.setattr(ray_membership, "CHECK_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = {"Alive": True, "NodeManagerPort": server.getsockname()[1]}  # at other addresses nothing listens on it
        nodes = [{**node, "NodeManagerAddress": f"127.0.0.{number}"} for number in (1, 2, 3)]
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        watch = asyncio.create_task(ray_membership.report_silent_nodes({"127.0.0.1", "127.0.0.2"}, said.append))
        await until(lambda: checks["127.0.0.2"] > 4)
        watch.cancel()
    assert [line.partition(";")[0] for line in said] == ["127.0.0.2 does not answer"]
    assert checks.keys() == {"127.0.0.1", "127.0.0.2"}
