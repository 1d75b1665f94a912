"""Re-scores stored rollouts after a change of a verifier; no model is asked.

row -> a session of its task -> its tool calls, repeated -> /verify with its response -> the row with the new reward

The stored tool outputs stay in the response; the calls are repeated only to restore the state of the session.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import NamedTuple

from ngym.errors import ServiceError
from ngym.grading.group_rewards import apply_outcome
from ngym.peers import Peer, PeerSession, ToolErrors
from ngym.rollout import calls_in
from ngym.schema import Json, is_pending


class ReverifiedRollout(NamedTuple):
    """A rollout with its old and its new reward. failure: why there is no new one; the row is then unchanged."""

    row: Json
    before: float | None
    after: float | None
    failure: str | None = None


async def reverify_rows(
    rows: Iterable[Json], gym_of: Callable[[Json], Peer], at_once: int
) -> AsyncIterator[ReverifiedRollout]:
    """Each row's new reward, in the order of the rows. gym_of: row -> its gym server."""
    under_way: deque[asyncio.Task[ReverifiedRollout]] = deque()
    try:
        for row in rows:
            under_way.append(asyncio.create_task(_verify_row(row, gym_of(row))))
            if len(under_way) >= at_once:
                yield await under_way.popleft()
        while under_way:
            yield await under_way.popleft()
    finally:
        for task in under_way:
            task.cancel()


async def verify_row(row: Json, gym: Peer) -> Json:
    """The answer of /verify, in a session in which the rollout's tool calls were repeated.

    Raises:
        ServiceError: the row cannot be verified.
    """
    session = gym.session()
    seeded = (await session.post("/seed_session", row)) or {}
    await _repeat_calls(row, session, {tool["name"] for tool in seeded.get("tools") or ()})
    scored: Json = await session.post("/verify", row)
    return scored


async def _verify_row(row: Json, gym: Peer) -> ReverifiedRollout:
    before: float | None = row.get("reward")
    try:
        scored = await verify_row(row, gym)
    except ServiceError as error:
        # gym servers begin with the row's number in the input of the collection, which has other rows than this file
        prefix = f"row {row.get('_ng_task_index')}: "
        return ReverifiedRollout(row, before, None, error.detail.removeprefix(prefix).removeprefix("the row: "))
    if is_pending(scored):
        return ReverifiedRollout(
            row, before, None, "its reward comes from a comparison with the other rollouts of its task"
        )
    return ReverifiedRollout(apply_outcome(row, scored), before, scored.get("reward"))


async def _repeat_calls(row: Json, session: PeerSession, tools: set[str]) -> None:
    """Repeat each call that reached the gym server. A call whose error the model read may fail in the same way."""
    refused = [item.get("call_id") for item in row["response"].get("output") or [] if _is_an_error(item)]
    for call in calls_in(row["response"], exact=True):
        if call.name not in tools or call.arguments is None:
            continue  # it never reached the gym server
        try:
            shows: ToolErrors = "show" if call.call_id in refused else "fail"
            body = json.dumps(call.arguments).encode()  # with all digits
            await session.request(f"/{call.name}", body, tool_errors=shows)
        except ServiceError as error:
            if not error.is_for_the_model:
                raise


def _is_an_error(item: Json) -> bool:
    """Whether it is a tool output that `RolloutContext.call_tool` marks as an error."""
    output = item.get("output")
    return item.get("type") == "function_call_output" and isinstance(output, str) and output.startswith("Error: ")
