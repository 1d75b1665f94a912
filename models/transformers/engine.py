"""Sampling with a Hugging Face model, token by token, in one thread next to the event loop, first come, first served;
and scores of a model for sequence classification, such as a reward model.

A log-probability is that of the sampling distribution, after temperature, top-k, top-p and min-p. Greedy tokens have
that of the model's own distribution.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from ngym.chat_codec import Finish, Sampled, Sampling
from ngym.errors import NotReady

from .options import Options

NO_LIMIT = 1 << 20  # for a model that does not state its context length


def classifies(folder: str, options: Options) -> bool:
    """Whether the model is one for sequence classification.

    Raises:
        OSError, ValueError: it has no config that transformers knows.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def _loaded(kind: Any, folder: str, options: Options) -> tuple[Any, Any, int]:
    """The tokenizer, the model and its context length. kind: an AutoModel class."""
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    code = {"trust_remote_code": options.trust_remote_code}
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, **code)
    data = {"dtype": getattr(torch, options.dtype), "use_safetensors": True}  # never opens a pickle
    model = kind.from_pretrained(folder, **data, **code)
    if tokenizer.chat_template is None:
        raise ValueError("its tokenizer has no chat template; take an instruct model")
    own = getattr(model.config.get_text_config(), "max_position_embeddings", None) or NO_LIMIT
    return tokenizer, model.to(options.device).eval(), min(options.context or own, own)


class Classifier:
    """A loaded model for sequence classification; a reward model has one label.

    Raises:
        OSError, ValueError: the model cannot be loaded.
    """

    def __init__(self, folder: str, options: Options) -> None:
        self.tokenizer, self._model, self.context = _loaded(AutoModelForSequenceClassification, folder, options)
        self.labels: dict[int, str] = self._model.config.id2label
        self._device = options.device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="transformers")

    def close(self) -> None:
        """End the thread after the current text."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def logits(self, ids: list[int]) -> list[float]:
        """One for each label."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._logits, ids)

    @torch.inference_mode()
    def _logits(self, ids: list[int]) -> list[float]:
        logits: list[float] = self._model(input_ids=torch.tensor([ids], device=self._device)).logits[0].tolist()
        return logits


class Engine:
    """A loaded model.

    Raises:
        OSError, ValueError: the model cannot be loaded.
    """

    def __init__(self, folder: str, options: Options) -> None:
        self.tokenizer, self._model, self.context = _loaded(AutoModelForCausalLM, folder, options)
        model = self._model
        self.ends: int | list[int] | None = model.generation_config.eos_token_id
        known = self.ends if isinstance(self.ends, list) else [self.ends, self.tokenizer.eos_token_id]
        self._ends = frozenset(end for end in known if end is not None)
        # For a long prompt, unused logits of all other positions would take gigabytes.
        keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if keeps else {}
        self._device = options.device
        self._closing = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="transformers")

    def close(self) -> None:
        """Stop generations at their next token and end the thread."""
        self._closing.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def generate(self, prompt: list[int], sampling: Sampling) -> AsyncGenerator[Sampled, None]:
        """Tokens as they are sampled. Sampling stops when the caller stops reading."""
        loop = asyncio.get_running_loop()
        tokens: asyncio.Queue[Sampled | None] = asyncio.Queue()
        given_up = threading.Event()

        def work() -> None:
            try:
                for sampled in self._sample(prompt, sampling):
                    if given_up.is_set():
                        return
                    if self._closing.is_set():
                        raise NotReady("this server is stopping")
                    loop.call_soon_threadsafe(tokens.put_nowait, sampled)
            finally:
                loop.call_soon_threadsafe(tokens.put_nowait, None)

        working = loop.run_in_executor(self._thread, work)
        try:
            while (sampled := await tokens.get()) is not None:
                yield sampled
            await working  # raises the error of the thread, if any
        finally:
            given_up.set()
            working.cancel()  # if it has not begun

    @torch.inference_mode()
    def _sample(self, prompt: list[int], sampling: Sampling) -> Iterator[Sampled]:
        draw = torch.Generator(self._device)
        if sampling.seed is None:
            draw.seed()
        else:
            draw.manual_seed(sampling.seed)
        stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._ends)
        ids, past = torch.tensor([prompt], device=self._device), None
        for count in range(1, sampling.max_tokens + 1):
            out = self._model(input_ids=ids, past_key_values=past, use_cache=True, **self._last_only)
            past = out.past_key_values
            token, logprob = _drawn(out.logits[0, -1].float(), sampling, draw)
            finish: Finish | None = "stop" if token in stops else "length" if count == sampling.max_tokens else None
            yield Sampled([token], [logprob], finish)
            if finish:
                return
            ids = torch.tensor([[token]], device=self._device)


def _drawn(logits_V: Tensor, sampling: Sampling, draw: torch.Generator) -> tuple[int, float]:
    """A token and its log-probability."""
    if sampling.temperature == 0:
        logprobs_V = logits_V.log_softmax(-1)
        token = int(logprobs_V.argmax())
        return token, float(logprobs_V[token])
    logits_V = logits_V / sampling.temperature
    if 0 < sampling.top_k < len(logits_V):
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1:
        probs_V, order_V = logits_V.softmax(-1).sort(descending=True)
        beyond_V = probs_V.cumsum(-1) - probs_V >= max(sampling.top_p, 1e-9)  # the likeliest always stays
        logits_V = logits_V.masked_fill(torch.zeros_like(beyond_V).scatter(0, order_V, beyond_V), -torch.inf)
    if sampling.min_p > 0:
        probs_V = logits_V.softmax(-1)
        logits_V = logits_V.masked_fill(probs_V < sampling.min_p * probs_V.max(), -torch.inf)
    logprobs_V = logits_V.log_softmax(-1)
    token = int(torch.multinomial(logprobs_V.exp(), 1, generator=draw))
    return token, float(logprobs_V[token])
