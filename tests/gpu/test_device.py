"""The trainer on a device, against plain PyTorch in float32 on the CPU.

`make test` runs this file on the CPU, `pytest -m gpu` on an NVIDIA GPU: the same bodies, so that only CUDA itself is left
to be tested there.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import math
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled import QUICKLY_COMPILED, rounds_on_cpu
from image_models import png, segment_with, write_image_model
from paths import ROOT
from plain_engine import PlainEngine
from safetensors.torch import save_file
from steps_on_ranks import SHAPE, TOKENIZER
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ngym.trainer import loop
from ngym.trainer.algorithms import Setup, dpo, kto, reward_model, sft
from ngym.trainer.data import samples
from ngym.trainer.engine import engine, optimizer, sanity_checks
from ngym.trainer.model import attention, layers, packing
from ngym.trainer.model import policy as model
from ngym.trainer.model.lora import write_base
from ngym.trainer.recipe import recipe
from ngym.trainer.weights.colocated_phases import ColocatedPhases

pytestmark = pytest.mark.usefixtures("only_rank")

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]
LAUNCH = recipe.Launch(rank=0, local_rank=0, ranks=1)
ADAMW = {"lr": 1e-2, "eps": 1e-3}  # the eps hides no gradient: a wrong factor moves the weights by lr
BUDGET = 300  # tokens: several micro-batches in a step


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=GPU)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def nothing_left_on_the_gpu(device: torch.device) -> Iterator[None]:
    yield
    if device.type == "cuda":
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(ROOT / TOKENIZER)


@pytest.fixture(scope="module")
def start(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a policy and of a teacher."""
    folder = tmp_path_factory.mktemp("start")
    for seed, name in enumerate(("policy", "teacher")):
        shape = {**SHAPE, "head_dim": 16}  # the least that FlexAttention takes
        options = recipe.ModelOptions(from_scratch=shape, tokenizer=TOKENIZER)
        model.load_policy(options, tokenizer, seed).network.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


# Samples of each kind, without files


def draw_ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(20, 1000) for _ in range(count)]


def demonstrations(seed: int = 0, count: int = 12) -> list[Any]:
    draw = random.Random(seed)
    lengths = [draw.randrange(8, 60) for _ in range(count)]
    return [samples.Sample((samples.Segment(draw_ids(draw, length), [(4, length)]),)) for length in lengths]


def pairs() -> list[Any]:
    draw, samples_made = random.Random(1), []
    for _ in range(6):
        prompt = draw_ids(draw, 12)
        sides = [(prompt + draw_ids(draw, draw.randrange(4, 20)), chosen) for chosen in (True, False)]
        samples_made.append(
            dpo.PairSample(tuple(dpo.Side(ids, [(12, len(ids))], chosen=chosen) for ids, chosen in sides))
        )
    return samples_made


def labeled_samples() -> list[Any]:
    answers, others = demonstrations(2), demonstrations(3)
    return [
        kto.LabeledSample(one.segments, label=index % 2 == 0, mismatched=other)
        for index, (one, other) in enumerate(zip(answers, others, strict=True))
    ]


def judged() -> list[Any]:
    draw, result = random.Random(4), []
    for _ in range(6):
        ids = [draw_ids(draw, draw.randrange(10, 30)) for _ in range(2)]
        sides = (
            reward_model.JudgedSegment(one, [(len(one), len(one) + 1)], label=chosen, length=len(one))
            for one, chosen in zip(ids, (True, False), strict=True)
        )
        result.append(reward_model.JudgedSample(tuple(sides)))
    return result


def rollouts() -> list[Any]:
    """Three tasks with four attempts each, which share their prompts; every attempt has two spans."""
    draw, result = random.Random(5), []
    for group in range(3):
        prompt = draw_ids(draw, 20)
        for _ in range(4):
            ids = prompt + draw_ids(draw, draw.randrange(12, 30))
            spans = [(20, 26), (29, len(ids))]
            sampler = [-6.9 + 0.2 * draw.random() for start, end in spans for _ in range(start, end)]
            fields = {"components": {}, "truncated": False, "turns": 1, "tool_calls": 0, "tool_errors": 0}
            segments = (samples.SampledSegment(ids, spans, sampler=sampler),)
            result.append(samples.RolloutSample(segments=segments, group=str(group), reward=draw.random(), **fields))
    return result


FAMILIES: dict[str, tuple[dict[str, Any], Any]] = {
    "sft": ({"name": "sft"}, demonstrations),
    "dpo": ({"name": "dpo"}, pairs),
    "wpo, with collisions": ({"name": "wpo"}, pairs),
    "orpo": ({"name": "orpo"}, pairs),
    "kto": ({"name": "kto"}, labeled_samples),
    "reward model": ({"name": "reward_model", "center_coef": 0.01}, judged),
    "grpo, entropy and KL": (
        {
            "name": "grpo",
            "loss": {"entropy_coef": 0.01},
            "kl": {"coef": 0.05},
            "correction": {"kind": "token"},
        },
        rollouts,
    ),
    "gspo": ({"name": "gspo"}, rollouts),
    "cispo": ({"name": "cispo"}, rollouts),
    "ppo": ({"name": "grpo", "advantage": {"estimator": "gae", "lam": 0.95}, "critic": {}}, rollouts),
    "distillation": ({"name": "grpo", "teacher": {"path": "teacher", "beta": 0.5, "reward_coef": 1.0}}, rollouts),
}


def make_recipe(start: Path, family: str, **more: Any) -> recipe.Recipe:
    algorithm = dict(FAMILIES[family][0])
    if "teacher" in algorithm:
        algorithm["teacher"] = {**algorithm["teacher"], "path": str(start / "teacher")}
    defaults = {"output": "unused", "model": {"path": str(start / "policy")}, "data": {"path": "unused"}}
    return recipe.Recipe.model_validate({**defaults, "algorithm": algorithm, **more})


def network(spec: recipe.Recipe, tokenizer: PreTrainedTokenizerBase, *, critic: bool = False) -> Any:
    if spec.algorithm.name == "reward_model":
        return model.load_reward_model(spec.model, tokenizer, 0).eval()
    policy = model.load_policy(spec.model, tokenizer, 0).eval()
    if critic:
        policy.critic = model.CriticNetwork(policy.network, None)
        nn.init.normal_(policy.critic.head.weight, std=0.1, generator=torch.Generator().manual_seed(1))
    return policy


def plain(spec: recipe.Recipe, tokenizer: PreTrainedTokenizerBase, *, critic: bool = False) -> PlainEngine:
    policy = network(spec, tokenizer, critic=critic)
    built = optimizer.build(policy.network, spec.optimizer, policy.critic)
    return PlainEngine(policy, built, spec.optimizer.max_grad_norm)


def build_engine(spec: recipe.Recipe, tokenizer: PreTrainedTokenizerBase, device: torch.device, **more: Any) -> Any:
    learner = engine.Engine(network(spec, tokenizer, **more), LAUNCH, spec.engine, spec.optimizer)
    assert learner.device.type == device.type
    return learner


def state(learner: Any, kind: str) -> dict[str, Tensor]:
    """The float32 tensors of a kind (`master`, Adam's `exp_avg`) by the names of the weights, on the CPU."""
    if isinstance(learner, PlainEngine):
        return learner.state(kind)
    gathered = optimizer.gather_state(learner._deepspeed, learner.policy)
    return {name.removeprefix(f"{kind}/"): one for name, one in gathered if name.startswith(f"{kind}/")}


def change(before: dict[str, Tensor], after: dict[str, Tensor]) -> Tensor:
    return torch.cat([(after[name] - before[name]).flatten() for name in before])


def steps(learner: Any, algorithm: Any, batches: Sequence[Sequence[Any]]) -> list[tuple[float, float]]:
    results = [loop.take_step(learner, algorithm, batch, BUDGET, 1.0) for batch in batches]
    return [(one.means["loss"], one.update.grad_norm) for one in results]


# Losses and gradients


def first_steps(
    spec: recipe.Recipe, family: str, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> list[tuple[float, Tensor]]:
    """The loss of a step, and Adam's first moment after it: of plain torch on the CPU, and of the engine on the device."""
    found = []
    for build in (plain, lambda *args, **more: build_engine(*args, device, **more)):
        learner: Any = build(spec, tokenizer, critic=family == "ppo")
        algorithm = spec.algorithm.create(Setup(spec, learner, tokenizer))
        batch = algorithm.prepare(FAMILIES[family][1](), learner, BUDGET)
        (step,) = steps(learner, algorithm, [batch])
        moments = state(learner, "exp_avg")
        found.append((step[0], torch.cat([moments[name].flatten() for name in sorted(moments)])))
    return found


# How close a first step is, by precision: its loss (relative, absolute) and its gradient.
CLOSE = {"fp32": (1e-4, 1e-5, 2e-3), "bf16": (0.02, 0.02, 0.06), "fp16": (0.003, 0.003, 0.01)}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_loss_and_its_gradient_are_those_of_plain_torch(
    family: str, precision: str, device: torch.device, start: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """After one step Adam's first moment is the gradient, times 1 - beta."""
    spec = make_recipe(
        start,
        family,
        engine={"zero_stage": int(precision != "fp32"), "precision": precision},
        optimizer={"name": "adamw", "lr": 1e-3, "max_grad_norm": None},
    )
    (loss, gradient), (of_device, of_device_gradient) = first_steps(spec, family, tokenizer, device)
    relative, absolute, of_gradient = CLOSE[precision]
    assert of_device == pytest.approx(loss, rel=relative, abs=absolute)
    error = float((of_device_gradient - gradient).norm() / gradient.norm())
    assert gradient.norm() > 1e-5 and error < of_gradient, error


@pytest.fixture
def back_to_float32() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("back_to_float32")
def test_products_in_tf32_have_nearly_the_gradient_of_float32_and_are_proved_as_such(
    device: torch.device, start: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """A CPU has none, and computes in float32."""
    is_gpu = device.type == "cuda"
    spec = make_recipe(
        start, "sft", engine={"float32_matmul_precision": "high"}, optimizer={"lr": 1e-3, "max_grad_norm": None}
    )
    (loss, gradient), (of_device, of_device_gradient) = first_steps(spec, "sft", tokenizer, device)
    relative, absolute, of_gradient = CLOSE["fp16" if is_gpu else "fp32"]
    assert torch.get_float32_matmul_precision() == "high"
    assert of_device == pytest.approx(loss, rel=relative, abs=absolute)
    assert float((of_device_gradient - gradient).norm() / gradient.norm()) < of_gradient
    learner = build_engine(spec, tokenizer, device)
    assert learner.dtype == "float32" and learner.product_dtype == ("float16" if is_gpu else "float32")


@pytest.mark.parametrize("family", ["sft", "grpo, entropy and KL", "gspo", "distillation"])
def test_compiled_layers_with_flex_attention_have_the_gradient_of_plain_torch(
    family: str, device: torch.device, start: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefixes are shared, lengths differ, and the head's kernels are compiled, too."""
    if device.type == "cpu" and family != "gspo":
        pytest.skip("FlexAttention has no backward on a CPU; tests/trainer/test_scores.py has the rest")
    if device.type == "cpu" and not rounds_on_cpu:
        pytest.skip("the trainer refuses it with this torch")
    if not any(map(shutil.which, layers.COMPILERS)):
        pytest.skip("there is no C++ compiler")
    masks: list[attention.Layout] = []
    make_block_mask = attention.Layout.make_block_mask
    monkeypatch.setattr(
        attention.Layout, "make_block_mask", lambda self, device: masks.append(self) or make_block_mask(self, device)
    )
    plain, eager = attention.packed_attention, list[bool]()
    monkeypatch.setattr(
        attention, "packed_attention", lambda *args, **named: eager.append("flex" in named) or plain(*args, **named)
    )
    spec = make_recipe(
        start,
        family,
        engine={"zero_stage": 1, "precision": "bf16", "compile": True},
        optimizer={"name": "adamw", "lr": 1e-3, "max_grad_norm": None},
    )
    with torch._inductor.config.patch(QUICKLY_COMPILED if device.type == "cpu" else {}):
        (loss, gradient), (of_device, of_device_gradient) = first_steps(spec, family, tokenizer, device)
    assert bool(masks) == (not any(eager)) == (device.type == "cuda")  # in the layers' graphs, not outside of them
    assert of_device == pytest.approx(loss, rel=0.02, abs=0.02)
    error = float((of_device_gradient - gradient).norm() / gradient.norm())
    assert error < 0.06, error


WAYS: dict[str, dict[str, Any]] = {
    "zero 0": {"zero_stage": 0},
    "zero 1": {"zero_stage": 1},
    "zero 2": {"zero_stage": 2},
    "zero 3": {"zero_stage": 3},
    "bf16, zero 1": {"zero_stage": 1, "precision": "bf16"},
    "bf16, zero 2": {"zero_stage": 2, "precision": "bf16"},
    "bf16, zero 3": {"zero_stage": 3, "precision": "bf16"},
    "fp16, zero 1": {"zero_stage": 1, "precision": "fp16"},
    "fp16, zero 2": {"zero_stage": 2, "precision": "fp16"},
    "fp16, zero 3": {"zero_stage": 3, "precision": "fp16"},
    "zero 1, optimizer on the CPU": {"zero_stage": 1, "offload": {"optimizer": "cpu"}},
    "optimizer on the CPU": {"zero_stage": 2, "offload": {"optimizer": "cpu"}},
    "weights on the CPU": {"zero_stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
    "bf16, optimizer on the CPU": {"zero_stage": 2, "precision": "bf16", "offload": {"optimizer": "cpu"}},
    "checkpointed": {"activation_checkpointing": True},
    "bf16, checkpointed": {"zero_stage": 1, "precision": "bf16", "activation_checkpointing": True},
    "compiled": {"compile": True},
    "bf16, compiled, checkpointed": {
        "zero_stage": 1,
        "precision": "bf16",
        "compile": True,
        "activation_checkpointing": True,
    },
    "bf16, compiled, half of the activations": {
        "zero_stage": 1,
        "precision": "bf16",
        "compile": True,
        "activation_checkpointing": 0.5,
    },
    "fp16, compiled": {"zero_stage": 1, "precision": "fp16", "compile": True},
}


def compiles(device: torch.device) -> None:
    """Skip where compilation takes too long or is impossible."""
    if device.type == "cpu":
        pytest.skip("tests/trainer/test_scores.py compiles for a CPU; it takes half a minute")
    if not any(map(shutil.which, layers.COMPILERS)):
        pytest.skip("there is no C++ compiler")


# How close three steps are, by precision: losses, gradient norms, and the change of the weights.
FOLLOWS = {"fp32": (1e-4, 1e-3, 1e-3), "bf16": (0.02, 0.1, 0.1), "fp16": (0.003, 0.01, 0.015)}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_takes_the_steps_of_plain_torch(
    way: str, device: torch.device, start: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    if WAYS[way].get("compile"):
        compiles(device)
    spec = make_recipe(start, "sft", engine=WAYS[way], optimizer=ADAMW)
    batches = [demonstrations(seed) for seed in range(3)]
    expected = plain(spec, tokenizer)
    right = steps(expected, sft.Sft(), batches)
    learner = build_engine(spec, tokenizer, device)
    before = state(learner, "master")
    results = steps(learner, sft.Sft(), batches)
    of_losses, of_norms, of_weights = FOLLOWS[spec.engine.precision]
    assert [loss for loss, _ in results] == pytest.approx([loss for loss, _ in right], rel=of_losses)
    assert [norm for _, norm in results] == pytest.approx([norm for _, norm in right], rel=of_norms)
    moved, should = change(before, state(learner, "master")), change(before, expected.state("master"))
    error = float((moved - should).norm() / should.norm())
    assert error < of_weights, error


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_float16_gradient_that_overflows_is_computed_again_with_a_lower_scale(
    stage: int, device: torch.device, start: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    spec = make_recipe(start, "sft", engine=WAYS[f"fp16, zero {stage}"], optimizer=ADAMW)
    usual, high = (build_engine(spec, tokenizer, device) for _ in range(2))
    high._loss_scale.load({"value": 2.0**40, "stable": 0, "overflows": 0})
    high._deepspeed.optimizer.loss_scale = 2.0**40
    (right,), (actual,) = (steps(learner, sft.Sft(), [demonstrations()]) for learner in (usual, high))
    scaling = high.scaling()
    assert scaling["overflow_retries"] > 10 and scaling["loss_scale"] * 2 ** scaling["overflow_retries"] == 2.0**40
    assert usual.scaling()["overflow_retries"] == 0 and actual == pytest.approx(right, rel=0.003)


# Attention and logits


def kernels() -> Any:
    """benchmarks/attention_kernels.py."""
    name = "attention_kernels"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


KERNELS = ["padded, torch's choice", "padded, math", "padded, flash", "padded, memory-efficient", "padded, cuDNN"]
KERNELS += ["flex", "varlen"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", KERNELS)
def test_an_attention_kernel_shares_prefixes_as_the_reference_does(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    of_kernels = kernels()
    assert list(of_kernels.KERNELS) == KERNELS
    backward = not of_kernels.unavailable(name, device, dtype, backward=True)
    if reason := of_kernels.unavailable(name, device, dtype, backward=False):
        pytest.skip(reason)
    batch = of_kernels.PackedRows.draw(groups=2, size=3, prompt=40, answer=60, device=device)
    torch.manual_seed(0)
    shapes = [(batch.tokens, heads, 64) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    weight = torch.randn(shapes[0], device=device)

    def run(kernel: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        leaves = [one.detach().clone().requires_grad_(backward) for one in tensors]
        attended = kernel(*leaves, batch)
        if backward:
            (attended.float() * weight).sum().backward()
        return [attended.detach().float()] + [one.grad.float() for one in leaves if backward]

    expected = run(of_kernels.reference, [one.float() for one in inputs])
    try:
        found = run(of_kernels.KERNELS[name], inputs)
    except RuntimeError as error:
        if "No available kernel" in str(error):
            pytest.skip("torch's kernel does not take these shapes on this GPU")
        raise
    for actual, right in zip(found, expected, strict=True):
        error = float((actual - right).norm() / right.norm())
        assert error < (1e-4 if dtype is torch.float32 else 2e-2), error


@pytest.mark.parametrize(("groups", "size", "prompt", "answer"), [(2, 3, 40, 60), (3, 4, 300, 500), (5, 2, 1, 400)])
def test_a_mask_of_blocks_is_that_of_its_rows(
    groups: int, size: int, prompt: int, answer: int, device: torch.device
) -> None:
    """Blocks that are called whole are, those that are left out have no row that sees another, and each block counts once."""
    batch = kernels().PackedRows.draw(groups, size, prompt, answer, device)
    mask, block = batch.layout.make_block_mask(device), attention.FLEX_BLOCK
    sees = torch.zeros(batch.tokens, batch.tokens, dtype=torch.bool)
    for rows in batch.rows:
        sees[rows[:, None], rows] = torch.ones(len(rows), len(rows), dtype=torch.bool).tril()
    places = torch.arange(batch.tokens, device=device)
    allowed = mask.mask_mod(None, None, places[:, None], places[None])
    assert torch.equal(allowed.cpu(), sees)
    listed = ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices))
    partly, wholly = (
        {
            (row, other)
            for row, count in enumerate(counts[0, 0].tolist())
            for other in indices[0, 0, row, :count].tolist()
        }
        for counts, indices in listed
    )
    assert not partly & wholly and (wholly or prompt < 128)
    for row, other in itertools.product(range(len(mask.kv_num_blocks[0, 0])), repeat=2):
        part = sees[row * block : (row + 1) * block, other * block : (other + 1) * block]
        assert part.any() == ((row, other) in partly | wholly), (row, other)
        assert part.all() or (row, other) not in wholly, (row, other)


def test_varlen_attention_gets_each_sequence_with_its_prefix(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a plain function in place of torch's kernel, which needs a GPU."""

    def attend(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *_: Any, window_size: Any) -> Tensor:
        assert window_size == (-1, 0)  # causal
        parts = []
        for start, end in itertools.pairwise(bounds.tolist()):
            inputs = (one[start:end].transpose(0, 1) for one in (query, key, value))
            parts.append(F.scaled_dot_product_attention(*inputs, is_causal=True).transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend)
    of_kernels = kernels()
    batch = of_kernels.PackedRows.draw(groups=2, size=3, prompt=20, answer=30, device=device)
    torch.manual_seed(0)
    inputs = [torch.randn(batch.tokens, heads, 16, device=device) for heads in (4, 2, 2)]
    torch.testing.assert_close(
        of_kernels.varlen(*inputs, batch), of_kernels.reference(*inputs, batch), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_in_chunks_are_those_in_one_piece(
    dtype: torch.dtype, device: torch.device, start: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """And on a GPU, where memory is measured, they take less of it."""
    policy = network(make_recipe(start, "sft", optimizer=ADAMW), tokenizer).to(device, dtype)
    packed = packing.pack(demonstrations(count=64), device)
    found, peaks = [], []
    for rows in (100_000, 50):
        policy.zero_grad()
        policy.logits_bytes = rows * policy.vocabulary * 4
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        scores = policy(packed, model.RequestedScores(entropy=True))
        (scores.logprobs_N + scores.entropy_N).mean().backward()
        if device.type == "cuda":
            peaks.append(torch.cuda.max_memory_allocated() - before)
        gradient = torch.cat([one.grad.float().flatten() for one in policy.parameters()])
        found.append((scores.logprobs_N.detach(), gradient))
    (logprobs, gradient), (in_chunks, of_chunks) = found
    assert logprobs.dtype is torch.float32
    torch.testing.assert_close(in_chunks, logprobs, atol=1e-5 if dtype is torch.float32 else 0.02, rtol=0)
    assert float((of_chunks - gradient).norm() / gradient.norm()) < (1e-5 if dtype is torch.float32 else 0.02)
    assert not peaks or peaks[1] < 0.8 * peaks[0]


# A run


@contextmanager
def in_one_order(device: torch.device) -> Iterator[None]:
    """Sums have the same bits each time."""
    torch.use_deterministic_algorithms(device.type == "cuda", warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):  # the backward of the memory-efficient kernel adds in any order
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "way", ["zero 0", "zero 1", "bf16, zero 2", "fp16, zero 2", "zero 3", "bf16, optimizer on the CPU"]
)
def test_a_resumed_engine_is_the_stored_one_bit_for_bit(
    way: str, device: torch.device, start: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """The state is; so are the next steps, with kernels that always add in one order."""
    spec = make_recipe(start, "sft", engine=WAYS[way], optimizer=ADAMW)
    batches = [demonstrations(seed) for seed in range(4)]
    with in_one_order(device):
        first = build_engine(spec, tokenizer, device)
        steps(first, sft.Sft(), batches[:2])
        stored = first.save_state(tmp_path)
        written = dict(optimizer.gather_state(first._deepspeed, first.policy))
        expected = steps(first, sft.Sft(), batches[2:])
        second = build_engine(spec, tokenizer, device)
        second.load_state(tmp_path, stored)
        loaded = dict(optimizer.gather_state(second._deepspeed, second.policy))
        assert set(loaded) == set(written)
        assert all(torch.equal(loaded[name], one) for name, one in written.items())
        assert steps(second, sft.Sft(), batches[2:]) == expected


@pytest.fixture(scope="module")
def wide(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a policy whose matrices are large enough for 8-bit states, some of them (1e5) for paged ones."""
    folder = tmp_path_factory.mktemp("wide")
    shape = SHAPE | {"hidden_size": 128, "intermediate_size": 1024, "head_dim": 32, "initializer_range": 0.05}
    options = recipe.ModelOptions(from_scratch=shape, tokenizer=TOKENIZER)
    model.load_policy(options, tokenizer, 0).network.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    return folder


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit"])
def test_8_bit_states_take_the_steps_of_adamw_and_resume_bit_for_bit(
    name: str, device: torch.device, wide: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    batches = [demonstrations(seed) for seed in range(6)]
    adamw = build_engine(make_recipe(wide, "sft", optimizer={"lr": 1e-3}), tokenizer, device)
    right = steps(adamw, sft.Sft(), batches)
    spec = make_recipe(wide, "sft", optimizer={"name": name, "lr": 1e-3})
    with in_one_order(device):
        first = build_engine(spec, tokenizer, device)
        actual = steps(first, sft.Sft(), batches[:3])
        stored = first.save_state(tmp_path)
        written = dict(optimizer.gather_state(first._deepspeed, first.policy))
        expected = steps(first, sft.Sft(), batches[3:])
        second = build_engine(spec, tokenizer, device)
        second.load_state(tmp_path, stored)
        loaded = dict(optimizer.gather_state(second._deepspeed, second.policy))
        assert set(loaded) == set(written) and any(one.dtype is torch.uint8 for one in written.values())
        assert all(torch.equal(loaded[key], one) for key, one in written.items())
        assert steps(second, sft.Sft(), batches[3:]) == expected
    assert [loss for loss, _ in (*actual, *expected)] == pytest.approx([loss for loss, _ in right], rel=0.01)
    held = sum(one.nbytes for key, one in written.items() if not key.startswith("master/"))
    assert held < 0.75 * sum(one.nbytes for key, one in optimizer.gather_state(adamw._deepspeed, adamw.policy)) * 2 / 3


QLORA_WAYS = [("zero 0", "nf4"), ("zero 0", "fp4"), ("bf16, zero 1", "nf4"), ("bf16, zero 2", "fp4")]
QLORA_WAYS += [("fp16, zero 1", "nf4"), ("bf16, checkpointed", "nf4"), ("bf16, compiled, checkpointed", "nf4")]


@pytest.mark.parametrize(("way", "kind"), QLORA_WAYS)
def test_qlora_is_lora_on_the_dequantized_weights(
    way: str, kind: str, device: torch.device, wide: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """The same steps, and the saved policy says what was trained."""
    pytest.importorskip("bitsandbytes")
    if WAYS[way].get("compile"):
        compiles(device)
    lora, batches = {"rank": 8, "alpha": 16}, [demonstrations()] * 4
    options = {"engine": WAYS[way], "optimizer": ADAMW}
    on_packed = {"path": str(wide / "policy"), "lora": {**lora, "base_4bit": kind}}
    quantized = make_recipe(wide, "sft", model=on_packed, **options)
    policy = network(quantized, tokenizer)
    write_base(tmp_path / "base", policy.network, tokenizer, quantized.engine.dtype)
    packed = [one for one in policy.network.parameters() if one.dtype is torch.uint8]
    assert len(packed) == 14 and all(one.device.type == device.type for one in packed)
    learner = engine.Engine(policy, LAUNCH, quantized.engine, quantized.optimizer)
    (tmp_path / "state").mkdir()
    stored = learner.save_state(tmp_path / "state")
    plain_lora = make_recipe(wide, "sft", model={"path": str(tmp_path / "base"), "lora": lora}, **options)
    other = build_engine(plain_lora, tokenizer, device)
    other.load_state(tmp_path / "state", stored)
    exact = quantized.engine.precision == "fp32"
    right, actual = steps(other, sft.Sft(), batches), steps(learner, sft.Sft(), batches)
    assert [loss for loss, _ in actual] == pytest.approx([loss for loss, _ in right], rel=1e-4 if exact else 0.02)
    assert [norm for _, norm in actual] == pytest.approx([norm for _, norm in right], rel=1e-3 if exact else 0.1)
    assert actual[-1][0] < actual[0][0]
    learner.save(tmp_path / "policy", tokenizer)
    dequantized = build_engine(
        make_recipe(wide, "sft", model={"path": str(tmp_path / "policy")}, **options), tokenizer, device
    )
    data = packing.pack(batches[0], device)
    with torch.no_grad():
        error = float((dequantized.logprobs(data) - learner.logprobs(data)).abs().mean())
    assert error < (1e-4 if exact else 0.02), error


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "idefics3"])
def test_a_step_on_images_is_that_of_plain_pytorch_on_the_cpu(
    family: str, device: torch.device, tmp_path: Path
) -> None:
    write_image_model(tmp_path, family)
    options = recipe.ModelOptions(path=str(tmp_path))

    def loaded() -> tuple[model.Policy, list[samples.Sample]]:
        policy = model.load_policy(options, model.load_tokenizer(options), 0)
        assert not isinstance(policy.images, str), policy.images
        images = [png("red"), png("blue", (112, 56))]
        contents = (images[:1], images[1:], images, [])
        return policy, [samples.Sample((segment_with(policy.images, each, [50, 51, 52]),)) for each in contents]

    policy, batch = loaded()
    loss = -policy.logprobs(packing.pack(batch, torch.device("cpu"))).mean()
    loss.backward()
    gradient = torch.cat([each.grad.flatten() for each in policy.parameters() if each.grad is not None])
    for way, bound in (({"zero_stage": 0}, 1e-3), ({"zero_stage": 1, "precision": "bf16"}, 0.05)):
        policy, batch = loaded()
        engine_options = recipe.EngineOptions.model_validate(way)
        learner = engine.Engine(policy, LAUNCH, engine_options, recipe.OptimizerOptions(lr=1e-3))
        step = loop.take_step(learner, sft.Sft(), batch, BUDGET, 1.0)
        assert step.means["loss"] == pytest.approx(float(loss.detach()), rel=bound)
        assert step.update.grad_norm == pytest.approx(float(gradient.norm()), rel=bound)


@pytest.mark.parametrize("way", ["zero 0", "bf16, zero 2"])
def test_qlora_resumes_bit_for_bit(
    way: str, device: torch.device, wide: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    lora = {"path": str(wide / "policy"), "lora": {"rank": 8, "base_4bit": "nf4"}}
    spec = make_recipe(wide, "sft", model=lora, engine=WAYS[way], optimizer=ADAMW)
    batches = [demonstrations(seed) for seed in range(4)]
    with in_one_order(device):
        first = build_engine(spec, tokenizer, device)
        steps(first, sft.Sft(), batches[:2])
        stored = first.save_state(tmp_path)
        expected = steps(first, sft.Sft(), batches[2:])
        second = build_engine(spec, tokenizer, device)
        second.load_state(tmp_path, stored)
        assert steps(second, sft.Sft(), batches[2:]) == expected


@pytest.mark.parametrize("way", ["zero 0", "zero 1", "bf16, zero 2", "fp16, zero 2", "zero 3"])
def test_a_step_that_is_not_finite_changes_nothing(
    way: str, device: torch.device, start: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    class Once(sft.Sft):
        calls = 0

        def loss(self, scores: Any, packed: Any) -> Any:
            self.calls += 1
            loss = super().loss(scores, packed)
            return loss._replace(sum=loss.sum * math.inf) if self.calls == 2 else loss

    learner = build_engine(make_recipe(start, "sft", engine=WAYS[way], optimizer=ADAMW), tokenizer, device)
    logged: list[tuple[dict[str, float], dict[str, Tensor]]] = []
    loop.train(
        learner,
        Once(),
        [samples.Batch([demonstrations(seed, 4)]) for seed in range(3)],
        10_000,
        lambda step: 1.0,
        sanity_checks.NanGuard(tmp_path, 2),
        lambda step, values: logged.append((values, state(learner, "master"))),
    )
    (_, first), (skipped, second), (values, third) = logged
    assert skipped["skipped_steps"] == 1 and values["skipped_steps"] == 1 and math.isfinite(values["loss"])
    assert float(change(first, second).abs().max()) == 0 < float(change(second, third).abs().max())
    assert len(list(tmp_path.iterdir())) == 1
    if device.type == "cuda":
        assert values["memory/peak_gpu"] > 0


@pytest.mark.parametrize("way", ["bf16, zero 1", "bf16, zero 2", "fp16, zero 1", "zero 1"])
def test_a_colocated_trainer_sleeps_wakes_and_learns_as_if_it_had_not(
    way: str, device: torch.device, start: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Without servers: its own phases. On a GPU its memory is free while services sample."""
    spec = make_recipe(start, "sft", engine=WAYS[way], optimizer=ADAMW)
    batches = [demonstrations(seed) for seed in range(3)]
    awake = build_engine(spec, tokenizer, device)
    expected = steps(awake, sft.Sft(), batches)
    del awake
    learner = build_engine(spec, tokenizer, device)
    phases, actual = ColocatedPhases(learner, None), []
    for batch in batches:
        phases.push()
        names = set(learner.weights())
        held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        phases.sample()
        if device.type == "cuda":
            assert torch.cuda.memory_allocated() < held
            assert not sum(one.numel() for one in learner.policy.parameters() if one.device.type == "cuda")
        phases.train()
        actual += steps(learner, sft.Sft(), [batch])
        assert all(one.device.type == device.type for one in learner.policy.parameters()) and names
    exact = spec.engine.precision == "fp32"
    for one, other in zip(actual, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5 if exact else 1e-2)


def test_the_benchmark_measures_steps_attention_and_pushes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """benchmarks/gpu.py with its tiny shape; its compiled side and TRL's are left to `scripts/gpu_check`."""
    kernels()
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu

    part_specs = [
        specs[0]
        for specs in gpu.measurements(list(gpu.PARTS), ["tiny"])
        if specs[0]["side"] in ("", "models/transformers", "ours")
    ]
    assert [spec["part"] for spec in part_specs] == ["ipc", "delta", "attention", "sft", "grpo"]
    monkeypatch.setattr(gpu, "in_group", lambda measure: measure)  # this process is in one
    rows = [{**spec, **gpu.PARTS[spec["part"]](spec)} for spec in part_specs]
    assert rows[0]["gb"] > rows[1]["gb"] > 0 and max(row["difference"] for row in rows[:2]) < 0.1
    # A kernel may refuse the shapes.
    measured = [ms for ms in rows[2]["kernels_ms"].values() if not isinstance(ms, str)]
    assert len(measured) >= 3 and min(measured) > 0 and min(row["tokens_s"] for row in rows[3:]) > 0
    assert rows[3]["loss"] == pytest.approx(math.log(1024), abs=0.3)
    text = gpu.render_rows(rows, "this machine")
    assert "| sft | tiny | ours |" in text and "| padded, math |" in text and "models/transformers: 0.00 GB" in text
    flops = gpu.flop_per_token(gpu.SHAPES["8B"], 8_190_735_360, 0.0)
    assert flops == pytest.approx(6 * (8.19e9 - 151936 * 4096), rel=1e-3)


def test_a_server_on_the_device_samples_with_the_trainers_logprobs_before_and_after_a_push(
    device: torch.device, start: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """The engine of models/transformers: a batch of prompts of several lengths, sleep, a push and waking."""
    from ngym.chat_codec import Sampling
    from ngym.services.base.app import load
    from ngym.weight_push.routes import MEMORY

    app = load(ROOT / "models" / "transformers" / "app.py")
    options = app.Options.model_validate({"model": str(start / "policy"), "device": str(device)})
    module = importlib.import_module(f"{app.Options.__module__.rpartition('.')[0]}.engine")
    served = module.Engine(options.model, options, lambda tokens: None)
    learner = build_engine(make_recipe(start, "sft", optimizer=ADAMW), tokenizer, device)
    prompts = [draw_ids(random.Random(length), length) for length in (1, 5, 12, 12, 30)]

    async def sample_answer(prompt: list[int]) -> tuple[list[int], list[float], int]:
        sampling = Sampling(16, 1.0, 1.0, 0, 0.0, len(prompt), (), (), True, {}, False)
        [answer] = [one async for one in served.generate(prompt, sampling)]
        return answer.ids, answer.logprobs, answer.version

    async def check(version: int) -> None:
        for prompt, (ids, logprobs, served_version) in zip(
            prompts, await asyncio.gather(*map(sample_answer, prompts)), strict=True
        ):
            segment = samples.Segment([*prompt, *ids], [(len(prompt), len(prompt) + len(ids))])
            with torch.no_grad():
                ours = learner.logprobs(packing.pack([samples.Sample((segment,))], device)).tolist()
            assert (len(ids), served_version) == (16, version) and ours == pytest.approx(logprobs, abs=1e-4)

    async def both() -> None:
        await check(0)
        steps(learner, sft.Sft(), [demonstrations()])
        pushed = {name: tensor.detach().cpu().contiguous() for name, tensor in dict(learner.weights()).items()}
        save_file({name: pushed[name] for name in served.checkpoint_shapes()}, tmp_path / "00000.safetensors")
        await served.pause_for_push("wait", 60)
        served.asleep = MEMORY
        await served.release_memory(1)
        if device.type == "cuda":
            assert {one.device.type for one in served._model.parameters()} == {"cpu"}
        await served.restore_memory(["weights"])
        served.asleep = frozenset({"kv_cache"})
        await served.switch_weights(tmp_path, 1, "keep", 60)
        await served.restore_memory(["kv_cache"])
        served.asleep = frozenset()
        await check(1)

    try:
        asyncio.run(both())
    finally:
        served.close()


def test_a_failed_allocation_is_reported_in_one_line(device: torch.device) -> None:
    message = r"^step 1: out of memory: [^\n]*[Tt]ried to allocate [^\n]*micro_batch_tokens \(now 8,192;[^\n]*$"
    with (
        pytest.raises(sanity_checks.OutOfMemory, match=message),
        sanity_checks.explain_out_of_memory(lambda: "step 1", sanity_checks.to_fit(8192)),
    ):
        torch.empty(10**15, device=device)
