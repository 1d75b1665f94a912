"""Services and collections over several machines without a scheduler: joined, at fixed addresses, cut off, without power."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from counting import STEPS, TASK, config
from machines import Machine, can_make_machines, kill, machines
from waiting import wait_until

pytestmark = pytest.mark.skipif(not can_make_machines(), reason="needs root, util-linux, iproute2 and namespaces")

ENV = {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "NGYM_TOKEN": "the-token-of-this-run",
    "NGYM_ADMIN_TOKEN": "the-token-of-its-admin",
}
HEAD = "http://node1:11000"
Json = dict[str, Any]
NOTHING: Mapping[str, str] = MappingProxyType({})


def write(folder: Path, content: Json) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "global_config.yaml").write_text(yaml.safe_dump(content))
    return folder


def write_tasks(folder: Path, count: int, **more: Any) -> None:
    rows = [{**TASK, "number": number, **more} for number in range(count)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class Running:
    """A program that runs on a machine, and what it has printed so far."""

    def __init__(
        self, machine: Machine, words: tuple[str, ...], folder: Path, env: Mapping[str, str] = NOTHING
    ) -> None:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.program = machine.popen(*words, cwd=folder, env={**ENV, **env}, **pipes)
        self.text = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.program.stdout is not None
        for line in self.program.stdout:
            self.text += line

    def await_text(self, text: str, times: int = 1) -> None:
        self.await_that(lambda: self.text.count(text) >= times, f"{text!r} {times} times")

    def await_that(self, condition: Callable[[], object], what: str) -> None:
        wait_until(lambda: condition() or self.program.poll() is not None, patience_s=300)
        assert condition(), f"not {what}: {self.text[-3000:]}"

    def await_end(self) -> int:
        wait_until(lambda: self.program.poll() is not None, patience_s=300)
        self._reader.join()
        return int(self.program.returncode)


class Machines:
    """The machines of a test, in order; `start` and `run` use the commands and tokens of this project."""

    def __init__(self, made: list[Machine]) -> None:
        self.made = made
        self.started: list[Running] = []

    def __getitem__(self, number: int) -> Machine:
        """node1 is 1."""
        return self.made[number - 1]

    def start(self, number: int, *words: str, folder: Path, env: Mapping[str, str] = NOTHING) -> Running:
        self.started.append(running := Running(self[number], words, folder, env))
        return running

    def run(self, number: int, *words: str, folder: Path, env: Mapping[str, str] = NOTHING) -> tuple[int, str]:
        """Run a command to its end: its exit code and its output."""
        result = self[number].run(*words, cwd=folder, env={**ENV, **env})
        return result.returncode, result.stdout + result.stderr

    def collect(self, number: int, *words: str, folder: Path) -> list[Json]:
        """The rows of a collection from this machine; it has to succeed."""
        code, text = self.run(number, *COLLECT, "--overwrite", *words, folder=folder)
        assert code == 0, text
        return rows(folder / "out.jsonl")


COLLECT = (
    "ng_collect_rollouts", "--agent", "counter_agent", "--input", "tasks.jsonl", "--output", "out.jsonl",
)  # fmt: skip


@contextmanager
def some_machines(count: int, folder: Path, **options: Any) -> Iterator[Machines]:
    with ExitStack() as stack:
        made = Machines(stack.enter_context(machines(count, shared=[folder], **options)))
        stack.callback(lambda: [kill(each.program) for each in made.started])
        yield made


def rows(file: Path) -> list[Json]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def has_lines(file: Path, count: int) -> bool:
    return file.exists() and file.read_bytes().count(b"\n") >= count


def check_rows(folder: Path, count: int) -> None:
    """Each task once, each tool call once, and no failure became a reward."""
    found = rows(folder / "out.jsonl")
    assert Counter(row["number"] for row in found) == Counter(range(count))
    assert {row["reward"] for row in found} == {1.0}
    assert {row["ng"]["tool_calls"] for row in found} == {STEPS}


OPEN = {"ngym": {"host": "0.0.0.0", "head": {"host": "0.0.0.0"}}}


def test_a_replica_of_another_machine_joins_a_run_is_cut_off_and_joins_again(tmp_path: Path) -> None:
    first, second = write(tmp_path / "first", {**config(), **OPEN}), write(tmp_path / "second", config())
    write_tasks(first, 30)
    with some_machines(3, tmp_path) as made:
        run = made.start(1, "ng_run", "--plain", folder=first)
        run.await_text("ready in")
        words = ("ng_serve", "counter_agent", "--join", HEAD, "--host", "0.0.0.0")
        guest = made.start(2, *words, folder=second)
        guest.await_text(f"takes calls of the run at {HEAD}")
        made.collect(3, "--head", HEAD, folder=first)
        check_rows(first, 30)
        made[2].cut()
        run.await_text("counter_agent@10.77.0.2")
        run.await_that(lambda: "left the run" in run.text, "forgotten")
        guest.await_text("cannot be joined now")
        made.collect(3, "--head", HEAD, folder=first)
        made[2].connect()
        guest.await_text("takes calls", times=2)
        kill(run.program)
        guest.await_text("cannot be joined now", times=2)
        made.start(1, "ng_run", "--plain", folder=first).await_text("ready in")
        guest.await_text("takes calls", times=3)
        code, status = made.run(3, "ng_status", "--head", HEAD, folder=first)
        assert code == 0 and "http://10.77.0.2:" in status and "http://node1:" in status


def test_what_is_wrong_with_a_replica_that_joins_is_one_line(tmp_path: Path) -> None:
    here = {"ngym": {"host": "10.77.0.1", "head": {"host": "10.77.0.1"}}}
    first, second = write(tmp_path / "first", {**config(), **here}), write(tmp_path / "second", config())
    other = {**config(), "counter": {"kind": "gym_server", "app": "gym_servers/math"}}
    third = write(tmp_path / "third", other)
    host = ("--host", "node2")
    mistakes: list[tuple[tuple[str, ...], Path, Mapping[str, str], str]] = [
        ((HEAD,), second, NOTHING, "which cannot call http://127.0.0.1:"),
        ((HEAD,), second, NOTHING, "--host 10.77.0.2"),
        ((HEAD,), first, NOTHING, "10.77.0.1 is no address of this machine"),
        ((HEAD, "--host", "nobody"), second, NOTHING, "nobody is no address of this machine"),
        (("http://nobody:11000", *host), second, NOTHING, "--join http://nobody:11000: "),
        (("http://node1:11001", *host), second, NOTHING, "its address is ngym.head.host"),
        ((HEAD, *host), second, {"NGYM_TOKEN": "the-token-of-that-run"}, "NGYM_TOKEN is not the token of the run"),
        ((HEAD, *host), second, {"NGYM_ADMIN_TOKEN": "the-token-of-that-run"}, "NGYM_ADMIN_TOKEN is not the admin"),
        ((HEAD, *host), third, NOTHING, "'counter' has app gym_servers/counter in this run's config"),
        ((HEAD, *host, "counter.max_body_mib=4"), second, NOTHING, "'counter' has max_body_mib none in this run's"),
    ]
    with some_machines(2, tmp_path) as made:
        made.start(1, "ng_run", "--plain", folder=first).await_text("ready in")
        for words, folder, env, message in mistakes:
            code, text = made.run(2, "ng_serve", "counter", "--join", *words, folder=folder, env=env)
            assert code == 2 and len(text.splitlines()) == 1 and message in text, text
        made[1].cut()
        code, text = made.run(2, "ng_serve", "counter", "--join", HEAD, *host, folder=second)
        assert code == 2 and "no head of ng_run answers there (" in text, text
        code, text = made.run(2, "ng_status", "--head", HEAD, folder=second)
        assert code == 1 and "no head of ng_run answers there (" in text, text


def test_machines_that_share_a_folder_find_the_run_of_one_of_them(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", {**config(), "ngym": {"host": "10.77.0.1", "head": {"host": "10.77.0.1"}}})
    with some_machines(2, tmp_path) as made:
        made.start(1, "ng_run", "--plain", folder=folder).await_text("ready in")
        elsewhere = ("ngym.host=10.77.0.2", "ngym.head.host=10.77.0.2")
        made.start(2, "ng_run", "--plain", *elsewhere, folder=folder).await_text("ready in")
        for number in (1, 2):
            code, text = made.run(number, "ng_status", folder=folder)
            assert code == 0 and "3 of 3 services ready; http://10.77.0.1:11000" in text, text
        assert {path.name.partition("2-")[0] for path in (folder / ".ngym").glob("logs*")} == {"logs", "logs-node"}
        made[1].cut()
        code, text = made.run(2, "ng_status", folder=folder)
        assert code == 1 and "nothing runs in" in text, text


def replicated(config: Json, *numbers: int) -> Json:
    """The config with each service on these machines, started there by ng_serve."""
    ports = dict(zip(PORTS, range(8000, 8000 + len(PORTS)), strict=True))
    places = {name: [f"http://10.77.0.{number}:{ports[name]}" for number in numbers] for name in PORTS}
    return {name: {**stanza, "urls": places[name]} for name, stanza in config.items()}


PORTS = ("policy", "counter", "counter_agent")


def serve_all(made: Machines, folder: Path, *numbers: int) -> None:
    """Start all services on each of these machines, and wait until they serve."""
    started = [
        made.start(number, "ng_serve", name, "--host", f"10.77.0.{number}", folder=folder)
        for number in numbers
        for name in PORTS
    ]
    for each in started:
        each.await_text("listens at")


def test_a_machine_that_loses_power_costs_no_row_and_others_take_over(tmp_path: Path) -> None:
    head = {"ngym": {"host": "10.77.0.1", "head": {"host": "10.77.0.1"}}}
    folder = write(tmp_path / "run", {**replicated(config(latency_s=0.1), 2, 3), **head})
    write_tasks(folder, 400)
    with some_machines(3, tmp_path) as made:
        serve_all(made, folder, 2, 3)
        made.start(1, "ng_run", "--plain", folder=folder).await_text("ready in")
        collecting = made.start(1, *COLLECT, folder=folder)
        collecting.await_that(lambda: has_lines(folder / "out.jsonl", 50), "begun")
        made[2].power_off()
        assert collecting.await_end() == 0, collecting.text
    check_rows(folder, 400)
    failures = rows(folder / "out_failures.jsonl")
    assert {row["failure"]["class"] for row in failures} == {"connect"}
    assert any("its machine has been silent for 30 s" in row["failure"]["message"] for row in failures)


def test_a_collection_waits_for_the_only_gym_server_until_its_machine_is_back(tmp_path: Path) -> None:
    head = {"ngym": {"host": "10.77.0.1", "head": {"host": "10.77.0.1"}}}
    external = {**config(latency_s=0.1)["counter"], "url": "http://10.77.0.2:8000"}
    folder = write(tmp_path / "run", {**config(latency_s=0.1), "counter": external, **head})
    write_tasks(folder, 300)
    with some_machines(2, tmp_path) as made:
        made.start(2, "ng_serve", "counter", "--host", "10.77.0.2", folder=folder).await_text("listens at")
        made.start(1, "ng_run", "--plain", folder=folder).await_text("ready in")
        collecting = made.start(1, *COLLECT, folder=folder)
        collecting.await_that(lambda: has_lines(folder / "out.jsonl", 50), "begun")
        made[2].cut()
        collecting.await_text("counter does not answer at http://10.77.0.2:8000")
        made[2].connect()
        assert collecting.await_end() == 0, collecting.text
    check_rows(folder, 300)
    assert not rows(folder / "out_failures.jsonl"), "an outage costs no attempt"


def test_the_services_of_docker_compose_run_on_a_machine_each(tmp_path: Path, root: Path) -> None:
    """Its commands and environments; a scripted model in the place of vLLM."""
    compose = yaml.safe_load((root / "docker-compose.yml").read_text())["services"]
    content = yaml.safe_load((root / "docker" / "global_config.yaml").read_text())
    answer = {"text": "The answer is 4."}
    content["policy"] = {"kind": "model", "app": "models/scripted", "url": "http://policy:8000", "replies": [answer]}
    names = ["policy", "calculator", "calculator_agent", "collect"]
    app, runs = tmp_path / "app", tmp_path / "runs"
    app.mkdir()
    runs.mkdir()
    write(tmp_path / "mounted", content)
    tokens = {name: "" for name in ENV if name.startswith("NGYM_")}
    with some_machines(len(names), tmp_path, private=[app]) as made:
        for number in range(1, len(names) + 1):
            hosts = "".join(f"10.77.0.{each} {name}\n" for each, name in enumerate(names, 1))
            image = (
                f"cp {tmp_path}/mounted/global_config.yaml {app}; ln -s {root}/data {app}/data; ln -s {runs} {app}/runs"
            )
            made.run(number, "sh", "-ec", f"printf '{hosts}' >> /etc/hosts; {image}", folder=tmp_path)

        def words_of(name: str) -> list[str]:
            return [
                str(app / "global_config.yaml") if "global_config" in word else word
                for word in compose[name]["command"]
            ]

        def env_of(name: str) -> dict[str, str]:
            return tokens | {key: ENV[key] for key in compose[name]["environment"] if key in ENV}

        for number, name in enumerate(names[:3], 1):
            made.start(number, *words_of(name), folder=app, env=env_of(name)).await_text("listens at")
        code, text = made.run(4, *words_of("collect"), folder=app, env=env_of("collect"))
        assert code == 0, text
    assert len(rows(runs / "docker.jsonl")) == 80


def test_large_rows_over_slow_lines_fail_no_rollout(tmp_path: Path) -> None:
    head = {"ngym": {"host": "10.77.0.1", "head": {"host": "10.77.0.1"}}}
    folder = write(tmp_path / "run", {**replicated(config(), 2), **head})
    write_tasks(folder, 24, padding="x" * 500_000)
    with some_machines(2, tmp_path, rate="20mbit") as made:
        serve_all(made, folder, 2)
        made.start(1, "ng_run", "--plain", folder=folder).await_text("ready in")
        made.collect(1, folder=folder)
    check_rows(folder, 24)
    assert not rows(folder / "out_failures.jsonl")
