"""The trainer on one GPU: tokens/s, MFU and peak memory of SFT and GRPO steps with random weights, SFT beside TRL's trainer;
attention kernels; and pushes over `ipc` and `delta` into a model server.

    python benchmarks/gpu.py [--parts sft grpo attention ipc] [--shapes 0.6B 8B] [--micro-batch 8192] [--json FILE] [--write]
    python benchmarks/gpu.py --parts ipc --server models/vllm     # where vLLM is installed
    python benchmarks/gpu.py --tiny          # the same code with tiny shapes; also on a CPU

Each measurement is a process with a time limit of its own; one that fails or runs out of memory is a row that says so. The
ways of a shape are tried in order until one fits. `--write` puts the table into docs/gpus.md.

MFU is the share of the card's dense bf16 peak that 6 x parameters (without the embedding table) + 6 x layers x heads x head
size x tokens of context is, times the tokens/s. What activation checkpointing computes twice does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "gpus.md"
BEGIN, END = "<!-- measured by benchmarks/gpu.py: do not edit -->", "<!-- end of what was measured -->"
MARK = "@row "
Row = dict[str, Any]


def qwen3(hidden: int, inner: int, layers: int, heads: int, kv_heads: int = 8, *, tied: bool = True) -> Row:
    """The shape of a published Qwen3, without its weights."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": tied,
    }


SHAPES: dict[str, Row] = {
    "0.6B": qwen3(1024, 3072, 28, 16),
    "8B": qwen3(4096, 12288, 36, 32, tied=False),
    "1.7B": qwen3(2048, 6144, 28, 16),
    "4B": qwen3(2560, 9728, 36, 32),
}
TINY = {**qwen3(64, 128, 2, 4, 2), "head_dim": 32, "vocab_size": 1024, "max_position_embeddings": 1024}
# bf16 with float32 master weights and moments takes 16 bytes a parameter, and ZeRO 1 and 2 four more during a step.
ZERO_1 = {"zero_stage": 1, "precision": "bf16"}
IN_PARTS = {"zero_stage": 3, "precision": "bf16"}  # its step converts a part of the gradient at a time
ON_CPU = {"zero_stage": 2, "precision": "bf16", "offload": {"optimizer": "cpu"}}
WAYS: dict[str, list[Row]] = {
    "ours": [
        *({"engine": {**ZERO_1, "activation_checkpointing": again}} for again in (False, True)),
        *({"engine": {**how, "activation_checkpointing": True}} for how in (IN_PARTS, ON_CPU)),
    ],
    "ours, compiled": [
        {"engine": {**ZERO_1, "compile": True, "activation_checkpointing": again}} for again in (False, 0.6, 0.5, True)
    ],
    "TRL": [
        *({"dtype": "float32", "checkpointed": again} for again in (False, True)),
        {"dtype": "bfloat16", "checkpointed": True},
    ],
    "TRL, Liger": [{"dtype": "float32", "checkpointed": again, "liger": True} for again in (False, True)],
    # without float32 master weights: less memory and time, and small updates round away
    "TRL, Liger, bf16": [{"dtype": "bfloat16", "checkpointed": again, "liger": True} for again in (False, True)],
}
# Activations of so many tokens do not fit beside master weights: the first way is left out, with more all but the last.
LARGE, MANY = ("8B",), 4096
SEQUENCES, LENGTH, MICRO_BATCH = 16, 2048, 8192  # of an SFT step; tokens computed at once
GROUPS, ATTEMPTS, PROMPT, ANSWER = 4, 8, 1024, 1024  # of a GRPO step; answers are of a half to the whole length
WARM, MEASURED = 2, 5
CHANGED_SHARE = 0.03  # of the weights in bf16, by a step of AdamW at 1e-6 (docs/training.md)
# Model servers that pushes go into, and their options.
SERVERS: dict[str, Row] = {
    "models/transformers": {"dtype": "bfloat16"},
    "models/vllm": {
        "engine": {
            "dtype": "bfloat16",
            "enforce_eager": True,
            "gpu_memory_utilization": 0.3,
            "kv_cache_memory_bytes": 1 << 30,
            "max_model_len": 1024,
        }
    },
}
LIMIT_S = 150.0  # of one measurement
# bf16, dense, in FLOP/s (vendors' data sheets); by a part of the device's name
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}


def main() -> None:
    global MEASURED  # of this process, which is one measurement
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="in this order")
    parser.add_argument("--sides", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument(
        "--steps", type=int, default=MEASURED, help=f"measured ones, after {WARM}  [default: {MEASURED}]"
    )
    parser.add_argument("--micro-batch", type=int, default=MICRO_BATCH, help="tokens at once  [default: %(default)s]")
    parser.add_argument("--server", choices=list(SERVERS), default="models/transformers", help="that pushes go into")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the code")
    parser.add_argument("--seconds", type=float, default=1500, help="begin no measurement after these")
    parser.add_argument("--json", type=Path, help="where the rows go, too, after each of them")
    parser.add_argument("--profile", type=Path, help="a folder for the kernels of one more step of each of our rows")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # a spec: this process is a measurement
    options = parser.parse_args()
    if options.measure:
        spec = json.loads(options.measure)
        MEASURED = options.steps
        print(MARK + json.dumps(PARTS[spec["part"]](spec)), flush=True)
        return
    deadline, rows = time.monotonic() + options.seconds, []
    shapes = ["tiny"] if options.tiny else options.shapes
    for specs in measurements(options.parts, shapes, options.sides, options.micro_batch, options.server):
        if options.profile:
            options.profile.mkdir(parents=True, exist_ok=True)
            specs = [{**spec, "profile": str(options.profile.resolve())} for spec in specs]
        row = first_that_fits(specs, deadline, options.steps)
        print("  " + "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        rows.append(row)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    text = render_rows(rows, describe_machine())
    print(f"\n{text}")
    if options.write:
        write(text)


def measurements(
    parts: Sequence[str],
    shapes: Sequence[str],
    selected: Sequence[str] = (),
    at_once: int = MICRO_BATCH,
    server: str = "models/transformers",
) -> Iterator[list[Row]]:
    """The specs of each row: its ways, of which the first that fits is measured."""
    for part, side in (("ipc", server), ("delta", server), ("attention", "")):
        if part in parts:
            yield [{"part": part, "shape": "tiny" if shapes == ["tiny"] else "8B", "side": side}]
    sides = [
        ("sft", "ours, compiled"),
        ("sft", "TRL, Liger, bf16"),
        ("grpo", "ours, compiled"),
        ("grpo", "TRL, Liger, bf16"),
    ]
    sides += [("sft", "TRL, Liger"), ("sft", "TRL"), ("sft", "ours"), ("grpo", "ours")]
    for shape in shapes:
        for part, side in sides:
            if part in parts:
                if selected and side not in selected:
                    continue
                master = side != "TRL, Liger, bf16"
                ways = WAYS[side]
                if shape in LARGE and at_once >= MANY and master:
                    ways = ways[1:] if at_once == MANY else ways[-1:]
                more = {"micro_batch": at_once} if at_once != MICRO_BATCH else {}
                yield [{"part": part, "shape": shape, "side": side, **way, **more} for way in ways]


def first_that_fits(specs: Sequence[Row], deadline: float, steps: int = MEASURED) -> Row:
    row: Row = {}
    for spec in specs:
        row = {name: spec[name] for name in ("part", "shape", "side")} | run_measurement(spec, deadline, steps)
        if row.get("problem") != "out of memory":
            break
    return row


def run_measurement(spec: Row, deadline: float, steps: int = MEASURED) -> Row:
    """Its figures, or its `problem`."""
    left = deadline - time.monotonic()
    if left < 5:
        return {"problem": "not begun: no time was left"}
    command = [sys.executable, str(HERE / "gpu.py"), "--measure", json.dumps(spec), "--steps", str(steps)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=min(LIMIT_S, left), check=False)
    except subprocess.TimeoutExpired as error:  # it may have measured, and not have profiled
        late = {"problem": f"not done after {min(LIMIT_S, left):.0f} s"}
        return row_of((error.stdout or b"").decode(errors="replace")) or late
    if row := row_of(done.stdout):
        return row
    sys.stderr.write(done.stderr[-4000:])
    if "OutOfMemoryError" in done.stderr or "out of memory" in done.stderr or done.returncode == -9:
        return {"problem": "out of memory"}
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return {"problem": lines[-1][:200]}


def row_of(output: str) -> Row:
    """The last row of a measurement's output; empty without one."""
    found = [line for line in output.splitlines() if line.startswith(MARK)]
    row: Row = json.loads(found[-1].removeprefix(MARK)) if found else {}
    return row


# Measurements, each in a process of its own


def device_here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def shape_of(spec: Row) -> Row:
    return TINY if spec["shape"] == "tiny" else SHAPES[spec["shape"]]


def scale_tokens(spec: Row, tokens: int) -> int:
    """A number of tokens; a 32nd of it for the tiny shape."""
    return max(2, tokens // 32) if spec["shape"] == "tiny" else tokens


def at_once(spec: Row) -> int:
    """Tokens of a micro-batch."""
    return scale_tokens(spec, spec.get("micro_batch", MICRO_BATCH))


def network_of(shape: Row, dtype: torch.dtype, attention: str) -> Any:
    """Random weights, made on the device: the same ones in each dtype, but for rounding."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    with device_here():
        how = {"dtype": torch.float32, "attn_implementation": attention}
        return AutoModelForCausalLM.from_config(Qwen3Config(**shape), **how).to(dtype)


def sequences(spec: Row) -> list[list[int]]:
    draw, length = random.Random(0), scale_tokens(spec, LENGTH)
    return [[draw.randrange(1000) for _ in range(length)] for _ in range(SEQUENCES)]


def flop_per_token(shape: Row, parameters: int, context: float) -> float:
    """Forward and backward. context: the tokens that a token sees, times two."""
    table = shape["vocab_size"] * shape["hidden_size"]
    counted = parameters if shape["tie_word_embeddings"] else parameters - table
    attention = shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"] * context
    return 6.0 * counted + 6.0 * attention


def figures(spec: Row, seconds: Sequence[float], tokens: int, parameters: int, context: float) -> Row:
    rate, row = tokens / median(seconds), {}
    if torch.cuda.is_available():
        peak = next((peak for name, peak in PEAKS.items() if name in torch.cuda.get_device_name()), float("nan"))
        row = {
            "mfu": rate * flop_per_token(shape_of(spec), parameters, context) / peak,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        }
    return {"tokens_s": rate, "step_s": median(seconds), "slowest_s": max(seconds), "parameters": parameters, **row}


def ours(spec: Row) -> tuple[Any, int]:
    """The engine, and the number of its parameters."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from ngym.trainer.engine import engine
    from ngym.trainer.model import attention
    from ngym.trainer.model.policy import Policy
    from ngym.trainer.recipe import recipe

    ALL_ATTENTION_FUNCTIONS.register(attention.NAME, attention.packed_attention)
    network = network_of(shape_of(spec), torch.bfloat16, attention.NAME)
    parameters = sum(one.numel() for one in network.parameters())
    launch, adamw = recipe.Launch(rank=0, local_rank=0, ranks=1), recipe.OptimizerOptions(lr=1e-5)
    options = recipe.EngineOptions.model_validate(spec["engine"])
    return engine.Engine(Policy(network).eval(), launch, options, adamw), parameters


def time_steps(
    step: Callable[[], float], warm: int = WARM, measured: int | None = None
) -> tuple[list[float], list[float]]:
    """The seconds of the measured steps, and the losses of all."""
    seconds, losses = [], []
    for _ in range(warm + (MEASURED if measured is None else measured)):
        began = time.perf_counter()
        losses.append(step())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds[warm:], losses


def profile_step(spec: Row, row: Row, step: Callable[[], float]) -> Row:
    """The row. With --profile, after it: the kernels of one more step by their time, and the step's time beside theirs."""
    if "profile" not in spec:
        return row
    print(MARK + json.dumps(row), flush=True)  # the profile may take too long
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        time_steps(step, warm=0, measured=1)
    name = f"{spec['part']}-{spec['shape']}-{spec['side'].replace(', ', '-')}.txt"
    by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=by, row_limit=45, max_name_column_width=90)
    (Path(spec["profile"]) / name).write_text(table)
    return row


def in_group(measure: Callable[[Row], Row]) -> Callable[[Row], Row]:
    """Within a process group of this process alone."""

    def join_and_measure(spec: Row) -> Row:
        from ngym.trainer.engine import distributed
        from ngym.trainer.recipe import recipe

        with distributed.join_process_group(recipe.Launch(rank=0, local_rank=0, ranks=1)):
            return measure(spec)

    return join_and_measure


def way(spec: Row) -> str:
    """The settings of the measurement, for the table."""
    how = spec.get("engine", spec)
    labels = [f"ZeRO {how['zero_stage']}" if "zero_stage" in how else f"{spec['dtype']} weights"]
    labels += ["optimizer on the CPU"] if "offload" in how else []
    again = how.get("activation_checkpointing", False) or how.get("checkpointed", False)
    by_budget = isinstance(again, float)
    words = f"{again:.0%} of activations kept" if by_budget else f"{again} layers checkpointed"
    labels += ["checkpointed" if again is True else words] if again else []
    labels += [f"{spec['micro_batch']:,} tokens at once"] if "micro_batch" in spec else []
    return ", ".join(labels)


def sft(spec: Row) -> Row:
    """SFT: sequences of equal length, so that neither side pads."""
    if spec["side"].startswith("TRL"):
        return sft_by_trl(spec)
    return in_group(sft_by_us)(spec)


def sft_by_us(spec: Row) -> Row:
    from ngym.trainer import loop
    from ngym.trainer.algorithms.sft import Sft
    from ngym.trainer.data.samples import Sample, Segment

    learner, parameters = ours(spec)
    batch = [Sample((Segment(ids, [(1, len(ids))]),)) for ids in sequences(spec)]
    budget = at_once(spec)

    def step() -> float:
        return loop.take_step(learner, Sft(), batch, budget, 1.0).means["loss"]

    seconds, losses = time_steps(step)
    found = figures(spec, seconds, sum(sample.tokens for sample in batch), parameters, scale_tokens(spec, LENGTH))
    return profile_step(spec, {**found, "loss": losses[0], "way": way(spec)}, step)


def sft_by_trl(spec: Row) -> Row:
    """TRL's SFTTrainer with the same sequences, micro-batches and optimizer. Its first loss is ours."""
    try:
        import trl
    except ImportError as error:
        return {"problem": f"TRL is not installed: {error}"}
    from datasets import Dataset

    rows = sequences(spec)
    options = trl.SFTConfig(
        **trl_options(spec, SEQUENCES), adam_beta2=0.95, max_length=None, train_sampling_strategy="sequential"
    )
    data = Dataset.from_dict({"input_ids": rows * (WARM + MEASURED)})
    watch, parameters = run_of_trl(
        spec, lambda network, **more: trl.SFTTrainer(network, args=options, train_dataset=data, **more)
    )
    tokens = sum(map(len, rows))
    measured = figures(spec, watch.seconds[WARM:], tokens, parameters, scale_tokens(spec, LENGTH))
    return {**measured, "loss": watch.losses[0], "way": way(spec)}


def trl_options(spec: Row, batch: int) -> Row:
    """The options of its trainers; `batch` sequences make a step."""
    micro = at_once(spec) // scale_tokens(spec, LENGTH)
    return {
        "output_dir": os.environ.get("TMPDIR", "/tmp") + "/trl",
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": batch // micro,
        "max_steps": WARM + MEASURED,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "bf16": True,
        "gradient_checkpointing": spec["checkpointed"],
        "use_liger_kernel": spec.get("liger", False),
        "use_cpu": not torch.cuda.is_available(),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def run_of_trl(spec: Row, trainer: Callable[..., Any]) -> tuple[Any, int]:
    """The seconds and losses of the steps of a trainer of TRL, and the number of parameters."""
    from transformers import AutoTokenizer, TrainerCallback

    class Watch(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.losses: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - self.began)

        def on_log(self, args: Any, state: Any, control: Any, logs: Row, **_: Any) -> None:
            self.losses += [logs["loss"]] if "loss" in logs else []

    network, watch = network_of(shape_of(spec), getattr(torch, spec["dtype"]), "sdpa"), Watch()
    parameters = sum(one.numel() for one in network.parameters())
    tokenizer = AutoTokenizer.from_pretrained(HERE.parent / "data" / "tiny_policy" / "tokenizer")
    trainer(network, processing_class=tokenizer, callbacks=[watch]).train()
    return watch, parameters


def grpo_by_trl(spec: Row) -> Row:
    """TRL's GRPOTrainer on the same finished rollouts, brought by its `rollout_func`."""
    try:
        import trl
    except ImportError as error:
        return {"problem": f"TRL is not installed: {error}"}
    from datasets import Dataset

    groups: dict[str, list[Any]] = {}
    for rollout in draw_rollouts(spec):
        groups.setdefault(rollout.group, []).append(rollout)

    def rollouts(prompts: list[str], _: Any) -> dict[str, Any]:
        """prompts: each group's name, as often as it has rollouts."""
        rows = [one for name in prompts[::ATTEMPTS] for one in groups[name]]
        parts = [(one.segments[0], one.segments[0].spans[0][0]) for one in rows]
        return {
            "prompt_ids": [segment.token_ids[:first] for segment, first in parts],
            "completion_ids": [segment.token_ids[first:] for segment, first in parts],
            "logprobs": [segment.sampler for segment, _ in parts],
            "reward": [one.reward for one in rows],
        }

    def rewards(completions: list[str], reward: list[float], **_: Any) -> list[float]:
        return reward

    options = trl.GRPOConfig(
        **trl_options(spec, GROUPS * ATTEMPTS),
        num_generations=ATTEMPTS,
        steps_per_generation=GROUPS * ATTEMPTS // (at_once(spec) // scale_tokens(spec, LENGTH)),
        max_completion_length=scale_tokens(spec, ANSWER),
        beta=0.0,
        loss_type="dapo",
        shuffle_dataset=False,
    )
    data = Dataset.from_dict({"prompt": list(groups) * (WARM + MEASURED)})
    watch, parameters = run_of_trl(
        spec,
        lambda network, **more: trl.GRPOTrainer(
            network, reward_funcs=rewards, args=options, train_dataset=data, rollout_func=rollouts, **more
        ),
    )
    drawn = [one for rows in groups.values() for one in rows]
    tokens = sum(one.tokens for one in drawn)
    return {**figures(spec, watch.seconds[WARM:], tokens, parameters, tokens / len(drawn)), "way": way(spec)}


def grpo(spec: Row) -> Row:
    """GRPO: from finished rollouts with rewards to changed weights. Tokens count each rollout's prompt."""
    if spec["side"].startswith("TRL"):
        return grpo_by_trl(spec)
    return in_group(grpo_by_us)(spec)


def grpo_by_us(spec: Row) -> Row:
    from ngym.trainer import loop
    from ngym.trainer.algorithms.policy_gradient import PolicyGradient
    from ngym.trainer.recipe.algorithms import GrpoOptions

    learner, parameters = ours(spec)
    rollouts, budget = draw_rollouts(spec), at_once(spec)
    algorithm = PolicyGradient(GrpoOptions(), 1, None)  # an update a batch, as `ng_train` and TRL have by default

    def step() -> float:
        return loop.take_step(learner, algorithm, algorithm.prepare(rollouts, learner, budget), budget, 1.0).means[
            "loss"
        ]

    seconds, _ = time_steps(step)
    tokens = sum(rollout.tokens for rollout in rollouts)
    found = figures(spec, seconds, tokens, parameters, tokens / len(rollouts))
    return profile_step(spec, {**found, "way": way(spec)}, step)


def draw_rollouts(spec: Row) -> list[Any]:
    from ngym.trainer.data.samples import RolloutSample, SampledSegment

    draw, rollouts = random.Random(0), []
    prompt, answer = scale_tokens(spec, PROMPT), scale_tokens(spec, ANSWER)
    fields = {"components": {}, "truncated": False, "turns": 1, "tool_calls": 0, "tool_errors": 0}
    for group in range(GROUPS):
        shared = [draw.randrange(1000) for _ in range(prompt)]
        for _ in range(ATTEMPTS):
            ids = shared + [draw.randrange(1000) for _ in range(draw.randrange(answer // 2, answer + 1))]
            segment = SampledSegment(ids, [(prompt, len(ids))], sampler=[-7.0] * (len(ids) - prompt))
            rollouts.append(RolloutSample(segments=(segment,), group=str(group), reward=draw.random(), **fields))
    return rollouts


def attention(spec: Row) -> Row:
    """Forward and backward of one layer's attention over rollouts that share prompts, in ms, by kernel."""
    from attention_kernels import KERNELS, PackedRows, unavailable

    shape, device, found = shape_of(spec), device_here(), {}
    batch = PackedRows.draw(2, ATTEMPTS, scale_tokens(spec, 2 * PROMPT), scale_tokens(spec, ANSWER), device)
    heads = [shape["num_attention_heads"], *[shape["num_key_value_heads"]] * 2]
    inputs = [
        torch.randn(batch.tokens, count, shape["head_dim"], device=device, dtype=torch.bfloat16, requires_grad=True)
        for count in heads
    ]
    for name, kernel in KERNELS.items():
        if unavailable(name, device, torch.bfloat16, backward=True):
            continue

        def step(kernel: Any = kernel) -> float:
            kernel(*inputs, batch).square().mean().backward()
            return 0.0

        try:
            found[name] = 1e3 * median(time_steps(step)[0])
        except (RuntimeError, torch.OutOfMemoryError) as error:  # a row for the others all the same
            found[name] = str(error).splitlines()[0][:80]
    return {"tokens": batch.tokens, "kernels_ms": found}


def ipc(spec: Row) -> Row:
    """Pushes over `ipc`, of weights that all changed. vLLM takes no `ipc` on a CPU: there they go over `http`."""
    has_ipc = torch.cuda.is_available() or spec["side"] == "models/transformers"
    return push(spec, "ipc" if has_ipc else "http", lambda weight: weight.mul_(1.02))  # more than bf16 rounds away


def delta(spec: Row) -> Row:
    """Pushes over `delta`, of weights of which CHANGED_SHARE moved to the next value in bf16."""
    return push(spec, "delta", move_some)


def move_some(weight: torch.Tensor) -> None:
    weight.view(torch.int16).add_(torch.rand(weight.shape, device=weight.device) < CHANGED_SHARE)


def push(spec: Row, transport: str, step: Callable[[torch.Tensor], object]) -> Row:
    """Pushes into a model server, as `ng_train` makes them: names and shapes, the weights, the commit, and the proof that
    both have the same log-probabilities.

    Args:
        step: changes a weight in place, before each push.
    """
    import ngym
    from ngym.trainer.weights.push import Pusher
    from ngym.trainer.weights.replica import LogprobProof

    shape = shape_of(spec)
    network = network_of(shape, torch.bfloat16, "sdpa").eval()
    ids = list(range(20, 84))
    with tempfile.TemporaryDirectory(prefix="ngym-", dir="/dev/shm") as name:  # 16 GB, read once
        network.save_pretrained(Path(name, "model"))
        for file in (HERE.parent / "data" / "tiny_policy" / "tokenizer").iterdir():
            shutil.copy(file, Path(name, "model"))
        token = secrets.token_hex(16)
        server, on_gpu = spec["side"], torch.cuda.is_available()
        stanza: Row = {"kind": "model", "app": server, "model": "model", "push_token": token, **SERVERS[server]}
        if transport == "ipc" and on_gpu and "engine" in stanza:
            stanza["engine"] = {**stanza["engine"], "weight_transfer_config": {"backend": "ipc"}}
        config = Path(name, "services.yaml")
        config.write_text(json.dumps({"policy": stanza}))
        with ngym.run(config, progress=False) as services:
            pusher, pushes = Pusher(services.urls["policy"], token, transport=transport), []
            for _ in range(WARM + MEASURED):
                version = pusher.prepare() + 1
                with torch.no_grad():
                    for weight in network.parameters():
                        step(weight)
                    logits_TV = network(torch.tensor([ids], device=device_here())).logits[0, :-1].float()
                    next_T1 = torch.tensor(ids[1:], device=device_here())[:, None]
                    logprobs = logits_TV.log_softmax(-1).gather(1, next_T1)[:, 0].tolist()
                proof = LogprobProof(ids, logprobs, "bfloat16")
                pushes.append(pusher.push(version, network.state_dict(), proof))
            pusher.finish()
    seconds = [push.seconds for push in pushes[WARM:]]
    worst = max(push.difference for push in pushes)
    return {
        "gb": pushes[-1].bytes / 1e9,
        "push_s": median(seconds),
        "slowest_s": max(seconds),
        "difference": worst,
        "over": transport,
    }


PARTS: dict[str, Callable[[Row], Row]] = {"sft": sft, "grpo": grpo, "attention": attention, "ipc": ipc, "delta": delta}


# The table


def describe_machine() -> str:
    import transformers

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {sys.version.split()[0]}"
    return f"{time.strftime('%Y-%m-%d')}, {name}; {versions}; load {os.getloadavg()[0]:.1f}."


def render_rows(rows: Sequence[Row], machine: str) -> str:
    lines = [machine]
    heads = ("step", "shape", "", "tokens/s", "MFU", "peak GiB", "step s", "slowest", "first loss", "way")
    cells = [cells_of(row) for row in rows if row["part"] in ("sft", "grpo")]
    lines += table(heads, cells) if cells else []
    for row in rows:
        if row["part"] == "attention":
            what = f"{row['tokens']:,} tokens, bf16" if "tokens" in row else row.get("problem", "")
            kernels = row.get("kernels_ms", {}).items()
            lines += ["", f"Attention of a layer, forward and backward, {what}:"]
            lines += table(("kernel", "ms"), [(name, number(ms, 2)) for name, ms in kernels])
        if row["part"] in ("ipc", "delta"):
            what = row.get("problem") or f"{row['gb']:.2f} GB in {number(row['push_s'], 3)} s, proof included"
            lines += ["", f"A push over `{row.get('over', row['part'])}` into {row['side']}: {what}."]
    return "\n".join(lines)


def cells_of(row: Row) -> list[str]:
    name = [row["part"], row["shape"], row["side"]]
    if "problem" in row:
        return [*name, "", "", "", "", "", "", row["problem"]]
    mfu = f"{row['mfu']:.1%}" if "mfu" in row else ""
    rest = [
        number(row.get("peak_gib"), 1),
        number(row["step_s"], 3),
        number(row["slowest_s"], 3),
        number(row.get("loss"), 4),
    ]
    return [*name, f"{row['tokens_s']:,.0f}", mfu, *rest, row["way"]]


def number(value: Any, digits: int) -> str:
    return f"{value:,.{digits}f}" if isinstance(value, float) else str(value or "")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["", *(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *rows))]


def write(text: str) -> None:
    page = PAGE.read_text()
    before, rest = page.split(BEGIN, 1)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}")


if __name__ == "__main__":
    main()
