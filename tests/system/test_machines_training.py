"""Training over several machines, which are Linux namespaces: ranks, a policy elsewhere, and machines that fall silent."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked import ForkedCommand
from machines import Machine, Program, can_make_machines, kill, machines
from small_model import SHAPE
from trainer_service import free_port
from waiting import PATIENCE_S, wait_until

from ngym.collect import CollectionLimits
from ngym.supervise.zygote_client import ZygoteGone
from ngym.trainer.engine.distributed import RankHost, machine_names
from ngym.trainer.online.rollout_stream import reporting_gate
from ngym.trainer.recipe.extensions import PushFailed
from ngym.trainer.weights import push, replica
from ngym.trainer.weights.replica import Replica

needs_machines = pytest.mark.skipif(not can_make_machines(), reason="needs root and network namespaces")
SERVER = "http://node2:8000"
TOKENS = {"NGYM_TOKEN": "token-of-the-run-of-a-test", "NGYM_ADMIN_TOKEN": "token-of-its-admin-in-a-test"}
SERVICES = f"""
policy: {{kind: model, app: models/transformers, model: run/initial, model_within_s: 600, push_lease_s: 2, url: "{SERVER}"}}
letters: {{kind: gym_server, app: gym_servers/letters}}
letters_agent: {{kind: agent, app: agents/simple, gym: letters, model: policy}}
"""


def sft_words(root: Path, *more: str) -> list[str]:
    shape = [f"model.from_scratch.{name}={value}" for name, value in SHAPE.items()]
    script = f"data.made_by=[{root}/data/calculator/generate.py,demonstrations,--count,400,--seed,0]"
    words = ["sft.yaml", "output=run", script, "batch_size=16", "optimizer.name=adamw", "engine.zero_stage=2", *shape]
    return [*words, "max_steps=100000", "epochs=100000", "checkpoint.every=3", *more]


def rank_variables(rank: int, address: str, port: str) -> dict[str, str]:
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": "2"}
    return {**meeting, "RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}


def ng_train(machine: Machine, folder: Path, log: str, words: Sequence[str], **variables: str) -> Program:
    command = [str(Path(sys.executable).with_name("ng_train")), *words]
    with (folder / log).open("w") as output:
        return machine.popen(*command, cwd=folder, env=variables, stdout=output, stderr=subprocess.STDOUT)


@contextmanager
def on_both(nodes: Sequence[Machine], folder: Path, words: Sequence[str]) -> Iterator[list[Program]]:
    """A rank on each machine, whose outputs are in 0.log and 1.log."""
    with ExitStack() as stack:
        ranks = []
        for rank, node in enumerate(nodes):
            ranks.append(ng_train(node, folder, f"{rank}.log", words, **rank_variables(rank, "node1", "29500")))
            stack.callback(kill, ranks[-1])
        yield ranks


def steps(folder: Path) -> list[dict[str, Any]]:
    file = folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for_step(folder: Path, step: int, programs: Sequence[Program | ForkedCommand]) -> None:
    wait_until(lambda: len(steps(folder)) >= step or any(one.poll() is not None for one in programs), 5 * PATIENCE_S)
    assert len(steps(folder)) >= step, [path.read_text() for path in folder.glob("*.log")]


@needs_machines
def test_ranks_of_two_machines_compute_what_those_of_one_do_and_name_a_machine_that_falls_silent(
    root: Path, tmp_path: Path
) -> None:
    """Each machine's own name is 127.0.1.1 for itself, where the other cannot connect."""
    words, one = sft_words(root), tmp_path / "one"
    one.mkdir()
    port = free_port()
    alone = [
        ForkedCommand(["train", *words], one, {**os.environ, **rank_variables(rank, "127.0.0.1", port)})
        for rank in range(2)
    ]
    try:
        wait_for_step(one, 3, alone)
    finally:
        for process in alone:
            process.kill()
            process.communicate()
    with machines(2, shared=[tmp_path], debian=True) as nodes:
        with on_both(nodes, tmp_path, words) as ranks:
            wait_for_step(tmp_path, 4, ranks)
            nodes[1].cut()
            assert [rank.wait(PATIENCE_S) for rank in ranks] == [1, 1]
        outputs = [(tmp_path / f"{rank}.log").read_text() for rank in range(2)]
        assert "rank 1 on node2 has given no sign of life for 45 s, so rank 0 ends too" in outputs[0]
        assert "rank 0 on node1 has given no sign of life for 45 s, so rank 1 ends too" in outputs[1]
        assert not any("Traceback" in output for output in outputs)
        compared = [[(row["loss"], row["grad_norm"]) for row in steps(folder)[:3]] for folder in (one, tmp_path)]
        assert compared[0] == compared[1]
        nodes[1].connect()
        done = len(steps(tmp_path))
        with on_both(nodes, tmp_path, [*words, "--resume"]) as ranks:
            wait_for_step(tmp_path, done + 1, ranks)
        assert "resuming after step" in (tmp_path / "0.log").read_text()


@pytest.mark.parametrize(
    ("folders", "more", "expected"),
    [
        (
            (".", "elsewhere"),
            (),
            r"output: .*/elsewhere/run on rank 1 .* is not .*/run of rank 0 .*; all machines need the same folder",
        ),
        (
            (".", "."),
            ("optimizer.lr=0.5",),
            r"optimizer\.lr: 0\.5 on rank 1 \(.*\), 0\.005 on rank 0 \(.*\); start all",
        ),
    ],
)
def test_ranks_with_another_folder_or_recipe_end_in_one_line(
    root: Path, tmp_path: Path, folders: tuple[str, str], more: tuple[str, ...], expected: str
) -> None:
    port = free_port()
    ranks = []
    for rank, folder in enumerate(folders):
        (tmp_path / folder).mkdir(exist_ok=True)
        words = sft_words(root, *(more if rank else ()))
        place = {**os.environ, **rank_variables(rank, "127.0.0.1", port)}
        ranks.append(ForkedCommand(["train", *words], tmp_path / folder, place))
    outputs = [rank.communicate(timeout=5 * PATIENCE_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], outputs
    assert all(re.search(expected, output) and "Traceback" not in output for output in outputs), outputs
    assert not list(tmp_path.rglob(".seen-by-all*"))


def test_ranks_that_read_other_rows_end_in_one_line(root: Path, tmp_path: Path) -> None:
    script = root / "data" / "calculator" / "generate.py"
    command = [sys.executable, str(script), "demonstrations", "--count", "40", "--output", str(tmp_path / "rows.jsonl")]
    subprocess.run(command, check=True)
    folders = [tmp_path, tmp_path / "elsewhere"]
    folders[1].mkdir()
    (folders[1] / "rows.jsonl").write_text("".join((tmp_path / "rows.jsonl").open().readlines()[1:]))
    port, words = free_port(), sft_words(root, f"output={tmp_path / 'run'}", "data.path=rows.jsonl", "data.made_by=[]")
    ranks = [
        ForkedCommand(["train", *words], folder, {**os.environ, **rank_variables(rank, "127.0.0.1", port)})
        for rank, folder in enumerate(folders)
    ]
    outputs = [rank.communicate(timeout=5 * PATIENCE_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], outputs
    expected = (
        r"rows\.jsonl: sha256 \w{12} on rank 1 \(.*\), sha256 \w{12} on rank 0 \(.*\); all machines need the same file"
    )
    assert all(re.search(expected, output) and "Traceback" not in output for output in outputs), outputs


def weights(node: Machine, folder: Path) -> dict[str, Any]:
    """The state of the policy's weights, asked from its own machine."""
    words = ["curl", "-s", "-m", "5", "-H", f"authorization: Bearer {TOKENS['NGYM_ADMIN_TOKEN']}", f"{SERVER}/weights"]
    answer = node.run(*words, cwd=folder).stdout
    return json.loads(answer) if answer.startswith("{") else {}


@needs_machines
def test_a_push_to_another_machine_that_is_cut_changes_nothing_and_a_silent_machine_is_named(tmp_path: Path) -> None:
    (tmp_path / "services.yaml").write_text(SERVICES)
    words = ["letters.yaml", "output=run", "max_steps=1000", "rollouts.policy_app=null", "checkpoint.every=2"]
    words += ["rollouts.services=services.yaml", "rollouts.max_output_tokens=16", "rollouts.tasks_per_step=2"]
    with machines(2, shared=[tmp_path], rate="10mbit") as (trainer, server), ExitStack() as stack:
        serve = [str(Path(sys.executable).with_name("ng_serve")), "policy", "--config", "services.yaml"]
        with (tmp_path / "server.log").open("w") as log:
            serving = server.popen(
                *serve, "--host", server.address, cwd=tmp_path, env=TOKENS, stdout=log, stderr=subprocess.STDOUT
            )
        stack.callback(kill, serving)
        training = ng_train(trainer, tmp_path, "train.log", words, **TOKENS)
        stack.callback(kill, training)
        wait_for_step(tmp_path, 1, [training, serving])
        wait_until(lambda: weights(server, tmp_path).get("updating"))
        server.cut()
        before = weights(server, tmp_path)
        wait_until(lambda: not weights(server, tmp_path)["updating"])  # the lease of the push has ended
        assert weights(server, tmp_path)["policy_version"] == before["policy_version"]
        server.connect()
        wait_for_step(tmp_path, before["policy_version"] + 2, [training, serving])
        server.power_off()
        output = tmp_path / "train.log"
        wait_until(lambda: re.search(rf"{SERVER}.*(trying again for up to|waiting for it)", output.read_text()))
        os.killpg(training.pid, signal.SIGINT)
        wait_until(lambda: "--resume continues after step" in output.read_text())
    rows = steps(tmp_path)
    assert [row["policy_version"] for row in rows] == list(range(1, len(rows) + 1))
    assert all(row["token_mult_prob_error"] < 1.001 and row["lag"] == 0 for row in rows)


def test_a_push_that_breaks_after_more_than_the_patience_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a large model over a slow network."""
    now, lines = [0.0], list[str]()
    answers = iter([push.TransientPushError("the line was cut"), {"policy_version": 3, "transport": ["http"]}])

    def ask(replica: Replica) -> dict[str, Any]:
        now[0] += 400
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(push, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None))
    monkeypatch.setattr(Replica, "weights", ask)
    pusher = push.Pusher([SERVER], "token", patience_s=300, say=lines.append)
    assert pusher.versions() == [3]
    assert lines == ["the line was cut; trying again for up to 300 s"]
    pusher.finish()


def test_a_push_to_a_server_that_hangs_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of its machine accepts the connection and the request, as of a stopped process."""
    lines: list[str] = []
    monkeypatch.setattr(push, "SAY_AFTER_S", 0.01)
    monkeypatch.setattr(push, "UNANSWERED_S", 0.02)
    monkeypatch.setattr(push, "PAUSE_S", 10.0)  # more than the patience: the request is not sent again
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        pusher = push.Pusher([url], "token", patience_s=5.0, say=lines.append)
        with pytest.raises(PushFailed, match="GET /weights: TimeoutError"):
            pusher.versions()
        pusher.finish()
        monkeypatch.setattr(replica, "CONNECT_S", 0.1)
        abandoned = Replica(url, "token", timeout_s=100 * PATIENCE_S)
        abandoned._push = "the push that had no answer"
        abandoned.give_up()  # waits for no answer, either
    assert lines == [f"{url}: GET /weights: no answer for 0 s; waiting up to 5 s for it"]


def test_a_push_whose_services_have_ended_does_not_wait_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run holds the listening socket of a server that is gone, so that its kernel still accepts requests."""
    monkeypatch.setattr(push, "SAY_AFTER_S", 0.01)
    monkeypatch.setattr(push, "PAUSE_S", 2 * PATIENCE_S)  # more than the patience: the request is not sent again
    with socket.create_server(("127.0.0.1", 0)) as listener:
        known = [f"http://127.0.0.1:{listener.getsockname()[1]}"]
        lookups = [known, known]  # for the pusher, and before the request

        def urls() -> list[str]:
            if not lookups:
                raise ZygoteGone("the process that starts the services ended")
            return lookups.pop()

        pusher = push.Pusher(urls, "token", patience_s=PATIENCE_S)
        with pytest.raises(ZygoteGone):
            pusher.versions()
        pusher.finish()


def test_machines_with_equal_names_are_shown_with_their_addresses() -> None:
    places = [("gpu", "10.0.0.1"), ("gpu", "10.0.0.1"), ("gpu", "10.0.0.2"), ("other", "10.0.0.3")]
    names = machine_names([RankHost(*place) for place in places])
    assert names == ["gpu at 10.0.0.1", "gpu at 10.0.0.1", "gpu at 10.0.0.2", "other"]


def test_a_collection_that_waits_says_so_once() -> None:
    lines: list[str] = []
    gate = reporting_gate(CollectionLimits(give_up_s=60), lines.append)
    for _ in range(2):
        gate.hold("policy", f"policy does not answer at {SERVER}")
    assert lines == [f"policy does not answer at {SERVER}; waiting for it, 60 s at the most"]
