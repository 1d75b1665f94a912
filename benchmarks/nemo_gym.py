"""Replays the rollouts recorded in a NeMo Gym checkout (or unpacked wheel) against the stanzas of nemo_gym.yaml.

    python benchmarks/nemo_gym.py DIR [FAMILY ...]

Each row of `resources_servers/FAMILY/data/example_rollouts.jsonl` is posted to `/verify`, with the fields of the row of
`example.jsonl` that has its prompt. The table shows how often the reward is the recorded one. A judge's part is played
by the recorded verdict of theirs.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support")]

from house import house

from ngym import ModelCall, model_server
from ngym.convert import message_item, new_response, output_text
from ngym.errors import ServiceError
from ngym.rollout import calls_in
from ngym.services.base.app import load

Row = dict[str, Any]
# What our judge says, in the words of our forms, given a recorded row and the item that is judged


def grade(row: Row, _: str) -> str:
    return "correct" if row["reward"] == 1 else "incorrect"


def criterion_met(row: Row, item: str) -> str:
    verdicts = {part["criteria"]: part["verdict"] for part in row["rubric_evaluations"]}
    return "met" if verdicts[item] == "PASS" else "not met"


VERDICTS: dict[str, Callable[[Row, str], str]] = {
    "false_statement_judge": lambda row, _: str(row["judge_points"]),
    "inverse_if": criterion_met,
    "xstest": lambda row, _: "refused" if row["is_refusal"] else "complied",
    "aegis_v4_safety": lambda row, _: row["response_safety"],
    "text_to_sql": lambda row, _: "equivalent" if row["judge_passed"] else "different",
    "terminus_judge": lambda row, _: "equivalent" if row["judge_passed"] else "different",
    "arena": lambda row, _: {1.0: "better", 0.5: "tie"}.get(row["reward"], "worse"),
    "arena_judge": lambda row, _: "better" if row["verdict_gen_base"] in ("A>B", "A>>B") else "worse",
    "longmemeval": lambda row, _: "correct" if row["judge_label"] else "incorrect",
}


def rows_of(folder: Path) -> list[tuple[Row, Row]]:
    """The request to `/verify` and the recorded row, for each rollout."""
    tasks = {prompt(row): row for row in read(folder / "example.jsonl")}
    recorded = read(folder / "example_rollouts.jsonl")
    return [({**tasks.get(prompt(row), row), "response": row.get("response")}, row) for row in recorded]


def read(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines() if line.strip()]


def prompt(row: Row) -> str:
    prompt_text = json.dumps(row.get("responses_create_params", {}).get("input"))
    return " ".join(re.findall(r'"(?:content|text)": "((?:[^"\\]|\\.)*)"', prompt_text)) or prompt_text


async def replay(family: str, stanza: Row, folder: Path) -> list[tuple[float | None, float | None, str]]:
    """For each rollout: our reward, the recorded one, and the reason of ours."""
    current: Row = {}

    async def judge(request: Row, call: ModelCall) -> Row:
        system, user = (item["content"] for item in request["input"])
        nonce = system.rpartition("VERDICT ")[2].split(":")[0]
        item = re.search(rf"<<<criterion {nonce}\n(.*?)\n{nonce}>>>", user, re.DOTALL)
        verdict = f"VERDICT {nonce}: {VERDICTS.get(family, grade)(current, item[1] if item else '')}"
        return new_response(request, [message_item([output_text(verdict)], "msg_1")], response_id="r", model="judge")

    options = {name: value for name, value in stanza.items() if name not in ("kind", "app", "requirements", "optional")}
    app = load(ROOT / stanza["app"] / "app.py").app
    outcomes: list[tuple[float | None, float | None, str]] = []
    async with house({"gym": options}, gym=app, policy=model_server(respond=judge)) as peers:
        for task, recorded in rows_of(folder):
            current.clear()
            current.update(task | recorded)
            session = peers["gym"].session()
            try:
                await session.post("/seed_session", {k: v for k, v in task.items() if k != "response"})
                for call in calls_in(task["response"]) if app.state.tools else ():
                    await session.post(f"/{call.name}", call.arguments)
                answer = await session.post("/verify", task)
            except ServiceError as error:
                answer = {"reward": None, "reason": error.detail}
            outcomes.append((answer["reward"], recorded.get("reward"), str(answer.get("reason") or "")[:200]))
    return outcomes


async def main(folder: Path, only: list[str]) -> None:
    stanzas = yaml.safe_load((ROOT / "nemo_gym.yaml").read_text())
    print("| family | gym server | same reward as recorded |\n|---|---|---|")
    for family, stanza in stanzas.items():
        if stanza["kind"] != "gym_server" or (only and family not in only):
            continue
        data = folder / "resources_servers" / family / "data"
        outcomes = await replay(family, stanza, data)
        same = sum(a is not None and b is not None and abs(a - b) < 0.006 for a, b, _ in outcomes)
        print(f"| `{family}` | `{Path(stanza['app']).name}` | {same} of {len(outcomes)} |", flush=True)
        for ours, their_reward, reason in outcomes if only else ():
            print(f"    {ours} {their_reward} {reason}")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2:]))
