"""Does the gym server take these rows, and pay for the set's own answers? Asked over the wire, as agents ask."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

from ngym.errors import ServiceError
from ngym.peers import Peer
from ngym.prepare.rows import Converted
from ngym.prepare.sets import Made, Split, saying

AT_ONCE = 16
SLICE = 1_000  # rows that wait for their turn
FULL = 1.0 - 1e-6
SHOWN_CHARS = 160


async def accepted(
    peer: Peer, rows: Mapping[Split, list[Converted]], left_out: Counter[str]
) -> dict[Split, list[Converted]]:
    """The rows that the server takes as tasks and whose own answer earns the full reward; the others are counted.

    A row without an answer of its own has to get a verdict on an empty one.
    """
    limit = asyncio.Semaphore(AT_ONCE)

    async def right(each: Converted) -> bool:
        async with limit:
            problem = await _problem(peer, each.made)
        if problem:
            left_out[problem[:SHOWN_CHARS]] += 1
        return problem is None

    kept: dict[Split, list[Converted]] = {}
    for split, several in rows.items():
        kept[split] = []
        for start in range(0, len(several), SLICE):
            some = several[start : start + SLICE]
            verdicts = await asyncio.gather(*map(right, some))
            kept[split] += [each for each, is_right in zip(some, verdicts, strict=True) if is_right]
    return kept


async def _problem(peer: Peer, made: Made) -> str | None:
    session = peer.session()
    request = {**made.row, "response": {"output": made.answer or saying("")}}
    try:
        await session.post("/seed_session", made.row)
        verdict = await session.post("/verify", request)
        await session.request("/session", None, method="DELETE")
    except ServiceError as error:
        return f"refused: {error.detail}"
    reward = verdict["reward"]
    if reward is None:
        return f"cannot be verified: {verdict.get('outcome') or ''} {verdict.get('reason') or ''}".rstrip(" :")
    if made.answer and reward < FULL:
        return "its own answer does not earn the full reward"
    return None
