"""A zygote that outlives commands: services fork from its imports, with the later command's variables, and end with
it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from click.testing import CliRunner
from waiting import PATIENCE_S, running, until

from ngym.cli import run
from ngym.config.service_config import Config, load_config
from ngym.errors import ConfigError
from ngym.supervise import warm_zygote
from ngym.supervise.placement import LocalPlacer
from ngym.supervise.supervisor import Supervisor
from ngym.supervise.zygote_client import ZygoteClient

APP = """
import os
from pathlib import Path

from ngym import VerifyRequest, gym_server

preloaded_by = None

def preload():
    global preloaded_by
    preloaded_by = os.getpid()

def is_preloaded_for(options, root):
    return options.get("max_body_mib") != 7

async def verify(task: VerifyRequest):
    seen = {"variable": os.environ.get("NGYM_A_TOKEN"), "folder": str(Path.cwd())}
    return {"reward": 1.0, "preloaded_by": preloaded_by, **seen}

app = gym_server(verify=verify)
"""
ANSWER = {"responses_create_params": {"input": "?"}, "response": {"output": []}}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The sockets of this test; the processes behind them end with it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield
    processes = [psutil.Process(each.pid) for each in warm_zygote.running()]
    warm_zygote.end()
    psutil.wait_procs(processes, PATIENCE_S)
    assert not running(processes)


def config(folder: Path, app: str = APP, **options: Any) -> Config:
    file = folder / "gym_servers" / "one" / "app.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists() or file.read_text() != app:
        file.write_text(app)
    stanza = {"kind": "gym_server", "app": "gym_servers/one", **options}
    config = folder / "global_config.yaml"
    config.write_text(yaml.safe_dump({"ngym": {"head": {"port": 0}}, "one": stanza}))
    return load_config([config])


@asynccontextmanager
async def command(config: Config, warm: bool = False) -> AsyncIterator[Supervisor]:
    async with Supervisor(config, engine=LocalPlacer(ZygoteClient.start(), warm)) as stack:
        yield stack


async def answer(stack: Supervisor) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        reply = await client.post(f"{stack.states[0].url}/verify", json=ANSWER)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


async def test_services_of_later_commands_fork_from_the_imports_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with command(config(tmp_path), warm=True) as stack:
        first = await answer(stack)
        [zygote] = warm_zygote.running()
    assert first["preloaded_by"] == zygote.pid and first["variable"] is None

    monkeypatch.setenv("NGYM_A_TOKEN", "of the second")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    async with command(config(tmp_path)) as stack:
        second = await answer(stack)
        service = psutil.Process(stack.states[0].pid)
    assert second["preloaded_by"] == zygote.pid and second["variable"] == "of the second"
    assert second["folder"] == str(tmp_path / "elsewhere")
    assert not running([service]) and warm_zygote.running() == [zygote]
    await until(lambda: not psutil.Process(zygote.pid).children())


HAS_VLLM = importlib.util.find_spec("vllm") is not None
APPS = [
    pytest.param(
        {"app": "models/vllm", "engine": {"max_model_len": 256}},
        marks=pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed"),
    ),
    {"app": "models/transformers"},
]


@pytest.mark.parametrize("model", APPS, ids=["vllm", "transformers"])
async def test_a_model_is_served_from_the_imports_of_an_earlier_command(tmp_path: Path, model: dict[str, Any]) -> None:
    from vllm_service import tokens_of, write_checkpoint

    write_checkpoint(tmp_path / "policy")
    stanza = {"kind": "model", "model": "policy", **model}
    file = tmp_path / "global_config.yaml"
    file.write_text(yaml.safe_dump({"ngym": {"head": {"port": 0}}, "policy": stanza}))
    sampled = []
    for _ in range(2):
        async with command(load_config([file]), warm=True) as stack:
            [warm] = warm_zygote.running()
            zygote = psutil.Process(stack.states[0].pid).parent()
            assert zygote is not None and zygote.ppid() == warm.pid
            body = {"input": "hello", "max_output_tokens": 8, "ignore_eos": True, "temperature": 0}
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                reply = await client.post(f"{stack.states[0].url}/v1/responses", json=body)
            assert reply.status_code == 200, reply.text
            sampled.append(tokens_of(reply.json())[1])
    assert len(sampled[0]) == 8 and sampled[0] == sampled[1]


async def test_without_warm_nothing_is_kept(tmp_path: Path) -> None:
    async with command(config(tmp_path)) as stack:
        assert (await answer(stack))["preloaded_by"] is None
    assert not warm_zygote.running()


async def test_options_and_code_that_do_not_fit_the_imports_start_as_usual(tmp_path: Path) -> None:
    async with command(config(tmp_path), warm=True):
        pass
    async with command(config(tmp_path, max_body_mib=7)) as stack:
        assert (await answer(stack))["preloaded_by"] is None
    async with command(config(tmp_path, APP + "\n# changed\n")) as stack:
        assert (await answer(stack))["preloaded_by"] is None


@pytest.mark.parametrize("body", ["raise RuntimeError", "import threading, time; threading.Thread(target=time.sleep, args=[9], daemon=True).start()"])  # fmt: skip
async def test_a_preload_that_fails_or_starts_threads_is_not_used(tmp_path: Path, body: str) -> None:
    app = APP.replace("    global preloaded_by\n    preloaded_by = os.getpid()", f"    {body}")
    async with command(config(tmp_path, app), warm=True) as stack:
        assert (await answer(stack))["preloaded_by"] is None
        await until(lambda: not warm_zygote.running())


async def test_no_warm_ends_it_and_needs_no_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with command(config(tmp_path), warm=True):
        [zygote] = warm_zygote.running()
    process = psutil.Process(zygote.pid)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ended = CliRunner().invoke(run.main, ["--no-warm"])
    assert ended.exit_code == 0 and ended.output == f"ended process {zygote.pid}\n"
    await until(lambda: not running([process]))
    again = CliRunner().invoke(run.main, ["--no-warm"])
    assert again.exit_code == 0 and again.output == "no process is kept\n"


async def test_services_continue_when_it_ends_and_end_with_their_command(tmp_path: Path) -> None:
    async with command(config(tmp_path), warm=True) as stack:
        zygotes = [psutil.Process(each.pid) for each in warm_zygote.running()]
        warm_zygote.end()
        await until(lambda: not running(zygotes))
        assert (await answer(stack))["preloaded_by"] == zygotes[0].pid
        service = psutil.Process(stack.states[0].pid)
    assert not running([service])


async def test_a_folder_that_others_can_use_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / f"ngym-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="must be a folder of this user that others cannot use"):
        async with command(config(tmp_path), warm=True):
            pass
    folder.chmod(0o700)


def test_warm_on_ray_is_one_line(tmp_path: Path) -> None:
    config(tmp_path)
    result = CliRunner().invoke(run.main, ["--warm", "--on", "ray"])
    assert result.exit_code == 2 and "--warm works on Linux, and with --on local" in result.output
