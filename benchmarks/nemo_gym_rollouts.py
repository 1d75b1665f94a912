"""Rollouts a second of NeMo Gym and of ngym: the same rows, the same chain of services, the same engine.

Both stacks run side by side: a gym server, the simple agent and a model server that speaks Chat Completions to one engine
(a bare uvicorn application that answers at once). Both collectors then run the same rollouts in turns, each as a command
of its own, with the same number in flight; meanwhile all processes of the other stack are stopped. The rate is that of the
engine's calls, from the first to the last, so that start-up does not count; beside it is the time of the whole command. With
a wrong reward the exit code is 1.

    python benchmarks/nemo_gym_rollouts.py [--rollouts 1024] [--in-flight 64 512] [--rounds 3] [--nemo-gym PYTHON]

Without --nemo-gym, an environment with NeMo Gym is made in runs/bench (1.4 GB).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import orjson
import psutil
import uvicorn
import uvloop
import yaml
from bare import read, reply
from nemo_gym_programs import BIN, free_port, relay, running, stanza, write_venvs
from peer_environments import NEMO_GYM, nemo_gym_python

from ngym.runtime.event_loop import signals_as_keyboard_interrupt

Row = dict[str, Any]
TASKS = 64
IDLE_S = 10
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": ""}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
OPTIONS = {"A": "Karyotyping", "B": "Polymerase chain reaction", "C": "Whole-genome sequencing", "D": "Microarrays"}
QUESTION = "Which test finds a known mutation? Answer with a letter in \\boxed{}.\n"


class Chain(NamedTuple):
    """A kind of rollout. configuration: their environment; ours: our gym server for its rows."""

    name: str
    configuration: str
    ours: str
    row: Row


CHAINS = [
    Chain(
        "one turn",
        "mcqa",
        "gym_servers/mcqa",
        {
            "responses_create_params": {"input": [{"role": "user", "content": QUESTION + json.dumps(OPTIONS)}]},
            "options": [{letter: text} for letter, text in OPTIONS.items()],
            "expected_answer": "B",
            "grading_mode": "strict_single_letter_boxed",
        },
    ),
    Chain(
        "one tool call",
        "example_single_tool_call",
        "gym_servers/weather",
        {"responses_create_params": {"input": [{"role": "user", "content": "The weather in Oslo?"}], "tools": [TOOL]}},
    ),
]


def engine(listener: socket.socket, meter: Any) -> None:
    """Chat Completions that answer at once: a tool call if there are tools and no result yet, else the answer B.

    meter: calls, and the times of the first and the last, since it was reset.
    """
    call = {"id": "call_0", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    usage = {"prompt_tokens": 100, "completion_tokens": 8, "total_tokens": 108}

    def completion(message: Row, finish: str) -> bytes:
        choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish, "logprobs": None}
        return orjson.dumps(
            {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
        )

    calls = completion({"content": None, "tool_calls": [call]}, "tool_calls")
    says = completion({"content": "\\boxed{B}"}, "stop")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raw = await read(receive)
        body = orjson.loads(raw) if raw else {}
        wants = body.get("tools") and all(message["role"] != "tool" for message in body["messages"])
        now = time.monotonic()
        meter[:] = [meter[0] + 1, meter[1] or now, now]
        await reply(send, calls if wants else says)

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # uvicorn raises it again, and the parent's handler was inherited
    config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None, access_log=False, timeout_keep_alive=75)
    uvloop.run(uvicorn.Server(config).serve(sockets=[listener]))


def their_config(engine_url: str, head: int, venvs: Path) -> Row:
    options = {"return_token_id_information": False, "uses_reasoning_parser": False, "api_key": "none", "model": "m"}
    config = {"policy": stanza("model", "vllm_model", base_url=f"{engine_url}/v1", **options)}
    for chain in CHAINS:
        config[chain.configuration] = stanza("gym_server", chain.configuration, domain="agent")
        config[f"{chain.configuration}_agent"] = stanza(
            "agent", "simple_agent", gym=chain.configuration, model="policy"
        )
        config[f"{chain.configuration}_environment"] = relay(f"{chain.configuration}_agent")
    head_server = {"host": "127.0.0.1", "port": head}
    return config | {"head_server": head_server, "skip_venv_if_present": True, "uv_venv_dir": str(venvs)}


def our_config(engine_url: str, head: int) -> Row:
    upstream = {"base_url": f"{engine_url}/v1", "api": "chat", "api_key_env": None, "model": "m"}
    config: Row = {"policy": {"kind": "model", "app": "models/openai", **upstream}}
    for chain in CHAINS:
        config[chain.configuration] = {"kind": "gym_server", "app": chain.ours}
        agent = {"kind": "agent", "app": "agents/simple", "gym": chain.configuration, "model": "policy"}
        config[f"{chain.configuration}_agent"] = agent
    return config | {"ngym": {"head": {"port": head}}}


class Side(NamedTuple):
    """command: (agent, input, output, repeats, in flight) -> the arguments of its collector. pid: of its `ng_run`."""

    name: str
    pid: int
    command: Callable[[str, str, str, int, int], list[str]]


def nemo_gym_side(venv: Path, head: int, pid: int) -> Side:
    def command(agent: str, rows: str, out: str, repeats: int, in_flight: int) -> list[str]:
        options = {"agent_name": agent, "input_jsonl_fpath": rows, "output_jsonl_fpath": out, "num_repeats": repeats}
        options |= {"num_samples_in_parallel": in_flight, "head_server.host": "127.0.0.1", "head_server.port": head}
        return [str(venv / "bin/ng_collect_rollouts"), *(f"+{key}={value}" for key, value in options.items())]

    return Side(f"NeMo Gym {NEMO_GYM}", pid, command)


def ours(head: int, pid: int) -> Side:
    def command(agent: str, rows: str, out: str, repeats: int, in_flight: int) -> list[str]:
        options = ["--head", f"http://127.0.0.1:{head}", "--agent", agent, "--input", rows, "--output", out]
        counts = ["--repeats", str(repeats), "--concurrency", str(in_flight)]
        return [str(BIN / "ng_collect_rollouts"), *options, *counts]

    return Side("ngym", pid, command)


class Timing(NamedTuple):
    rollouts_s: float
    whole_s: float


def time_collection(side: Side, chain: Chain, folder: Path, repeats: int, in_flight: int, meter: Any) -> Timing:
    """One command. The program ends if a rollout is missing or has another reward than 1."""
    rows = folder / f"{chain.configuration}.jsonl"
    rows.write_text("".join(json.dumps(chain.row) + "\n" for _ in range(TASKS)))
    out = folder / f"{side.name.split()[0]}_{time.monotonic_ns()}.jsonl"
    command = side.command(f"{chain.configuration}_agent", rows.name, out.name, repeats, in_flight)
    meter[:] = [0, 0, 0]
    began = time.monotonic()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    seconds = time.monotonic() - began
    rewards = [json.loads(line)["reward"] for line in out.read_text().splitlines()] if out.exists() else []
    if len(rewards) != TASKS * repeats or set(rewards) != {1.0}:
        output = (done.stdout + done.stderr)[-3000:]
        sys.exit(f"{side.name}, {chain.name}: {len(rewards)} rollouts, rewards {sorted(set(rewards))}\n{output}")
    calls, first, last = meter[:]
    return Timing(len(rewards) * (calls - 1) / calls / (last - first), seconds)


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


@contextmanager
def pause_processes(pid: int) -> Iterator[None]:
    """All processes of a stack stopped until the block ends, so that what it does when idle costs the other nothing."""
    processes = family(pid)
    try:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def memory_mb(pid: int) -> float:
    """The proportional set size of a stack."""
    return sum(one.memory_full_info().pss for one in family(pid)) / 1e6


def cpu_share(pid: int) -> float:
    """The share of one core that a stack uses when nothing is asked of it."""

    def used_s() -> float:
        return sum(sum(one.cpu_times()[:2]) for one in family(pid))

    before = used_s()
    time.sleep(IDLE_S)
    return (used_s() - before) / IDLE_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1024)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--nemo-gym", type=Path, help="the Python of an environment with NeMo Gym  [default: one is made]"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, and its children, ignore it
    venv = (options.nemo_gym or nemo_gym_python(options.folder / "nemo_gym")).absolute().parent.parent
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    context = multiprocessing.get_context("fork")
    meter = context.Array("d", 3)
    serving = context.Process(target=engine, args=(listener, meter), daemon=True)
    serving.start()
    heads = {"ours": free_port(), "theirs": free_port()}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config = their_config(url, heads["theirs"], folder / "venvs")
        (folder / "theirs.yaml").write_text(yaml.safe_dump(config))
        (folder / "ours.yaml").write_text(yaml.safe_dump(our_config(url, heads["ours"])))
        write_venvs(folder, venv, config)
        our_run = [str(BIN / "ng_run"), "--config", "ours.yaml"]
        their_run = [str(venv / "bin/ng_run"), "+config_paths=[theirs.yaml]"]
        began = time.monotonic()
        with running(our_run, folder, f"http://127.0.0.1:{heads['ours']}/health") as our_pid:
            ready_s = [time.monotonic() - began]
            began = time.monotonic()
            with running(their_run, folder, f"http://127.0.0.1:{heads['theirs']}/readyz") as their_pid:
                ready_s.insert(0, time.monotonic() - began)
                sides = [nemo_gym_side(venv, heads["theirs"], their_pid), ours(heads["ours"], our_pid)]
                idle = [(memory_mb(side.pid), cpu_share(side.pid)) for side in sides]
                measure(options, folder, sides, meter)
    for side, seconds, (megabytes, share) in zip(sides, ready_s, idle, strict=True):
        usage = f"{megabytes:,.0f} MB and {share:.1%} of a core when idle"
        print(f"{side.name}: ready after {seconds:.1f} s (to the second), {usage}")
    serving.terminate()


def measure(options: argparse.Namespace, folder: Path, sides: list[Side], meter: Any) -> None:
    print(f"{options.rollouts} rollouts, {options.rounds} rounds in turns; load {os.getloadavg()[0]:.1f}")
    print(
        "| rollout | in flight | "
        + " | ".join(f"{side.name}: rollouts/s, whole command s" for side in sides)
        + " | ratio |"
    )
    print("|---|---|---|---|---|", flush=True)
    repeats = max(1, options.rollouts // TASKS)
    for chain in CHAINS:
        for in_flight in options.in_flight:
            found: dict[str, list[Timing]] = {side.name: [] for side in sides}
            for _ in range(options.rounds):
                for side, other in (sides, sides[::-1]):
                    with pause_processes(other.pid):
                        found[side.name].append(time_collection(side, chain, folder, repeats, in_flight, meter))
            rates = {name: sorted(took.rollouts_s for took in rounds) for name, rounds in found.items()}
            cells = [
                f"{median(rates[name]):,.0f} ({rates[name][0]:,.0f} to {rates[name][-1]:,.0f}), "
                f"{median(took.whole_s for took in rounds):.2f}"
                for name, rounds in found.items()
            ]
            ratio = median(rates[sides[1].name]) / median(rates[sides[0].name])
            print(f"| {chain.name} | {in_flight} | {' | '.join(cells)} | {ratio:.1f} |", flush=True)


if __name__ == "__main__":
    with signals_as_keyboard_interrupt():
        main()
