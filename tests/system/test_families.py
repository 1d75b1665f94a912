"""Each model family: tool calls in its own format, captured tokens, pushed weights, and its detection."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm_service import TAGS, TEMPLATE, Servers, user, write_tokenizer

from ngym.services.base.app import load

with_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

TOKEN = "a token for this test only"
CONTEXT = 1024
SIZE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
LLAMA_TEMPLATE = r"""{%- for m in messages -%}
<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>

{% if m.tool_calls %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}
{%- else %}{{ m.content }}{% endif %}<|eot_id|>
{%- endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
GEMMA_TEMPLATE = r"""{%- for m in messages -%}
<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}
{% if m.tool_calls %}[{{ m.tool_calls[0].function.name }}({% for name, value in m.tool_calls[0].function.arguments.items() %}{{ name }} = {{ value }},{% endfor %})]
{%- else %}{{ m.content }}{% endif %}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
MISTRAL_TEMPLATE = r"""{%- for m in messages -%}
{%- if m.role == 'user' %}[INST] {{ m.content }}[/INST]
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- elif m.tool_calls %}[TOOL_CALLS][{"name": "{{ m.tool_calls[0].function.name }}", "arguments": {{ m.tool_calls[0].function.arguments | tojson }}}]</s>
{%- else %}{{ m.content }}</s>{% endif %}
{%- endfor %}"""


class Family(NamedTuple):
    """configuration: transformers' class of that name, and what is special in it. call: a tool call in its form."""

    configuration: str
    network: str
    more: dict[str, Any]
    special: list[str]
    template: str
    call: str
    options: dict[str, Any]


EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "qwen2": Family("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}, QWEN, TEMPLATE, CHATML_CALL, {}),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", {"tie_word_embeddings": False}, QWEN, TEMPLATE, CHATML_CALL, {}),
    "qwen3_moe": Family(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"tie_word_embeddings": False, **EXPERTS},
        QWEN,
        TEMPLATE,
        CHATML_CALL,
        {},
    ),
    "llama": Family(
        "LlamaConfig",
        "LlamaForCausalLM",
        {"tie_word_embeddings": False},
        ["<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        LLAMA_TEMPLATE,
        '{"name": "add", "parameters": {"a": 1, "b": 2}}',
        {},
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"tie_word_embeddings": True, "sliding_window": 64, "query_pre_attn_scalar": 32},
        ["<pad>", "<start_of_turn>", "<end_of_turn>"],
        GEMMA_TEMPLATE,
        "[add(a=1, b=2)]",
        {"tool_call_parser": "pythonic"},  # its own template writes no calls
    ),
    "mistral": Family(
        "MistralConfig",
        "MistralForCausalLM",
        {"tie_word_embeddings": False, "sliding_window": None},
        ["<unk>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"],
        MISTRAL_TEMPLATE,
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]',
        {},
    ),
}
IN_THE_SUITE = "llama"


def write_family(folder: Path, family: Family) -> Any:
    """Its checkpoint; the network."""
    import transformers

    ids = write_tokenizer(
        folder, family.template, family.special, TAGS if family.template is TEMPLATE else ("<|python_tag|>",)
    )
    transformers.set_seed(0)
    ends = {"eos_token_id": len(family.special) - 1}
    config = getattr(transformers, family.configuration)(vocab_size=ids, **SIZE, **ends, **family.more)
    network = getattr(transformers, family.network)(config)
    network.save_pretrained(folder)
    return network.eval()


def logprobs(network: Any, ids: list[int], first: int) -> list[float]:
    import torch

    with torch.no_grad():
        logits_TV = network(torch.tensor([ids])).logits[0, first - 1 : -1]
    return logits_TV.log_softmax(-1).gather(1, torch.tensor(ids[first:])[:, None])[:, 0].tolist()


def change_weights(network: Any) -> dict[str, Any]:
    """Other weights, under the names of the checkpoint."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.2 if parameter.ndim > 1 else 0.5))
    weights = revert_weight_conversion(network, dict(network.state_dict()))  # transformers fuses experts
    tied = {"lm_head.weight"} if network.config.tie_word_embeddings else set()
    return {name: tensor.clone() for name, tensor in weights.items() if name not in tied}


@with_vllm
@pytest.mark.parametrize(
    "name", [name if name == IN_THE_SUITE else pytest.param(name, marks=pytest.mark.soak) for name in FAMILIES]
)
def test_a_family_calls_tools_in_its_own_form_and_continues_from_its_own_ids_under_pushed_weights(
    name: str, tmp_path: Path, root: Path
) -> None:
    family = FAMILIES[name]
    network = write_family(tmp_path / "policy", family)
    options = {"model": str(tmp_path / "policy"), "engine": {"max_model_len": CONTEXT}, **family.options}
    stanza = {"options": options, "admin_token": TOKEN}
    with Servers(tmp_path, root, {"policy": stanza}) as servers:
        server = servers["policy"]
        function = {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}
        task = {"tools": [{"type": "function", "function": function}]}
        history = [user("what is 1 + 2?")]

        def ask(**more: Any) -> dict[str, Any]:
            reply = server.post("/rollouts/r-1/v1/chat/completions", messages=history, **task, **more)
            assert reply.status_code == 200, reply.text
            message: dict[str, Any] = reply.json()["choices"][0]["message"]
            return message

        first = ask(structured_outputs={"choice": [family.call]}, max_tokens=200)
        [call] = first["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1, "b": 2})
        item = {"role": "assistant", "content": first["content"], "tool_calls": first["tool_calls"]}
        history += [item, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]

        ids = [11, 12, 13, 30, 40, 50, 60]
        from ngym.trainer.weights import push, replica

        pusher = push.Pusher([server.url], TOKEN)
        weights = change_weights(network)
        from ngym.trainer.weights import push

        proof = replica.LogprobProof(ids, logprobs(network, ids, 1))
        assert pusher.push(pusher.prepare() + 1, weights, proof).difference < 1e-4
        pusher.finish()

        # few tokens, and the same each time: an end of turn among them would begin another segment
        second = ask(ignore_eos=True, max_tokens=12, seed=3)
        prompt, sampled = second["prompt_token_ids"], second["generation_token_ids"]
        assert second["generation_log_probs"] == pytest.approx(
            logprobs(network, prompt + sampled, len(prompt)), abs=1e-4
        )
        history += [{"role": "assistant", "content": second["content"]}, user("and now?")]
        third = ask(max_tokens=4)
        [segment] = server.get("/rollouts/r-1/segments").json()["segments"]
        assert segment["token_ids"] == third["prompt_token_ids"] + third["generation_token_ids"]
        assert [version for _, _, version in segment["policy_version"]] == [0, 1, 1]


@with_vllm
def test_gpt_oss_takes_new_experts_and_sinks(tmp_path: Path, root: Path) -> None:
    import transformers

    size = write_tokenizer(tmp_path / "policy", TEMPLATE, QWEN, TAGS)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64, "tie_word_embeddings": False}
    config = transformers.GptOssConfig(vocab_size=size, **(SIZE | {"head_dim": 64}), eos_token_id=2, **experts)
    network = transformers.GptOssForCausalLM(config).eval()
    network.save_pretrained(tmp_path / "policy")
    options = {"model": str(tmp_path / "policy"), "engine": {"max_model_len": CONTEXT}}
    with Servers(tmp_path, root, {"policy": {"options": options, "admin_token": TOKEN}}) as servers:
        from ngym.trainer.weights import push, replica

        pusher = push.Pusher([servers["policy"].url], TOKEN)
        ids = list(range(5, 105))  # more than the sliding window
        from ngym.trainer.weights import push

        assert pusher.prove(replica.LogprobProof(ids, logprobs(network, ids, 1))) < 1e-4
        first, weights = logprobs(network, ids, 1), change_weights(network)
        from ngym.trainer.weights import push, replica

        proof = replica.LogprobProof(ids, logprobs(network, ids, 1))
        assert sum(abs(new - old) for new, old in zip(proof.logprobs, first, strict=True)) > 10
        assert pusher.push(pusher.prepare() + 1, weights, proof).difference < 1e-4
        pusher.finish()


# How a family is known


@pytest.fixture(scope="module")
def parsers_of(root: Path) -> Callable[[str, str], tuple[str | None, str | None]]:
    module = load(root / "models" / "vllm" / "app.py")
    return importlib.import_module(f"{module.__name__}.serving.arguments").parsers_of


BEGINS = "{% if add_generation_prompt %}"
THINKS = BEGINS + "<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize(
    ("model_type", "template", "tools", "reasoning"),
    [
        ("qwen2", "<tool_call>{{ arguments }}</tool_call>" + BEGINS, "hermes", None),
        ("qwen3", "<think>{{ reasoning_content }}</think><tool_call>{{ arguments }}" + THINKS, "hermes", "qwen3"),
        ("qwen3", "<tool_call>{{ arguments }}" + BEGINS, "hermes", None),
        ("qwen3_moe", "<tool_call>\n<function=name>{{ arguments }}" + BEGINS, "qwen3_coder", None),
        ("qwen2", "<think>" + THINKS, None, "qwen3"),
        ("llama", "<|python_tag|> ipython" + BEGINS, "llama3_json", None),
        ("llama", THINKS, None, "deepseek_r1"),
        ("llama4", "", "llama4_pythonic", None),
        ("mistral", "[INST] [TOOL_CALLS]", "mistral", None),
        ("gemma3_text", "<start_of_turn>" + BEGINS, None, None),
        ("gpt_oss", "", "openai", "openai_gptoss"),
        (
            "deepseek_v3",
            "<\uff5ctool\u2581call\u2581begin\uff5c>function```json" + THINKS,
            "deepseek_v3",
            "deepseek_r1",
        ),
        ("glm4_moe", "<tool_call>{{ name }}<arg_key>" + BEGINS + "<think></think>", "glm45", "glm45"),
        ("opt", "", None, None),
    ],
)
def test_the_parsers_of_a_family_are_chosen_by_its_type_and_template(
    parsers_of: Callable[[str, str], tuple[str | None, str | None]],
    model_type: str,
    template: str,
    tools: str | None,
    reasoning: str | None,
) -> None:
    assert tuple(parsers_of(model_type, template)) == (tools, reasoning)
