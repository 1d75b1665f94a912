"""Services with packages of their own: installed once, run by their own Python, watched like every other service."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from click.testing import CliRunner
from waiting import running, until

from ngym.cli import run, validate
from ngym.config.service_config import Config, load_config
from ngym.errors import ConfigError
from ngym.peers import Peers
from ngym.services.base.runner import EXIT_CONFIG
from ngym.supervise.supervisor import Supervisor
from ngym.supervise.venvs import Venv, find_uv, make, venv_of

OTHER = "8.2.1"  # of click, which the core needs too; we have a newer one
APP = """
import importlib.metadata, os, sys
from ngym import VerifyRequest, gym_server

print("this is a line of its log")

async def verify(task: VerifyRequest) -> dict[str, object]:
    click = importlib.metadata.version("click")
    return {"reward": float("right" in task.text), "click": click, "prefix": sys.prefix, "pid": os.getpid()}

app = gym_server(verify=verify)
"""
README = "---\ndescription: An old package.\ndomain: other\nkind: single_turn\nlicense: MIT\n---\n"
GOLD = {"case": "right", "task": {}, "text": "This is right", "expect": {"reward": 1.0, "click": OTHER}}


@pytest.fixture
def project(tmp_path: Path, shared_venvs: Path) -> Path:
    """A folder with one service whose packages are its own; they are kept from one run of the tests to the next."""
    (tmp_path / ".ngym").mkdir()
    (tmp_path / ".ngym" / "venvs").symlink_to(shared_venvs)
    return write_project(tmp_path, f"click=={OTHER}\n")


def write_project(folder: Path, requirements: str, **more: Any) -> Path:
    (folder / "gym_servers" / "old").mkdir(parents=True)
    (folder / "data" / "old").mkdir(parents=True)
    (folder / "gym_servers" / "old" / "app.py").write_text(APP)
    (folder / "gym_servers" / "old" / "README.md").write_text(README)
    (folder / "gym_servers" / "old" / "requirements.txt").write_text(requirements)
    (folder / "data" / "old" / "gold.jsonl").write_text(json.dumps(GOLD) + "\n")
    file = "gym_servers/old/requirements.txt"
    stanza = {"kind": "gym_server", "app": "gym_servers/old", "requirements": file, **more}
    config = {"ngym": {"head": {"port": 0}}, "old": stanza}
    (folder / "global_config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return folder


def config_of(folder: Path) -> Config:
    return load_config([folder / "global_config.yaml"])


def venv_in(folder: Path) -> Venv:
    config = config_of(folder)
    venv = venv_of(config, config.stanza("old"))
    assert venv is not None
    return venv


async def answer(peers: Peers) -> Any:
    request = {"responses_create_params": {"input": "?"}, "response": {"output": []}}
    return await peers["old"].post("/verify", request)


async def test_the_service_has_the_packages_that_it_names_and_the_core_that_runs(project: Path) -> None:
    async with Supervisor(config_of(project)) as stack:
        peers = Peers(stack.urls, owner="the test")
        response = await answer(peers)
        await peers.close()
        (state,) = stack.states
        assert response["click"] == OTHER != importlib.metadata.version("click")
        assert (
            Path(response["prefix"]).resolve() == venv_in(project).folder.resolve() and response["prefix"] != sys.prefix
        )
        assert response["pid"] == state.pid  # the forked process, turned into another program
    assert "this is a line of its log" in (project / ".ngym" / "logs" / "old.log").read_text()


async def test_it_is_started_again_at_its_address_and_ends_with_the_others(project: Path) -> None:
    async with Supervisor(config_of(project)) as stack:
        peers = Peers(stack.urls, owner="the test")
        first = stack.states[0].pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: stack.states[0].restarts == 1 and stack.states[0].status == "ready")
        response = await answer(peers)
        await peers.close()
        assert response["click"] == OTHER and response["pid"] == stack.states[0].pid != first
        alive = [psutil.Process(response["pid"])]
    assert running(alive) == []


def test_it_is_validated_and_shown_like_every_other_one(project: Path) -> None:
    config = ["--config", str(project / "global_config.yaml")]
    tried = CliRunner().invoke(validate.main, [*config, "--environment", "old", "--within", "60"])
    assert tried.exit_code == 0, tried.output
    result = CliRunner().invoke(run.main, [*config, "--dry-run"])
    assert yaml.safe_load(result.stdout)["old"]["requirements"] == "gym_servers/old/requirements.txt"


async def test_ng_serve_runs_it_too(project: Path) -> None:
    command = [sys.executable, "-m", "ngym", "serve", "old", "--config", str(project / "global_config.yaml")]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        line = ""
        while "listens at" not in line:
            line = (await process.stderr.readline()).decode()
        peers = Peers({"old": [line.split()[-1]]}, owner="the test")
        response = await answer(peers)
        await peers.close()
    finally:
        process.terminate()
        await process.communicate()
    assert response["click"] == OTHER and response["pid"] == process.pid
    assert process.returncode == 0


async def test_two_that_need_the_same_at_once_make_it_once(tmp_path: Path) -> None:
    venv = venv_in(write_project(tmp_path, f"click=={OTHER}\n"))
    torn = venv.folder.with_suffix(".new") / "lib"
    torn.mkdir(parents=True)  # what a killed run left behind
    messages: list[str] = []
    pythons = await asyncio.gather(*(make(venv, messages.append, find_uv()) for _ in range(3)))
    assert set(pythons) == {venv.python}
    assert messages[0].startswith("installing ") and str(venv.requirements) in messages[0]
    assert [text.split(",")[0] for text in messages[1:]] == ["waiting for another process"] * 2
    core = await asyncio.create_subprocess_exec(venv.python, "-P", "-c", "import ngym.services.base.runner")
    assert await core.wait() == 0
    assert sorted(path.name for path in venv.folder.parent.iterdir()) == [venv.folder.name, f"{venv.folder.name}.lock"]


async def test_an_installation_that_is_interrupted_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    venv = venv_in(write_project(tmp_path, f"click=={OTHER}\n"))
    making = asyncio.create_task(make(venv, lambda text: None, find_uv()))
    await until(lambda: venv.folder.with_suffix(".new").exists())
    making.cancel()
    await asyncio.wait([making])
    assert making.cancelled() and not venv.folder.exists()


async def test_changed_requirements_get_an_environment_of_their_own(tmp_path: Path) -> None:
    first = venv_in(write_project(tmp_path, f"click=={OTHER}\n"))
    first.requirements.write_text("click==8.1.8\n")
    second = venv_in(tmp_path)
    assert first.folder != second.folder and first.folder.name.startswith("old-")


def test_an_environment_that_is_gone_ends_the_service_in_one_line() -> None:
    job = "ServiceJob({'python': '/nowhere/bin/python', 'action': 'run', 'spec': {}}, [])"
    program = f"from ngym.supervise.service_main import ServiceJob, perform; perform({job})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    told = "cannot be run (No such file or directory); start again to recreate the environment"
    assert (done.returncode, done.stderr) == (EXIT_CONFIG, f"/nowhere/bin/python: {told}\n")


async def test_a_package_that_does_not_exist_is_named_in_one_line(tmp_path: Path) -> None:
    folder = write_project(tmp_path, "no-such-package-at-all==1.0\n")
    with pytest.raises(ConfigError) as caught:
        async with Supervisor(config_of(folder)):
            pass
    line = str(caught.value)
    assert "\n" not in line and "global_config.yaml:" in line and "the packages of 'old'" in line
    assert "no-such-package-at-all" in line and "cannot be installed; uv says:" in line
    assert not venv_in(folder).folder.exists()


@pytest.mark.parametrize(
    ("stanza", "complaint"),
    [
        ("app: gym_servers/math\n  requirements: nowhere.txt", "global_config.yaml:4: there is no file 'nowhere.txt' in "),
        ("app: gym_servers/math\n  requirements: 3", "global_config.yaml:4: requirements: Input should be a valid string"),
        ("url: http://there:1\n  requirements: a.txt", "global_config.yaml:4: service 'one' runs elsewhere; remove this key"),
    ],
)  # fmt: skip
def test_a_wrong_requirements_key_has_a_clear_line(tmp_path: Path, stanza: str, complaint: str) -> None:
    (tmp_path / "global_config.yaml").write_text(f"one:\n  kind: gym_server\n  {stanza}\n")
    with pytest.raises(ConfigError) as caught:
        load_config([tmp_path / "global_config.yaml"])
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.soak
async def test_without_uv_pip_does_it(tmp_path: Path) -> None:
    folder = write_project(tmp_path, f"click=={OTHER}\n")
    await make(venv_in(folder), lambda text: None, uv=None)
    async with Supervisor(config_of(folder)) as stack:
        peers = Peers(stack.urls, owner="the test")
        assert (await answer(peers))["click"] == OTHER
        await peers.close()
    wrong = venv_in(write_project(tmp_path / "wrong", "no-such-package-at-all==1.0\n"))
    with pytest.raises(ConfigError, match=r"cannot be installed; pip says: .*no-such-package-at-all"):
        await make(wrong, lambda text: None, uv=None)
