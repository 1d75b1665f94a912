"""How much CPU does the collector itself spend on a rollout? It is driven against an agent that answers at once.

    python benchmarks/collector.py [--rows 20000] [--in-flight 64 512 4096]

Prints rows/s and milliseconds of CPU per row (user + system, of the collector's process alone; rows are written to disk
with group commit, and the aggregates are kept, as in a real run). The stub agent runs in a second process.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import aclosing
from pathlib import Path

import orjson

from ngym.collect.files import Files
from ngym.collect.plan import Recipe
from ngym.collect.record import Source
from ngym.collect.run import Limits
from ngym.peers import Peers
from ngym.process import run


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def collected(files: Files, url: str, in_flight: int) -> int:
    peers = Peers({"agent": [url]})
    collection = files.run(peers, Limits(concurrency=in_flight))
    count = 0
    async with aclosing(collection.outcomes(files.todo(max_attempts=3))) as outcomes:
        async for _ in outcomes:
            count += 1
    await files.flush()
    await peers.close()
    return count


def measure(folder: Path, url: str, rows: int, in_flight: int) -> str:
    source = folder / "tasks.jsonl"
    task = {"responses_create_params": {"input": "What is 17 + 25?", "temperature": 1.0}, "expected_answer": "42"}
    source.write_bytes(b"".join(orjson.dumps({**task, "n": n}) + b"\n" for n in range(rows // 4)))
    files = Files(folder / f"out{in_flight}.jsonl", Source(source, Recipe(agent="agent", repeats=4)))
    files.prepare(resume=False, overwrite=False, max_attempts=3, agents={"agent"}, command=sys.argv)
    began, used = time.perf_counter(), cpu_s()
    count = run(collected(files, url, in_flight))
    wall, used = time.perf_counter() - began, cpu_s() - used
    files.close()
    assert count == rows == sum(1 for _ in (folder / f"out{in_flight}.jsonl").open())
    return f"{in_flight:9d} {rows:8d} {rows / wall:10.0f} {1000 * used / rows:11.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20000)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[64, 512, 4096])
    options = parser.parse_args()
    stub = [sys.executable, str(Path(__file__).with_name("stub_agent.py"))]
    with subprocess.Popen(stub, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        url = agent.stdout.readline().strip()
        print("in flight     rows     rows/s  CPU ms/row")
        with tempfile.TemporaryDirectory() as folder:
            for in_flight in options.in_flight:
                print(measure(Path(folder), url, options.rows // 4 * 4, in_flight), flush=True)
        agent.communicate()


if __name__ == "__main__":
    main()
