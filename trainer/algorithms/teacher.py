"""The teacher of on-policy distillation: its log-probabilities of the tokens that the policy sampled.

    teacher = opened(setup, options)      # a local checkpoint, or any server with vLLM's /inference/v1/generate
    teacher(packed)                       # [N], without a gradient

`opened` validates it: its token ids mean the same, its answers do not change, and value i belongs to token i. The last
is tested with a known text whose last token is then exchanged: the value of that token changes, and no other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import orjson
import torch
from torch import Tensor

from ngym.errors import ConfigError, UsageError
from ngym.net.tls import client_context

from ..data.samples import Sample, Segment
from ..engine.engine import Engine
from ..model.packing import Packed, pack
from ..model.policy import load_policy, load_tokenizer
from ..recipe.objective import Teacher
from ..recipe.recipe import ModelOptions
from . import Setup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KNOWN_TEXT = "Tom has 37 coins and buys 58 more, so he has 95 coins. The cat sat on the mat; 2 + 2 = 4."
# Of a log-probability: kernels in bfloat16 add in another order when other requests share the batch.
TOLERANCE = 0.2
CALLS = 32  # at the same time
TIMEOUT_S = 600.0
Scored = Callable[[Packed], Tensor]


def opened(setup: Setup, options: Teacher, temperature: float) -> Scored:
    """The validated teacher. Every rank calls it.

    Raises:
        ConfigError: it cannot be loaded or reached, or is not a teacher for this policy; with one line.
    """
    _, engine, tokenizer = setup
    if options.path is not None:
        key, scored = f"algorithm.teacher.path: {options.path}", _local(options.path, setup, temperature)
    else:
        assert options.url is not None
        key = f"algorithm.teacher.url: {options.url}"
        scored = Server(options.url, options.model, os.environ.get(options.api_key_env or ""))
    # the other ranks wait for the result of rank 0
    if found := engine.share(_problem(scored, tokenizer, engine) if engine.rank == 0 else None):
        raise ConfigError(f"{key}: {found}")
    return scored


def _local(path: str, setup: Setup, temperature: float) -> Scored:
    """A frozen network from a folder, whole on every rank."""
    recipe, engine, tokenizer = setup
    options, key = ModelOptions(path=path), f"algorithm.teacher.path: {path}"
    try:
        own = load_tokenizer(options)
        policy = load_policy(options, own, recipe.seed, temperature).to(engine.device)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    ids = own.get_vocab()
    other = next((token for token, number in tokenizer.get_vocab().items() if ids.get(token) != number), None)
    if other is not None:
        _refuse(key, f"another tokenizer than the policy's: its token {other!r} has another id or none")
    if policy.vocabulary < len(tokenizer):
        _refuse(key, f"its network has {policy.vocabulary:,} tokens, the policy's tokenizer {len(tokenizer):,}")
    frozen = policy.eval().requires_grad_(False)

    def scored(packed: Packed) -> Tensor:
        longest = max(len(segment.token_ids) for segment in packed.segments)
        if longest > frozen.context:
            raise UsageError(f"{key}: its context is {frozen.context:,} tokens, and a rollout has {longest:,}")
        with torch.no_grad():
            return frozen.logprobs(packed)

    return scored


class Server:
    """A server that returns the logprobs of a prompt, such as models/vllm or vLLM itself.

    model: the name that requests carry, if any.
    """

    def __init__(self, url: str, model: str | None, key: str | None) -> None:
        self._url = url.rstrip("/")
        self._model = {} if model is None else {"model": model}
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._pool = ThreadPoolExecutor(CALLS, "teacher")

    def __call__(self, packed: Packed) -> Tensor:
        found = self._pool.map(self._of_segment, packed.segments)
        return torch.tensor([value for of_segment in found for value in of_segment], device=packed.token_ids_T.device)

    def tokens(self, text: str) -> list[int]:
        """The server's own token ids of a text."""
        answer = self._post("/tokenize", {"prompt": text, "add_special_tokens": False})
        return list(answer["tokens"])

    def _of_segment(self, segment: Segment) -> list[float]:
        ids = segment.token_ids
        asked = {"token_ids": ids, "sampling_params": {"prompt_logprobs": 0, "max_tokens": 1, "temperature": 1.0}}
        said = self._post("/inference/v1/generate", asked).get("prompt_logprobs")
        if not isinstance(said, list) or len(said) != len(ids):
            count = len(said) if isinstance(said, list) else "no"
            raise UsageError(
                f"algorithm.teacher.url: {self._url} returned {count} prompt_logprobs for {len(ids)} tokens"
            )
        try:
            return [
                float(said[at][str(ids[at])]["logprob"]) for start, end in segment.spans for at in range(start, end)
            ]
        except (KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__} {error}"
            raise UsageError(f"the teacher's prompt_logprobs are without the prompt's own tokens ({reason})") from error

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = Request(self._url + path, orjson.dumps(self._model | body), self._headers)
        context = client_context() if self._url.startswith("https") else None
        try:
            with urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
                said: dict[str, Any] = orjson.loads(answer.read())
        except HTTPError as error:
            detail = f"{error.code} {error.read()[:300].decode(errors='replace')}"
            raise UsageError(f"{self._url}{path} answered {detail}") from error
        except (OSError, ValueError) as error:
            raise UsageError(f"{self._url}{path} cannot be used: {error}") from error
        return said


def _problem(scored: Scored, tokenizer: PreTrainedTokenizerBase, engine: Engine) -> str | None:
    """Why the teacher cannot be used, or None."""
    ids = tokenizer(KNOWN_TEXT, add_special_tokens=False)["input_ids"]
    exchanged = [*ids[:-1], ids[0] if ids[0] != ids[-1] else ids[1]]
    try:
        if isinstance(scored, Server) and scored.tokens(KNOWN_TEXT) != ids:
            return "another tokenizer than the policy's: a known text has other token ids there"
        first, again, other = (_of_ids(scored, each, engine) for each in (ids, ids, exchanged))
    except UsageError as error:
        return str(error)
    if not all(value <= 1e-3 for value in first):  # also for nan
        return "its values of a known text are not log-probabilities"
    if (apart := _apart(first, again)) > TOLERANCE:
        return f"it is not deterministic: two answers for the same text differ by {apart:.3g}"
    if (apart := _apart(first[:-1], other[:-1])) > TOLERANCE or abs(first[-1] - other[-1]) < 1e-6:
        return "its values are not aligned: exchanging the last token must change the last value, and no other"
    return None


def _of_ids(scored: Scored, ids: Sequence[int], engine: Engine) -> list[float]:
    packed = pack([Sample((Segment(list(ids), [(1, len(ids))]),))], engine.device)
    return [float(value) for value in scored(packed)]


def _apart(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(left - right) for left, right in zip(one, other, strict=True))


def _refuse(key: str, reason: str) -> NoReturn:
    raise ConfigError(f"{key}: {reason}")
