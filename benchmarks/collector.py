"""The CPU that the collector itself needs for a rollout, with an agent that answers at once.

    python benchmarks/collector.py [--quick] [--json FILE]

rows/s and milliseconds of CPU per row (user + system, of the collector's process alone; rows are written to disk with group
commit, and the aggregates are kept, as in a real run), at several numbers in flight, and for larger rows. The stub agent runs
in a second process.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple

import orjson
from parts import play

from ngym.collect.collection_files import CollectionFiles
from ngym.collect.plan import CollectionPlan
from ngym.collect.rollout_scheduler import CollectionLimits
from ngym.collect.run_record import CollectionSettings
from ngym.peers import Peers
from ngym.runtime.event_loop import run
from ngym.schema import Json


class Case(NamedTuple):
    """rows: a multiple of four. extra_bytes: of each, beside the stub's own few hundred."""

    in_flight: int
    rows: int
    extra_bytes: int = 0


CASES = [
    *(Case(in_flight, 20_000) for in_flight in (64, 512, 4096)),
    Case(64, 10_000, 10_000),
    Case(64, 2_000, 100_000),
    Case(64, 400, 1_000_000),
]
QUICK = [Case(64, 4_000), Case(4096, 8_192), Case(64, 400, 100_000)]


async def collect_rollouts(files: CollectionFiles, url: str, in_flight: int) -> int:
    peers = Peers({"agent": [url]})
    collection = files.run(peers, CollectionLimits(concurrency=in_flight))
    count = 0
    async with aclosing(collection.outcomes(files.todo(max_attempts=3))) as outcomes:
        async for _ in outcomes:
            count += 1
    await files.flush()
    await peers.close()
    return count


def rows(quick: bool) -> Iterator[Json]:
    cases = QUICK if quick else CASES
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(cases):
            command = [sys.executable, str(Path(__file__).with_name("stub_agent.py")), str(case.extra_bytes)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
                assert agent.stdout is not None
                yield measure(Path(folder, str(number)), agent.stdout.readline().strip(), case)
                agent.communicate()


def measure(folder: Path, url: str, case: Case) -> Json:
    folder.mkdir()
    source, output = folder / "tasks.jsonl", folder / "out.jsonl"
    task = {"responses_create_params": {"input": "What is 17 + 25?", "temperature": 1.0}, "expected_answer": "42"}
    source.write_bytes(b"".join(orjson.dumps({**task, "n": n}) + b"\n" for n in range(case.rows // 4)))
    files = CollectionFiles(output, CollectionSettings(source, CollectionPlan(agent="agent", repeats=4)))
    files.prepare(resume=False, overwrite=False, max_attempts=3, agents={"agent"}, command=sys.argv)
    began, used = time.perf_counter(), time.process_time()
    count = run(collect_rollouts(files, url, case.in_flight))
    wall, used = time.perf_counter() - began, time.process_time() - used
    files.close()
    assert count == case.rows, count
    size = output.stat().st_size
    output.unlink()
    return {
        "in_flight": case.in_flight,
        "row_bytes": size // count,
        "rows_s": count / wall,
        "mb_s": size / wall / 1e6,
        "cpu_ms": 1e3 * used / count,
    }


if __name__ == "__main__":
    play(__doc__, rows)
