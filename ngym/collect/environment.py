"""What does an environment itself say of its rollouts? Its `compute_metrics`, asked at the end; a failure loses nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson

from ngym.errors import ServiceError, boundary
from ngym.files.jsonl import read
from ngym.net.json_limits import BULK_WEIGHT, NODE_WEIGHT, json_weight
from ngym.peers import Peer
from ngym.schema import Json

MOST_ROLLOUTS, MOST_BYTES = 50_000, 64 << 20  # of an agent; an environment with more is asked about the first
MOST_WEIGHT = BULK_WEIGHT * 9 // 10  # the rest is for what is around the rows
ROW_WEIGHT = 16  # of the object itself and its comma
MOST_FIELD_BYTES = 16 << 10
ASKED_S, TIMEOUT_S = 10.0, 120.0
NOT_SENT = frozenset({"responses_create_params", "response", "ng", "agent_ref"})


async def environment_metrics(output: Path, agent: Peer) -> Json | None:
    """`{"metrics": {...}, "errors": [...]}` over an agent's rows in the file; None: the environment has no metrics of its own."""
    try:
        if not await _has_metrics(agent):
            return None
        rows, more = await asyncio.to_thread(_slim_rows, output, agent.name)
        body = {"verify_responses": rows}
        answer = await agent.post("/aggregate_metrics", body, timeout=TIMEOUT_S, idempotent=True)
        with boundary("agent_error", f"{agent.name} answered /aggregate_metrics with no metrics"):
            own: Json = answer["ng"]["environment"]
    except ServiceError as error:
        return {"metrics": {}, "errors": [error.detail]}
    return {**own, "errors": [*own["errors"], f"only the first {len(rows):,} rollouts are in it"]} if more else own


async def _has_metrics(agent: Peer) -> bool:
    """No for an agent that is not ours, and does not know the question."""
    try:
        answer = await agent.get("/aggregate_metrics", timeout=ASKED_S)
    except ServiceError as error:
        if (error.upstream or {}).get("status") in (404, 405):
            return False
        raise
    return isinstance(answer, dict) and bool(answer.get("compute_metrics"))


def _slim_rows(output: Path, agent: str) -> tuple[list[Json], bool]:
    """What the verifier said, without what was said to and by the model, and without fields that are long.

    Also whether there are more rows than may be sent.
    """
    slim: list[Json] = []
    size = weight = 0
    for line in read(output):
        if line.problem or line.row["agent_ref"]["name"] != agent:
            continue
        fields = {name: orjson.dumps(value) for name, value in line.row.items() if name not in NOT_SENT}
        short = {name: value for name, value in fields.items() if len(value) <= MOST_FIELD_BYTES}
        size += sum(map(len, short.values()))
        weight += ROW_WEIGHT + sum(NODE_WEIGHT + 1 + json_weight(value) for value in short.values())
        if len(slim) == MOST_ROLLOUTS or size > MOST_BYTES or weight > MOST_WEIGHT:
            return slim, True
        slim.append({name: line.row[name] for name in short})
    return slim, False
