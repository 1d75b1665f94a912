"""The commands as real processes: output, exit codes, and cleanup."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import pytest
from waiting import PATIENCE_S, descendants, running, wait_until

from ngym.supervise.supervisor import GRACE_S

YES = """
from ngym import VerifyRequest, gym_server

async def verify(task: VerifyRequest) -> float:
    return 1.0

app = gym_server(verify=verify)
"""
# Neither the service nor its worker listens to SIGTERM.
STUBBORN = """
import signal, subprocess, sys
from ngym import ServiceContext, ServiceOptions

class Options(ServiceOptions):
    pass

async def serve(context: ServiceContext) -> None:
    import asyncio
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(3600)"])

    async def answer(reader, writer):
        await reader.readline()
        writer.write(b"HTTP/1.0 200 OK\\r\\n\\r\\n{}")
        writer.close()

    server = await asyncio.start_server(answer, sock=context.sockets[0])
    await server.serve_forever()
"""
CONFIG = """
ngym: {head: {port: 0}}
one: {kind: gym_server, app: gym_servers/yes}
"""
BRIDGE = """
bridge: {kind: gym_server, app: gym_servers/bridge}
bridge_agent: {kind: agent, app: agents/simple, gym: bridge, model: policy}
policy: {kind: model, app: models/scripted}
"""
HEAVY = {"aiohttp", "fastapi", "omegaconf", "pydantic", "rich", "starlette", "uvicorn", "yaml"}


def command(name: str, *words: str) -> list[str]:
    code = f"import sys; sys.argv[0] = 'ng_{name}'; from ngym.cli.{name} import main; main()"
    return [sys.executable, "-P", "-c", code, *words]


def run_to_end(folder: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    return subprocess.run(
        command(name, *words), cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


class Running:
    """An `ng_run --json` that was started; `process` is it, `events` what it has said so far.

    start_s: what it took until it was ready; on a slow or busy machine, everything takes so much longer.
    """

    def __init__(self, folder: Path, *words: str) -> None:
        self._started = time.monotonic()
        self.process = subprocess.Popen(
            command("run", "--json", *words), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.events: list[dict[str, Any]] = []

    def until_ready(self) -> Running:
        self.until(lambda event: event["event"] == "ready")
        self.start_s = time.monotonic() - self._started
        return self

    def until(self, awaited: Callable[[dict[str, Any]], bool]) -> None:
        """Until it has said that."""
        assert self.process.stdout is not None
        while not any(map(awaited, self.events)):
            line = self.process.stdout.readline()
            assert line, self.process.communicate()[1]
            self.events.append(json.loads(line))

    def processes(self) -> list[psutil.Process]:
        """Every process of the run but ng_run itself."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, number: signal.Signals = signal.SIGINT) -> tuple[int, str, str]:
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "gym_servers").mkdir()
    (tmp_path / "gym_servers" / "yes.py").write_text(YES)
    (tmp_path / "gym_servers" / "stubborn.py").write_text(STUBBORN)
    (tmp_path / "global_config.yaml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def run(folder: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(*words: str) -> Running:
        started.append(Running(folder, *words))
        return started[-1].until_ready()

    yield start
    for ng_run in started:
        ng_run.process.kill()
        ng_run.process.communicate()


def post(url: str, body: bytes) -> Any:
    request = Request(url, data=body, headers={"content-type": "application/json"})
    with urlopen(request, timeout=PATIENCE_S) as reply:
        return json.loads(reply.read())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_however_ng_run_ends_no_process_is_left(
    run: Callable[..., Running], folder: Path, number: signal.Signals
) -> None:
    with (folder / "global_config.yaml").open("a") as config:
        config.write("two: {kind: model, app: gym_servers/stubborn}\n")
    ng_run = run()
    everyone = ng_run.processes()
    assert len(everyone) == 4  # the zygote, two services, the worker of one
    code, out, _ = ng_run.end(number)
    if number is signal.SIGKILL:
        wait_until(lambda: not running(everyone))
    else:
        assert running(everyone) == []
        assert code == 0 and json.loads(out.splitlines()[-1])["event"] == "stopped"
        assert not (folder / ".ngym" / "head.json").exists()


def test_a_second_run_in_a_folder_says_that_commands_use_the_first_one(
    run: Callable[..., Running], folder: Path
) -> None:
    first = run()
    second = subprocess.Popen(command("run"), cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        assert second.stdout is not None
        lines = iter(second.stdout.readline, "")
        ready = next(line for line in lines if line.startswith("ready in "))
        head, other = ready.split()[5].rstrip(";"), first.events[-1]["head"]
        start = f"another run (process {first.process.pid}, {other}) is in this folder, and commands use that one; "
        assert next(lines).startswith(f"{start}for this run, give them --head {head}. Its logs are in {folder}")
    finally:
        second.terminate()
        second.communicate()


def test_a_second_ctrl_c_kills_at_once(run: Callable[..., Running], folder: Path) -> None:
    (folder / "global_config.yaml").write_text(
        "two: {kind: model, app: gym_servers/stubborn}\nngym: {head: {port: 0}}\n"
    )
    ng_run = run()
    stubborn = psutil.Process(next(event["pid"] for event in ng_run.events if event.get("pid")))
    ng_run.process.send_signal(signal.SIGINT)
    ng_run.until(lambda event: event["event"] == "stopping")
    ng_run.process.send_signal(signal.SIGINT)
    lived_s = 0.0  # while the machine hangs, it lives no longer
    while running([stubborn]):
        time.sleep(0.01)
        lived_s += 0.01
        assert lived_s < GRACE_S / 2, "so long it lives after one Ctrl-C"
    assert ng_run.process.wait(PATIENCE_S) == 0


def test_a_closed_terminal_leaves_nothing_running(folder: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execv(sys.executable, command("run"))
    output = b""
    while b"ready in" not in output:
        output += os.read(terminal, 65536)
    everyone = psutil.Process(pid).children(recursive=True)
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(everyone) == 2
    wait_until(lambda: not running(everyone))


def test_a_reader_that_goes_away_ends_the_run_without_a_word(folder: Path) -> None:
    reading, writing = os.pipe()
    with subprocess.Popen(command("run"), cwd=folder, stdout=writing, stderr=subprocess.PIPE, text=True) as process:
        os.close(writing)
        os.read(reading, 10)
        os.close(reading)
        descendants(psutil.Process(process.pid), lambda each: each.name() == "ng:one" and each.kill())  # which is news
        assert process.communicate(timeout=PATIENCE_S)[1] == "" and process.returncode == 0


def test_json_has_an_event_for_each_change(run: Callable[..., Running]) -> None:
    events = run("one.replicas=2").events
    services = [event for event in events if event["event"] == "service"]
    assert {event["label"] for event in services} == {"one-0", "one-1"}
    assert {"time", "name", "kind", "status", "detail", "pid", "url", "restarts"} <= services[0].keys()
    assert events[-1]["event"] == "ready" and events[-1]["head"].startswith("http://127.0.0.1:")
    assert events[-1]["locked"] is False


def test_a_locked_run_says_where_its_token_is_and_ng_status_finds_it_there(
    run: Callable[..., Running], folder: Path
) -> None:
    ready = run("ngym.require_token=true").events[-1]
    assert ready["locked"] is True and ".ngym/head.json" in ready["text"]
    status = subprocess.run(command("status"), cwd=folder, capture_output=True, text=True, check=False)
    assert status.returncode == 0 and "1 of 1 services ready" in status.stdout
    stranger = subprocess.run(
        [*command("status"), "--head", ready["head"]], capture_output=True, text=True, check=False
    )
    assert stranger.returncode == 1 and "NGYM_TOKEN" in stranger.stderr and "Traceback" not in stranger.stderr


def test_ng_status_shows_the_run_and_its_exit_code_shows_whether_all_is_ready(
    run: Callable[..., Running], folder: Path
) -> None:
    run()
    result = run_to_end(folder, "status")
    assert result.returncode == 0 and "1 of 1 services ready" in result.stdout and "gym_server  ready" in result.stdout
    record = json.loads(run_to_end(folder, "status", "--json").stdout)
    assert record["servers"][0]["name"] == "one"


def test_ng_status_without_a_run_says_so_and_fails(folder: Path) -> None:
    result = run_to_end(folder, "status")
    assert (
        result.returncode == 1
        and result.stderr == f"nothing runs in {folder}: start it with ng_run there, or name a run with --head URL\n"
    )


def test_ng_status_fails_while_something_is_not_ready(run: Callable[..., Running], folder: Path) -> None:
    with (folder / "global_config.yaml").open("a") as config:
        config.write("far: {kind: model, url: 'http://127.0.0.1:9'}\n")
    run().until(lambda event: "not reachable" in event.get("detail", ""))
    result = run_to_end(folder, "status")
    assert result.returncode == 1 and "1 of 2 services ready" in result.stdout and "not reachable" in result.stdout


def test_a_dry_run_prints_the_resolved_config_without_its_secrets_and_starts_nothing(folder: Path) -> None:
    result = run_to_end(folder, "run", "--dry-run", "one.replicas=3", "one.api_key=sk-123")
    assert result.returncode == 0 and "replicas: 3" in result.stdout and "<redacted>" in result.stdout
    assert "sk-123" not in result.stdout and not (folder / ".ngym").exists()


def test_a_dry_run_on_ray_promises_no_address_of_this_machine(folder: Path) -> None:
    result = run_to_end(folder, "run", "--on", "ray", "--dry-run", "ngym.head.port=11000")
    assert result.returncode == 0 and "the address of its node, a free port" in result.stderr
    assert "the head at the address of this node:11000" in result.stderr and "127.0.0.1" not in result.stderr


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--config", "nope.yaml"], "nope.yaml: no such file"),
        (["onne.replicas=2"], "no service named 'onne' (did you mean 'one'?)"),
        (["one.tolerance=2"], "command line: one: unknown key 'tolerance'"),
        (["one.app=gym_servers/yess"], "no service at 'gym_servers/yess'"),
    ],
)
def test_a_wrong_config_is_one_line_and_exit_code_2(folder: Path, words: list[str], line: str) -> None:
    result = run_to_end(folder, "run", *words)
    assert result.returncode == 2 and line in result.stderr and len(result.stderr.splitlines()) == 1


def test_a_port_in_use_is_one_line_and_exit_code_2(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        result = run_to_end(folder, "run", f"one.port={listener.getsockname()[1]}")
    assert result.returncode == 2 and "is in use by another program; stop that program" in result.stderr


def test_a_gym_server_without_its_package_is_reported_and_ends_only_a_strict_run(
    folder: Path, run: Callable[..., Running]
) -> None:
    (folder / "gym_servers" / "bridge.py").write_text("import no_such_package")
    (folder / "bridge.yaml").write_text(BRIDGE)
    (folder / "rows.jsonl").write_text('{"responses_create_params": {"input": "hi"}}')
    words = ["--config", "global_config.yaml", "--config", "bridge.yaml"]
    ng_run = run(*words)
    text = next(event["text"] for event in ng_run.events if event["event"] == "ready")
    assert "\nbridge: failed, " in text and "No module named 'no_such_package'" in text
    status_result = run_to_end(folder, "status")
    assert status_result.returncode == 1 and "2 of 4 services ready" in status_result.stdout
    assert f"bridge: {folder / 'gym_servers' / 'bridge.py'}: No module named 'no_such_package'" in status_result.stdout
    collect = ["--agent", "bridge_agent", "--input", "rows.jsonl", "--output", "out.jsonl"]
    result = run_to_end(folder, "rollouts.collect", *collect)  # instead of a wait for a service that does not come
    assert result.returncode == 1 and "agent 'bridge_agent' needs bridge, which cannot be started: " in result.stderr
    assert ng_run.end()[0] == 0
    for ends in (["--strict"], ["--only", "bridge"]):  # nothing is left to run
        strict_result = run_to_end(folder, "run", *words, *ends)
        assert strict_result.returncode == 2 and "No module named 'no_such_package'" in strict_result.stderr


def test_a_service_that_cannot_start_is_shown_with_its_log_and_exit_code_1(folder: Path) -> None:
    (folder / "gym_servers" / "yes.py").write_text("raise RuntimeError('no licence')")
    result = run_to_end(folder, "run", "ngym.max_restarts=2")
    assert result.returncode == 1
    assert "service 'one' died 2 times in a row" in result.stderr and "RuntimeError: no licence" in result.stderr


def test_ng_validate_names_every_mistake_of_every_service(folder: Path) -> None:
    assert run_to_end(folder, "validate").returncode == 0
    (folder / "gym_servers" / "broken.py").write_text("import ngym\nngym.nonsense\n")
    (folder / "global_config.yaml").write_text(
        "one: {kind: gym_server, app: gym_servers/yes, treshold: 1}\n"
        "two: {kind: agent, app: agents/simple, gym: onne, model: one}\n"
        "three: {kind: gym_server, app: gym_servers/broken}\n"
    )
    result = run_to_end(folder, "validate")
    assert result.returncode == 2
    assert "global_config.yaml:1: unknown key 'treshold'" in result.stderr
    assert "global_config.yaml:2: no service named 'onne' (did you mean 'one'?)" in result.stderr
    assert "gym_servers/broken.py:2: AttributeError: module 'ngym' has no attribute 'nonsense'" in result.stderr
    (folder / "gym_servers" / "broken.py").write_text("raise RuntimeError('no licence')\n")
    result = run_to_end(folder, "validate")
    assert "global_config.yaml:3: the app of 'three' cannot be loaded" in result.stderr
    assert "RuntimeError: no licence" in result.stderr


def test_mistakes_of_several_stanzas_are_reported_together(folder: Path) -> None:
    (folder / "global_config.yaml").write_text(
        "one: {kind: gym_servr, app: gym_servers/yes}\n"
        "two: {kind: agent, app: agents/simpel, gym: one, model: one}\n"
        "three: {kind: modle, app: models/scripted, replicas: 0}\n"
        "ngym: {head: {port: -1}}\n"
        "five: {kind: gym_server, app: gym_servers/yes, treshold: 1}\n"
        "six: {kind: agent, app: agents/simple, gym: fife, model: three}\n"
        "seven: {kind: model, app: models/transformers, model: ./nowhere}\n"
    )
    messages = (
        "'gym_servr' is not a service kind",
        "agents/simpel",
        "replicas",
        "port",
        "treshold",
        "'fife'",
        "'./nowhere'",
    )
    for name in ("validate", "run"):
        result = run_to_end(folder, name)
        assert result.returncode == 2
        for line, text in enumerate(messages, 1):
            assert re.search(rf"global_config.yaml:{line}: .*{text}", result.stderr), result.stderr
        assert "global_config.yaml:3: 'modle' is not a service kind" in result.stderr
        assert "'three'" not in result.stderr  # it exists; only its stanza is wrong


def test_ng_run_names_the_wrong_options_of_all_services(folder: Path) -> None:
    (folder / "global_config.yaml").write_text(
        "one: {kind: gym_server, app: gym_servers/yes, treshold: 1}\n"
        "two: {kind: gym_server, app: gym_servers/yes, max_body: 1}\n"
    )
    result = run_to_end(folder, "run")
    assert result.returncode == 2
    assert sorted(result.stderr.splitlines()) == sorted(set(result.stderr.splitlines()))
    assert "global_config.yaml:1: unknown key 'treshold'" in result.stderr
    assert "global_config.yaml:2: unknown key 'max_body'" in result.stderr


def test_a_policy_that_does_not_exist_is_named_before_anything_starts(folder: Path) -> None:
    (folder / "global_config.yaml").write_text(
        "policy:\n  kind: model\n  app: models/vllm\n  model: runs/quickstart/sft/policy\n"
        "other: {kind: model, app: models/transformers, model: ./nowhere}\n"
        "gym: {kind: gym_server, app: gym_servers/yes}\n"
    )
    for name in ("validate", "run"):
        result = run_to_end(folder, name)
        assert result.returncode == 2
        line, other = result.stderr.splitlines()
        assert "global_config.yaml:4: service 'policy': model 'runs/quickstart/sft/policy': there is no folder" in line
        assert "`make quickstart` makes it" in line
        assert "global_config.yaml:5: service 'other': model './nowhere': there is no folder" in other
    assert not (folder / ".ngym" / "logs").exists()


def test_a_verify_that_returns_text_is_found_without_a_model(folder: Path) -> None:
    (folder / "gym_servers" / "text.py").write_text(
        "from ngym import VerifyRequest, gym_server\n\n\nasync def verify(task: VerifyRequest) -> str:\n"
        "    return '1.0'\n\n\napp = gym_server(verify=verify)\n"
    )
    (folder / "global_config.yaml").write_text("one: {kind: gym_server, app: gym_servers/text}\n")
    result = run_to_end(folder, "validate")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "text.py:4: verify: it returns str; a reward is a number, None, or a record with 'reward'" in line


def test_ng_serve_runs_one_service_alone(folder: Path) -> None:
    with subprocess.Popen(command("serve", "one"), cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = process.stderr.readline().split()[-1]
        assert json.loads(urlopen(f"{url}/ready", timeout=PATIENCE_S).read()) == {"status": "ready"}
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("urls", "port"),
    [
        (["http://198.51.100.1:8001", "http://127.0.0.1:8002"], 8002),
        (["http://198.51.100.1:8001", "http://198.51.100.2:8001"], 8001),
        (["http://198.51.100.1:8001", "http://localhost:8001"], 8001),
    ],
)
def test_ng_serve_listens_at_the_port_of_the_url_of_its_machine(folder: Path, urls: list[str], port: int) -> None:
    result = run_to_end(folder, "serve", "one", f"one.urls={json.dumps(urls)}", "--dry-run", "--json")
    assert json.loads(result.stdout)["port"] == port, result.stderr


@pytest.mark.parametrize(
    ("urls", "number"),
    [
        (["http://198.51.100.1:8001", "http://198.51.100.2:8002"], "none"),
        (["http://127.0.0.1:1", "http://localhost:2"], "2"),
    ],
)
def test_ng_serve_asks_for_the_port_that_its_urls_do_not_tell(folder: Path, urls: list[str], number: str) -> None:
    words = ("serve", "one", f"one.urls={json.dumps(urls)}", "--dry-run", "--json")
    result = run_to_end(folder, *words)
    (line,) = result.stderr.splitlines()
    assert result.returncode == 2 and f"{number} of the addresses of 'one' ({', '.join(urls)})" in line, line
    assert line.endswith("give --port")
    assert json.loads(run_to_end(folder, *words, "--port", "8003").stdout)["port"] == 8003


def test_a_new_project_runs_unchanged(run: Callable[..., Running], folder: Path) -> None:
    result = run_to_end(folder, "init", "my_env")
    assert result.returncode == 0 and "ng_run" in result.stdout
    project = folder / "my_env"
    events = run("--config", "my_env/global_config.yaml", "ngym.head.port=0").events
    (agent,) = [e["url"] for e in events if e.get("kind") == "agent" and e["status"] == "ready"]
    task = (project / "gym_servers" / "my_env" / "data" / "example.jsonl").read_bytes().splitlines()[0]
    assert post(f"{agent}/run", task)["reward"] == 1.0


def test_ng_init_never_overwrites(folder: Path) -> None:
    result = run_to_end(folder, "init", "my_env", "--folder", str(folder))
    assert result.returncode == 2 and "exists and is not empty; nothing was written" in result.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["global_config.yaml", "gym_servers"]


def test_a_misspelled_command_gets_the_nearest_name(folder: Path) -> None:
    result = run_to_end(folder, "shell.main", "statsu")
    assert result.returncode == 2 and "no command 'statsu' (did you mean 'status'?)" in result.stderr


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, ngym.cli.{0}; print(*sorted(m for m in sys.modules if m in {1!r}))"
    for name in ("shell.main", "run", "status", "serve", "validate", "init", "list", "train", "rollouts.collect"):
        result = subprocess.run(
            [sys.executable, "-c", code.format(name, HEAVY)], capture_output=True, text=True, check=False
        )
        assert (result.returncode, result.stdout.split()) == (0, []), name
