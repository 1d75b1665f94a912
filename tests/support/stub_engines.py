"""The scripted model of upstreams.py with token ids: as a Hugging Face model, and as an SGLang server."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from upstreams import Json, Stub, StubReply, Turn, scripted_reply

CONTEXT = 4000
HEADER = "<|im_start|>assistant\n"
TEMPLATE = r"""{%- if tools %}<|im_start|>system
tools: {{ tools | tojson }}<|im_end|>
{% endif %}{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{%- if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}
{%- endif %}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""It forgets old reasoning, and writes calls without line breaks: history is not what the model said."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and the tags that chat templates use."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    bpe.train_from_iterator(
        ["user assistant tool hello there word forever add You said The tool says Fine"] * 9, trainer
    )
    bpe.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "</think>")])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=special[0], eos_token=special[2])
    wrapped.chat_template = TEMPLATE
    return wrapped


def answer_ids(tokens: PreTrainedTokenizerFast, prompt: list[int]) -> list[int]:
    """The scripted answer to a prompt, up to the id that ends the turn."""
    text = tokens.decode(prompt, skip_special_tokens=False)
    turns = [
        Turn(role, reply) for role, reply in re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", text, re.DOTALL)
    ]
    reply = scripted_reply([turn for turn in turns if turn.role != "system"], "tools: [" in text, None)
    return tokens.encode(_render(reply) + "<|im_end|>", add_special_tokens=False)


def _render(reply: StubReply) -> str:
    thought = f"<think>{reply.reasoning}</think>" if reply.reasoning else ""
    call = f"\n<tool_call>\n{json.dumps(reply.call)}\n</tool_call>" if reply.call else ""
    return thought + reply.text + call


class StubConfig(PretrainedConfig):
    model_type = "ngym_test_stub"
    max_position_embeddings = CONTEXT


class StubModel(PreTrainedModel, GenerationMixin):
    """Sure of what `scripted_reply` says next: nearly all probability is on it. What it has seen is its cache."""

    config_class = StubConfig

    def __init__(self, config: StubConfig) -> None:
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.tokens = tokenizer()
        self.header = self.tokens.encode(HEADER, add_special_tokens=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, **_: Any) -> Any:
        ids = (past_key_values or []) + input_ids[0].tolist()
        n = len(self.header)
        start = max(place + n for place in range(len(ids) - n + 1) if ids[place : place + n] == self.header)
        answer = answer_ids(self.tokens, ids[:start])
        if "forever" in self.tokens.decode(ids[:start]):
            answer = self.tokens.encode("x" * CONTEXT, add_special_tokens=False)
        logits = torch.zeros(1, 1, len(self.tokens))
        logits[0, 0, answer[len(ids) - start]] = 30.0
        return SimpleNamespace(logits=logits, past_key_values=ids)


def write_stub_model(folder: Path) -> Path:
    """A checkpoint of it."""
    AutoConfig.register("ngym_test_stub", StubConfig, exist_ok=True)
    AutoModelForCausalLM.register(StubConfig, StubModel, exist_ok=True)
    model = StubModel(StubConfig(eos_token_id=2, pad_token_id=0))
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


class Sglang(Stub):
    """SGLang's native API. Streams repeat all that was said, unless `incremental` (its --incremental-streaming-output)."""

    def __init__(self, folder: Path, incremental: bool = False) -> None:
        super().__init__()
        self.tokens = tokenizer()
        self.folder = folder
        self.incremental = incremental
        self.version = "default"
        self.prompt_tokens = 0

    def routes(self) -> tuple[str, ...]:
        asleep = ("release_memory_occupation", "resume_memory_occupation")
        return ("generate", "model_info", "server_info", "update_weights_from_disk", "flush_cache", *asleep)

    def answer(self, route: str, body: Json) -> Response:
        match route:
            case "model_info":
                return JSONResponse({"model_path": str(self.folder), "weight_version": self.version})
            case "server_info":
                return JSONResponse({"context_length": CONTEXT})
            case "update_weights_from_disk":
                if not Path(body["model_path"]).is_dir():
                    return JSONResponse({"success": False, "message": "no such folder", "num_paused_requests": 0}, 400)
                self.version = body["weight_version"]
                return JSONResponse({"success": True, "message": "Succeeded", "num_paused_requests": 0})
            case "generate":
                return self._generate(body)
        return Response("Cache flushed.\n") if route == "flush_cache" else JSONResponse(None)

    async def _handle(self, path: str, request: Request) -> Response:
        raw = await request.body()
        body = json.loads(raw) if raw else {}
        if path == "generate":  # what misbehaves is asked for in ids
            text = self.tokens.decode(body["input_ids"])
            if "garbage" in text:
                return Response("<html>welcome</html>", media_type="text/html")
            if "forever" in text:
                return await self._forever(request, bool(body.get("stream")))
        return await super()._handle(path, request)

    def error(self, status: int) -> Json:
        return {"error": {"message": f"stub says {status}"}}

    def beat(self) -> bytes:
        return b"data: " + json.dumps(self._answer_json([70], 1, None)).encode() + b"\n\n"

    def _generate(self, body: Json) -> Response:
        parameters = body["sampling_params"]
        self.prompt_tokens = len(body["input_ids"])
        assert body["return_logprob"] is True
        ids = answer_ids(self.tokens, body["input_ids"])
        fits = len(ids) <= parameters["max_new_tokens"]
        ids = ids[: parameters["max_new_tokens"]]
        finish = {"type": "stop", "matched": ids[-1]} if fits else {"type": "length", "length": len(ids)}
        if not body.get("stream"):
            return JSONResponse(self._answer_json(ids, len(ids), finish))

        async def events() -> AsyncIterator[bytes]:
            for end in range(2, len(ids) + 2, 2):
                last = end >= len(ids)
                part = ids[end - 2 : end] if self.incremental else ids[:end]
                event = self._answer_json(part, min(end, len(ids)), finish if last else None)
                yield b"data: " + json.dumps(event).encode() + b"\n\n"
                await asyncio.sleep(0)
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    def _answer_json(self, ids: list[int], count: int, finish: Json | None) -> Json:
        meta = {
            "id": "x",
            "finish_reason": finish,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": count,
            "weight_version": self.version,
        }
        meta["output_token_logprobs"] = [[-token / 1024, token, None] for token in ids]
        return {"text": "", "output_ids": ids, "meta_info": meta}
