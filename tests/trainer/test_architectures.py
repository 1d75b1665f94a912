"""The trainer's logits equal Hugging Face's for every model family: sliding windows, sinks, soft caps, experts,
scales."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiled import needs_compiler
from transformers import AutoConfig, AutoModelForCausalLM

from ngym.errors import ConfigError
from ngym.trainer import loop, training_run
from ngym.trainer.algorithms import sft
from ngym.trainer.data import samples
from ngym.trainer.engine import engine
from ngym.trainer.model import attention, layers, packing, policy
from ngym.trainer.recipe import recipe

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "mistral": {"sliding_window": 6},
    "gemma3_text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma2": {"sliding_window": 6, "attn_logit_softcapping": 2.0, "final_logit_softcapping": None},
    "gpt_oss": {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "decoder_sparse_step": 1, **EXPERTS},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.3},
    # half of each head is rotated
    "glm4_moe": {"first_k_dense_replace": 1, "n_routed_experts": 4, "partial_rotary_factor": 0.5, **EXPERTS},
    # the sequences of a micro-batch one after another
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        **{f"linear_num_{kind}_heads": 2 for kind in ("key", "value")},
        **{f"linear_{kind}_head_dim": 8 for kind in ("key", "value")},
    },
}


def network(family: str, implementation: str, **more: Any) -> Any:
    shape = AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family], **more})
    torch.manual_seed(0)
    causal_lm = AutoModelForCausalLM.from_config(shape, dtype=torch.float32, attn_implementation=implementation)
    for name, parameter in causal_lm.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return causal_lm.eval()


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(attention.NAME, attention.packed_attention)


def batch() -> list[Any]:
    """Some begin alike."""
    rng = random.Random(1)
    prompt = [rng.randrange(1, 96) for _ in range(9)]
    segments = [samples.Segment(prompt + [rng.randrange(1, 96) for _ in range(n)], [(9, 9 + n)]) for n in (3, 9, 2, 12)]
    alone = [rng.randrange(1, 96) for _ in range(25)]
    return [samples.Sample((segment,)) for segment in [*segments, samples.Segment(alone, [(4, 9), (20, 25)])]]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_batch_has_the_logprobs_and_gradients_of_hugging_faces_own_forward(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, reference = policy.Policy(network(family, attention.NAME)), network(family, "eager")
    packed = packing.pack(batch(), CPU)
    together = ours.logprobs(packed)
    together.sum().backward()
    alone = []
    modeling = sys.modules[type(reference).__module__]
    if isinstance(rotary := getattr(modeling, layers.ROTARY), partial):
        monkeypatch.setattr(modeling, layers.ROTARY, rotary.args[0])
    for segment in packed.segments:
        ids = torch.tensor([segment.token_ids])
        logprobs = reference(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        of_token = logprobs.gather(1, ids[0, 1:, None]).squeeze(1)
        alone += [of_token[start - 1 : end - 1] for start, end in segment.spans]
    torch.cat(alone).sum().backward()
    torch.testing.assert_close(together, torch.cat(alone), atol=5e-5, rtol=1e-4)
    own = dict(ours.network.named_parameters())
    assert any(name.endswith("sinks") for name in own) == (family == "gpt_oss")
    for name, parameter in reference.named_parameters():
        assert torch.allclose(own[name].grad, parameter.grad, atol=5e-4, rtol=1e-3), name


@pytest.mark.parametrize(
    ("options", "ranks", "problem"),
    [
        ({"sequence_parallel": 2}, 2, "engine.sequence_parallel: "),
        ({"zero_stage": 1, "tensor_parallel": 2}, 2, "engine.tensor_parallel: "),
        ({"zero_stage": 3}, 2, "engine.zero_stage: "),
        ({"zero_stage": 3}, 1, None),
        ({"zero_stage": 2}, 2, None),
    ],
)
def test_ranks_that_run_the_same_layers_are_refused_where_sequences_are_computed_one_by_one(
    options: dict[str, Any], ranks: int, problem: str | None
) -> None:
    lines: list[str] = []
    job: Any = SimpleNamespace(
        recipe=SimpleNamespace(engine=recipe.EngineOptions(**options)),
        launch=recipe.Launch(rank=0, local_rank=0, ranks=ranks),
        say=lines.append,
    )
    with pytest.raises(ConfigError, match=f"^{problem}") if problem else nullcontext():
        training_run._check_one_by_one(job, "qwen3_5_text")
    assert bool(lines) == (problem is None)


# Of each family, whether its norms and its rotary embedding are those that `fuse_layers` replaces.
FUSED = {
    "llama": (True, True),
    "qwen2": (True, True),
    "qwen3": (True, True),
    "mistral": (True, True),
    "phi3": (True, True),
    "qwen3_moe": (True, True),
    "granite": (True, True),
    "gemma2": (False, True),  # factors of 1 + w
    "gemma3_text": (False, True),
    "qwen3_5_text": (False, True),
    "gpt_oss": (True, False),  # half as many cosines
    "glm4_moe": (True, True),
    "cohere": (False, False),  # a norm with a mean; neighbours are rotated
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_that_compute_a_norm_and_rotary_embeddings_as_llama_are_fused(family: str) -> None:
    fused_network = policy.Policy(network(family, attention.NAME)).network
    norms, of_plain = (
        [module for module in one.modules() if type(module).__name__.endswith("Norm")]
        for one in (fused_network, network(family, attention.NAME))
    )
    fused = [type(module) is not type(plain) for module, plain in zip(norms, of_plain, strict=True)]
    rotary = getattr(sys.modules[type(fused_network).__module__], layers.ROTARY)
    assert (all(fused), isinstance(rotary, partial)) == FUSED[family] and all(fused) == any(fused)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_functions_have_the_outputs_and_gradients_of_their_formulas(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, cos, sin = torch.randn(2, 3, 5, 8), torch.randn(1, 1, 5, 8), torch.randn(1, 1, 5, 8)
    weight, grad = torch.randn(8), torch.randn(2, 3, 5, 8)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()

    def rotary(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return x * cos.to(dtype).to(x) + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin.to(dtype).to(x)

    def fused_rotary(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return layers.Rotary.apply(x, cos.to(x), sin.to(x))  # type: ignore[no-any-return,no-untyped-call]

    def fused_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return layers.RmsNorm.apply(x, weight, 1e-5)  # type: ignore[no-any-return,no-untyped-call]

    bound = {"atol": 4 * torch.finfo(dtype).eps, "rtol": 8 * torch.finfo(dtype).eps}
    for fused, formula in ((fused_norm, norm), (fused_rotary, rotary)):
        results = []
        for function, precision in ((fused, dtype), (formula, torch.float64)):
            inputs = [each.to(dtype).to(precision, copy=True).requires_grad_() for each in (x, weight)]
            y = function(*inputs)
            y.backward(grad.to(dtype).to(precision))
            assert y.dtype == precision
            results.append([y.detach(), *(each.grad for each in inputs if each.grad is not None)])
        for actual, right in zip(*results, strict=True):
            assert actual.dtype == dtype
            torch.testing.assert_close(
                actual.double(), right, atol=bound["atol"] * float(right.abs().max()), rtol=bound["rtol"]
            )


def of_lengths(*lengths: int) -> packing.MicroBatch:
    rng = random.Random(sum(lengths))
    segments = [samples.Segment([rng.randrange(1, 96) for _ in range(n)], [(2, n)]) for n in lengths]
    return packing.pack([samples.Sample((segment,)) for segment in segments], CPU)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile traces layers and their gradients as ever, and generates no code."""
    from torch._dynamo.backends.debugging import aot_eager

    monkeypatch.setattr(layers, "_compile", lambda graph, inputs, memory_budget: aot_eager(graph, inputs))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@needs_compiler
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])  # the latter has two kinds of layers
def test_compiled_layers_have_the_gradients_of_plain_ones_for_every_kind_of_batch(
    family: str, traced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where sequences of equal length are part of the layer's graph. FlexAttention has no backward here."""
    supports = attention._flex_supports
    plain, compiled = (policy.Policy(network(family, attention.NAME)) for _ in range(2))
    layers.compile_layers(compiled.network)
    for packed in (of_lengths(20, 20, 20), of_lengths(23), packing.pack(batch(), CPU), of_lengths(21, 21)):
        equal = bool(packed.layout.equal)
        monkeypatch.setattr(
            attention, "_flex_supports", (lambda query, kind: kind.window is None) if equal else supports
        )
        found = []
        for one in (plain, compiled):
            one.zero_grad()
            logprobs = one.logprobs(packed)
            logprobs.sum().backward()
            found.append([logprobs.detach(), *(each.grad for each in one.parameters() if each.grad is not None)])
        for actual, right in zip(*found, strict=True):
            torch.testing.assert_close(actual, right, atol=1e-4, rtol=1e-3)


@needs_compiler
def test_attention_is_part_of_a_layers_only_graph_whatever_the_lengths(
    traced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, without a gradient: FlexAttention has no backward on a CPU."""
    monkeypatch.setattr(attention, "_flex_supports", lambda query, kind: True)
    plain, compiled = (policy.Policy(network("qwen3", attention.NAME)) for _ in range(2))
    layers.compile_layers(compiled.network)
    batches = [of_lengths(20, 20, 20), of_lengths(30, 20), packing.pack(batch(), CPU), of_lengths(23)]
    batches += [of_lengths(22, 22), of_lengths(40, 20, 30), packing.pack(batch()[:4], CPU), of_lengths(24)]
    counts = []
    with torch.no_grad():
        for packed in batches:
            expected = plain.logprobs(packed)
            if not packed.layout.equal:
                packed.layout.make_block_mask(CPU)
            torch.testing.assert_close(compiled.logprobs(packed), expected, atol=1e-5, rtol=0)
            counts.append(graphs())
    assert counts == [1, 2, 2, 3, 3, 3, 3, 3]  # several of equal length, FlexAttention, one


@pytest.mark.parametrize("family", FAMILIES)
def test_two_steps_in_fp16_are_those_of_fp32(family: str, only_rank: None) -> None:
    found = []
    for stage, precision in ((0, "fp32"), (1, "fp16")):
        options = recipe.EngineOptions.model_validate({"zero_stage": stage, "precision": precision})
        launch = recipe.Launch(rank=0, local_rank=0, ranks=1)
        network_policy = policy.Policy(network(family, attention.NAME))
        learner = engine.Engine(network_policy, launch, options, recipe.OptimizerOptions(lr=1e-2, eps=1e-3))
        steps = [loop.take_step(learner, sft.Sft(), batch(), 60, 1.0) for _ in range(2)]
        found.append([(step.means["loss"], step.update.grad_norm) for step in steps])
    for actual, right in zip(*found, strict=True):
        assert actual == pytest.approx(right, rel=0.005)


def test_soft_capped_logits_are_refused() -> None:
    with pytest.raises(ConfigError, match="gemma2: its logits are soft-capped"):
        policy.Policy(network("gemma2", attention.NAME, final_logit_softcapping=3.0))


def test_attention_sinks_are_refused_where_ranks_share_the_tokens() -> None:
    layout = attention.Layout.of([torch.arange(9)], CPU)
    query = torch.zeros(1, 4, 9, 8)
    with pytest.raises(NotImplementedError, match="sinks do not support"):
        attention.packed_attention(
            torch.nn.Identity(), query, query, query, None, layout=layout, s_aux=torch.zeros(4), group=object()
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_attention_in_16_bits_on_a_cpu_is_that_of_float32_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = [(2, heads, attention.SHORT_TOKENS // 8, 16) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    gradient = torch.randn(shapes[0], dtype=dtype)
    ours = attention.attend(*inputs, attention.AttentionKind())
    reference = attention.attend(*exact, attention.AttentionKind())
    ours.backward(gradient)
    reference.backward(gradient.float())
    assert ours.dtype == dtype and torch.equal(ours, reference.to(dtype))
    with torch.no_grad():  # so are the scores of a batch before it is trained
        assert torch.equal(attention.attend(*inputs, attention.AttentionKind()), ours)
    for rounded, tensor in zip(inputs, exact, strict=True):
        assert rounded.grad is not None and tensor.grad is not None
        assert torch.equal(rounded.grad, tensor.grad.to(dtype))
