"""How long from `ng_run` to "ready" with three light services, how much memory do they take, and how fast do they stop?

The services are counter, a scripted model and the simple agent. Memory is that of every process of the run: ng_run, the
process that forks, and the three services. RSS counts a shared page once for each process, PSS once in all.

    python benchmarks/startup.py [--runs 5]
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

CONFIG = """
ngym: {head: {port: 0}}
policy: {kind: model, app: models/scripted}
counter: {kind: gym_server, app: gym_servers/counter}
counter_agent: {kind: agent, app: agents/simple, gym: counter, model: policy}
"""
NG_RUN = [sys.executable, "-P", "-c", "from ngym.cli.run import main; main()", "--json"]


class Run(NamedTuple):
    ready_s: float
    cpu_s: float
    rss_mb: float
    pss_mb: float
    largest_rss_mb: float
    stop_s: float


def measure(folder: str) -> Run:
    started = time.perf_counter()
    with subprocess.Popen(NG_RUN, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["event"] == "ready":
                break
        else:
            sys.exit("ng_run ended before its services were ready")
        ready_s = time.perf_counter() - started
        main = psutil.Process(process.pid)
        everyone = [main, *main.children(recursive=True)]
        memory = [one.memory_full_info() for one in everyone]
        cpu = [one.cpu_times() for one in everyone]
        stopping = time.perf_counter()
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        process.wait()
        return Run(
            ready_s,
            sum(times.user + times.system for times in cpu),
            sum(one.rss for one in memory) / 1e6,
            sum(one.pss for one in memory) / 1e6,
            max(one.rss for one in memory) / 1e6,
            time.perf_counter() - stopping,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "global_config.yaml").write_text(CONFIG)
        results = [measure(folder) for _ in range(runs)]
    for name, unit, values in (
        ("command to ready", "s", [run.ready_s for run in results]),
        ("CPU until then", "s", [run.cpu_s for run in results]),
        ("memory, sum of RSS", "MB", [run.rss_mb for run in results]),
        ("memory, sum of PSS", "MB", [run.pss_mb for run in results]),
        ("largest process, RSS", "MB", [run.largest_rss_mb for run in results]),
        ("Ctrl-C to gone", "s", [run.stop_s for run in results]),
    ):
        print(f"{name:<22} median {statistics.median(values):8.2f} {unit:<3} max {max(values):8.2f} {unit}")


if __name__ == "__main__":
    main()
