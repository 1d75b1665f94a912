"""Sampling with a Hugging Face model, all requests in one batch, in a thread next to the event loop; weights that a
trainer replaces.

A log-probability is that of the sampling distribution, after temperature, top-k, top-p and min-p. Greedy tokens have
that of the model's own distribution.

The batch is continuous: a request joins it between two tokens, and leaves it when its answer ends. It also leaves when
its memory is needed or the weights have changed, and comes back with its tokens so far. Families with a state of
another kind (linear attention, state spaces) are sampled one answer at a time.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import math
import queue
import shutil
import sys
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ngym.chat_codec import Finish, SampledTokens, Sampling
from ngym.errors import BadRequest, Boundary, NotReady, ServiceError
from ngym.rollout import shortest_float32
from ngym.runtime.cpu_threads import cache_memory
from ngym.weight_push.routes import PauseMode, PromptLogprobs, Seconds
from ngym.weight_push.stage import PrivateFolder, Shapes, shapes_in

from .batch import Batch, Draw, Row, sample, sliding_layers, with_room
from .expert_recorder import ExpertRecorder
from .grouped_attention import GROUPED
from .loading import checkpoint_folder, device_of, load_model, load_network, weight_files
from .options import Options
from .prefix_cache import MIN_PREFIX_TOKENS, PrefixMatch

PREFILL_TOKENS = 16_384  # of one forward pass, padding included; a longer prompt is computed alone
GATHER_S = 0.002  # an idle engine waits for further requests while they come at this interval,
GATHER_MAX_S = 0.03  # and at most so long
COMPACT_BELOW = 0.75  # the share of rows that go on at which those that ended are still computed
MB = 1_000_000
KV_CACHE = 4_096 * MB  # at most, unless the options say otherwise
FILE_ROOM = 16 << 20  # for the names in a safetensors file and the config files beside it
HEAD = "lm_head.weight"
STOPPING = "this server is stopping"
MODEL_ERRORS = Boundary("model_error", "the model failed")
CUT_OFF = "a weight push with mode abort ended this answer; ask again"


class Engine:
    """A loaded model, its batch, and the version of its weights.

    Args:
        count: called with the number of tokens that were sampled.

    Raises:
        OSError, ValueError: the model cannot be loaded.
    """

    sleep_problem: str | None = None

    def __init__(self, folder: str, options: Options, count: Callable[[float], None]) -> None:
        self.tokenizer, self._model, self.context = load_model(AutoModelForCausalLM, folder, options)
        model = self._model
        self._experts = ExpertRecorder(model) if options.routed_experts else None
        self.ends: int | list[int] | None = model.generation_config.eos_token_id
        known = self.ends if isinstance(self.ends, list) else [self.ends, self.tokenizer.eos_token_id]
        self._ends = frozenset(end for end in known if end is not None)
        self.asleep: frozenset[str] = frozenset()
        self.weights_dropped = False
        self._count = count
        self._folder = folder
        self._options = options
        self._version = 0
        accepted = inspect.signature(model.forward).parameters
        # For a long prompt, unused logits of all other positions would take gigabytes.
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._takes_positions = "position_ids" in accepted
        sliding = sliding_layers(model.config)
        self._is_batched = sliding is not None
        self._max_rows = options.batch if self._is_batched else 1
        # SDPA takes the mask as it is; other attentions and windows need transformers to make one.
        self._takes_mask = model.config._attn_implementation in ("sdpa", GROUPED) and not any(sliding or [True])
        self._device = device_of(options)
        share = cache_memory() if self._device == "cpu" else sys.maxsize
        self._limit = options.kv_cache_mb * MB if options.kv_cache_mb else min(KV_CACHE, share)
        self._batch = Batch(sliding, self._device, min(self._limit, share))
        self._draw = torch.Generator(self._device)
        self._draw.seed()
        self._waiting: deque[Row] = deque()
        self._numbers = itertools.count()
        self._paused = self._closing = False
        self._largest = 0  # number of answers at once since the engine was idle
        self._drained: Future[None] | None = None
        self._inbox: queue.SimpleQueue[Row | Callable[[], None] | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unsent: list[tuple[Row, SampledTokens | ServiceError]] = []
        self._thread = threading.Thread(target=self._work, name="transformers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop generations at their next token and end the thread."""
        self._closing = True
        self._inbox.put(None)
        self._thread.join()

    @property
    def running(self) -> int:
        """The number of answers in the batch."""
        return sum(not row.is_ended for row in self._batch.rows)

    @property
    def waiting(self) -> int:
        """The number of answers that wait for a place in the batch."""
        return len(self._waiting) + self._inbox.qsize()

    async def generate(self, prompt: list[int], sampling: Sampling) -> AsyncGenerator[SampledTokens, None]:
        """Tokens as they are sampled, or all at once if there is no stream and no stop string. Sampling stops when the
        caller stops reading.
        """
        if self._closing:
            raise NotReady(STOPPING)
        self._loop = asyncio.get_running_loop()
        stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._ends)
        draw = None if sampling.seed is None else Draw(sampling.seed, self._device)
        row = Row(list(prompt), len(prompt) + sampling.max_tokens, stops, sampling, draw, next(self._numbers))
        self._inbox.put(row)
        try:
            while True:
                sampled = await row.answers.get()
                if isinstance(sampled, ServiceError):
                    # One exception that many callers raise would hold the frames of all of them.
                    raise copy(sampled) from sampled
                yield sampled
                if sampled.finish:
                    return
        finally:
            row.given_up = True

    # Weights

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._options.dtype)
        return dtype

    def checkpoint_shapes(self) -> Shapes | None:
        """The shapes of the loaded checkpoint by name; None: it is not in safetensors files of a folder."""
        files = weight_files(checkpoint_folder(self._folder))
        if not files:
            return None
        shapes = shapes_in(map(str, files))
        if self._is_tied:
            shapes.pop(HEAD, None)  # some checkpoints have the embedding twice
        return shapes

    @property
    def _is_tied(self) -> bool:
        return bool(getattr(self._model.config.get_text_config(), "tie_word_embeddings", False))

    async def policy_version(self) -> int:
        return self._version

    async def switch_weights(self, folder: Path, version: int, mode: PauseMode, patience_s: float) -> Seconds:
        """Serve the checkpoint in this folder from now on. Answers in flight are prefilled again with it.

        Raises:
            ServiceError: generations in flight did not end in time; the old weights are still served.
        """
        began = monotonic()
        await self.pause_for_push(mode, patience_s)
        paused = monotonic()
        try:
            await self._run(partial(self._switch, partial(self._load, folder), version))
        finally:
            await self.resume()
        return Seconds(paused - began, monotonic() - paused)

    async def switch_tensors(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Serve copies of these tensors, by the checkpoint's names, and resume the paused generation."""
        try:
            await self._run(partial(self._switch, partial(self._copy, tensors), version))
        finally:
            await self.resume()

    @property
    def device(self) -> torch.device:
        return torch.device(self._device)

    async def pause_for_push(self, mode: PauseMode, patience_s: float) -> None:
        """Pause generation between two tokens. Raises ServiceError if the answers in flight take too long to end."""
        if self.asleep:
            return
        drained = await self._run(partial(self._pause, mode))
        try:
            async with asyncio.timeout(patience_s):
                await asyncio.wrap_future(drained)
        except BaseException as error:
            await self.resume()
            if isinstance(error, TimeoutError):
                problem = f"generations in flight did not end within {patience_s:.0f} s; push with mode keep or abort"
                raise ServiceError(problem, status=409, retryable=True) from None
            raise

    async def prove(self, prompt: list[int]) -> PromptLogprobs:
        """Logprobs of a prompt with the current weights. Raises BadRequest if the prompt does not fit this model."""
        if self.asleep:
            raise ServiceError("this server is asleep; wake it first", status=409)
        known = self._model.get_input_embeddings().num_embeddings
        if len(prompt) > self.context or max(prompt) >= known:
            bounds = f"at most {self.context:,} ids below {known:,}"
            raise BadRequest(f"field 'prompt_token_ids': this model takes {bounds}")
        proof: PromptLogprobs = await self._run(partial(self._prove, prompt))
        return proof

    async def release_memory(self, level: int) -> None:
        """Move the weights of the paused engine to the host. Raises ServiceError."""
        await self._move_to("cpu")

    async def restore_memory(self, parts: list[str]) -> None:
        """Move the weights back to the device. With the last part, generation resumes. Raises ServiceError."""
        if "weights" in parts:
            await self._move_to(self._device)
        if self.asleep <= frozenset(parts):
            await self._run(self._unpause)

    async def _move_to(self, device: str) -> None:
        try:
            await self._run(partial(self._move, device))
        except RuntimeError as error:  # such as one of memory
            raise ServiceError(f"the weights cannot be moved to {device}: {error}", retryable=True) from error

    async def resume(self) -> None:
        """Resume paused generation, unless the server sleeps."""
        if not self.asleep:
            await self._run(self._unpause)

    async def _run(self, work: Callable[[], Any]) -> Any:
        """The result of a function that runs in the thread, between two tokens."""
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001  (the caller raises it)
                done.set_exception(error)

        self._inbox.put(run)
        return await asyncio.shield(asyncio.wrap_future(done))

    # In the thread

    @torch.inference_mode()
    def _work(self) -> None:
        while True:
            for item in self._read_inbox():
                if item is None:
                    self._fail([*self._batch.rows, *self._waiting], NotReady(STOPPING))
                    self._send()
                    return
                if isinstance(item, Row):
                    self._waiting.append(item)
                else:
                    item()
            if self._paused:
                self._send()
                continue
            try:
                with MODEL_ERRORS:
                    self._step()
            except ServiceError as error:  # such as one of memory; the callers raise it, and the server goes on
                self._fail(self._batch.rows, error)
                self._batch.prefixes.clear()
                self._batch.clear()
            if self._drained is not None and not self._batch.rows:
                self._paused = True
                self._drained.set_result(None)
                self._drained = None
            self._send()

    def _read_inbox(self) -> list[Row | Callable[[], None] | None]:
        """The contents of the inbox. An idle engine waits for it."""
        is_idle = self._paused or not (self._batch.rows or self._waiting)
        received = [self._inbox.get()] if is_idle else []
        if received and isinstance(received[0], Row) and not self._paused:
            self._gather()
        while not self._inbox.empty():
            received.append(self._inbox.get())
        return received

    def _gather(self) -> None:
        """Wait for the rest of a burst, such as the rollouts of a training step: one pass then prefills all of them, and
        no step samples for only a few. A request after one that was alone does not wait.
        """
        is_burst, self._largest = self._largest > 1, 0
        until = monotonic() + GATHER_MAX_S
        arrived = -1
        while is_burst and self._inbox.qsize() > arrived and monotonic() < until:
            arrived = self._inbox.qsize()
            sleep(GATHER_S)

    def _step(self) -> None:
        """Sample the next token of every row."""
        batch = self._batch
        if self._drained is None:
            self._admit()
        if len(going := batch.active_rows) <= COMPACT_BELOW * len(batch.rows):
            batch.keep(going)
        self._preempt()
        # A family with a cache of its own gets its whole prompt in the first pass.
        count = len(batch.rows[0].ids) if batch.rows and batch.cache is None else 1
        batch.grow(count)
        if not batch.rows:
            return
        last = torch.tensor([row.ids[-count:] for row in batch.rows], device=self._device)
        kwargs: dict[str, Any] = {}
        if (mask := batch.mask()) is not None:
            if self._takes_mask:  # as SDPA adds it: each layer would convert booleans
                zero = torch.zeros((), dtype=self.dtype, device=self._device)
                kwargs["attention_mask"] = zero.where(mask[:, None, None], -math.inf)
            else:
                kwargs["attention_mask"] = mask.long()
        if self._takes_positions:
            positions = [
                [0] if row.is_ended else list(range(batch.end - count - start, batch.end - start))
                for row, start in zip(batch.rows, batch.starts, strict=True)
            ]
            kwargs["position_ids"] = torch.tensor(positions, device=self._device)
        out = self._model(input_ids=last, past_key_values=batch.cache, use_cache=True, **self._last_only, **kwargs)
        batch.cache = out.past_key_values
        if self._experts is not None:
            self._experts.after_step(batch.rows, count)
        tokens, logprobs = sample(batch.rows, out.logits[:, -1], self._draw)
        before = self.running
        for slot, (row, token, logprob) in enumerate(zip(batch.rows, tokens, logprobs, strict=True)):
            if not row.is_ended and self._add(row, token, logprob):
                batch.remember(slot)
        self._count(before)
        if all(row.is_ended for row in batch.rows):
            batch.clear()

    def _add(self, row: Row, token: int, logprob: float) -> bool:
        """Add a token to a row; returns whether it is the last one of the answer."""
        if not math.isfinite(logprob):
            self._fail([row], ServiceError("the model computed no finite log-probability"))
            return False
        row.ids.append(token)
        ids, logprobs = row.unsent
        ids.append(token)
        logprobs.append(logprob)
        finish: Finish | None = "stop" if token in row.stops else "length" if len(row.ids) == row.limit else None
        if finish or row.needs_each_token:
            self._deliver(row, finish)
        return finish is not None

    def _deliver(self, row: Row, finish: Finish | None) -> None:
        ids, logprobs = row.unsent
        row.unsent = ([], [])
        row.is_ended = row.is_ended or finish is not None
        sampled = SampledTokens(ids, shortest_float32(logprobs), finish, self._version, row.cached, row.take_experts())
        self._unsent.append((row, sampled))

    def _fail(self, rows: Sequence[Row], error: ServiceError) -> None:
        for row in rows:
            if not row.is_ended:
                row.is_ended = True
                self._unsent.append((row, error))

    def _send(self) -> None:
        """Give the callers what they wait for, with one call of their event loop."""
        if self._unsent and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_deliver_answers, self._unsent)
        self._unsent = []

    def _admit(self) -> None:
        """Prefill waiting requests and add them to the batch."""
        batch = self._batch
        rows: list[Row] = []
        prefixes: dict[int, PrefixMatch] = {}  # the prefix of a row, by its number
        longest = 0
        going = len(batch.active_rows)
        while self._waiting and going + len(rows) < self._max_rows:
            row = self._waiting[0]
            length = max(longest, len(row.ids) - 1)
            count = going + len(rows) + 1
            is_first = count == 1
            if not row.given_up and not is_first:
                if rows and (len(rows) + 1) * length > PREFILL_TOKENS:
                    break
                if not self._fits(count, max(length, batch.length) + 1):
                    break
            self._waiting.popleft()
            if not row.given_up:
                rows.append(row)
                longest = length
                if self._takes_positions and (prefix := batch.prefixes.find(row.ids, len(row.ids) - 1)):
                    prefixes[row.number] = prefix
        self._largest = max(self._largest, going + len(rows))
        if rows and not self._is_batched:
            batch.add(rows, None, [0], [0])
            return
        for some in (
            [row for row in rows if row.number in prefixes],
            [row for row in rows if row.number not in prefixes],
        ):
            try:
                if some:
                    with MODEL_ERRORS:
                        cache, places, ends = self._prefill(some, prefixes)
                        if self._experts is not None:
                            self._experts.after_prefill(some, places, prefixes)
                        batch.add(some, cache, places, ends)
                        self._remember(some, places, prefixes)
            except ServiceError as error:  # the callers raise it
                self._fail(some, error)

    def _remember(self, rows: list[Row], places: list[int], prefixes: Mapping[int, PrefixMatch]) -> None:
        """Keep prompts of which a part was computed: those of a group's other rollouts may come later."""
        for index, row in enumerate(rows):
            known = prefixes[row.number][1] if row.number in prefixes else 0
            if places[index] not in places[:index] and len(row.ids) - 1 - known >= MIN_PREFIX_TOKENS:
                self._batch.remember(self._batch.rows.index(row))

    def _fits(self, rows: int, length: int) -> bool:
        return rows * with_room(length) * self._batch.bytes_per_token <= self._limit

    def _preempt(self) -> None:
        """Take the newest rows out of a batch that has outgrown its memory; they come back with their tokens."""
        batch = self._batch
        going = batch.active_rows
        count, length = len(going), batch.length + 1
        while count > 1 and not self._fits(count, length):
            count -= 1
        if count < len(going):
            oldest = sorted(going, key=lambda index: batch.rows[index].number)
            self._waiting.extendleft(batch.rows[index] for index in reversed(oldest[count:]))
            batch.keep(sorted(oldest[:count]))

    def _prefill(self, rows: list[Row], prefix_of_row: Mapping[int, PrefixMatch]) -> tuple[Any, list[int], list[int]]:
        """A cache of all ids but the last of each row, the place there of each row, and the column after its last token.
        Equal prompts, such as those of a group of rollouts, are computed once. prefix_of_row: prefixes of all rows, or of none.
        """
        distinct: dict[tuple[int, ...], int] = {}
        places = [distinct.setdefault(tuple(row.ids[:-1]), len(distinct)) for row in rows]
        prompts = list(distinct)
        firsts = [rows[places.index(place)].number for place in range(len(distinct))]
        prefixes = [prefix_of_row[number] for number in firsts] if firsts[0] in prefix_of_row else []
        common = [length for _, length in prefixes] or [0] * len(prompts)
        for row, place in zip(rows, places, strict=True):
            row.cached = row.cached or min(common[place], row.limit - row.sampling.max_tokens)
        past = max(common)
        rest = max(len(prompt) - length for prompt, length in zip(prompts, common, strict=True))
        ends = [past + len(prompts[place]) - common[place] for place in places]
        cache = self._batch.cache_of_prefixes(prefixes, rest) if prefixes else self._batch.new_cache(len(prompts))
        if rest == 0:
            return cache, places, ends
        # Padding behind the tokens of a row is computed, too, but none of them sees it.
        ids = [list(prompt[length:]) for prompt, length in zip(prompts, common, strict=True)]
        kwargs: dict[str, Any] = {}
        if min(common) < past:
            columns_T = torch.arange(past + rest, device=self._device)
            starts_B = torch.tensor([past - length for length in common], device=self._device)
            kwargs["attention_mask"] = (columns_T >= starts_B[:, None]).long()
        if self._takes_positions:
            lasts_B = torch.tensor([max(0, len(prompt) - 1) for prompt in prompts], device=self._device)
            common_B = torch.tensor(common, device=self._device)
            positions_BT = common_B[:, None] + torch.arange(rest, device=self._device)
            kwargs["position_ids"] = positions_BT.minimum(lasts_B[:, None])
        ids_BT = torch.tensor([each + [0] * (rest - len(each)) for each in ids], device=self._device)
        self._model(input_ids=ids_BT, past_key_values=cache, use_cache=True, **self._last_only, **kwargs)
        return cache, places, ends

    def _pause(self, mode: PauseMode) -> Future[None]:
        """Pause generation. Returns a future that is done when it has stopped."""
        drained: Future[None] = Future()
        drained.set_running_or_notify_cancel()  # so that a caller who gives up cannot cancel it
        if mode == "abort":
            self._fail([*self._batch.rows, *self._waiting], NotReady(CUT_OFF))
            self._waiting.clear()
            self._batch.clear()
        if mode == "wait" and self._batch.rows:
            self._drained = drained
        else:
            self._paused = True
            drained.set_result(None)
        return drained

    def _unpause(self) -> None:
        self._paused, self._drained = False, None

    def _switch(self, load: Callable[[], None], version: int) -> None:
        load()
        going = [row for row in self._batch.rows if not row.is_ended]
        for row in going:
            if row.unsent[0]:
                self._deliver(row, None)  # these tokens are those of the old weights
        self._waiting.extendleft(reversed(going))
        self._batch.prefixes.clear()
        self._batch.clear()
        self.weights_dropped = False
        self._version = version

    def _load(self, folder: Path) -> None:
        """Load all tensors: in place if the model has them under the checkpoint's names, else by a second model."""
        files = sorted(folder.glob("*.safetensors"))
        if self._has_all(shapes_in(str(file) for file in files)):
            # All files are read before the first tensor is replaced: an error leaves the old weights as they are.
            self._replace([item for tensors in [load_file(file) for file in files] for item in tensors.items()])
            return
        for file in checkpoint_folder(self._folder).glob("*.json"):
            if not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
        places = {name: file.name for file in files for name in shapes_in([str(file)])}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
        device = next(self._model.parameters()).device
        self._model = load_network(AutoModelForCausalLM, str(folder), self._options, self.tokenizer).to(device)
        if self._experts is not None:
            self._experts = ExpertRecorder(self._model)

    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Load tensors that are not in files, likewise."""
        if self._has_all({name: tuple(tensor.shape) for name, tensor in tensors.items()}):
            self._replace(tensors.items())
            if self.device.type == "cuda":
                torch.cuda.synchronize()  # the trainer may change them after this
            return
        private = PrivateFolder(sum(tensor.nbytes for tensor in tensors.values()) + FILE_ROOM)
        try:
            save_file({name: tensor.cpu() for name, tensor in tensors.items()}, private.path / "model.safetensors")
            self._load(private.path)
        finally:
            private.remove()

    def _has_all(self, shapes: Shapes) -> bool:
        """Whether these are the model's own tensors, by name and shape."""
        ours = self._model.state_dict()
        tied = {HEAD} if self._is_tied else set()
        return shapes.keys() == ours.keys() - tied and all(ours[name].shape == shape for name, shape in shapes.items())

    def _replace(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        ours = self._model.state_dict(keep_vars=True)
        for name, tensor in tensors:
            ours[name].data.copy_(tensor)

    def _prove(self, prompt: list[int]) -> PromptLogprobs:
        ids_BT = torch.tensor([prompt], device=self._device)
        logprobs_TV = self._model(input_ids=ids_BT).logits[0, :-1].float().log_softmax(-1)
        logprobs = logprobs_TV.gather(1, ids_BT[0, 1:, None])[:, 0].tolist()
        return PromptLogprobs(self._version, self._options.dtype, logprobs)

    def _move(self, device: str) -> None:
        self._batch.prefixes.clear()
        self._model.to(device)
        if device == "cpu" and torch.cuda.is_available():
            torch.cuda.empty_cache()


def _deliver_answers(answers: list[tuple[Row, SampledTokens | ServiceError]]) -> None:
    for row, answer in answers:
        row.answers.put_nowait(answer)
