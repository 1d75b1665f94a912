"""The teachers of on-policy distillation: their log-probabilities of the tokens that the policy sampled.

    teachers = open_teachers(setup, options, temperature)
    teachers.scores(rollouts, engine, budget)     # by rollout, by segment, by token, without a gradient; None: too long
    teachers.distributions(packed)                # of one teacher's whole distributions, for a divergence

A teacher is a local checkpoint, any server with vLLM's /inference/v1/generate, or the policy itself with a hint that the
sampled rollout did not have (self-distillation). `open_teacher` validates it: its token ids mean the same, its answers do
not change, and value i belongs to token i. The last is tested with a known text whose last token is then exchanged: the
value of that token changes, and no other.
"""

from __future__ import annotations

import http.client
import math
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol
from urllib.error import HTTPError
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, Request, build_opener

import orjson
import torch
from torch import Tensor

from ngym.errors import ConfigError, NgymError, UsageError
from ngym.net.keepalive import break_when_silent
from ngym.net.tls import client_context
from ngym.peer_answers import is_context_overflow, words

from ..data.samples import RolloutSample, Sample, SampledSegment, Segment
from ..engine.engine import Engine, score
from ..model.images import ImageReader, placeholder_problem
from ..model.packing import MicroBatch, pack
from ..model.policy import ModelRefused, Policy, load_policy, load_tokenizer
from ..model.teacher_divergence import Distributions, TopK
from ..recipe.objective import PLACEHOLDER, Teacher, TeacherShare, TeacherSource
from ..recipe.recipe import ModelOptions
from . import Setup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KNOWN_TEXT = "Tom has 37 coins and buys 58 more, so he has 95 coins. The cat sat on the mat; 2 + 2 = 4."
# Of a log-probability: kernels in bfloat16 add in another order when other requests share the batch.
TOLERANCE = 0.2
QUESTION = {"role": "user", "content": "Q"}
CALLS = 32  # at the same time
TIMEOUT_S = 600.0
CONNECT_S = 10.0
PAUSES_S = (0.2, 0.5, 1.0, 2.0)  # between the attempts of a call: asking twice changes nothing
RESTART_PAUSES_S = (5.0,) * 60  # then, if the server has answered before: it restarts and loads its model
UNAVAILABLE = frozenset({429, 500, 502, 503, 504})  # 500: the first answer of a vLLM whose engine process has died
TOO_LONG = math.inf  # instead of the log-probabilities of a segment that a server refuses as too long
CACHED_ANSWERS = 4096  # answers for segments that are scored again


class OpenTeacher(Protocol):
    """A validated teacher."""

    @property
    def context(self) -> int:
        """The tokens of the longest segment that it scores."""

    def logprobs(self, packed: MicroBatch) -> Tensor:
        """Its log-probabilities of the trained tokens, [N], without a gradient; TOO_LONG of a segment that it refuses."""

    def distributions(self, packed: MicroBatch) -> Distributions:
        """Its distributions of them."""

    def images_problem(self, images: ImageReader) -> str | None:
        """The reason why it cannot score rollouts with the images of a policy that reads them in this way, or None."""


class Teachers:
    """All teachers of a run, each with its weight, agents and hint."""

    def __init__(self, teachers: Sequence[tuple[TeacherShare, OpenTeacher, Hint | None]]) -> None:
        self._teachers = teachers

    def scores(self, rollouts: Sequence[RolloutSample], engine: Engine, budget: int) -> list[list[list[float]] | None]:
        """The weighted mean of the teachers' log-probabilities, by rollout, by segment, by sampled token.

        None for a rollout that does not fit the contexts of all its teachers, with their hints. The difference to the
        policy's is a sample of the weighted mean of the reverse KLs. Every rank calls it.

        Raises:
            UsageError: a rollout has no teacher.
        """
        inputs = [self._inputs(rollout) for rollout in rollouts]
        fitting = [place for place, of_teachers in enumerate(inputs) if self._fit(of_teachers)]
        sums = {place: [[0.0] * segment.trained for segment in rollouts[place].segments] for place in fitting}
        for index, (share, teacher, _) in enumerate(self._teachers):
            given = {place: asked for place in sums if (asked := inputs[place][index]) is not None}
            logprobs = score([*given.values()], teacher.logprobs, engine, budget) if given else []
            for place, of_segments in zip(given, logprobs, strict=True):
                if any(TOO_LONG in values for values in of_segments):
                    sums.pop(place)
                    continue
                for total, values in zip(sums[place], of_segments, strict=True):
                    total[:] = [so_far + share.weight * value for so_far, value in zip(total, values, strict=True)]
        weights = [self._weight(of_teachers) for of_teachers in inputs]
        return [
            [[value / weight for value in total] for total in sums[place]] if place in sums else None
            for place, weight in enumerate(weights)
        ]

    def _inputs(self, rollout: RolloutSample) -> list[RolloutSample | None]:
        """The rollout as each teacher sees it; None for a teacher of other agents."""
        inputs = [
            None
            if share.agents and rollout.agent not in share.agents
            else (rollout if hint is None else hint.insert(rollout))
            for share, _, hint in self._teachers
        ]
        if all(asked is None for asked in inputs):
            raise UsageError(
                f"algorithm.teacher.several: no teacher scores the rollouts of {rollout.agent!r}; add its name to agents"
            )
        return inputs

    def _fit(self, inputs: Sequence[RolloutSample | None]) -> bool:
        """Whether what each teacher sees of a rollout fits its context."""
        return all(
            asked is None or asked.longest <= teacher.context
            for asked, (_, teacher, _) in zip(inputs, self._teachers, strict=True)
        )

    def _weight(self, inputs: Sequence[RolloutSample | None]) -> float:
        """The sum of the weights of the teachers that score a rollout."""
        shares = zip(inputs, self._teachers, strict=True)
        return sum(share.weight for asked, (share, _, _) in shares if asked is not None)

    def images_problem(self, images: ImageReader) -> str | None:
        """The reason why a teacher cannot score rollouts with images, or None."""
        problems = (teacher.images_problem(images) for _, teacher, _ in self._teachers)
        return next((problem for problem in problems if problem is not None), None)

    def distributions(self, packed: MicroBatch) -> Distributions:
        """Those of the only teacher."""
        [(_, teacher, _)] = self._teachers
        return teacher.distributions(packed)


class Hint:
    """Inserts a message that only the teacher sees into a rollout, before the first token that the policy sampled.

    The prompt of a segment ends with the template's generation prompt; the message goes before it, as a user's message.

    as_parts: contents of messages are lists, which templates of models with images read.

    Raises:
        ConfigError: the chat template cannot render such a message.
    """

    def __init__(self, text: str, tokenizer: PreTrainedTokenizerBase, *, as_parts: bool = False) -> None:
        self._text = text
        self._tokenizer = tokenizer
        self._as_parts = as_parts
        self._question = self._render(QUESTION)
        answering = self._render(QUESTION, prompt=True)
        if not answering.startswith(self._question) or answering == self._question:
            raise ConfigError("algorithm.teacher.hint: the model's chat template has no generation prompt")
        self._opening = self._ids(answering[len(self._question) :])
        self._hint_ids("")

    def insert(self, rollout: RolloutSample) -> RolloutSample:
        """The rollout as the teacher sees it: the same sampled tokens, further back.

        Raises:
            UsageError: a prompt does not end with the generation prompt.
        """
        text = PLACEHOLDER.sub(lambda name: rollout.task[name[1]], self._text)
        hint = self._hint_ids(text)
        return replace(rollout, segments=tuple(self._insert_hint(hint, segment) for segment in rollout.segments))

    def _insert_hint(self, hint: list[int], segment: SampledSegment) -> SampledSegment:
        start = segment.spans[0][0]
        place = start - len(self._opening)
        if segment.token_ids[max(0, place) : start] != self._opening:
            raise UsageError(
                "algorithm.teacher.hint: a prompt does not end with the generation prompt of the policy's chat template"
            )
        token_ids = [*segment.token_ids[:place], *hint, *segment.token_ids[place:]]
        spans = [(a + len(hint), b + len(hint)) for a, b in segment.spans]
        images = tuple(image if image.places[0] < place else image.moved(len(hint)) for image in segment.images)
        return replace(segment, token_ids=token_ids, spans=spans, images=images)

    def _hint_ids(self, text: str) -> list[int]:
        rendered = self._render(QUESTION, {"role": "user", "content": text})
        if not rendered.startswith(self._question):
            raise ConfigError("algorithm.teacher.hint: the model's chat template renders a history again when it grows")
        return self._ids(rendered[len(self._question) :])

    def _render(self, *messages: dict[str, str], prompt: bool = False) -> str:
        given: list[Any] = [*messages]
        if self._as_parts:
            given = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
        try:
            return str(self._tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=prompt))
        except Exception as error:  # jinja raises errors of any type
            raise ConfigError(
                f"algorithm.teacher.hint: the model's chat template refuses a second message of the user: {error}"
            ) from error

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def open_teachers(setup: Setup, options: Teacher, temperature: float) -> Teachers:
    """The validated teachers. Every rank calls it.

    Raises:
        ConfigError: as `open_teacher`, or a hint cannot be inserted.
    """
    top_k = 0 if options.beta is None else options.top_k
    as_parts = not isinstance(setup.engine.policy.images, str)
    return Teachers(
        [
            (
                share,
                open_teacher(setup, share, temperature, whole=options.beta is not None, top_k=top_k),
                None if share.hint is None else Hint(share.hint, setup.tokenizer, as_parts=as_parts),
            )
            for share in options.sources
        ]
    )


def open_teacher(
    setup: Setup, source: TeacherSource, temperature: float, *, whole: bool = False, top_k: int = 0
) -> OpenTeacher:
    """A validated teacher. Every rank calls it. whole: its distributions are needed; top_k: of a server's likeliest tokens.

    Raises:
        ConfigError: it cannot be loaded or reached, or is not a teacher for this policy; with one line.
    """
    _, engine, tokenizer = setup
    if source.current_policy:
        return CurrentPolicy(engine)
    if source.path is not None:
        key = f"algorithm.teacher.path: {source.path}"
        teacher: OpenTeacher = _load_local(source.path, setup, temperature, whole=whole)
    else:
        assert source.url is not None
        key = f"algorithm.teacher.url: {source.url}"
        teacher = Server(source.url, source.model, os.environ.get(source.api_key_env or ""), top_k)
    # the other ranks wait for the result of rank 0
    if problem := engine.broadcast(_find_problem(teacher, tokenizer, engine) if engine.rank == 0 else None):
        raise ConfigError(f"{key}: {problem}")
    return teacher


def _load_local(path: str, setup: Setup, temperature: float, *, whole: bool) -> OpenTeacher:
    """A frozen network from a folder, whole on every rank. whole: its distributions are needed."""
    recipe, engine, tokenizer = setup
    options, key = ModelOptions(path=path), f"algorithm.teacher.path: {path}"
    try:
        own_tokenizer = load_tokenizer(options)
        policy = load_policy(options, own_tokenizer, recipe.seed, temperature).to(engine.device)
    except ModelRefused as error:
        raise ConfigError(f"algorithm.teacher.path: {error.reason}") from error
    ids = own_tokenizer.get_vocab()
    mismatch = next((token for token, number in tokenizer.get_vocab().items() if ids.get(token) != number), None)
    if mismatch is not None:
        _refuse(key, f"another tokenizer than the policy's: its token {mismatch!r} has another id or none")
    if policy.vocabulary < len(tokenizer):
        _refuse(key, f"its network has {policy.vocabulary:,} tokens, the policy's tokenizer {len(tokenizer):,}")
    if whole and policy.vocabulary != engine.policy.vocabulary:
        reason = f"its network has {policy.vocabulary:,} tokens, the policy's {engine.policy.vocabulary:,}"
        _refuse(key, f"{reason}; with teacher.beta both must have as many")
    return Checkpoint(policy.eval().requires_grad_(False), key)


class CurrentPolicy:
    """The policy as it is before a step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def context(self) -> int:
        return self._engine.policy.context

    def logprobs(self, packed: MicroBatch) -> Tensor:
        assert isinstance(self._engine.policy, Policy)
        check_context(packed, self._engine.policy, "algorithm.teacher.hint: the policy")
        return self._engine.logprobs(packed)

    def distributions(self, packed: MicroBatch) -> Distributions:
        raise UsageError("algorithm.teacher.beta: not with current_policy")

    def images_problem(self, images: ImageReader) -> str | None:
        return None


class Checkpoint:
    """A frozen network. key: of the recipe, with its folder, for messages."""

    def __init__(self, policy: Policy, key: str) -> None:
        self._policy = policy
        self._key = key

    @property
    def context(self) -> int:
        return self._policy.context

    @torch.no_grad()
    def logprobs(self, packed: MicroBatch) -> Tensor:
        return self._check_segments(packed).logprobs(packed)

    def distributions(self, packed: MicroBatch) -> Distributions:
        return self._check_segments(packed).distributions(packed)

    def images_problem(self, images: ImageReader) -> str | None:
        own = self._policy.images
        problem = own if isinstance(own, str) else placeholder_problem(own, images)
        return problem and f"images are not supported with {self._key}: {problem}"

    def _check_segments(self, packed: MicroBatch) -> Policy:
        """Check that the network reads these segments, and return it."""
        check_context(packed, self._policy, self._key)
        for image in (image for segment in packed.segments for image in segment.images):
            assert not isinstance(self._policy.images, str), "rows with images are refused"
            if (count := self._policy.images.count(image.content)) != len(image.places):
                raise UsageError(
                    f"{self._key}: it has {count} placeholders for an image that has {len(image.places)} in a rollout; "
                    "its processor must be the policy's"
                )
        return self._policy


def check_context(packed: MicroBatch, policy: Policy, key: str) -> None:
    """
    Raises:
        UsageError: a segment is longer than the network's context. key: of the recipe, for its message.
    """
    longest = max(len(segment.token_ids) for segment in packed.segments)
    if longest > policy.context:
        raise UsageError(f"{key}: its context is {policy.context:,} tokens, and a rollout has {longest:,}")


class _Connection(http.client.HTTPConnection):
    """A connection that is given up when the teacher's machine does not answer."""

    def connect(self) -> None:
        self.timeout = CONNECT_S
        super().connect()
        break_when_silent(self.sock)
        self.sock.settimeout(TIMEOUT_S)


class _TlsConnection(_Connection, http.client.HTTPSConnection):
    """The same over TLS."""


class _Handler(HTTPHandler):
    def http_open(self, req: Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, req)


class _TlsHandler(HTTPSHandler):
    def https_open(self, req: Request) -> http.client.HTTPResponse:
        return self.do_open(_TlsConnection, req, context=client_context())


def _opener(url: str) -> OpenerDirector:
    return build_opener(_TlsHandler if url.startswith("https") else _Handler)


class Server:
    """A server that returns the logprobs of a prompt, such as models/vllm or vLLM itself.

    Answers are kept by the digest of the segment, so the second update on a batch asks for nothing.

    model: the name that requests carry, if any. top_k: how many of the likeliest tokens to ask for.
    """

    def __init__(self, url: str, model: str | None, key: str | None, top_k: int = 0) -> None:
        self._url = url.rstrip("/")
        self._opener = _opener(url)
        self._model = {} if model is None else {"model": model}
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._pool = ThreadPoolExecutor(CALLS, "teacher")
        self._top_k = top_k
        self._cache: OrderedDict[bytes, list[Any]] = OrderedDict()
        self._has_answered = False
        self._is_awaited = False

    @cached_property
    def context(self) -> int:
        """Without the token that a request samples. A server that does not tell its context has no limit here."""
        return int(self._tokenize(KNOWN_TEXT).get("max_model_len") or sys.maxsize) - 1

    def logprobs(self, packed: MicroBatch) -> Tensor:
        logprobs = [place[0] for of_segment in self._token_logprobs(packed) for place in of_segment]
        return torch.tensor(logprobs, device=packed.token_ids_T.device)

    def distributions(self, packed: MicroBatch) -> Distributions:
        device = packed.token_ids_T.device
        places = [place for of_segment in self._token_logprobs(packed) for place in of_segment]
        logprobs_NK = torch.full((len(places), self._top_k), -torch.inf, device=device)
        token_ids_NK = torch.zeros((len(places), self._top_k), dtype=torch.int64, device=device)
        for row, (_, ids, logprobs) in enumerate(places):
            logprobs_NK[row, : len(ids)] = torch.tensor(logprobs, device=device)
            token_ids_NK[row, : len(ids)] = torch.tensor(ids, device=device)
        return TopK(logprobs_NK, token_ids_NK)

    def tokens(self, text: str) -> list[int]:
        """The server's own token ids of a text."""
        return list(self._tokenize(text)["tokens"])

    def images_problem(self, images: ImageReader) -> str | None:
        return f"images are not supported with algorithm.teacher.url: {self._url}; name a checkpoint, with path"

    def ask_again(self) -> None:
        """Empty the cache of answers."""
        self._cache.clear()

    def _tokenize(self, text: str) -> dict[str, Any]:
        return self._post("/tokenize", {"prompt": text, "add_special_tokens": False})

    def _token_logprobs(self, packed: MicroBatch) -> list[list[TokenLogprobs]]:
        """The logprobs at each segment's trained tokens."""
        digests = [_digest(segment) for segment in packed.segments]
        missing = {
            digest: unscored
            for digest, unscored in zip(digests, packed.segments, strict=True)
            if digest not in self._cache
        }
        scores = dict(zip(missing, self._pool.map(self._score_segment, missing.values()), strict=True))
        places = [scores[digest] if digest in scores else self._cache[digest] for digest in digests]
        self._cache.update(scores)
        while len(self._cache) > CACHED_ANSWERS:
            self._cache.popitem(last=False)
        return places

    def _score_segment(self, segment: Segment) -> list[TokenLogprobs]:
        ids = segment.token_ids
        params = {"prompt_logprobs": self._top_k, "max_tokens": 1, "temperature": 1.0}
        try:
            answer = self._post("/inference/v1/generate", {"token_ids": ids, "sampling_params": params})
        except PromptTooLong:  # the server did not tell its context, or another one answers
            return [TokenLogprobs(TOO_LONG, [], [])] * segment.trained
        positions = answer.get("prompt_logprobs")
        if not isinstance(positions, list) or len(positions) != len(ids):
            count = len(positions) if isinstance(positions, list) else "no"
            raise UsageError(
                f"algorithm.teacher.url: {self._url} returned {count} prompt_logprobs for {len(ids)} tokens"
            )
        try:
            return [
                _parse_position(positions[at], ids[at], self._top_k)
                for start, end in segment.spans
                for at in range(start, end)
            ]
        except (KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__} {error}"
            raise UsageError(f"the teacher's prompt_logprobs are without the prompt's own tokens ({reason})") from error

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = Request(self._url + path, orjson.dumps(self._model | body), self._headers)
        restart_pauses_s = RESTART_PAUSES_S if self._has_answered else ()
        began = time.monotonic()
        for attempt, pause_s in enumerate((*PAUSES_S, *restart_pauses_s, None)):
            try:
                with self._opener.open(request) as answer:
                    content: dict[str, Any] = orjson.loads(answer.read())
                    self._has_answered, self._is_awaited = True, False
                    return content
            except HTTPError as error:
                if pause_s is None or _has_hung(attempt, began) or error.code not in UNAVAILABLE:
                    raise _refusal(f"{self._url}{path}", error) from error
                problem = f"answers {error.code}"
            except (OSError, http.client.HTTPException, ValueError) as error:
                if pause_s is None or _has_hung(attempt, began) or isinstance(error, ValueError):
                    kind = TeacherGone if self._has_answered else UsageError
                    raise kind(f"{self._url}{path} cannot be used: {error}") from error
                problem = f"does not answer ({error})"
            if attempt == len(PAUSES_S):
                self._report_wait(problem)
            time.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    def _report_wait(self, problem: str) -> None:
        """Say once, and not for each of the calls, that the run waits for the server."""
        if not self._is_awaited:
            self._is_awaited = True
            limit_s = sum(RESTART_PAUSES_S)
            text = f"ng_train: the teacher {self._url} {problem}; waiting up to {limit_s:.0f} s for its restart"
            print(text, file=sys.stderr, flush=True)


def _has_hung(attempt: int, began: float) -> bool:
    """Whether the attempts so far took longer than all waits for a restart: the server hangs."""
    return attempt >= len(PAUSES_S) and time.monotonic() - began > sum(RESTART_PAUSES_S)


class TeacherGone(NgymError):
    """A server that has answered before does not answer any more: the recipe is right, so --resume may continue."""


class PromptTooLong(UsageError):
    """The server refuses a prompt that does not fit its context."""


def _refusal(url: str, error: HTTPError) -> UsageError:
    """The error of an answer that is not 200."""
    body = error.read()
    text = body.decode(errors="replace")
    try:
        reason, code = words(orjson.loads(body))
    except ValueError:
        reason, code = text, None
    kind = PromptTooLong if is_context_overflow(error.code, code, reason) else UsageError
    return kind(f"{url} answered {error.code} {text[:300]}")


def _digest(segment: Segment) -> bytes:
    return blake2b(orjson.dumps([segment.token_ids, segment.spans]), digest_size=16).digest()


class TokenLogprobs(NamedTuple):
    """A token of a prompt: its own logprob, and the likeliest tokens there with theirs."""

    logprob: float
    token_ids: list[int]
    logprobs: list[float]


def _parse_position(position: dict[str, Any], token_id: int, top_k: int) -> TokenLogprobs:
    """The logprobs of one position of a server's answer, which always includes the token itself.

    Raises:
        KeyError, TypeError, ValueError: it has another form.
    """
    own_logprob = float(position[str(token_id)]["logprob"])
    candidates = ((int(name), float(entry["logprob"])) for name, entry in position.items())
    likeliest = sorted(candidates, key=lambda pair: -pair[1])[:top_k]
    return TokenLogprobs(own_logprob, [likely_id for likely_id, _ in likeliest], [logprob for _, logprob in likeliest])


def _find_problem(teacher: OpenTeacher, tokenizer: PreTrainedTokenizerBase, engine: Engine) -> str | None:
    """The reason why the teacher cannot be used, or None."""
    ids = tokenizer(KNOWN_TEXT, add_special_tokens=False)["input_ids"]
    changed_ids = [*ids[:-1], ids[0] if ids[0] != ids[-1] else ids[1]]
    try:
        if isinstance(teacher, Server) and teacher.tokens(KNOWN_TEXT) != ids:
            return "another tokenizer than the policy's: a known text has other token ids there"
        first, repeat, changed = (_score_ids(teacher, token_ids, engine) for token_ids in (ids, ids, changed_ids))
    except (UsageError, TeacherGone) as error:
        return str(error)
    if TOO_LONG in first:
        return f"its context is too small for a known text of {len(ids)} tokens"
    if not all(value <= 1e-3 for value in first):  # also for nan
        return "its values of a known text are not log-probabilities"
    if (difference := _max_difference(first, repeat)) > TOLERANCE:
        return f"it is not deterministic: two answers for the same text differ by {difference:.3g}"
    if (difference := _max_difference(first[:-1], changed[:-1])) > TOLERANCE or abs(first[-1] - changed[-1]) < 1e-6:
        return "its values are not aligned: exchanging the last token must change the last value, and no other"
    return None


def _score_ids(teacher: OpenTeacher, ids: Sequence[int], engine: Engine) -> list[float]:
    if isinstance(teacher, Server):
        teacher.ask_again()
    packed = pack([Sample((Segment(list(ids), [(1, len(ids))]),))], engine.device)
    return [float(value) for value in teacher.logprobs(packed)]


def _max_difference(first: Sequence[float], second: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(first, second, strict=True))


def _refuse(key: str, reason: str) -> NoReturn:
    raise ConfigError(f"{key}: {reason}")
