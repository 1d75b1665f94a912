"""Routing replay: the recorded experts are used, with the router's own weights for them and their gradients."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ngym.errors import ConfigError
from ngym.routed_experts import ExpertRows
from ngym.trainer.data import samples
from ngym.trainer.model import attention, layers, packing, policy, routing_replay
from ngym.trainer.online import services
from ngym.trainer.recipe import recipe_reader

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def of_qwen(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    values_TK = logits_TE.softmax(-1).gather(1, chosen_TK)
    return values_TK / values_TK.sum(-1, keepdim=True)


def of_gpt_oss(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    return logits_TE.gather(1, chosen_TK).softmax(-1)


def of_glm(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    values_TK = logits_TE.sigmoid().gather(1, chosen_TK)
    return values_TK / (values_TK.sum(-1, keepdim=True) + 1e-20)


FAMILIES: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "qwen3_moe": ({"num_experts": 6, "decoder_sparse_step": 1, "norm_topk_prob": True}, of_qwen),
    "gpt_oss": ({"num_local_experts": 6}, of_gpt_oss),
    "glm4_moe": ({"first_k_dense_replace": 1, "n_routed_experts": 6, "n_group": 1, "topk_group": 1}, of_glm),
}


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(attention.NAME, attention.packed_attention)


def network(family: str, implementation: str) -> Any:
    shape = AutoConfig.for_model(family, **SHAPE, **FAMILIES[family][0])
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(shape, dtype=torch.float32, attn_implementation=implementation).eval()


def drawn(rng: random.Random, tokens: int) -> ExpertRows:
    """Experts that no router would choose, of three layers."""
    chosen = [expert for _ in range(tokens * 3) for expert in rng.sample(range(6), 2)]
    return ExpertRows(3, 2, "uint8", bytearray(chosen))


def batch() -> list[samples.Sample]:
    """Of two samples with a common prompt the prompt's experts are the same; the last token of each has none."""
    rng = random.Random(3)
    prompt, of_prompt = [rng.randrange(1, 96) for _ in range(6)], drawn(rng, 6)
    made = []
    for length in (3, 5):
        experts = ExpertRows(3, 2, "uint8", of_prompt.raw + drawn(rng, length - 1).raw)
        ids = prompt + [rng.randrange(1, 96) for _ in range(length)]
        made.append(samples.Segment(ids, [(6, 6 + length)], experts=experts))
    alone = [rng.randrange(1, 96) for _ in range(11)]
    made.append(samples.Segment(alone, [(4, 6), (9, 11)], experts=drawn(rng, 10)))
    return [samples.Sample((segment,)) for segment in made]


def bare(made: list[samples.Sample]) -> list[samples.Sample]:
    """The samples without their experts."""
    return [replace(one, segments=tuple(replace(segment, experts=None) for segment in one.segments)) for one in made]


def with_replay(family: str) -> policy.Policy:
    made = policy.Policy(network(family, attention.NAME))
    made.routers = routing_replay.replay_routing(made.network)
    assert made.routers == samples.Routers(3, 2, 6)
    return made


def forced(reference: Any, weigh: Callable[[Tensor, Tensor], Tensor], segment: samples.Segment) -> Tensor:
    """Logprobs of the trained tokens by Hugging Face's own forward, whose routers return the segment's experts."""
    assert segment.experts is not None
    known = torch.tensor(list(segment.experts.raw)).view(-1, 3, 2)

    def route(router: Any, layer: int, hidden_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = torch.nn.functional.linear(hidden_TH.flatten(0, -2), router.weight, getattr(router, "bias", None))
        own = logits_TE[-1:].topk(2).indices
        chosen_TK = torch.cat((known[:, layer], own)) if len(known) < len(logits_TE) else known[:, layer]
        return logits_TE, weigh(logits_TE, chosen_TK), chosen_TK

    for layer, block in enumerate(reference.model.layers):
        for router in (getattr(block.mlp, name, None) for name in ("gate", "router")):
            if router is not None:
                router.forward = partial(route, router, layer)
    ids = torch.tensor([segment.token_ids])
    logprobs = reference(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    of_token = logprobs.gather(1, ids[0, 1:, None]).squeeze(1)
    return torch.cat([of_token[start - 1 : end - 1] for start, end in segment.spans])


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_batch_is_that_of_hugging_faces_forward_with_these_experts(family: str, checkpointed: bool) -> None:
    ours, reference = with_replay(family), network(family, "eager")
    if checkpointed:
        layers.checkpoint_layers(ours.network)
    packed = packing.pack(batch(), CPU)
    assert len(packed.token_ids_T) < sum(len(segment.token_ids) for segment in packed.segments)
    together = ours.logprobs(packed)
    expected = torch.cat([forced(reference, FAMILIES[family][1], segment) for segment in packed.segments])
    torch.testing.assert_close(together, expected, atol=5e-5, rtol=1e-4)
    ours.logprobs(packing.pack(batch()[:1], CPU))  # another micro-batch before the backward computes layers again
    together.sum().backward()
    expected.sum().backward()
    own = dict(ours.network.named_parameters())
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(own[name].grad, parameter.grad, atol=5e-4, rtol=1e-3), name


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_without_experts_are_routed_as_always(family: str) -> None:
    packed = packing.pack(bare(batch()), CPU)
    plain = policy.Policy(network(family, attention.NAME)).logprobs(packed)
    torch.testing.assert_close(with_replay(family).logprobs(packed), plain)


def test_it_makes_no_difference_which_samples_share_a_micro_batch() -> None:
    """Their common prompts have other experts, as an engine may compute them twice."""
    rng, ours = random.Random(4), with_replay("qwen3_moe")
    made = [
        replace(one, segments=(replace(one.segments[0], experts=drawn(rng, one.segments[0].experts.rows)),))
        for one in batch()
    ]
    assert len(packing.pack(made, CPU).token_ids_T) < sum(one.tokens for one in made)
    common = packing.common_experts(made)
    made = [
        replace(one, segments=(replace(one.segments[0], experts=experts[0]),))
        for one, experts in zip(made, common, strict=True)
    ]
    together = packing.pack(made, CPU)
    alone = {id(one.segments[0]): ours.logprobs(packing.pack([one], CPU)) for one in made}
    expected = torch.cat([alone[id(segment)] for segment in together.segments])
    torch.testing.assert_close(ours.logprobs(together), expected)


def test_a_network_that_does_not_replay_routes_by_itself() -> None:
    """As a critic, or a teacher."""
    own = policy.Policy(network("qwen3_moe", attention.NAME))
    with_experts, without = packing.pack(batch(), CPU), packing.pack(bare(batch()), CPU)
    torch.testing.assert_close(own.logprobs(with_experts), own.logprobs(without))
    assert not torch.allclose(with_replay("qwen3_moe").logprobs(with_experts), own.logprobs(without), atol=1e-3)


@pytest.mark.parametrize(
    ("app", "options"),
    [
        ("models/vllm", {"engine": {"enable_return_routed_experts": True}, "bundle_tokens": "auto"}),
        ("models/transformers", {"routed_experts": True}),
        ("models/scripted", {}),
    ],
)
def test_the_policys_server_records_experts_where_ng_train_starts_it(
    app: str, options: dict[str, Any], root: Path
) -> None:
    overrides = ["model.path=acme/policy", "algorithm.routing_replay=true"]
    recipe, _ = recipe_reader.read_recipe(["grpo.yaml"], overrides)
    config = services.config_for(root / "global_config.yaml", "policy", app, services.serving_options(recipe))
    assert config.stanza("policy").options == {"model": "acme/policy", **options}


def test_a_model_without_experts_is_refused() -> None:
    shape = AutoConfig.for_model("qwen3", **SHAPE)
    with pytest.raises(ConfigError, match="qwen3 has no routers of experts"):
        routing_replay.replay_routing(AutoModelForCausalLM.from_config(shape))
