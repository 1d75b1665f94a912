"""Growth of time and memory, one axis at a time: rollouts in flight, turns, bytes of a row, tasks, replicas, parameters
(of a trained and of a served model), context.

Rollouts go through agent, gym server and a scripted model (rollouts.py); rows and tasks are collected from a stub agent
(collector.py); training steps are those of trainer_ours.py; a served model answers 64 requests at once. Memory is the
largest resident set: of the three services together, of the collecting process, or of the trainer.

    python benchmarks/curves.py [--only AXIS ...] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from statistics import median

import collector
import rollouts
from bare import Case
from lockstep import Side
from memory import of_services, rss, watch
from parts import format_figure

from ngym.collect.collection_files import CollectionFiles
from ngym.collect.plan import CollectionPlan
from ngym.collect.rollout_scheduler import CollectionLimits
from ngym.collect.run_record import CollectionSettings
from ngym.config.service_config import load_config
from ngym.peers import Peers
from ngym.runtime import event_loop
from ngym.runtime.cpu_threads import usable_cores
from ngym.schema import Json
from ngym.supervise.supervisor import Supervisor

MB, FIRST, SECONDS = 1e6, 2_000, 3.0
LONG = 100_000  # tokens: a step takes minutes, of which the first allocations are a small part
TOKEN_BYTES = 13  # of a token in an answer: its text, its id and its log-probability
HERE = Path(__file__).parent
SHAPES = {  # layers, hidden size, heads of 64
    "tiny": (2, 128, 2),
    "middle": (6, 256, 4),
    "small": (12, 512, 8),
    "large": (16, 1024, 16),
    "huge": (24, 1280, 20),
}
SERVERS: dict[str, Json] = {  # with the options that suit a tiny model
    "models/transformers": {"threads": 1},
    "models/vllm": {"threads": 1, "kv_cache_mb": 64},
}
ANSWERS, SAMPLED = 64, 96  # answers at once, tokens of each
TURNS = 4  # of a conversation
LONG_PROMPT = 100  # times four tokens


def in_flight(quick: bool) -> Iterator[Json]:
    for level in [1, 64] if quick else [1, 8, 64, 512, 4096, 8192]:
        yield {"in_flight": level, **event_loop.run(_through_services(Case(1, False), level))}


def turns(quick: bool) -> Iterator[Json]:
    for count in [1, 10] if quick else [1, 10, 100]:
        yield {"turns": count, **event_loop.run(_through_services(Case(count, False), 64))}


def replicas(quick: bool) -> Iterator[Json]:
    for count in [1, 2] if quick else [1, 2, 4, 8]:
        yield {"replicas": count, **event_loop.run(_through_services(Case(1, False), 512, count))}


def answer_bytes(quick: bool) -> Iterator[Json]:
    """Of a rollout without tools: a text, or the ids and log-probabilities of an answer's tokens (TOKEN_BYTES each)."""
    for size in [1_000, 100_000] if quick else [1_000, 100_000, 1_000_000, 10_000_000]:
        for tokens in [False, True]:
            text = "word " * (size // (5 * TOKEN_BYTES if tokens else 5))
            replies = {"replies.jsonl": json.dumps({"text": text})}
            found = event_loop.run(_through_services(Case(0, tokens), 8, files=replies))
            yield {"answer_bytes": size, "token_ids": tokens, **found}


async def _through_services(case: Case, level: int, replicas: int = 1, files: Mapping[str, str] | None = None) -> Json:
    """files: instead of the usual replies, by name."""
    replies = {"replies": [], "file": next(iter(files))} if files else {}
    config = rollouts.scripted_config(case, **replies).replace(
        "model: policy}", f"model: policy, max_steps: 1000, replicas: {replicas}}}"
    )
    config = config.replace("app: gym_servers/env}", f"app: gym_servers/env, replicas: {replicas}}}")
    config = config.replace("models/scripted,", f"models/scripted, replicas: {replicas},")
    async with rollouts.services(config, files or {}) as stack:
        peers = Peers(stack.urls)
        pids = {"collector": os.getpid()} | {state.label: state.pid for state in stack.states if state.pid}
        await rollouts.time_rollouts(peers, case, 0.5, 64)
        peak = {name: rss(pid) for name, pid in pids.items()}
        watching = asyncio.create_task(watch(pids, peak))
        began = time.perf_counter()
        latencies = sorted(await rollouts.time_rollouts(peers, case, SECONDS, level))
        seconds = time.perf_counter() - began
        watching.cancel()
        await peers.close()
    found = {"rollouts_s": len(latencies) / seconds, "p99_s": latencies[int(0.99 * len(latencies))]}
    return {**found, "services_mb": of_services(peak), "collector_mb": peak["collector"]}


def row_bytes(quick: bool) -> Iterator[Json]:
    for size, count in {0: 4_000, 10_000: 4_000, 100_000: 1_000, 1_000_000: 200, 10_000_000: 20}.items():
        if not quick or size <= 100_000:
            yield _alone(_rows, size, count)


def _rows(size: int, count: int) -> Json:
    def measured(folder: Path, url: str) -> Json:
        found = collector.measure(folder, url, collector.Case(64, count, size))
        return {name: found[name] for name in ("row_bytes", "rows_s", "mb_s")}

    return _from_a_stub(measured, size)


def tasks(quick: bool) -> Iterator[Json]:
    for count in [1_000, 100_000] if quick else [1_000, 100_000, 1_000_000, 10_000_000]:
        yield _alone(_tasks, count)


def _tasks(count: int) -> Json:
    """Of a file with so many tasks, the first 2,000 rollouts."""

    def measured(folder: Path, url: str) -> Json:
        source = folder / "tasks.jsonl"
        folder.mkdir()
        with source.open("w") as lines:
            for number in range(count):
                lines.write(f'{{"responses_create_params": {{"input": "What is {number} + 2?"}}, "n": {number}}}\n')
        began = time.perf_counter()
        settings = CollectionSettings(source, CollectionPlan(agent="agent", repeats=2))
        files = CollectionFiles(folder / "out.jsonl", settings)
        files.prepare(resume=False, overwrite=False, max_attempts=3, agents={"agent"}, command=sys.argv)
        ready = time.perf_counter() - began
        event_loop.run(_first(files, url))
        seconds = time.perf_counter() - began
        files.close()
        size = source.stat().st_size / MB
        return {"tasks": count, "file_mb": size, "begins_after_s": ready, f"first_{min(FIRST, 2 * count)}_s": seconds}

    return _from_a_stub(measured, 0)


async def _first(files: CollectionFiles, url: str) -> None:
    peers, left = Peers({"agent": [url]}), FIRST
    collection = files.run(peers, CollectionLimits(concurrency=64))
    async with aclosing(collection.outcomes(files.todo(max_attempts=3))) as outcomes:
        async for _ in outcomes:
            left -= 1
            if not left:
                break
    await files.flush()
    await peers.close()


def _from_a_stub(measured: Callable[[Path, str], Json], extra_bytes: int) -> Json:
    command = [sys.executable, str(HERE / "stub_agent.py"), str(extra_bytes)]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent,
    ):
        assert agent.stdout is not None
        found = measured(Path(folder, "run"), agent.stdout.readline().strip())
        agent.communicate()
    return {**found, "collector_mb": _peak_mb(os.getpid())}


def _peak_mb(pid: int) -> float:
    """The largest resident set that this process has had."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024 / MB


def _alone(measured: Callable[..., Json], *arguments: int) -> Json:
    """In a process of its own, whose peak of memory is that of this figure."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measured, arguments)


def parameters(quick: bool) -> Iterator[Json]:
    for name in ["tiny", "middle"] if quick else SHAPES:
        yield _steps(name, tokens=128, batch=8)


def context(quick: bool) -> Iterator[Json]:
    for tokens in [1_024, 4_096] if quick else [1_024, 4_096, 16_384, 65_536, 131_072]:
        yield {"context": tokens, **_steps("tiny", tokens, batch=1, warm=tokens < LONG)}


def served_parameters(quick: bool) -> Iterator[Json]:
    """Tokens a second of a model server as it comes, and with the options of a tiny model; medians of three rounds."""
    from trainer import new_model

    for name in ["tiny"] if quick else ["tiny", "middle", "small"]:
        with tempfile.TemporaryDirectory() as folder:
            new_model(Path(folder, "model"), _shape(name, 512))
            for app, options in SERVERS.items():
                as_it_comes, small = (
                    event_loop.run(_measure_sampling(Path(folder), app, each)) for each in ({}, options)
                )
                yield {"model": name, "server": app, "tokens_s": as_it_comes, "with_small_options": small}


def served_replicas(quick: bool) -> Iterator[Json]:
    """Tokens a second of several replicas of a model server, which share the cores, and with all cores for each."""
    from trainer import new_model

    with tempfile.TemporaryDirectory() as folder:
        new_model(Path(folder, "model"), _shape("tiny" if quick else "small", 512))
        for app in SERVERS:
            for count in [2] if quick else [1, 2, 4]:
                all_cores = {"replicas": count, "threads": usable_cores()}
                shared, unshared = (
                    event_loop.run(_measure_sampling(Path(folder), app, each))
                    for each in ({"replicas": count}, all_cores)
                )
                yield {"server": app, "replicas": count, "tokens_s": shared, "with_all_cores_each": unshared}


def served_groups(quick: bool) -> Iterator[Json]:
    """Tokens a second of a model server for groups of eight rollouts with the same prompt, of 400 tokens; 64 of 128 rollouts
    at once. Medians of three rounds.
    """
    from trainer import new_model

    for name in ["tiny"] if quick else ["tiny", "small"]:
        with tempfile.TemporaryDirectory() as folder:
            new_model(Path(folder, "model"), _shape(name, 2048))
            for app in SERVERS:
                yield {
                    "model": name,
                    "server": app,
                    "tokens_s": event_loop.run(_measure_sampling(Path(folder), app, {}, group=8)),
                }


def served_turns(quick: bool) -> Iterator[Json]:
    """Tokens a second of a model server that conversations of several turns come to and leave: each prompt is all before
    it. Medians of three rounds.
    """
    from trainer import new_model

    for name in ["tiny"] if quick else ["tiny", "small"]:
        with tempfile.TemporaryDirectory() as folder:
            new_model(Path(folder, "model"), _shape(name, 2048))
            for app in SERVERS:
                yield {
                    "model": name,
                    "server": app,
                    "tokens_s": event_loop.run(_measure_sampling(Path(folder), app, {}, TURNS)),
                }


async def _measure_sampling(folder: Path, app: str, options: Json, turns: int = 1, group: int = 1) -> float:
    """Sampled tokens a second, as the usage counts them.

    Args:
        turns: of each conversation.
        group: the conversations that begin with the same long prompt. With several, or several turns, twice as many
            conversations begin as run at once, and the lengths of the answers vary.
    """
    policy = {"kind": "model", "app": app, "model": "model", **options}
    config = folder / "global_config.yaml"
    config.write_text(json.dumps({"policy": policy, "ngym": {"head": {"port": 0}}}))
    varied = turns > 1 or group > 1
    count, at_once, draw = ANSWERS * (2 if varied else 1), asyncio.Semaphore(ANSWERS), random.Random(0)
    lengths = [[draw.randrange(8, 56) if varied else SAMPLED for _ in range(turns)] for _ in range(count)]
    rates = []
    async with Supervisor(load_config([config])) as running:
        peers = Peers(running.urls)

        async def conversation(number: int, played: int) -> int:
            messages: list[Json] = []
            sampled, first = 0, f"{played}-{number // group}" + " and so on" * (LONG_PROMPT if group > 1 else 0)
            async with at_once:
                for tokens in lengths[number]:
                    messages.append({"role": "user", "content": f"{number}?" if messages else first})
                    body = {"input": messages, "max_output_tokens": tokens, "ignore_eos": True}
                    answer = await peers["policy"].post("/v1/responses", body)
                    # With its token ids, as agents do. An answer of random tokens may be something else than a message.
                    messages += [item for item in answer["output"] if item["type"] == "message"]
                    sampled += answer["usage"]["output_tokens"]
            return sampled

        for played in range(4):
            began = time.perf_counter()
            tokens = sum(await asyncio.gather(*[conversation(number, played) for number in range(count)]))
            rates.append(tokens / (time.perf_counter() - began))
        await peers.close()
    return median(rates[1:])


def _shape(name: str, context: int) -> Json:
    layers, hidden, heads = SHAPES[name]
    shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "head_dim": 64}
    shape |= {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "max_position_embeddings": context}
    return shape


def _steps(name: str, tokens: int, batch: int, warm: bool = True) -> Json:
    """An SFT step on answers of about so many tokens. warm: after another one."""
    from trainer import new_model  # imports torch, whose memory would be counted above

    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        new_model(folder / "model", _shape(name, 2 * tokens))
        draw = random.Random(0)
        with (folder / "data.jsonl").open("w") as lines:
            for _ in range(2 * batch):
                text = "".join(draw.choice("0123456789") for _ in range(tokens - 8))
                messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
                lines.write(json.dumps({"messages": messages}) + "\n")
        spec = {"algorithm": "sft", "folder": str(folder / "out"), "model": str(folder / "model")}
        spec |= {"data": str(folder / "data.jsonl"), "batch": batch, "lr": 1e-4, "threads": os.cpu_count() or 1}
        spec |= {"micro_batch_tokens": max(4096, 2 * tokens), "engine": {"zero_stage": 0, "precision": "fp32"}}
        command = [sys.executable, str(HERE / "trainer_ours.py"), json.dumps(spec)]
        with Side(command, {**os.environ}, folder / "log") as side:
            if warm:
                side.step()
            found = side.step()
            peak = _peak_mb(side.pid)
            seconds = found["seconds"]
            size = {"parameters": side.ready["parameters"], "tokens": found["tokens"]}
        return {**size, "step_s": seconds, "tokens_s": found["tokens"] / seconds, "trainer_mb": peak}


AXES = {
    each.__name__: each
    for each in (
        in_flight,
        turns,
        replicas,
        answer_bytes,
        row_bytes,
        tasks,
        parameters,
        context,
        served_parameters,
        served_replicas,
        served_turns,
        served_groups,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(AXES), default=list(AXES), metavar="AXIS")
    parser.add_argument("--quick", action="store_true", help="the first sizes of each axis")
    parser.add_argument("--json", type=Path, help="where the rows go, too")
    options = parser.parse_args()
    found: dict[str, list[Json]] = {}
    for name in options.only:
        print(f"{name}, load {os.getloadavg()[0]:.1f}", flush=True)
        for row in AXES[name](options.quick):
            print("  " + "  ".join(f"{key} {format_figure(value)}" for key, value in row.items()), flush=True)
            found.setdefault(name, []).append(row)
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
