"""Runs one program inside an existing container: this source goes to `python -I -c`, a line of JSON to stdin.

    stdin   {"code", "stdin", "files", "cpu_s", "wall_s", "memory_bytes", "output_bytes"}
    stdout  {"stdout", "stderr", "answer", "status", "cpu_s", "wall_s", "memory_bytes", "cause"}

The container confines; this file sets limits and collects output. It imports nothing of ngym, which the container
lacks.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

MEMORY_EXIT = 86
# In the program's own interpreter, with the CPU seconds, the bytes of memory and the answer's descriptor as arguments.
PRELUDE = f"""
import os, resource, sys
cpu_s, memory, answer = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))  # SIGXCPU, then SIGKILL
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if answer != 3:
    os.dup2(answer, 3)
    os.close(answer)
def hook(kind, error, trace, old=sys.excepthook):
    old(kind, error, trace)
    if issubclass(kind, MemoryError):
        os._exit({MEMORY_EXIT})
sys.excepthook = hook
sys.argv = ["main.py"]
sys.path.insert(0, "")
exec(compile(open("main.py", "rb").read(), "main.py", "exec"), {{"__name__": "__main__"}})
"""


def main() -> None:
    request = json.loads(sys.stdin.readline())
    for name, content in {**request["files"], "main.py": request["code"], ".stdin": request["stdin"]}.items():
        if os.path.dirname(name):
            os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(content)
    print(json.dumps(run(request)), flush=True)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run main.py of the working directory and return its outcome."""
    began = time.monotonic()
    answer, answer_end = os.pipe()
    limits = [max(1, round(request["cpu_s"])), request["memory_bytes"], answer_end]
    with open(".stdin", "rb") as stdin:
        os.unlink(".stdin")
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", PRELUDE, *map(str, limits)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[answer_end],
        )
    os.close(answer_end)
    assert process.stdout is not None and process.stderr is not None
    pipes = {process.stdout.fileno(): "stdout", process.stderr.fileno(): "stderr", answer: "answer"}
    collected, cause = collect(pipes, request, began)
    os.kill(process.pid, signal.SIGKILL)  # process.kill() might reap it and lose its resource usage
    _, status, used = os.wait4(process.pid, 0)
    texts = {name: content.decode(errors="replace") for name, content in collected.items()}
    return {
        **texts,
        "cause": cause,
        "status": os.waitstatus_to_exitcode(status),
        "cpu_s": used.ru_utime + used.ru_stime,
        "wall_s": time.monotonic() - began,
        "memory_bytes": used.ru_maxrss * 1024,
    }


def collect(pipes: dict[int, str], request: dict[str, Any], began: float) -> tuple[dict[str, bytearray], str]:
    """Collect output until all pipes are closed or a limit is reached; returns the output and that limit."""
    collected = {name: bytearray() for name in pipes.values()}
    waiting = select.poll()
    for fd in pipes:
        waiting.register(fd, select.POLLIN)
    open_pipes = set(pipes)
    while open_pipes:
        remaining_s = request["wall_s"] - (time.monotonic() - began)
        if remaining_s <= 0:
            return collected, "asleep"
        for fd, _ in waiting.poll(remaining_s * 1000):
            chunk = os.read(fd, 1 << 16)
            content = collected[pipes[fd]]
            content += chunk[: request["output_bytes"] - len(content)]
            if not chunk:
                waiting.unregister(fd)
                open_pipes.discard(fd)
            elif len(content) >= request["output_bytes"]:
                return collected, "output"
    return collected, "exit"


if __name__ == "__main__":
    main()
