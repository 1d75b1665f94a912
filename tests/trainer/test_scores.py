"""Log-probabilities and entropy of the network: in chunks as in one piece, and with activation checkpointing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_model
import torch
from compiled import QUICKLY_COMPILED, needs_compiler
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, OPTConfig, PreTrainedTokenizerBase, Qwen3Config

from ngym.errors import ConfigError
from ngym.trainer import loop
from ngym.trainer.algorithms import sft
from ngym.trainer.data import samples
from ngym.trainer.engine import engine
from ngym.trainer.model import chunked_logprobs, layers, packing
from ngym.trainer.model import chunked_logprobs as decoder
from ngym.trainer.model import policy as model
from ngym.trainer.recipe import recipe

CPU = torch.device("cpu")
WHOLE = 1 << 30
SHAPE = {**small_model.SHAPE, "num_hidden_layers": 3}
Weights = dict[str, Tensor]

pytestmark = pytest.mark.usefixtures("only_rank")


@pytest.fixture(scope="module")
def tokenizer(root: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")


def policy(tokenizer: PreTrainedTokenizerBase, **shape: Any) -> Any:
    options = recipe.ModelOptions(from_scratch={**SHAPE, **shape}, tokenizer="data/tiny_policy/tokenizer")
    return model.load_policy(options, tokenizer, 0)


def batch(count: int = 12, seed: int = 0) -> list[Any]:
    draw = random.Random(seed)
    lengths = [draw.randrange(5, 40) for _ in range(count)]
    return [
        samples.Sample((samples.Segment([draw.randrange(1000) for _ in range(length)], [(2, length)]),))
        for length in lengths
    ]


class Largest(TorchDispatchMode):
    """The most elements that a tensor made within this block has."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def largest(work: Callable[[], object]) -> int:
    with Largest() as tally:
        work()
    return tally.elements


# --- chunks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "temperature", "bias", "compiled"),
    [
        *itertools.product([1, 7, 50, 1000], [1.0, 0.7], [False, True], [False]),
        *(pytest.param(*each, True, marks=needs_compiler) for each in ((7, 0.7, True), (1000, 1.0, False))),
    ],
)
@torch._inductor.config.patch(QUICKLY_COMPILED)
def test_chunks_have_the_logprobs_entropies_and_gradients_of_full_logits(
    rows: int, temperature: float, bias: bool, compiled: bool
) -> None:
    torch.manual_seed(0)
    head, token_ids = nn.Linear(16, 300, bias=bias), torch.randint(300, (50,))
    weights, hidden = torch.randn(2, 50), torch.randn(50, 16)

    def gradients(found: Any, leaf: Tensor) -> list[Tensor]:
        (weights[0] * found.logprobs_N + weights[1] * found.entropy_N).sum().backward()
        of_head = [parameter.grad for parameter in head.parameters()]
        head.zero_grad()
        return [leaf.grad, *of_head]

    leaf = hidden.clone().requires_grad_()
    logprobs = (head(leaf) / temperature).log_softmax(-1)
    picked = logprobs.gather(1, token_ids[:, None])[:, 0]
    expected = decoder.Scores(picked, -(logprobs.exp() * logprobs).sum(-1))
    of_full = gradients(expected, leaf)

    leaf = hidden.clone().requires_grad_()
    scorer = chunked_logprobs.Scorer()
    scorer.compiled = compiled
    options = {"head": head, "temperature": temperature, "logits_bytes": rows * 300 * 4}
    found = scorer(leaf, token_ids, entropy=True, **options)
    torch.testing.assert_close(found.logprobs_N, expected.logprobs_N, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found.entropy_N, expected.entropy_N, atol=1e-6, rtol=1e-6)
    for actual, right in zip(gradients(found, leaf), of_full, strict=True):
        torch.testing.assert_close(actual, right, atol=2e-6, rtol=1e-5)
    just_logprobs = scorer(hidden, token_ids, entropy=False, **options)
    assert just_logprobs.entropy_N is None and torch.equal(just_logprobs.logprobs_N, found.logprobs_N)
    leaf = hidden.clone().requires_grad_()
    both = scorer(leaf, token_ids, entropy=True, collision=True, **options)
    torch.testing.assert_close(both.collision_N, logprobs.detach().exp().square().sum(-1).log(), atol=1e-6, rtol=1e-6)
    assert not both.collision_N.requires_grad
    for actual, right in zip(gradients(both, leaf), of_full, strict=True):
        torch.testing.assert_close(actual, right, atol=2e-6, rtol=1e-5)


def test_a_head_that_is_not_trained_gets_no_gradient() -> None:
    head, hidden = nn.Linear(8, 30).requires_grad_(False), torch.randn(6, 8, requires_grad=True)
    options = {"head": head, "temperature": 1.0, "entropy": False, "logits_bytes": 2 * 30 * 4}
    chunked_logprobs.Scorer()(hidden, torch.arange(6), **options).logprobs_N.sum().backward()
    assert head.weight.grad is None and hidden.grad is not None


def test_a_bfloat16_head_has_its_softmax_in_float32() -> None:
    torch.manual_seed(0)
    head, hidden, token_ids = nn.Linear(16, 300), torch.randn(50, 16), torch.randint(300, (50,))
    low = nn.Linear(16, 300).to(torch.bfloat16)
    low.load_state_dict(head.state_dict())
    logits = low(hidden.bfloat16())
    expected = logits.float().log_softmax(-1).gather(1, token_ids[:, None])[:, 0]
    found = []
    for logits_bytes in (WHOLE, 7 * 300 * 4):
        leaf = hidden.bfloat16().requires_grad_()
        options = {"head": low, "temperature": 1.0, "entropy": True, "logits_bytes": logits_bytes}
        answer = chunked_logprobs.Scorer()(leaf, token_ids, **options)
        assert answer.logprobs_N.dtype == answer.entropy_N.dtype == torch.float32
        torch.testing.assert_close(answer.logprobs_N, expected, atol=2e-2, rtol=0)
        (answer.logprobs_N + answer.entropy_N).sum().backward()
        found.append(leaf.grad)
    torch.testing.assert_close(found[0], found[1], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("tied", [True, False])
def test_no_tensor_of_tokens_times_vocabulary_exists_forward_or_backward(
    tokenizer: PreTrainedTokenizerBase, tied: bool
) -> None:
    trained = policy(tokenizer, tie_word_embeddings=tied)
    packed = packing.pack(batch(60), CPU)
    tokens, vocabulary = len(packed.trained_N), len(tokenizer)
    assert tokens > 1000 and vocabulary == 1024

    def step() -> None:
        found = trained(packed, decoder.RequestedScores(entropy=True))
        (found.logprobs_N + found.entropy_N).sum().backward()

    assert largest(step) >= tokens * vocabulary  # in one piece it does: what is measured here is measured
    trained.logits_bytes = 32 * vocabulary * 4
    limit = max(vocabulary * SHAPE["hidden_size"], len(packed.token_ids_T) * SHAPE["intermediate_size"])
    assert largest(step) <= limit * 2 < tokens * vocabulary / 8


@pytest.mark.parametrize(("stage", "tied"), [(0, True), (2, False), (3, True), (3, False)])
def test_chunks_take_the_same_step_under_every_stage(
    tokenizer: PreTrainedTokenizerBase, stage: int, tied: bool
) -> None:
    """With this width the head is more than what ZeRO-3 keeps whole, so it is gathered for each use."""
    found: list[tuple[Weights, float]] = []
    for zero_stage, rows in ((0, 10_000), (stage, 20)):
        network = policy(tokenizer, hidden_size=128, tie_word_embeddings=tied)
        network.logits_bytes = rows * len(tokenizer) * 4
        launch = recipe.Launch(rank=0, local_rank=0, ranks=1)
        optimizing = recipe.OptimizerOptions(lr=1e-2, eps=1e-3)
        learner = engine.Engine(network, launch, recipe.EngineOptions(zero_stage=zero_stage), optimizing)
        norms = [loop.take_step(learner, sft.Sft(), batch(12, seed), 150, 1.0).update.grad_norm for seed in range(2)]
        found.append(({name: tensor.clone() for name, tensor in learner.weights().items()}, norms[-1]))
    (full, norm), (chunked, chunked_norm) = found
    assert chunked_norm == pytest.approx(norm, rel=1e-5)
    assert max((full[name] - chunked[name]).abs().max().item() for name in full if name in chunked) < 2e-6


# --- activation checkpointing ----------------------------------------------------------------------------------------


def backward_bytes(work: Callable[[], Tensor]) -> int:
    """The bytes of the distinct tensors that the graph of a result keeps."""
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        work()
    return sum(sizes.values())


@pytest.mark.parametrize("training", [True, False])
def test_layers_that_keep_only_their_inputs_have_the_same_gradients(
    tokenizer: PreTrainedTokenizerBase, training: bool
) -> None:
    packed = packing.pack(batch(), CPU)
    found = []
    for checkpointed in (0, 3, None):
        trained = policy(tokenizer, num_hidden_layers=6).train(training)
        if checkpointed != 0:
            layers.checkpoint_layers(trained.network, checkpointed)
        memory = backward_bytes(lambda trained=trained: trained.logprobs(packed))
        logprobs = trained.logprobs(packed)
        logprobs.sum().backward()
        found.append((logprobs, [parameter.grad for parameter in trained.parameters()], memory))
    (logprobs, gradients, everything), *others = found
    for same_logprobs, same_gradients, _ in others:
        torch.testing.assert_close(same_logprobs, logprobs, atol=1e-6, rtol=0)
        for actual, right in zip(same_gradients, gradients, strict=True):
            torch.testing.assert_close(actual, right, atol=1e-6, rtol=1e-6)
    half, inputs = (memory for *_, memory in others)
    assert inputs < 0.6 * everything and (inputs + everything) / 2 == pytest.approx(half, rel=0.05)


SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
DROPPING = {
    "in attention": Qwen3Config(
        **SMALL, num_key_value_heads=2, head_dim=8, intermediate_size=16, attention_dropout=0.5
    ),
    "in the layer itself": OPTConfig(
        **SMALL, ffn_dim=16, word_embed_proj_dim=16, dropout=0.5, attention_dropout=0.5, layerdrop=0.5
    ),
}


@pytest.mark.parametrize("where", DROPPING)
def test_a_network_with_dropout_drops_nothing_in_evaluation_mode_checkpointed_or_not(where: str) -> None:
    ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(DROPPING[where]).eval()
        if checkpointed:
            layers.checkpoint_layers(network)
        for _ in range(2):
            network.zero_grad()
            logits = network(ids, use_cache=False).logits
            logits.square().mean().backward()
            found.append((logits.detach(), [p.grad for p in network.parameters() if p.grad is not None]))
    (logits, gradients), *others = found
    for same_logits, same_gradients in others:
        torch.testing.assert_close(same_logits, logits, atol=1e-6, rtol=0)
        for actual, right in zip(same_gradients, gradients, strict=True):
            torch.testing.assert_close(actual, right, atol=1e-6, rtol=1e-5)


def test_a_network_whose_layers_cannot_be_checkpointed_is_refused() -> None:
    network = AutoModelForCausalLM.from_config(DROPPING["in attention"])
    network.supports_gradient_checkpointing = False
    with pytest.raises(ConfigError, match=r"engine\.activation_checkpointing: the layers of Qwen3ForCausalLM cannot"):
        layers.checkpoint_layers(network)


@pytest.mark.parametrize(("first", "device", "message"), [("2.99", "cpu", "use torch 2.99 or newer"), ("2.99", "cuda", None), ("2.9", "cpu", None)])  # fmt: skip
def test_a_torch_that_rounds_otherwise_on_a_cpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, first: str, device: str, message: str | None
) -> None:
    monkeypatch.setattr(layers, "ROUNDS_ON_CPU", first)
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        layers.check_rounding(torch.device(device))


def test_compiled_logits_may_take_a_share_of_a_large_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {0: 24 << 30, 1: 96 << 30}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=sizes[device.index])
    )
    small, large = (torch.device("cuda", index) for index in sizes)
    before = chunked_logprobs.LOGITS_BYTES["cuda"]
    assert chunked_logprobs.logits_limit(large, compiled=False) == before
    assert chunked_logprobs.logits_limit(small, compiled=True) == before
    assert chunked_logprobs.logits_limit(large, compiled=True) == 4 << 30
    assert chunked_logprobs.logits_limit(CPU, compiled=True) == chunked_logprobs.LOGITS_BYTES["cpu"]


# --- compiled layers -------------------------------------------------------------------------------------------------


@needs_compiler
@torch._inductor.config.patch(QUICKLY_COMPILED)
def test_compiled_layers_keep_as_much_of_their_activations_as_asked(tokenizer: PreTrainedTokenizerBase) -> None:
    """The gradient stays the same. Weights are saved, too, but they are not activations."""
    packed = packing.pack(batch(12, 0), CPU)
    saved, gradients = [], []
    for memory_budget in (None, 0.3):
        trained = policy(tokenizer).eval()
        layers.compile_layers(trained.network, memory_budget)
        trained.logprobs(packed).sum().backward()  # compiles
        trained.zero_grad()
        weights = {parameter.data_ptr() for parameter in trained.parameters()}
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logprobs = trained.logprobs(packed)
        logprobs.sum().backward()
        saved.append(sum(size for place, size in sizes.items() if place not in weights))
        gradients.append([parameter.grad.clone() for parameter in trained.parameters()])
    assert saved[1] < 0.8 * saved[0], saved
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@needs_compiler
@torch._inductor.config.patch(QUICKLY_COMPILED)
def test_compiled_layers_have_the_same_gradients_and_are_compiled_once_for_all_layouts(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    plain, compiled = policy(tokenizer).eval(), policy(tokenizer).eval()
    layers.checkpoint_layers(compiled.network)
    layers.compile_layers(compiled.network)
    graphs = []
    for seed in range(5):
        packed = packing.pack(batch(4 + 3 * seed, seed), CPU)
        with torch.no_grad():
            before = compiled.logprobs(packed)
        found = []
        for trained in (plain, compiled):
            trained.zero_grad()
            logprobs = trained.logprobs(packed)
            logprobs.sum().backward()
            found.append((logprobs.detach(), [parameter.grad.clone() for parameter in trained.parameters()]))
        (expected, gradients), (actual, same_gradients) = found
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(before, actual, atol=1e-5, rtol=0)
        for one, other in zip(same_gradients, gradients, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] == graphs[-1]
