"""Latency and throughput of the sandbox: `print(1)` in each tier that works here.

python benchmarks/sandbox.py [--runs 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from contextlib import aclosing
from statistics import quantiles

from ngym.errors import ServiceError
from ngym.runtime.event_loop import run
from ngym.sandbox import LocalSandbox
from ngym.sandbox.local import TIERS, Tier

PROGRAMS = {"print(1)": "print(1)", "numpy": "import numpy as np\nprint(np.arange(10).sum())"}
WARM_UP = 20


async def measure(tier: Tier, program: str, runs: int) -> str:
    async with aclosing(LocalSandbox(tier)) as sandbox:
        await sandbox.start()
        await asyncio.gather(*(sandbox.run(program) for _ in range(WARM_UP)))
        walls, cpu_s = [], 0.0
        for _ in range(runs):
            began = time.perf_counter()
            result = await sandbox.run(program)
            walls.append(1000 * (time.perf_counter() - began))
            cpu_s += result.cpu_s
            assert result.verdict == "ok", result
        began = time.perf_counter()
        await asyncio.gather(*(sandbox.run(program) for _ in range(runs)))
        rate = runs / (time.perf_counter() - began)
    cuts = quantiles(walls, n=20)
    return f"{cuts[9]:8.2f} {cuts[18]:8.2f} {1000 * cpu_s / runs:12.2f} {rate:8.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    runs = parser.parse_args().runs
    print(f"{'tier':12} {'program':10} {'p50 ms':>8} {'p95 ms':>8} {'CPU ms a run':>12} {'runs/s':>8}")
    for tier in TIERS:
        for name, program in PROGRAMS.items():
            try:
                print(f"{tier:12} {name:10} {run(measure(tier, program, runs))}", flush=True)
            except ServiceError as error:
                print(f"{tier:12} {error}")


if __name__ == "__main__":
    main()
