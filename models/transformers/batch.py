"""The answers that are sampled together: their rows of the KV cache, and their next tokens.

The rows are aligned at their last token and padded on the left. A row is prefilled up to the last of its ids, which the
next step of the batch computes; so a row can leave the batch and come back with the tokens that it has so far.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ngym.chat_codec import Sampled, Sampling

ROOM = 64  # tokens by which a cache grows at least
DRAWN = 1024  # numbers of an answer's noise that are drawn at once, if the vocabulary is smaller


def with_room(length: int) -> int:
    """The columns of a buffer for so many tokens and some more."""
    return length + max(ROOM, length // 4)


class Draw:
    """The random numbers of one answer with a seed, whatever else is in its batch."""

    def __init__(self, seed: int, device: str) -> None:
        self._generator = torch.Generator(device)
        self._generator.manual_seed(seed)
        self._ready: list[Tensor] = []

    def next(self, like_V: Tensor) -> Tensor:
        """Exponential noise [V] for the next token. Several tokens are drawn at once: each draw is one call."""
        if not self._ready:
            shape = (max(1, DRAWN // len(like_V)), len(like_V))
            self._ready = list(torch.empty(shape, device=like_V.device).exponential_(generator=self._generator))
            self._ready.reverse()
        return self._ready.pop()


@dataclass(eq=False)
class Row:
    """One answer under way.

    Attributes:
        ids: of the prompt and of the tokens so far.
        limit: the length of ids at which the answer ends.
        stops: ids that end it.
        draw: of an answer with a seed.
        unsent: the sampled tokens that the caller does not have yet.
        given_up: whether the caller has stopped reading.
        is_ended: whether the last token, or an error, was sent. Its row of the cache may stay for a while.
    """

    ids: list[int]
    limit: int
    stops: frozenset[int]
    sampling: Sampling
    draw: Draw | None
    answers: asyncio.Queue[Sampled | Exception] = field(default_factory=asyncio.Queue)
    unsent: tuple[list[int], list[float]] = field(default_factory=lambda: ([], []))
    given_up: bool = False
    is_ended: bool = False

    @property
    def is_filtered(self) -> bool:
        """Whether some tokens cannot be sampled."""
        return self.sampling.top_k > 0 or self.sampling.top_p < 1 or self.sampling.min_p > 0

    @property
    def is_told_each_token(self) -> bool:
        """Whether the caller needs each token at once: a stop string may end the answer."""
        return self.sampling.streamed or bool(self.sampling.stop)


class PaddedLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """Keys and values [B, H, T, D] of one layer, in buffers with room for more tokens. With a sliding window it has the
    tokens before the window, too: the mask leaves them out.
    """

    def __init__(self, is_sliding: bool) -> None:
        super().__init__()
        self.keys: Any = None
        self.values: Any = None
        self.is_sliding = is_sliding
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        end = self.length + key_states.shape[2]
        if self.keys is None:
            self.is_initialized, self.dtype, self.device = True, key_states.dtype, key_states.device
            self.keys, self.values = (_buffer(each, end) for each in (key_states, value_states))
        elif end > self.keys.shape[2]:
            self.keys, self.values = (_buffer(each, end) for each in (self.keys, self.values))
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.length


def _buffer(states: Tensor, length: int) -> Tensor:
    """A buffer for at least so many tokens that begins with these states. Nothing reads the rest before it is written."""
    buffer = states.new_empty((*states.shape[:2], with_room(length), states.shape[3]))
    buffer[:, :, : states.shape[2]] = states
    return buffer


class Part(NamedTuple):
    """Rows of one cache, for another one. starts: of each row's first token."""

    cache: Cache
    rows: list[int]
    starts: list[int]
    length: int


class Batch:
    """The answers under way, and their KV cache of the same number of rows.

    Attributes:
        starts: the columns of each row's first token; those before are padding.
        length: the columns of the cache.
        valid: [B, T + room], 1 where a column is not padding.
    """

    def __init__(self, sliding: Sequence[bool] | None, device: str) -> None:
        """sliding: for each layer; None: this family has a cache of its own, and one row only."""
        self.rows: list[Row] = []
        self.starts: list[int] = []
        self.length = 0
        self.cache: Any = None
        self.valid = torch.zeros(0, 0, dtype=torch.bool, device=device)
        self.bytes_per_token = 0  # of one row; 0 before the first pass
        self._sliding = sliding
        self._device = device

    def repeat(self, cache: Cache, rows: Sequence[int]) -> Cache:
        """A cache of these rows of another one, which may occur more than once."""
        repeated = self.layers()
        for layer, old in zip(repeated.layers, cache.layers, strict=True):
            layer.keys, layer.values = old.keys[rows], old.values[rows]
            layer.is_initialized, layer.dtype, layer.device, layer.length = True, old.dtype, old.device, old.length
        return repeated

    def layers(self) -> Cache:
        assert self._sliding is not None
        return Cache(layers=[PaddedLayer(each) for each in self._sliding])

    def keep(self, rows: Sequence[int]) -> None:
        """Leave out all other rows."""
        if len(rows) == len(self.rows):
            return
        self._compose([self._part(list(rows))], [self.rows[row] for row in rows])

    def add(self, rows: list[Row], cache: Any, starts: list[int], length: int) -> None:
        """Add rows with their cache of so many columns."""
        if self._sliding is None:
            self.rows, self.starts, self.length, self.cache = rows, starts, length, cache
            return
        new = Part(cache, list(range(len(rows))), starts, length)
        self._compose([self._part(list(range(len(self.rows)))), new], self.rows + rows)

    def clear(self) -> None:
        self.rows, self.starts, self.length, self.cache = [], [], 0, None

    def grow(self, count: int) -> None:
        """Make the next columns valid, which the next pass fills: one, unless the family has a cache of its own."""
        if self._sliding is not None:
            if self.length == self.valid.shape[1]:
                valid = self.valid.new_zeros(len(self.rows), with_room(self.length))
                valid[:, : self.length] = self.valid
                self.valid = valid
            self.valid[:, self.length] = True
        self.length += count

    def _part(self, rows: list[int]) -> Part:
        return Part(self.cache, rows, [self.starts[row] for row in rows], self.length)

    def _compose(self, parts: list[Part], rows: list[Row]) -> None:
        """One cache of these parts' rows, aligned at their ends, without columns that are padding in all rows."""
        parts = [part for part in parts if part.rows]
        if not parts:
            self.clear()
            return
        used = [part.length - min(part.starts) for part in parts]
        length = max(used)
        cache = self.layers()
        for index, layer in enumerate(cache.layers):
            olds = [part.cache.layers[index] for part in parts]
            if length:
                layer.keys, layer.values = (
                    self._aligned([getattr(old, name) for old in olds], parts, used, length)
                    for name in ("keys", "values")
                )
                layer.is_initialized, layer.dtype, layer.device = True, layer.keys.dtype, layer.keys.device
                layer.length = length
        if layer.keys is not None and not self.bytes_per_token:
            self.bytes_per_token = sum(2 * layer.keys[0, :, :1].nbytes for layer in cache.layers)
        self.rows, self.length, self.cache = rows, length, cache
        self.starts = [start + length - part.length for part in parts for start in part.starts]
        columns_T = torch.arange(length, device=self._device)
        self.valid = columns_T >= torch.tensor(self.starts, device=self._device)[:, None]

    def _aligned(self, states: list[Tensor | None], parts: list[Part], used: list[int], length: int) -> Tensor:
        one = next(state for state in states if state is not None)
        count = sum(len(part.rows) for part in parts)
        buffer = one.new_empty((count, one.shape[1], with_room(length), one.shape[3]))
        first = 0
        for state, part, columns in zip(states, parts, used, strict=True):
            rows = buffer[first : first + len(part.rows)]
            first += len(part.rows)
            padding = length if state is None else length - columns
            rows[:, :, :padding] = 0  # NaN would pass a mask
            if state is not None:
                columns_used = state[:, :, part.length - columns : part.length]
                rows[:, :, padding:length] = (
                    columns_used if part.rows == list(range(len(state))) else columns_used[part.rows]
                )
        return buffer


def sampled(rows: Sequence[Row], logits_BV: Tensor, draw: torch.Generator) -> tuple[list[int], list[float]]:
    """A token of each row and its log-probability, by the Gumbel-max trick. draw: of the rows without a seed."""
    logits_BV = logits_BV.float()
    greedy = [index for index, row in enumerate(rows) if row.sampling.temperature == 0]
    temperatures = [row.sampling.temperature or 1.0 for row in rows]
    if any(each != 1 for each in temperatures):
        logits_BV = logits_BV / torch.tensor(temperatures, device=logits_BV.device)[:, None]
    for index, row in enumerate(rows):
        if row.is_filtered and row.sampling.temperature > 0:
            logits_BV[index] = filtered(logits_BV[index], row.sampling)
    logprobs_BV = logits_BV.log_softmax(-1)
    like_V = logprobs_BV[0]
    seeded = {index: row.draw.next(like_V) for index, row in enumerate(rows) if row.draw is not None}
    if len(seeded) == len(rows):
        noise_BV = torch.stack(list(seeded.values()))
    else:
        noise_BV = torch.empty_like(logprobs_BV).exponential_(generator=draw)
        if seeded:
            noise_BV[list(seeded)] = torch.stack(list(seeded.values()))
    if greedy:
        noise_BV[greedy] = 1.0
    tokens_B = (logprobs_BV - noise_BV.clamp_(min=torch.finfo(torch.float32).tiny).log_()).argmax(-1)
    chosen_B = logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
    return tokens_B.tolist(), chosen_B.tolist()


def filtered(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """The logits without the tokens that top-k, top-p and min-p leave out."""
    if 0 < sampling.top_k < len(logits_V):
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1:
        probs_V, order_V = logits_V.softmax(-1).sort(descending=True)
        beyond_V = probs_V.cumsum(-1) - probs_V >= max(sampling.top_p, 1e-9)  # the likeliest always stays
        logits_V = logits_V.masked_fill(torch.zeros_like(beyond_V).scatter(0, order_V, beyond_V), -torch.inf)
    if sampling.min_p > 0:
        probs_V = logits_V.softmax(-1)
        logits_V = logits_V.masked_fill(probs_V < sampling.min_p * probs_V.max(), -torch.inf)
    return logits_V


def sliding_layers(config: Any) -> list[bool] | None:
    """For each layer of the cache, whether its attention has a window; None: some have a state of another kind."""
    try:
        layers = DynamicCache(config=config).layers
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    if not layers or any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        return None
    return [isinstance(layer, DynamicSlidingWindowLayer) for layer in layers]
