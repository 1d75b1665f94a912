"""The time until ng_view shows a large file of rollouts, and until it has indexed all of it.

The file has a conversation and token segments in each row, 21 kB together, and lies in the page cache. Each figure
is compared with reading the same file line by line with orjson, in one process, in the same run: a machine that is slow
that day is slow for both.

    python benchmarks/view.py [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.request import ProxyHandler, build_opener

import orjson
import psutil
from parts import cpu_s, play

from ngym.schema import Json

ROWS, QUICK_ROWS, REPEATS = 100_000, 10_000, 8
SAMPLED, PROMPT, WORDS = 600, 160, 520  # tokens and words of a row: 21 kB
DISTINCT = 500
POLL_S = 0.01
PATIENCE_S = 600.0
PAGES = 40
QUERIES = {
    "first": "",
    "sorted": "sort=-reward",
    "filtered": "q=reward%3C0.5+level:hard&sort=-tokens",
    "searched": "q=zebra",
}
LOCAL = build_opener(ProxyHandler({}))


class Viewer(NamedTuple):
    """began: when its process was started (monotonic seconds)."""

    url: str
    began: float
    process: psutil.Process

    def get(self, path: str) -> Any:
        with LOCAL.open(self.url + path) as answer:
            return json.loads(answer.read())


def measure(quick: bool) -> Iterator[Json]:
    with tempfile.TemporaryDirectory() as folder:
        file, cache = Path(folder, "out.jsonl"), Path(folder, "cache")
        rows = QUICK_ROWS if quick else ROWS
        write(file, rows)
        plain_s = plainly_read(file)
        yield {"rows": rows, "gigabytes": file.stat().st_size / 1e9, "orjson_s": plain_s}
        for opening in ("first", "second"):
            with viewer(file, cache) as web_viewer:
                found = measure_opening(web_viewer, rows)
                yield {"opening": opening, **found, "of_orjson": found["indexed_s"] / plain_s}
                if opening == "second":
                    yield from measure_pages(web_viewer, rows)


def measure_opening(web_viewer: Viewer, rows: int) -> Json:
    """Seconds from the start of the process to the first rows, and to all of them."""
    first = _when(lambda: web_viewer.get("/api/runs/r1/rows?limit=200")["rows"])
    indexed = _when(lambda: web_viewer.get("/api/runs")["runs"][0]["rows"] == rows)
    memory = sum(one.memory_info().rss for one in (web_viewer.process, *web_viewer.process.children(recursive=True)))
    return {
        "rows_s": first - web_viewer.began,
        "indexed_s": indexed - web_viewer.began,
        "cpu_s": cpu_s(web_viewer.process.pid),
        "megabytes": memory / 1e6,
    }


def measure_pages(web_viewer: Viewer, rows: int) -> Iterator[Json]:
    """The requests of the table: a sort order for the first time, and then its pages, as if a user scrolled."""
    for name, query in QUERIES.items():
        began = time.perf_counter()
        while "searching" in web_viewer.get(f"/api/runs/r1/rows?limit=200&{query}"):
            pass
        first_s = time.perf_counter() - began
        draw, pages = random.Random(0), []
        for _ in range(PAGES):
            began = time.perf_counter()
            web_viewer.get(f"/api/runs/r1/rows?limit=200&offset={draw.randrange(rows)}&{query}")
            pages.append(time.perf_counter() - began)
        yield {
            "order": name,
            "first_ms": 1000 * first_s,
            "page_ms": 1000 * median(pages),
            "worst_page_ms": 1000 * max(pages),
        }
    began = time.perf_counter()
    web_viewer.get("/api/runs/r1/stats")
    yield {"order": "stats", "first_ms": 1000 * (time.perf_counter() - began)}


def plainly_read(file: Path) -> float:
    began = time.perf_counter()
    with file.open("rb", buffering=1 << 20) as lines:
        for line in lines:
            orjson.loads(line)
    return time.perf_counter() - began


@contextmanager
def viewer(file: Path, cache: Path) -> Iterator[Viewer]:
    began = time.perf_counter()
    command = [sys.executable, "-m", "ngym.cli.view", "--json", "--no-open", "--port", "0", file]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        try:
            yield Viewer(facts["address"].rstrip("/"), began, psutil.Process(process.pid))
        finally:
            process.send_signal(signal.SIGINT)


def _when(condition: Callable[[], object]) -> float:
    deadline = time.perf_counter() + PATIENCE_S
    while not condition():
        if time.perf_counter() > deadline:
            raise TimeoutError(f"the viewer did not get so far within {PATIENCE_S:.0f} s")
        time.sleep(POLL_S)
    return time.perf_counter()


def write(file: Path, rows: int) -> None:
    """Rollouts of a made-up run; their texts repeat, their tokens and numbers do not."""
    draw = random.Random(0)
    some = [_rollout(draw) for _ in range(DISTINCT)]
    with file.open("wb", buffering=1 << 20) as lines:
        for number in range(rows):
            row = some[draw.randrange(DISTINCT)]
            row["_ng_task_index"], row["_ng_rollout_index"] = divmod(number, REPEATS)
            row["ng"] |= {"task_id": f"{number // REPEATS:016x}", "rollout_id": f"{number:016x}"}
            row["reward"] = draw.choice((0.0, 0.2, 1.0, None))
            lines.write(orjson.dumps(row) + b"\n")


def _rollout(draw: random.Random) -> Json:
    words = " ".join(draw.choices(("the", "model", "looks", "at", "every", "number", "and", "adds"), k=WORDS))
    segment = {
        "token_ids": [draw.randrange(150_000) for _ in range(PROMPT + SAMPLED)],
        "mask": [[PROMPT, PROMPT + SAMPLED]],
        "logprobs": [-draw.expovariate(2) for _ in range(SAMPLED)],
        "policy_version": [[PROMPT, PROMPT + SAMPLED, 3]],
    }
    return {
        "responses_create_params": {"input": [{"role": "user", "content": words[:600]}]},
        "agent_ref": {"type": "responses_api_agents", "name": "math_agent"},
        "level": draw.choice(("easy", "hard")),
        "response": {
            "output": [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": words}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": words[-80:]}]},
            ],
            "usage": {"input_tokens": PROMPT, "output_tokens": SAMPLED, "total_tokens": PROMPT + SAMPLED},
        },
        "ng": {"run_id": "run", "status": "ok", "policy_version": [3], "segments": [segment], "stop_reason": "answer",
               "turns": 1, "tool_calls": 0, "tool_errors": 0, "timings": {"total_s": draw.expovariate(1)}},
    }  # fmt: skip


if __name__ == "__main__":
    play(__doc__ or "", measure)
