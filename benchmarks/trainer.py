"""The time of an optimiser step here and in TRL: SFT, DPO and GRPO with the same model, data, batches and settings.

Each side is a separate process (TRL's in a virtual environment that the first run creates), and they take their steps in
turns, so that a busy machine slows both. That both do the same work is seen in their losses. TRL is run in several ways, and
compared at its fastest. Tokens are those of the samples, without padding: how a side computes them is its affair. (Ours computes
what samples begin with in common once.)

    python benchmarks/trainer.py [--algorithms sft dpo grpo] [--shapes tiny small] [--steps 20] [--trl PYTHON]

GRPO is its training part: finished rollouts become advantages, the loss, a step. TRL gets them through its `rollout_func`,
instead of generating. The data are the quickstart's, made by the first run (two minutes, in the folder).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from gpu import PEAKS
from lockstep import Side
from peer_environments import TRL, trl_python

from ngym.config.shipped_files import shipped
from ngym.runtime.cpu_threads import SPINNING_BRIEFLY

HERE = Path(__file__).parent
CONFIG = """\
policy: {kind: model, app: models/vllm, model: sft/policy, bundle_tokens: true}
calculator: {kind: gym_server, app: gym_servers/calculator}
calculator_agent: {kind: agent, app: agents/simple, gym: calculator, model: policy, max_steps: 4}
"""
GROUP = 8
LONGEST = 512  # a rollout that never ended would be most of its batch's padding
BATCH = {"sft": 32, "dpo": 32, "grpo": 8 * GROUP}
# The ways of TRL that could be its fastest. Packing (SFT only) changes the batches; `padding_free` is the alternative:
# one flat sequence and no padding. Its DPO and GRPO know no such thing in this version.
WAYS: dict[str, list[dict[str, Any]]] = {
    "sft": [{"micro_batch": 32}, {"micro_batch": 8}, {"micro_batch": 32, "padding_free": True}],
    "dpo": [{"micro_batch": 32}, {"micro_batch": 8}],
    "grpo": [{"micro_batch": 64}, {"micro_batch": 8}],
}
SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
LR = {"tiny": 1e-3, "small": 1e-4}


class ComparisonRow(NamedTuple):
    """One way of one side, over the measured steps. ratio: its seconds a token over ours, step by step."""

    name: str
    tokens_per_s: float
    ratio: float
    cpu_ratio: float
    cpu_ms_per_token: float
    losses: list[float]
    grad_norms: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=list(BATCH), default=list(BATCH))
    parser.add_argument("--shapes", nargs="+", choices=list(LR), default=list(LR))
    parser.add_argument(
        "--steps", type=int, choices=range(1, 25), default=20, metavar="N", help="measured ones; three more warm up"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--micro-batch-tokens", type=int, default=16384, metavar="N", help="of ours  [default: 16384]")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument(
        "--float32-matmul-precision", choices=["highest", "high"], default="highest", help="of both sides"
    )
    parser.add_argument(
        "--compile", action="store_true", help="ours with engine.compile; TRL with and without its torch_compile"
    )
    parser.add_argument("--profile", action="store_true", help="the parts of another step of ours, and their rates")
    parser.add_argument("--trl", type=Path, help="the Python of an environment with TRL  [default: one is made]")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    python = options.trl or trl_python(options.folder / "trl")
    data = make_data(options.folder / "trainer")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {options.threads} threads"
    products = options.float32_matmul_precision
    print(
        f"{device}, {options.precision}, matrix products {products}; load {os.getloadavg()[0]:.1f}; torch {torch.__version__}, TRL {TRL}"
    )
    for shape in options.shapes:
        for algorithm in options.algorithms:
            show(algorithm, shape, compare(algorithm, shape, options, python, data))


def compare(algorithm: str, shape: str, options: argparse.Namespace, python: Path, data: Path) -> list[ComparisonRow]:
    bf16 = options.precision == "bf16"
    spec = {
        "algorithm": algorithm,
        "folder": str(options.folder / "out"),
        "model": str(model_of(data, algorithm, shape)),
        "data": str(data / f"{algorithm}.jsonl"),
        "batch": BATCH[algorithm],
        "lr": LR[shape],
        "threads": options.threads,
        "bf16": bf16,
        "engine": {
            "zero_stage": int(bf16),
            "precision": options.precision,
            "float32_matmul_precision": options.float32_matmul_precision,
            "compile": options.compile,
        },
        "micro_batch_tokens": options.micro_batch_tokens,
        "profiled": 3 + options.steps + 1 if options.profile else None,
    }
    environment = {**os.environ, **SPINNING_BRIEFLY}  # both sides: threads that spin for longer slow the other side
    commands = {"ours": [sys.executable, str(HERE / "trainer_ours.py"), json.dumps(spec)]}
    for way in ways(algorithm, shape, options.compile):
        commands[f"TRL {describe_way(way)}"] = [
            str(python),
            str(HERE / "trainer_trl.py"),
            json.dumps({**spec, "way": way}),
        ]
    out = options.folder / "out"
    out.mkdir(exist_ok=True)
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(Side(command, environment, out / f"{algorithm}-{shape}-{index}.log"))
            for index, (name, command) in enumerate(commands.items())
        }
        reports: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for _ in range(3 + options.steps):
            for name, side in sides.items():
                reports[name].append(side.step())
        if options.profile:
            print(f"\nours, a step: {parts(sides['ours'].step())}")
        parameters = sides["ours"].ready["parameters"]
    tokens = [report["tokens"] for report in reports["ours"]]
    found = [compare_reports(name, each, reports["ours"], tokens) for name, each in reports.items()]
    if torch.cuda.is_available():
        for one in found:
            print(f"  {one.name}: MFU {mfu(one.tokens_per_s, parameters):.1%}")
    return found


def parts(step: dict[str, float]) -> str:
    rest = 1 - step["products"] - step["attention"] - step["adamw"]
    return (
        f"matrix products {step['products']:.0%}, at {step['gflops']:.0f} GFLOP/s (a single large one: "
        f"{step['most_gflops']:.0f}); attention {step['attention']:.0%}; AdamW {step['adamw']:.1%}, at "
        f"{step['adamw_gb_s']:.0f} GB/s (copying: {step['copied_gb_s']:.0f}); the rest {rest:.0%}"
    )


def ways(algorithm: str, shape: str, compiled: bool) -> list[dict[str, Any]]:
    """All that could be TRL's fastest; of the small model only those that leave room for the others in 24 GB."""
    found = [way for way in WAYS[algorithm] if shape == "tiny" or way["micro_batch"] == 8 or "padding_free" in way]
    return found + [{**way, "compile": True} for way in found] if compiled else found


def compare_reports(
    name: str, reports: Sequence[dict[str, float]], ours: Sequence[dict[str, float]], tokens: Sequence[float]
) -> ComparisonRow:
    warm = slice(3, None)
    pairs = list(zip(reports[warm], ours[warm], strict=True))
    cpu = sum(report["cpu"] for report in reports[warm])
    return ComparisonRow(
        name,
        1 / median(report["seconds"] / count for report, count in zip(reports[warm], tokens[warm], strict=True)),
        median(report["seconds"] / own["seconds"] for report, own in pairs),
        cpu / sum(own["cpu"] for own in ours[warm]),
        1e3 * cpu / sum(tokens[warm]),
        [report["loss"] for report in reports],
        [report["grad_norm"] for report in reports],
    )


def show(algorithm: str, shape: str, found: Sequence[ComparisonRow]) -> None:
    best = min(found[1:], key=lambda one: one.ratio)
    print(f"\n{algorithm}, {shape}: {best.ratio:.2f} x the tokens/s of TRL at its fastest ({best.name})")
    print(
        f"  {'':<34} {'tokens/s':>9} {'time':>6} {'CPU':>6} {'CPU ms/token':>13}   losses of steps 1 2 3 10 20, gradient 1"
    )
    for one in found:
        losses = " ".join(f"{one.losses[step - 1]:.4f}" for step in (1, 2, 3, 10, 20) if step <= len(one.losses))
        print(
            f"  {one.name:<34} {one.tokens_per_s:>9,.0f} {one.ratio:>6.2f} {one.cpu_ratio:>6.2f} "
            f"{one.cpu_ms_per_token:>13.3f}   {losses}, {one.grad_norms[0]:.4f}",
            flush=True,
        )


def describe_way(way: dict[str, Any]) -> str:
    how = "padding-free" if way.get("padding_free") else "padded"
    return f"{how}, {way['micro_batch']} at once{', compiled' if way.get('compile') else ''}"


def mfu(tokens_per_s: float, parameters: int) -> float:
    """The share of the device's peak that 6 x parameters x tokens are; attention over these short sequences is left out."""
    peak = next((peak for name, peak in PEAKS.items() if name in torch.cuda.get_device_name()), float("nan"))
    return 6 * parameters * tokens_per_s / peak


def make_data(folder: Path) -> Path:
    """The folder of the data: a policy that the quickstart's recipe made, its rollouts, pairs of them, and the shapes."""
    if (folder / "made").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    calculator = shipped() / "data" / "calculator"
    demonstrations, rollouts, pairs = (folder / f"{name}.jsonl" for name in ("demonstrations", "rollouts", "pairs"))
    (folder / "global_config.yaml").write_text(CONFIG)
    run(str(calculator / "generate.py"), "demonstrations", "--output", str(demonstrations), "--seed", "0")
    run("-m", "ngym", "train", "sft.yaml", f"data.path={demonstrations}", f"output={folder / 'sft'}", "--overwrite")
    run(
        *("-m", "ngym", "collect_rollouts", "--config", str(folder / "global_config.yaml")),
        *("--agent", "calculator_agent", "--input", str(calculator / "train.jsonl"), "--limit", "384"),
        *("--repeats", str(GROUP), "--output", str(rollouts), "--overwrite"),
    )
    run(
        *("-m", "ngym", "export", "--format", "preferences", "--input", str(rollouts), "--output", str(pairs)),
        *("--pairs", "best-worst", "--max-pairs", "4", "--overwrite"),
    )
    write(folder / "sft.jsonl", read(demonstrations))
    write(folder / "dpo.jsonl", random.Random(0).sample(read(pairs), len(read(pairs))))
    write(folder / "grpo.jsonl", whole_groups(read(rollouts)))
    tiny = json.loads((folder / "sft" / "policy" / "config.json").read_text())
    shapes = {"tiny": {**{key: tiny[key] for key in SMALL}, "initializer_range": 0.05}, "small": SMALL}
    for name, shape in shapes.items():
        new_model(folder / name, shape)
    (folder / "made").touch()
    return folder


def whole_groups(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rollouts of the tasks whose attempts were all scored, group after group."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("reward") is not None and len(row["ng"]["segments"][0]["token_ids"]) <= LONGEST:
            groups.setdefault(row["_ng_task_index"], []).append(row)
    return [row for group in groups.values() if len(group) == GROUP for row in group]


def new_model(folder: Path, shape: dict[str, Any]) -> None:
    from ngym.trainer.model import policy as model
    from ngym.trainer.recipe import recipe as config

    options = config.ModelOptions(from_scratch=shape, tokenizer="data/tiny_policy/tokenizer")
    tokenizer = model.load_tokenizer(options)
    model.load_policy(options, tokenizer, 0).network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def model_of(data: Path, algorithm: str, shape: str) -> Path:
    """SFT begins with a new model; the quickstart's policy learns from its own rollouts."""
    return data / "sft" / "policy" if shape == "tiny" and algorithm != "sft" else data / shape


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, stdout=sys.stderr)


def read(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
