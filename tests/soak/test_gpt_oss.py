"""gpt-oss, whose conversations are not rendered by a chat template: a tiny one calls a tool and continues from its
ids."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from vllm_service import Server, Servers, user

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.soak,  # it has the ids of the real one, 201,088 of them
]

TOKEN = "a token for this test only"
IDS = 201_088
FIRST_SPECIAL = 199_998
ENDS = {"return": 200_002, "text": 199_999, "call": 200_012}
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>'
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}}}


def harmony() -> Any:
    import openai_harmony

    return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def write_tokenizer(folder: Path) -> None:
    """One with harmony's ids; it need not encode, for harmony does that."""
    from openai_harmony import HarmonyError
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    encoding, letters = harmony(), bytes_to_unicode()
    vocabulary: dict[str, int] = {}
    for number in range(FIRST_SPECIAL):
        try:
            word = "".join(letters[byte] for byte in encoding.decode_utf8([number]).encode())
        except HarmonyError:  # a part of a letter
            word = f"part {number}"
        vocabulary[word if word not in vocabulary else f"again {number}"] = number
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    special = [encoding.decode([number]) for number in range(FIRST_SPECIAL, IDS)]
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    named = {"eos_token": "<|return|>", "pad_token": "<|endoftext|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)


def write_checkpoint(folder: Path) -> Any:
    import transformers

    write_tokenizer(folder)
    transformers.set_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=IDS,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        sliding_window=64,
        initializer_range=0.1,
        eos_token_id=list(ENDS.values()),
        pad_token_id=ENDS["text"],
        tie_word_embeddings=False,
    )
    network = transformers.GptOssForCausalLM(config)
    network.save_pretrained(folder)
    return network


def learn(network: Any, prompt: list[int], answer: list[int]) -> None:
    """To say just this."""
    import torch

    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0)
    ids = torch.tensor([prompt + answer])
    for _ in range(60):
        logits = network(ids).logits[0, len(prompt) - 1 : -1]
        torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :]).backward()
        optimizer.step()
        optimizer.zero_grad()


def logprobs(network: Any, ids: list[int], first: int) -> list[float]:
    import torch

    with torch.no_grad():
        logits_TV = network(torch.tensor([ids])).logits[0, first - 1 : -1]
    return logits_TV.log_softmax(-1).gather(1, torch.tensor(ids[first:])[:, None])[:, 0].tolist()


def ask(server: Server, rollout: str, history: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    task = {"messages": history, "tools": [{"type": "function", "function": ADD}], "max_tokens": tokens}
    reply = server.post(f"/rollouts/{rollout}/v1/chat/completions", **task)
    assert reply.status_code == 200, reply.text
    message: dict[str, Any] = reply.json()["choices"][0]["message"]
    return message


@pytest.mark.timeout(1800)
def test_it_calls_a_tool_and_continues_from_its_own_ids(tmp_path: Path, root: Path) -> None:
    network = write_checkpoint(tmp_path / "policy")
    options = {"model": str(tmp_path / "policy"), "engine": {"max_model_len": 1024}}
    stanzas = {"policy": {"options": options, "admin_token": TOKEN}}
    history = [user("what is 1 + 2?")]
    with Servers(tmp_path, root, stanzas) as servers:
        server = servers["policy"]
        prompt = ask(server, "r-0", history, 1)["prompt_token_ids"]
        answer = harmony().encode(CALL, allowed_special="all")
        learn(network, prompt, answer)
        from ngym.trainer.weights import push, replica

        pusher = push.Pusher([server.url], TOKEN)
        from ngym.trainer.weights import push

        proof = replica.LogprobProof(prompt, logprobs(network, prompt, 1))
        assert pusher.push(1, dict(network.state_dict()), proof).difference < 1e-4
        pusher.finish()
        first = ask(server, "r-1", history, 60)
        assert first["generation_token_ids"] == answer
        [call] = first["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1, "b": 2})
        history += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "3"},
        ]
        second = ask(server, "r-1", history, 20)
        prompt_2, sampled = second["prompt_token_ids"], second["generation_token_ids"]
        assert prompt_2[: len(prompt) + len(answer)] == prompt + answer
        tail = "<|start|>functions.add<|channel|>commentary to=assistant<|message|>3<|end|><|start|>assistant"
        assert harmony().decode(prompt_2[len(prompt) + len(answer) :]) == tail
        expected = logprobs(network, prompt_2 + sampled, len(prompt_2))
        assert second["generation_log_probs"] == pytest.approx(expected, abs=1e-4)
        [segment] = server.get("/rollouts/r-1/segments").json()["segments"]
        assert segment["token_ids"] == prompt_2 + sampled
