"""The time from `ng_run` to "ready" with three light services, their memory, and the time to stop them.

The services are counter, a scripted model and the simple agent. Memory is that of every process of the run: ng_run, the
process that forks, and the three services. RSS counts a shared page once for each process, PSS once in all.

    python benchmarks/startup.py [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil
from parts import play

from ngym.schema import Json

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


def measure(folder: str, *options: str, variables: Mapping[str, str] | None = None) -> Run:
    """`ng_run` in a folder with a global_config.yaml. variables: in addition to this process's environment."""
    started = time.perf_counter()
    environment = {**os.environ, **(variables or {})}
    command = [*NG_RUN, *options]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
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


def rows(quick: bool) -> Iterator[Json]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "global_config.yaml").write_text(CONFIG)
        runs = [measure(folder) for _ in range(3 if quick else 7)]
    for name in Run._fields:
        values = [getattr(run, name) for run in runs]
        yield {"what": name, "median": statistics.median(values), "most": max(values)}


if __name__ == "__main__":
    play(__doc__, rows)
