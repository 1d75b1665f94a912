"""A gym server as it ships: its rows, its gold cases, its server on a real socket."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from local_services import local_services
from paths import ROOT

from ngym.services.base.app import load


def rows(name: str, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "data" / name / f"{file}.jsonl").read_text().splitlines()]


def says(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def calls(*called: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """As function_call items."""
    return [
        {"type": "function_call", "call_id": f"c{i}", "name": name, "arguments": json.dumps(arguments)}
        for i, (name, arguments) in enumerate(called)
    ]


def rollout(row: dict[str, Any], *output: dict[str, Any]) -> dict[str, Any]:
    return {"responses_create_params": {"input": "a question"}, **row, "response": {"output": list(output)}}


def module(name: str) -> Any:
    return load(ROOT / "gym_servers" / name / "app.py")


def serving(name: str, **options: Any):
    return local_services({name: options}, **{name: module(name).app})


async def gold_failures(name: str) -> list[Any]:
    """The gold cases that get another reward than they must; none when all is well."""
    wrong = []
    async with serving(name) as peers:
        for gold in rows(name, "gold"):
            request = rollout(gold["task"], *gold.get("output", ()))
            if "text" in gold:
                request["response"]["output"].append(says(gold["text"]))
            session = peers[name].session()
            await session.post("/seed_session", request)
            for tool, arguments in gold.get("calls", ()):
                await session.post(f"/{tool}", arguments)
            answer = await session.post("/verify", request)
            for key, value in gold["expect"].items():
                actual = answer[key]
                if abs(actual - value) > 1e-9 if isinstance(value, float) and actual is not None else actual != value:
                    wrong.append((gold["case"], key, actual, value))
    return wrong


def unreproducible_files(name: str, folder: Path) -> list[str]:
    """The data files that the generator does not make again byte for byte."""
    generator = ROOT / "data" / name / "generate.py"
    subprocess.run([sys.executable, str(generator), str(folder)], check=True, timeout=300)
    files = [file for file in sorted(folder.iterdir()) if file.suffix == ".jsonl"]
    assert len(files) == 4
    return [file.name for file in files if file.read_bytes() != (generator.parent / file.name).read_bytes()]


def questions(name: str, file: str) -> list[str]:
    return [row["responses_create_params"]["input"] for row in rows(name, file)]
