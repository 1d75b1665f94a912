"""Supervised processes: started together, watched, restarted, given up, and ended."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from omegaconf import OmegaConf
from waiting import PATIENCE_S, reserved_port, running, until

from ngym.config.service_config import load_config
from ngym.errors import ConfigError, UsageError
from ngym.runtime.cpu_threads import usable_cores
from ngym.runtime.event_loop import run_unless_failed
from ngym.supervise import scaling, supervisor
from ngym.supervise.head_file import Reply, find_running, health, http_get
from ngym.supervise.service import STABLE_S, CrashCounter, ReplicaState, ServiceFailed, ServiceRefused
from ngym.supervise.service_log import ServiceLog
from ngym.supervise.supervisor import Supervisor
from ngym.supervise.zygote_client import ZygoteGone, receive, send
from ngym.telemetry.log_format import REDACTED, redact, secrets_in

YES = """
from ngym import VerifyRequest, gym_server

async def verify(task: VerifyRequest) -> float:
    return 1.0

app = gym_server(verify=verify)
"""
# Dies when a file says so, as often as that file says.
SHAKY = (
    """
import os, pathlib, sys
left = pathlib.Path(__file__).with_name("deaths")
count = int(left.read_text()) if left.exists() else 0
if count:
    left.write_text(str(count - 1))
    print(f"about to die, {count} to go", flush=True)
    os._exit(3)
"""
    + YES
)
SLOW = """
import asyncio
from contextlib import asynccontextmanager
from ngym import ServiceContext, VerifyRequest, gym_server

@asynccontextmanager
async def lifespan(context: ServiceContext):
    print("ngym-status: loading weights", flush=True)
    await asyncio.sleep(3600)
    yield

async def verify(task: VerifyRequest) -> float:
    return 1.0

app = gym_server(verify=verify, lifespan=lifespan)
"""
# Workers that a careless service leaves behind: a child, one in its own session, a daemon.
WITH_WORKERS = """
import subprocess, sys
from contextlib import asynccontextmanager
from ngym import ServiceContext, VerifyRequest, gym_server

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"

@asynccontextmanager
async def lifespan(context: ServiceContext):
    subprocess.Popen([sys.executable, "-c", STUBBORN])
    subprocess.Popen([sys.executable, "-c", STUBBORN], start_new_session=True)
    subprocess.run(["sh", "-c", f"setsid {sys.executable} -c '{STUBBORN}' &"], check=True)
    yield

async def verify(task: VerifyRequest) -> float:
    return 1.0

app = gym_server(verify=verify, lifespan=lifespan)
"""


SEES = """
import os
from ngym import VerifyRequest, gym_server

async def verify(task: VerifyRequest) -> float:
    return 1.0

app = gym_server(verify=verify)
app.add_api_route("/gpus", lambda: os.environ.get("CUDA_VISIBLE_DEVICES"), methods=["GET"])
app.add_api_route("/cores", lambda: os.environ.get("NGYM_CPUS"), methods=["GET"])
"""


class Project:
    """A folder with a config and services; `supervisor()` loads it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[ReplicaState] = []

    def write(self, config: dict[str, Any], **services: str) -> Project:
        (self.folder / "gym_servers").mkdir(exist_ok=True)
        for name, code in services.items():
            (self.folder / "gym_servers" / f"{name}.py").write_text(code)
        settings = {"head": {"port": 0}, **config.pop("ngym", {})}
        (self.folder / "global_config.yaml").write_text(yaml.safe_dump({"ngym": settings, **config}, sort_keys=False))
        return self

    def supervisor(self, on_event: Callable[[ReplicaState], None] | None = None, strict: bool = True) -> Supervisor:
        config = load_config([self.folder / "global_config.yaml"], ())
        return Supervisor(config, on_event or self.events.append, strict=strict)

    def statuses(self, label: str) -> list[str]:
        """One after the other; how long it was in each does not count."""
        return [status for status, _ in groupby(event.status for event in self.events if event.label == label)]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def gym(app: str, **more: Any) -> dict[str, Any]:
    return {"kind": "gym_server", "app": f"gym_servers/{app}", **more}


def processes_of(pids: list[int | None]) -> list[psutil.Process]:
    """These processes, their zygote, and all descendants."""
    first = psutil.Process(pids[0])
    zygote = first.parent()
    assert zygote is not None
    return [zygote, *zygote.children(recursive=True)]


async def test_services_start_together_and_their_urls_answer(project: Project) -> None:
    project.write({"one": gym("yes"), "many": gym("yes", replicas=2)}, yes=YES)
    async with project.supervisor() as stack:
        assert [len(stack.urls[name]) for name in ("one", "many")] == [1, 2]
        for url in (*stack.urls["one"], *stack.urls["many"]):
            assert (await health(url, PATIENCE_S)).ready
        assert {state.label for state in stack.states} == {"one", "many-0", "many-1"}
        alive = processes_of([state.pid for state in stack.states])
        assert len(alive) == 4
        for process in alive:
            process.send_signal(signal.SIGUSR1)  # a scheduler's warning to all processes is for the command
        for url in (*stack.urls["one"], *stack.urls["many"]):
            assert (await health(url, PATIENCE_S)).ready
    assert running(alive) == []
    assert project.statuses("one") == ["starting", "ready", "stopped"]


async def test_the_head_shows_who_is_where(project: Project) -> None:
    project.write({"one": gym("yes"), "many": gym("yes", replicas=2)}, yes=YES)
    async with project.supervisor() as stack:
        servers = {
            server["name"]: server
            for server in json.loads((await http_get(f"{stack.head_url}/servers", PATIENCE_S)).body)
        }
        assert servers["one"]["url"] == stack.urls["one"][0]
        assert servers["many"]["urls"] == stack.urls["many"]
        assert servers["one"]["status"] == "ready" and servers["one"]["restarts"] == 0
        assert servers["one"]["uptime_seconds"] >= 0 and servers["one"]["pid"] == stack.states[0].pid
        assert json.loads((await http_get(stack.head_url, PATIENCE_S)).body) == {"status": "ok"}


async def test_nemo_gyms_tools_find_our_services(project: Project) -> None:
    project.write(
        {
            "policy": {"kind": "model", "app": "models/scripted"},
            "env": gym("yes"),
            "env_agent": {"kind": "agent", "app": "agents/simple", "gym": "env", "model": "policy"},
        },
        yes=YES,
    )
    async with project.supervisor() as stack:
        body = (await http_get(f"{stack.head_url}/global_config_dict_yaml", PATIENCE_S)).body
        tree = OmegaConf.create(json.loads(body))  # what their ServerClient does with it
        for name, urls in stack.urls.items():
            (kind,) = tree[name]
            (implementation,) = tree[name][kind]
            server = tree[name][kind][implementation]
            assert f"http://{server.host}:{server.port}" == urls[0]
        assert tree.env_agent.responses_api_agents.simple.resources_server.name == "env"
        relay = tree.env_agent_environment_server.environment_servers.legacy_agent  # what its collector calls since 0.7
        assert relay.agent_server.name == "env_agent"
        assert f"http://{relay.host}:{relay.port}" == stack.urls["env_agent"][0]
        instances = json.loads((await http_get(f"{stack.head_url}/server_instances", PATIENCE_S)).body)
        assert {instance["process_name"] for instance in instances} == {"policy", "env", "env_agent"}
        assert {instance["status"] for instance in instances} == {"success"}


async def test_a_killed_service_comes_back_at_the_same_address(project: Project) -> None:
    project.write({"one": gym("yes"), "ngym": {"max_restarts": 2}}, yes=YES)
    async with project.supervisor() as stack:
        (url,) = stack.urls["one"]
        for deaths in range(1, 5):  # more often than max_restarts: it was ready each time
            pid = stack.states[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda deaths=deaths: stack.states[0].restarts == deaths and stack.states[0].status == "ready")
            assert (await health(url, PATIENCE_S)).ready and stack.states[0].pid != pid
    assert "killed by SIGKILL" in next(event.detail for event in project.events if event.status == "restarting")


async def test_a_connection_made_while_a_service_restarts_is_served_when_it_is_back(project: Project) -> None:
    project.write({"one": gym("yes")}, yes=YES)
    asking: list[asyncio.Task[Reply]] = []

    def ask_when_it_is_down(state: ReplicaState) -> None:
        if state.status == "restarting":
            asking.append(asyncio.create_task(http_get(f"{state.url}/health", PATIENCE_S)))

    async with project.supervisor(on_event=ask_when_it_is_down) as stack:
        os.kill(stack.states[0].pid or 0, signal.SIGKILL)
        await until(lambda: asking)
        assert (await asking[0]).status == 200


async def test_the_workers_of_a_killed_service_die_with_it(project: Project) -> None:
    project.write({"one": gym("workers")}, workers=WITH_WORKERS)
    async with project.supervisor() as stack:
        service = psutil.Process(stack.states[0].pid)
        in_group = [child for child in service.children() if os.getpgid(child.pid) == service.pid]
        assert in_group
        service.kill()
        await until(lambda: stack.states[0].restarts == 1 and stack.states[0].status == "ready")
        await until(lambda: not running(in_group))


async def test_after_the_end_no_worker_of_a_service_is_left(project: Project) -> None:
    project.write({"one": gym("workers")}, workers=WITH_WORKERS)
    async with project.supervisor() as stack:
        alive = processes_of([stack.states[0].pid])
        assert len(alive) == 5  # the zygote, the service, a child, one in its own session, a daemon
    assert running(alive) == []


async def test_a_service_that_dies_while_starting_is_tried_again(project: Project) -> None:
    project.write({"one": gym("shaky")}, shaky=SHAKY)
    (project.folder / "gym_servers" / "deaths").write_text("2")
    async with project.supervisor() as stack:
        assert stack.states[0].restarts == 2
    assert "exit code 3; again in 0.4 s" in [event.detail for event in project.events]


async def test_a_service_that_dies_again_and_again_is_named_with_its_log(project: Project) -> None:
    project.write({"fine": gym("yes"), "one": gym("shaky"), "ngym": {"max_restarts": 3}}, yes=YES, shaky=SHAKY)
    (project.folder / "gym_servers" / "deaths").write_text("99")
    with pytest.raises(ServiceFailed) as caught:
        async with project.supervisor():
            pass
    report = str(caught.value)
    assert "service 'one' died 3 times in a row without having been ready (exit code 3)" in report
    assert "about to die" in report and str(project.folder / ".ngym" / "logs" / "one.log") in report
    assert project.statuses("fine")[-1] == "stopped" and project.statuses("one")[-1] == "failed"


GIVES_REASON = """
import os
print("much that does not help")
print("ngym-status: cannot be started:")
print("the memory of the GPU is taken", flush=True)
os._exit(%d)
"""


@pytest.mark.parametrize("logs", ["text", "json"])
@pytest.mark.parametrize("code", [1, 69])
async def test_a_service_that_gives_its_reason_is_reported_with_it_alone(
    project: Project, code: int, logs: str
) -> None:
    project.write({"one": gym("taken"), "ngym": {"max_restarts": 2, "logs": logs}}, taken=GIVES_REASON % code)
    with pytest.raises((ServiceFailed, ServiceRefused)) as caught:
        async with project.supervisor():
            pass
    if code == 69:
        assert str(caught.value) == "the memory of the GPU is taken"
        return
    how = "exit code 1: the memory of the GPU is taken"
    log = project.folder / ".ngym" / "logs" / "one.log"
    died = "died 2 times in a row without having been ready"
    assert str(caught.value) == f"service 'one' {died} ({how}); its log is {log}"
    assert f"{how}; again in 0.2 s" in [event.detail for event in project.events]
    assert "much that does not help" in log.read_text()


REFUSES = "raise SystemExit(78)"
NO_SUCH_ENVIRONMENT = """
from contextlib import asynccontextmanager
from ngym.errors import ConfigError

@asynccontextmanager
async def lifespan(context):
    raise ConfigError("no environment 'chess'")
    yield

app = gym_server(verify=verify, lifespan=lifespan)
"""


@pytest.mark.parametrize("code", [REFUSES, SHAKY])
async def test_an_optional_service_that_cannot_be_started_is_reported_and_the_rest_runs(
    project: Project, code: str
) -> None:
    config = {"fine": gym("yes"), "bridge": gym("broken", optional=True), "ngym": {"max_restarts": 2}}
    project.write(config, yes=YES, broken=code)
    (project.folder / "gym_servers" / "deaths").write_text("99")
    async with project.supervisor() as stack:
        states = {state.label: state for state in stack.states}
        assert (states["fine"].status, states["bridge"].status) == ("ready", "failed")
        assert states["bridge"].detail
        assert not any(task.done() for task in stack._tasks)
    assert project.statuses("fine")[-1] == "stopped" and project.statuses("bridge")[-1] == "failed"


SLOW_MODEL = """
import asyncio
from contextlib import asynccontextmanager
from ngym import model_server

@asynccontextmanager
async def lifespan(context):
    await asyncio.sleep(3600)
    yield

async def respond(request, call):
    return {}

app = model_server(respond=respond, lifespan=lifespan)
"""


async def test_an_optional_service_that_is_not_ready_in_time_is_ended(project: Project) -> None:
    """It would take its memory and GPUs for the rest of the run, and calls that no one answers."""
    slow = {"kind": "model", "app": "gym_servers/slow", "optional": True}
    project.write({"fine": gym("yes"), "slow": slow, "ngym": {"model_ready_timeout_s": 0.5}}, yes=YES, slow=SLOW_MODEL)
    async with project.supervisor() as stack:
        states = {state.label: state for state in stack.states}
        assert (states["fine"].status, states["slow"].status) == ("ready", "failed")
        assert "was not ready within 0.5 s" in states["slow"].detail
        (pid,) = {event.pid for event in project.events if event.label == "slow" and event.pid}
        assert not psutil.pid_exists(pid)
        assert "Connect call failed" in (await health(states["slow"].url, PATIENCE_S)).reason
        assert not any(task.done() for task in stack._tasks)


async def test_a_gym_server_that_refuses_its_environment_is_reported_and_the_rest_runs(project: Project) -> None:
    """With a missing package, and with an environment that does not exist; a strict run ends."""
    unknown = YES.replace("app = gym_server(verify=verify)", NO_SUCH_ENVIRONMENT)
    services = {
        "policy": {"kind": "model", "app": "models/scripted"},
        "fine": gym("yes"),
        "bridge": gym("unknown"),
        "bridge_agent": {"kind": "agent", "app": "agents/simple", "gym": "bridge", "model": "policy"},
        "other": gym("missing"),
    }
    project.write(services, yes=YES, unknown=unknown, missing="import no_such_package")
    async with project.supervisor(strict=False) as stack:
        states = {state.label: state for state in stack.states}
        assert [states[name].status for name in services] == ["ready", "ready", "failed", "not ready", "failed"]
        assert states["bridge"].detail == "no environment 'chess'"
        assert states["bridge_agent"].detail == "needs bridge, which cannot be started: no environment 'chess'"
        assert "No module named 'no_such_package'" in states["other"].detail
        assert not any(task.done() for task in stack._tasks)
        (url,) = stack.urls["bridge"]
        assert "Connect call failed" in (await health(url, PATIENCE_S)).reason  # instead of a call that waits
        records = json.loads((await http_get(f"{stack.head_url}/servers", PATIENCE_S)).body)
        assert [record["detail"] for record in records] == [states[name].detail for name in services]
        (url,) = stack.urls["bridge_agent"]
        while (status := await health(url, PATIENCE_S)).ready:  # the agent itself says so, too
            await asyncio.sleep(0.05)
        assert status.reason == states["bridge_agent"].detail
    with pytest.raises(ConfigError, match=r"no environment 'chess'|no_such_package"):
        async with project.supervisor():
            pass


async def test_a_run_in_which_every_gym_server_refuses_ends(project: Project) -> None:
    project.write(
        {"policy": {"kind": "model", "app": "models/scripted"}, "only": gym("no")}, no="import no_such_package"
    )
    with pytest.raises(ConfigError, match="No module named 'no_such_package'"):
        async with project.supervisor(strict=False):
            pass


async def test_a_service_that_is_not_ready_in_time_is_named_with_what_it_waits_for(project: Project) -> None:
    for seconds in (0.5, 5.0, 50.0):
        project.write({"one": gym("slow"), "ngym": {"ready_timeout_s": seconds}}, slow=SLOW)
        with pytest.raises(ServiceFailed, match=rf"service 'one' was not ready within {seconds:g} s"):
            async with project.supervisor():
                pass
        if waits := [event.detail for event in project.events if event.detail == "loading weights"]:
            break  # it had begun to load within this time
    assert waits


async def test_wrong_options_end_the_run_with_their_line_and_without_a_restart(project: Project) -> None:
    project.write({"fine": gym("yes"), "one": gym("yes", tolerence=1)}, yes=YES)
    with pytest.raises(ConfigError, match=r"global_config\.yaml:\d+: unknown key 'tolerence'"):
        async with project.supervisor():
            pass
    assert project.statuses("one") == ["starting", "failed"]


async def test_a_port_in_use_is_reported_with_the_remedy_and_nothing_is_started(project: Project) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        project.write({"one": gym("yes", port=port)}, yes=YES)
        with pytest.raises(UsageError, match=f"'one': port {port} on 127.0.0.1 is in use .*leave `port` out"):
            async with project.supervisor():
                pass
    assert project.events == []


async def test_a_default_head_port_that_is_taken_gives_way_and_a_chosen_one_does_not(project: Project) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        project.write({"one": gym("yes"), "ngym": {"head": {"port": port}}}, yes=YES)
        with pytest.raises(UsageError, match=f"the head: port {port} .* is in use .*ngym.head.port"):
            async with project.supervisor():
                pass


async def test_an_external_service_is_only_watched(project: Project) -> None:
    with reserved_port() as port:
        nobody = f"http://127.0.0.1:{port}"
        project.write({"one": gym("yes"), "judge": {"kind": "model", "url": nobody}}, yes=YES)
        async with project.supervisor() as stack:
            assert stack.urls["judge"] == [nobody]
            judge = stack.states[1]
            assert judge.external and judge.pid is None and judge.status == "starting"
            await until(lambda: "not reachable" in stack.states[1].detail)


async def test_the_run_is_found_from_its_folder_and_a_second_one_leaves_it_alone(project: Project) -> None:
    project.write({"one": gym("yes")}, yes=YES)
    async with project.supervisor() as first:
        running = find_running(project.folder)
        assert running is not None and running.url == first.head_url
        assert (project.folder / ".ngym" / "head.json").stat().st_mode & 0o077 == 0  # it holds a token
        async with project.supervisor() as second:
            assert second.head_url != first.head_url
            assert find_running(project.folder) == running
        assert find_running(project.folder) == running
    assert find_running(project.folder) is None


async def test_a_killed_zygote_ends_the_run_and_every_service(project: Project) -> None:
    project.write({"one": gym("yes")}, yes=YES)
    with pytest.raises(ZygoteGone, match="killed, or out of memory"):
        async with project.supervisor() as stack:
            zygote, *services = processes_of([stack.states[0].pid])
            zygote.kill()
            await stack.failure()
    await until(lambda: not running(services))


async def test_work_that_begins_after_the_run_has_failed_raises_however_short_it_is(project: Project) -> None:
    async def short() -> str:
        for _ in range(3):
            await asyncio.sleep(0)
        return "done"

    project.write({"one": gym("yes")}, yes=YES)
    results: list[str] = []
    with pytest.raises(ZygoteGone):
        async with project.supervisor() as stack:
            processes_of([stack.states[0].pid])[0].kill()
            with pytest.raises(ZygoteGone):
                await stack.failure()
            results.append(await run_unless_failed(stack.failure(), short()))
    assert results == []


def test_a_message_larger_than_the_buffer_passes_between_sockets_that_do_not_block(tmp_path: Path) -> None:
    content, (ours, receiver) = {"spec": "x" * (4 << 20)}, socket.socketpair()
    with ours, receiver, (tmp_path / "log").open("w") as log, ThreadPoolExecutor(1) as thread:
        ours.setblocking(False)
        receiver.setblocking(False)
        sent = thread.submit(send, ours, content, [log.fileno()])
        message = receive(receiver)
        sent.result()
        assert message is not None and message.content == content
        with os.fdopen(message.fds[0], "w") as received:
            received.write("hello")
    assert (tmp_path / "log").read_text() == "hello" and len(message.fds) == 1


async def test_cancelling_the_start_leaves_nothing_running(project: Project) -> None:
    project.write({"one": gym("slow")}, slow=SLOW)
    stack = project.supervisor()
    starting = asyncio.create_task(stack.__aenter__())
    await until(lambda: any(event.detail == "loading weights" for event in project.events))
    alive = processes_of([stack.states[0].pid])
    starting.cancel()
    with suppress(asyncio.CancelledError):
        await starting
    assert starting.cancelled() and running(alive) == []


def test_secrets_are_known_by_whole_words() -> None:
    config = {
        "api_key": "sk-1",
        "hf_token": "hf",
        "max_tokens": 5,
        "primary_key": "id",
        "api_key_env": "OPENAI_API_KEY",
    }
    redacted_config = redact({"policy": config, "keys": [{"password": "x"}]})
    assert redacted_config["policy"] == {**config, "api_key": REDACTED, "hf_token": REDACTED}
    assert redacted_config["keys"] == [{"password": REDACTED}]


def test_every_value_of_env_and_headers_is_a_secret_and_so_is_a_password_in_a_url() -> None:
    options = {
        "server": ["npx", "some-server", "postgres://bob:canary-db@db/x", "https://h/a@b"],
        "url": "https://u:canary-url@h/x",
        "env": {"STRIPE_KEY": "canary-1", "KEYS": "canary-2", "GH_PAT": "canary-3", "SK": "canary-4", "EMPTY": ""},
        "headers": {"Cookie": "canary-5", "X-Auth": "canary-6", "Accept": "canary-7"},
        "nested": [{"env": {"A": "canary-8"}, "cookie": "canary-9", "max_tokens": 5}],
        "base_url": "http://127.0.0.1:8000",
    }
    redacted_config = redact(options)
    assert "canary" not in json.dumps(redacted_config)
    assert redacted_config["server"] == ["npx", "some-server", f"postgres://{REDACTED}@db/x", "https://h/a@b"]
    assert redacted_config["env"].keys() == options["env"].keys() and redacted_config["env"]["EMPTY"] == ""
    assert redacted_config["base_url"] == options["base_url"] and redacted_config["nested"][0]["max_tokens"] == 5
    planted = {"canary-db", "canary-url", *(f"canary-{number}" for number in range(1, 10))}
    assert planted <= set(secrets_in(options))


def test_secrets_among_the_arguments_of_a_program_and_in_the_query_of_a_url_are_hidden() -> None:
    command = [
        "npx",
        "some-server",
        "--token=canary-1",
        "--api-key",
        "canary-2",
        "PASSWORD=canary-3",
        "--max-tokens",
        "5",
    ]
    command += [
        "https://h/x?page=2&sig=canary-4&token=canary-5#a",
        "Authorization: Bearer canary-6",
        "--password",
        "--port",
    ]
    redacted_config = redact({"server": command, "url": "https://h/?api_key=canary-7"})
    assert "canary" not in json.dumps(redacted_config)
    assert redacted_config["server"][:4] == ["npx", "some-server", f"--token={REDACTED}", "--api-key"]
    assert redacted_config["server"][6:9] == [
        "--max-tokens",
        "5",
        f"https://h/x?page=2&sig={REDACTED}&token={REDACTED}#a",
    ]
    assert redacted_config["server"][-2:] == ["--password", "--port"]
    found = set(secrets_in({"server": command, "url": "https://h/?api_key=canary-7"}))
    assert {"Bearer canary-6", *(f"canary-{number}" for number in (1, 2, 3, 4, 5, 7))} <= found


def test_the_secrets_within_a_shell_command_are_hidden() -> None:
    command = (
        "cd /srv && GITHUB_TOKEN=canary-11 npx srv --token canary-12 --api-key 'canary-13' --max-tokens 50 "
        "-H 'Authorization: Bearer canary-14' --password=\"canary-15\" PWD=/tmp"
    )
    text = redact({"server": ["sh", "-c", command]})["server"][2]
    assert "canary" not in text
    assert "--max-tokens 50 -H 'Authorization: Bearer <redacted>'" in text and text.endswith("PWD=/tmp")
    assert {f"canary-{number}" for number in range(11, 16)} <= set(secrets_in({"server": ["sh", "-c", command]}))


def test_the_pause_before_a_restart_grows_until_a_service_has_been_ready_for_a_while() -> None:
    deaths = CrashCounter()
    pauses = []
    for _ in range(7):
        deaths.count(1.5)
        pauses.append(deaths.backoff_s)
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert deaths.give_up_reason(5) is None, "it was ready each time"
    deaths.count(STABLE_S)
    assert deaths.backoff_s == 0.2
    for _ in range(5):
        deaths.count(None)
    assert deaths.give_up_reason(5) == "died 5 times in a row without having been ready"


async def test_each_process_sees_its_own_gpus_and_cores_and_what_does_not_fit_starts_nothing(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    gym = {"kind": "gym_server", "app": "gym_servers/sees"}
    two = {**gym, "replicas": 2, "resources": {"gpus": 1}}
    project.write({"two": two, "none": {**gym, "resources": {"gpus": 0}}, "all": gym}, sees=SEES)
    async with project.supervisor() as stack:
        gpus = {}
        for state in stack.states:
            gpus[state.label] = [
                json.loads((await http_get(f"{state.url}/{what}", PATIENCE_S)).body) for what in ("gpus", "cores")
            ]
    half = str(max(1, usable_cores() // 2))
    assert gpus == {"two-0": ["5", half], "two-1": ["6", half], "none": ["", None], "all": ["4,5,6", None]}
    project.events.clear()
    project.write({"two": {**two, "replicas": 4}}, sees=SEES)
    with pytest.raises(ConfigError, match="this machine has 3, the services ask for 4"):
        await project.supervisor().__aenter__()
    assert not project.events


async def test_a_replica_joins_a_run_and_leaves_it(project: Project) -> None:
    project.write({"yes": {"kind": "gym_server", "app": "gym_servers/yes"}}, yes=YES)
    async with project.supervisor() as stack, stack.peers("test") as peers:
        own = list(stack.urls["yes"])
        join, nobody = f"{stack.head_url}/servers", b'{"name": "nope", "url": "http://h:1"}'
        answer = await peers.send("POST", join, nobody, {"authorization": "Bearer wrong"}, 30)
        assert answer.status == 403 and b"needs its admin token (NGYM_ADMIN_TOKEN)" in answer.body
        admin = {"authorization": f"Bearer {stack.admin_token}"}
        answer = await peers.send("POST", join, nobody, admin, 30)
        assert answer.status == 404 and b"no service named 'nope'" in answer.body
        answer = await peers.send("POST", join, b"[]", admin, 30)
        assert answer.status == 422
        words = [sys.executable, "-m", "ngym", "serve", "yes", "--join", stack.head_url]
        guest = await asyncio.create_subprocess_exec(*words, cwd=project.folder)
        try:
            await until(lambda: len(stack.urls["yes"]) == 2)
            assert stack.urls["yes"][0] == own[0]
            session = peers["yes"].session()
            home = session.url
            await peers.refresh()
            assert len(peers.urls["yes"]) == 2 and session.url == home == own[0]  # sessions stay where they are
        finally:
            guest.kill()
            await guest.wait()
        await until(lambda: stack.urls["yes"] == own)
        await until(lambda: len(stack.states) == 1)


async def test_a_replica_with_options_that_may_change_answers_joins_only_if_that_is_intended(project: Project) -> None:
    project.write({"yes": {"kind": "gym_server", "app": "gym_servers/yes"}}, yes=YES)
    words = [sys.executable, "-m", "ngym", "serve", "yes", "yes.max_body_mib=4"]
    async with project.supervisor() as stack:
        joins = ["--join", stack.head_url]
        refused = await asyncio.to_thread(
            subprocess.run, [*words, *joins], cwd=project.folder, capture_output=True, text=True, timeout=PATIENCE_S
        )
        (line,) = refused.stderr.splitlines()
        assert refused.returncode == 2 and "'yes' has max_body_mib none in this run's config, and 4 in that" in line
        assert line.endswith("or start it with --differs max_body_mib")
        guest = await asyncio.create_subprocess_exec(*words, *joins, "--differs", "max_body_mib", cwd=project.folder)
        try:
            await until(lambda: len(stack.urls["yes"]) == 2)
        finally:
            guest.kill()
            await guest.wait()


async def test_a_replica_that_joined_and_is_never_ready_is_forgotten_after_the_startup_limit(project: Project) -> None:
    project.write({"yes": {"kind": "gym_server", "app": "gym_servers/yes"}}, yes=YES)
    async with project.supervisor() as stack:
        settings = stack.config.settings.model_copy(update={"ready_timeout_s": 0.1})
        stack.config = stack.config.model_copy(update={"settings": settings})
        with reserved_port() as port:
            guest = stack.join("yes", f"http://127.0.0.1:{port}")
            assert guest in stack.states
            await until(lambda: len(stack.states) == 1)


async def test_a_trained_policy_that_starts_again_gets_no_calls_until_its_weights_are_proved(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write({"policy": {"kind": "model", "app": "models/scripted", "replicas": 2}, "yes": gym("yes")}, yes=YES)
    async with project.supervisor() as stack, stack.peers("test") as peers:
        first, second = both = list(stack.urls["policy"])
        admin = {"authorization": f"Bearer {stack.admin_token}"}

        async def trained(version: int, *urls: str, name: str = "policy", opener: dict[str, str] = admin) -> Any:
            body = json.dumps({"version": version, "urls": urls}).encode()
            reply = await peers.send("PUT", f"{stack.head_url}/servers/{name}/weights", body, opener, PATIENCE_S)
            return reply.json()

        assert (await trained(1, opener={}))["status"] == 403
        assert "is a gym_server, not a model" in (await trained(1, name="yes"))["detail"]
        assert await trained(1, *both) == {"waiting": []} and stack.urls["policy"] == both
        pid = stack.states[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: stack.states[1].restarts == 1 and stack.states[1].status == "ready")
        assert stack.urls["policy"] == [first]
        record = next(one for one in await peers.servers() if one["name"] == "policy")
        assert record["versions"] == [1, None] and record["urls"] == [first]
        assert record["detail"].startswith("policy-1 without calls until")
        assert await trained(1) == {"waiting": [second]} and stack.urls["policy"] == [first]
        assert await trained(1, second) == {"waiting": []} and stack.urls["policy"] == both
        assert await trained(2, first) == {"waiting": [second]} and stack.urls["policy"] == [first]
        metrics = (await http_get(f"{stack.head_url}/metrics", PATIENCE_S)).body.decode()
        assert 'ngym_service_policy_version{replica="0",service="policy"} 2.0' in metrics
        monkeypatch.setattr(supervisor, "TRAINED_S", 0.01)
        await trained(3, first)
        await until(lambda: stack.urls["policy"] == both)  # the trainer has ended


async def test_a_model_grows_while_calls_wait_and_shrinks_when_idle_without_losing_one(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "LOAD_CHECK_S", 0.05)
    monkeypatch.setattr(scaling, "GROW_AFTER_S", 0)
    # As by default, callers learn new addresses well before a replica without calls is stopped.
    monkeypatch.setattr(supervisor, "FOLLOW_S", 1.0)
    monkeypatch.setattr("ngym.peers.FOLLOW_S", 0.05)
    options = {"max_in_flight": 1, "latency_s": 0.1, "replicas": {"min": 1, "max": 2}}
    project.write({"policy": {"kind": "model", "app": "models/scripted", **options}})
    async with project.supervisor() as stack, stack.peers("test") as peers:
        first = list(stack.urls["policy"])
        done = asyncio.Event()

        async def calls() -> int:
            count = 0
            while not done.is_set():
                answer = await peers["policy"].post("/v1/responses", {"input": "hello"})
                assert answer["status"] == "completed"
                count += 1
            return count

        async with asyncio.TaskGroup() as callers:
            several = [callers.create_task(calls()) for _ in range(4)]
            await until(lambda: len(stack.urls["policy"]) == 2)
            assert [state.label for state in stack.states] == ["policy-0", "policy-1"]
            await peers.refresh()
            unknown = [
                await peers.send("GET", f"{url}/rollouts/r/segments", None, {}, 60) for url in stack.urls["policy"]
            ]
            started = [answer.json()["kept_s"] is None for answer in unknown]
            assert started == [False, True], "no captured call can have been lost at an address that no one had"
            done.set()
        assert all(task.result() for task in several)
        done.clear()
        monkeypatch.setattr(scaling, "SHRINK_AFTER_S", 0)
        grown = stack.states[1]
        async with asyncio.TaskGroup() as callers:
            alone = callers.create_task(calls())  # one call at a time: idle for two replicas
            await until(lambda: len(stack.states) == 1)
            done.set()
        assert alone.result() and stack.urls["policy"] == first
        assert grown.pid is not None and not psutil.pid_exists(grown.pid)
        assert project.statuses("policy-1") == ["starting", "ready", "stopped"]
        assert {event.detail for event in project.events if event.label == "policy-1"} >= {"ends its calls, and stops"}


FALTERING = """
import os, pathlib
if pathlib.Path(__file__).with_name("falters").exists():
    os._exit(3)

import asyncio
from ngym import model_server
from ngym.convert import message_item, new_response, output_text

async def respond(request, call):
    await asyncio.sleep(0.1)
    return new_response(request, [message_item([output_text("yes")], "m")], response_id="resp_1", model="m")

app = model_server(respond=respond)
"""


async def test_a_model_grows_again_after_a_replica_that_could_not_start(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LOAD_CHECK_S", 0.05), ("GROW_AFTER_S", 0), ("SHRINK_AFTER_S", 0)):
        monkeypatch.setattr(scaling, name, value)
    monkeypatch.setattr(supervisor, "FOLLOW_S", 0.1)
    options = {"max_in_flight": 1, "replicas": {"min": 1, "max": 2}}
    policy = {"kind": "model", "app": "gym_servers/faltering", **options}
    project.write({"policy": policy, "ngym": {"max_restarts": 1}}, faltering=FALTERING)
    async with project.supervisor() as stack, stack.peers("test") as peers:
        falters = project.folder / "gym_servers" / "falters"
        falters.touch()

        async def calls_until(condition: Callable[[], bool]) -> None:
            while not condition():
                await asyncio.gather(*(peers["policy"].post("/v1/responses", {"input": "hello"}) for _ in range(4)))

        await calls_until(lambda: "failed" in project.statuses("policy-1"))
        await until(lambda: len(stack.states) == 1)  # without calls, the failed one is removed
        assert project.statuses("policy-1")[-2:] == ["failed", "stopped"]
        falters.unlink()

        def unlucky(_: ServiceLog) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        failures = project.statuses("policy-1").count("failed")
        with monkeypatch.context() as patch:
            patch.setattr(ServiceLog, "open", unlucky)
            await calls_until(lambda: project.statuses("policy-1").count("failed") > failures)
        assert "Too many open files" in [event.detail for event in project.events if event.status == "failed"][-1]
        await until(lambda: len(stack.states) == 1)
        monkeypatch.setattr(scaling, "SHRINK_AFTER_S", PATIENCE_S)  # else the new one may leave before it is listed
        await calls_until(lambda: len(stack.urls["policy"]) == 2)


def test_both_sides_of_the_zygote_may_send_more_than_the_other_reads_at_once() -> None:
    """As if hundreds of services were forked in a row: more than the buffers of both directions hold."""
    count, text = 300, "x" * 8_000
    ours, child = socket.socketpair()
    numbers: list[int] = []

    def zygote() -> None:
        with child:
            for _ in range(count):
                message = receive(child)
                assert message is not None
                send(child, message.content)

    def hear() -> None:
        message = receive(ours)
        assert message is not None
        numbers.append(message.content["number"])

    with ours, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(zygote)
        ours.setblocking(False)
        for number in range(count):
            send(ours, {"number": number, "text": text}, hear=hear)
        while len(numbers) < count:
            hear()
        serving.result()
    assert numbers == list(range(count))
