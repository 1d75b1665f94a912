"""`/verify` requests a second of each environment and their CPU, compared with a gym server that checks nothing.

Right answers of the environment's gold.jsonl, 32 in flight, over HTTP to one process of it. Sessions are begun and tools called
before, outside the measured time. CPU is that of the service with its workers. A judge's model is a scripted one.

    python benchmarks/verify.py [--quick] [--json FILE]
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import orjson
from parts import cpu_s, play

from ngym.config.service_config import load_config
from ngym.config.shipped_files import shipped
from ngym.errors import ServiceError
from ngym.peers import Peer, Peers, PeerSession
from ngym.runtime import event_loop
from ngym.schema import Json
from ngym.supervise.supervisor import Supervisor
from ngym.validation import Case, Environment, can_be_alone, find_environment, with_stand_ins

IN_FLIGHT, AT_ONCE = 32, 128
OVERRIDES = ["ngym.head.port=0", "mcp.shared=true"]  # an MCP server for each session would be what is measured
PATIENCE_S = 30.0  # for one environment; one that takes longer is left out, and said to be
EMPTY = "empty"
APP = '''"""empty: every answer is right."""
from ngym import VerifyRequest, gym_server


async def verify(task: VerifyRequest) -> float:
    return 1.0


app = gym_server(verify=verify)
'''
CASE = Case(case="", task={"expected_answer": "4"}, text="The answer is 4.", expect={"reward": 1.0})
PARAMS: Json = {"input": "a question"}
Result = TypeVar("Result")


def measure(quick: bool) -> Iterator[Json]:
    yield from event_loop.run(every_environment(0.3 if quick else 1.5))


async def every_environment(seconds: float) -> list[Json]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "empty.py").write_text(APP)
        (root / "gym_servers").symlink_to(shipped() / "gym_servers")  # stanzas name files there
        shipped_config = (shipped() / "global_config.yaml").read_text()
        (root / "global_config.yaml").write_text(f"{shipped_config}\n{EMPTY}: {{kind: gym_server, app: empty}}\n")
        config = load_config([root / "global_config.yaml"], OVERRIDES)
        gyms = [stanza for stanza in config.services.values() if stanza.kind == "gym_server"]
        found = [one for one in (find_environment(config, stanza) for stanza in gyms) if one]
        chosen = [one for one in found if can_be_alone(config, one)]
        answers = {EMPTY: [CASE]} | {one.name: cases for one in chosen if (cases := right_answers(one))}
        alone = with_stand_ins(config, [Environment(EMPTY, root), *chosen])
        async with Supervisor(alone) as stack:
            pids = {state.name: state.pid for state in stack.states if state.pid}
            peers = Peers(stack.urls)
            rows = []
            for name, cases in answers.items():
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        rows.append(await rate(peers[name], pids[name], cases, seconds))
                except (TimeoutError, ServiceError) as error:
                    print(
                        f"{name} is left out: {error or f'not done in {PATIENCE_S:.0f} s'}", file=sys.stderr, flush=True
                    )
            await peers.close()
    empty = rows[0]
    return [
        {**row, "cpu_of_empty": row["cpu_ms"] / empty["cpu_ms"], "rate_of_empty": row["verify_s"] / empty["verify_s"]}
        for row in rows
    ]


def right_answers(environment: Environment) -> list[Case]:
    """The cases with the highest reward: wrong ones may take until a deadline."""
    cases = [case for case in environment.cases() if case.reward is not None]
    most = max((case.reward or 0.0 for case in cases), default=0.0)
    return [case for case in cases if case.reward == most > 0]


async def rate(peer: Peer, pid: int, cases: Sequence[Case], seconds: float) -> Json:
    """Sessions are begun AT_ONCE at a time, then all verified, until the verifying has taken so long."""
    turn = itertools.cycle(cases)
    count, wall, cpu = 0, 0.0, 0.0
    began = time.perf_counter()
    await verify_all(await all_of([begin(peer, next(turn)) for _ in range(IN_FLIGHT)]))  # warm-up
    while count == 0 or (wall < seconds and time.perf_counter() - began < 3 * seconds):
        sessions = await all_of([begin(peer, next(turn)) for _ in range(AT_ONCE)])
        used, started = cpu_s(pid), time.perf_counter()
        await verify_all(sessions)
        wall, cpu = wall + time.perf_counter() - started, cpu + cpu_s(pid) - used
        count += AT_ONCE
    return {"environment": peer.name, "verify_s": count / wall, "cpu_ms": 1e3 * cpu / count, "answers": len(cases)}


async def begin(peer: Peer, case: Case) -> tuple[PeerSession, bytes]:
    """A session as it is before `/verify`, and the body of that."""
    session = peer.session()
    body = {"responses_create_params": PARAMS, **case.task, "response": {"output": list(case.items)}}
    await session.post("/seed_session", body)
    for tool, arguments in case.calls:
        await session.post(f"/{tool}", arguments)
    return session, orjson.dumps(body)


async def verify_all(sessions: Sequence[tuple[PeerSession, bytes]]) -> None:
    await all_of([session.request("/verify", body) for session, body in sessions])


async def all_of(calls: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    gate = asyncio.Semaphore(IN_FLIGHT)

    async def one(call: Coroutine[Any, Any, Result]) -> Result:
        async with gate:
            return await call

    return list(await asyncio.gather(*map(one, calls)))


if __name__ == "__main__":
    play(__doc__, measure)
