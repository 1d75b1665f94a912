"""Secrets of a run do not appear in its files, logs and answers."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import httpx
import yaml

from ngym.config.service_config import load_config
from ngym.supervise.supervisor import Supervisor

LOOSE_LIPPED = '''
"""A gym server that prints all it knows, and fails with it."""
import logging, os, sys
from ngym import ServiceOptions, VerifyRequest, gym_server

class Options(ServiceOptions):
    store_password: str
    mirrors: list[dict[str, str]]

class Task(VerifyRequest):
    fails: bool

async def verify(task: Task, options: Options) -> float:
    print(dict(os.environ), options, flush=True)
    logging.getLogger("lips").warning("the options are %r and the environment %r", options, dict(os.environ))
    if task.fails:
        raise ValueError(f"could not log in: {options.store_password} {os.environ['UPSTREAM_API_KEY']}")
    return 1.0

app = gym_server(verify=verify, options=Options)
'''
VARIABLES = {
    "UPSTREAM_API_KEY": "canary-of-an-api-key",
    "HF_TOKEN": "canary-of-the-hub",
    "AWS_SECRET_ACCESS_KEY": "canary-of-the-cloud",
    "GITHUB_TOKEN": "canary-of-the-forge",
    "DATABASE_PASSWORD": "canary-of-a-database",
    "WANDB_API_KEY": "canary-of-a-tracker",
    "JUDGES_TOKEN": "canary-of-somebody-elses-judge",
    "NGYM_TOKEN": "canary-of-the-run",
    "NGYM_ADMIN_TOKEN": "canary-of-the-trainer",
    "SOME_CREDENTIALS": "canary-of-some-credentials",
}
WRITTEN = {"store_password": "canary-in-an-option", "mirrors": [{"url": "m", "access_key": "canary-deep-in-an-option"}]}


def project(folder: Path) -> Path:
    (folder / "gym_servers").mkdir()
    (folder / "gym_servers" / "lips.py").write_text(LOOSE_LIPPED)
    rows = [{"responses_create_params": {"input": "hello"}, "fails": fails} for fails in (False, True)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    services = {
        "policy": {"kind": "model", "app": "models/scripted"},
        "judge": {"kind": "model", "url": "http://127.0.0.1:9", "token_env": "JUDGES_TOKEN"},
        "lips": {"kind": "gym_server", "app": "gym_servers/lips.py", **WRITTEN},
        "lips_agent": {"kind": "agent", "app": "agents/simple", "gym": "lips", "model": "policy"},
    }
    file = folder / "global_config.yaml"
    file.write_text(yaml.safe_dump({**services, "ngym": {"head": {"port": 0}}}))
    return file


def canaries_in(text: str) -> list[str]:
    planted = [*VARIABLES.values(), str(WRITTEN["store_password"]), "canary-deep-in-an-option"]
    return [canary for canary in planted if canary in text]


async def test_no_planted_secret_is_found_in_logs_rows_errors_or_answers(tmp_path: Path, monkeypatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    file = project(tmp_path)
    collect = [sys.executable, "-m", "ngym", "collect_rollouts", "--config", str(file), "--agent", "lips_agent"]
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"), "--max-attempts", "1"]
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
    ran = await asyncio.create_subprocess_exec(*collect, *files, cwd=tmp_path, **pipes)
    output, _ = await ran.communicate()
    assert ran.returncode == 1, output.decode()
    log = (tmp_path / ".ngym" / "logs" / "lips.log").read_text()
    assert "<redacted>" in log and "the options are" in log, "the server did say what it knew"
    assert (tmp_path / "out.jsonl").read_text() and (tmp_path / "out_failures.jsonl").read_text()
    found = {"the command's own words": canaries_in(output.decode())}
    async with Supervisor(load_config([file])) as stack:
        headers = {"authorization": f"Bearer {stack.run_token}"}
        async with httpx.AsyncClient(headers=headers, timeout=60) as client:
            for path in ("/", "/servers", "/config", "/global_config_dict_yaml", "/server_instances"):
                found[path] = canaries_in((await client.get(stack.head_url + path)).text)
            (lips,) = stack.urls["lips"]
            row = {"responses_create_params": {"input": "hello"}, "fails": True, "response": {"output": []}}
            for path in ("/verify", "/seed_session", "/nowhere"):
                reply = await client.post(lips + path, json=row)
                found[path] = canaries_in(reply.text + str(reply.headers))
        for written in tmp_path.rglob("*"):
            # the config is where they were written; the run's own tokens are in head.json, which no one else may read
            if written.is_file() and written != file and written.name != "head.json":
                found[str(written)] = canaries_in(written.read_text(errors="replace"))
    assert not {place: canaries for place, canaries in found.items() if canaries}
    assert len(found) > 12
