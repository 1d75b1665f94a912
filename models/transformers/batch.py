"""The answers that are sampled together: their rows of the KV cache, and their next tokens.

The rows are aligned at their last token and padded on the left. A row is prefilled up to the last of its ids, which the
next step of the batch computes; so a row can leave the batch and come back with the tokens that it has so far.

A row that joins is written over one that has ended, or behind the last one, so that the others are not copied. All are
copied only when the buffers have no room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ngym.chat_codec import SampledTokens, Sampling
from ngym.errors import ServiceError
from ngym.routed_experts import ExpertRows

from .prefix_cache import Prefix, PrefixCache, PrefixMatch

MIN_GROWTH_TOKENS = 64  # tokens by which a cache grows at least
MIN_GROWTH_ROWS = 8  # rows by which it grows at least, if its limit allows
DRAWN_AT_ONCE = 1024  # numbers of an answer's noise that are drawn at once, if the vocabulary is smaller


def with_room(length: int, least: int = MIN_GROWTH_TOKENS) -> int:
    """The columns of a buffer for so many tokens, or its rows, and some more."""
    return length + max(least, length // 4)


class Draw:
    """The random numbers of one answer with a seed, whatever else is in its batch."""

    def __init__(self, seed: int, device: str) -> None:
        self._generator = torch.Generator(device)
        self._generator.manual_seed(seed)
        self._ready: list[Tensor] = []

    def next(self, like_V: Tensor) -> Tensor:
        """Exponential noise [V] for the next token. Several tokens are drawn at once: each draw is one call."""
        if not self._ready:
            shape = (max(1, DRAWN_AT_ONCE // len(like_V)), len(like_V))
            self._ready = list(torch.empty(shape, device=like_V.device).exponential_(generator=self._generator))
            self._ready.reverse()
        return self._ready.pop()


@dataclass(slots=True)
class RowExperts:
    """The experts of one answer.

    unsent: of the tokens whose experts the caller does not have yet. cached: of the tokens in the cache, [T, L, K].
    known: the bytes that were ever added to `unsent`.
    """

    unsent: ExpertRows
    cached: bytearray = field(default_factory=bytearray)
    known: int = 0

    def add(self, before: int, raw: bytes) -> None:
        """Add the experts of computed tokens, behind the first so many. Tokens of a row that came back to the batch are
        computed again, but keep the experts that they were sampled with.
        """
        del self.cached[before * self.unsent.row_bytes :]
        self.cached += raw
        self.unsent.raw += self.cached[self.known :]
        self.known = max(self.known, len(self.cached))

    def take(self) -> ExpertRows:
        """The unsent ones."""
        taken, self.unsent = self.unsent, replace(self.unsent, raw=bytearray())
        return taken


@dataclass(eq=False)
class Row:
    """One answer under way.

    Attributes:
        ids: of the prompt and of the tokens so far.
        limit: the length of ids at which the answer ends.
        stops: ids that end it.
        draw: of an answer with a seed.
        number: in the order of the requests.
        cached: the tokens of the prompt whose keys and values were there.
        experts: those of its tokens, if they are recorded.
        unsent: the sampled tokens that the caller does not have yet.
        given_up: whether the caller has stopped reading.
        is_ended: whether the last token, or an error, was sent. Its row of the cache may stay for a while.
    """

    ids: list[int]
    limit: int
    stops: frozenset[int]
    sampling: Sampling
    draw: Draw | None
    number: int
    answers: asyncio.Queue[SampledTokens | ServiceError] = field(default_factory=asyncio.Queue)
    unsent: tuple[list[int], list[float]] = field(default_factory=lambda: ([], []))
    cached: int = 0
    experts: RowExperts | None = None
    given_up: bool = False
    is_ended: bool = False

    @property
    def is_over(self) -> bool:
        return self.is_ended or self.given_up

    @property
    def is_filtered(self) -> bool:
        """Whether some tokens cannot be sampled."""
        return self.sampling.top_k > 0 or self.sampling.top_p < 1 or self.sampling.min_p > 0

    @property
    def needs_each_token(self) -> bool:
        """Whether the caller needs each token at once: a stop string may end the answer."""
        return self.sampling.streamed or bool(self.sampling.stop)

    def take_experts(self) -> ExpertRows | None:
        """Those that the caller does not have yet."""
        return None if self.experts is None else self.experts.take()


@dataclass
class Window:
    """The part of a cache's buffers that a pass uses: the first so many rows, from this column on."""

    rows: int
    first: int = 0


class PaddedLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """Keys and values of one layer, in buffers [B + room, H, T + room, D]. With a sliding window it has the tokens before
    the window, too: the mask leaves them out.
    """

    def __init__(self, is_sliding: bool, window: Window) -> None:
        super().__init__()
        self.keys: Any = None
        self.values: Any = None
        self.is_sliding = is_sliding
        self.window = window
        self.end = 0  # the column after the last token

    def set_buffers(self, keys: Tensor, values: Tensor, end: int) -> None:
        """Use these buffers."""
        self.is_initialized, self.dtype, self.device = True, keys.dtype, keys.device
        self.keys, self.values, self.end = keys, values, end

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        end = self.end + key_states.shape[2]
        if self.keys is None:
            self.set_buffers(key_states, value_states, end)
        else:
            self.keys[: self.window.rows, :, self.end : end] = key_states
            self.values[: self.window.rows, :, self.end : end] = value_states
            self.end = end
        rows, first = self.window.rows, self.window.first
        return self.keys[:rows, :, first:end], self.values[:rows, :, first:end]

    def get_seq_length(self) -> int:
        return self.end - self.window.first


class Batch:
    """The answers under way, and their KV cache.

    In the buffers, the columns before a row's first token are 0: NaN would pass a mask, and a buffer that is not
    written yet, or was another row's, may have some.

    Attributes:
        rows: one for each row of the cache in use. Some may be over; they are computed until others take their places.
        starts: the columns of each row's first token.
        end: the column after the last token of all rows.
        cache: None before the first row; that of a family with a cache of its own is its own.
        bytes_per_token: of one row; 0 before the first pass.
        prefixes: those that fit beside the buffers.
    """

    def __init__(self, sliding: Sequence[bool] | None, device: str, limit: int) -> None:
        """sliding: for each layer; None: this family has a cache of its own, and one row only. limit: in bytes; the buffers
        have room for more rows and longer prompts as far as it allows.
        """
        self.rows: list[Row] = []
        self.starts: list[int] = []
        self.end = 0
        self.cache: Any = None
        self.bytes_per_token = 0
        self._sliding = sliding
        self._device = device
        self._limit = limit
        self._window = Window(0)
        self.prefixes = PrefixCache(limit)

    @property
    def active_rows(self) -> list[int]:
        """The rows that are not over."""
        return [index for index, row in enumerate(self.rows) if not row.is_over]

    @property
    def length(self) -> int:
        """The columns from the first token of a row that is not over."""
        return self.end - self._first(self.active_rows)

    def new_cache(self, rows: int) -> Cache:
        """An empty cache for so many rows."""
        return self._cache(Window(rows))

    def clear(self) -> None:
        """Leave out all rows."""
        self.prefixes.shrink(self._limit)
        self.rows, self.starts, self.end, self.cache = [], [], 0, None

    def add(self, rows: list[Row], cache: Any, places: Sequence[int], ends: Sequence[int]) -> None:
        """Add rows, with the keys and values of their ids but the last.

        Args:
            cache: has those of a row in its row `places`, which rows may have in common, before the column `ends`; the
                columns before them are 0.
        """
        if self._sliding is None:
            self.rows, self.starts, self.end, self.cache = rows, [0], 0, cache
            return
        lengths = [len(row.ids) - 1 for row in rows]
        longest = max(lengths)
        if not self.bytes_per_token and longest:
            self.bytes_per_token = sum(2 * layer.keys[0, :, :1].nbytes for layer in cache.layers)
        over = [index for index, row in enumerate(self.rows) if row.is_over][: len(rows)]
        slots = [*over, *range(len(self.rows), len(self.rows) + len(rows) - len(over))]
        if longest > self.end or max(slots) >= self._buffer_size[0]:
            going = self.active_rows
            self._copy(going, len(going) + len(rows), longest, self.cache if any(self._buffer_size) else cache)
            slots = list(range(len(going), len(going) + len(rows)))
        for end in set(ends):
            some = [index for index in range(len(rows)) if ends[index] == end]
            self._write(
                [slots[index] for index in some],
                cache,
                [places[index] for index in some],
                end,
                longest=max(lengths[index] for index in some),
            )
        self.rows += [rows[0]] * (max(slots) + 1 - len(self.rows))
        self.starts += [0] * (len(self.rows) - len(self.starts))
        for slot, row, length in zip(slots, rows, lengths, strict=True):
            self.rows[slot], self.starts[slot] = row, self.end - length

    def _write(self, slots: list[int], cache: Cache, places: list[int], end: int, *, longest: int) -> None:
        """Write the last columns before `end` of these rows of a cache into our rows."""
        into, source, padding = self._index(slots), self._index(places), self.end - longest
        for layer, source_layer in zip(self.cache.layers, cache.layers, strict=True):
            if layer.keys is not None:  # else no row has a token yet
                for buffer, states in ((layer.keys, source_layer.keys), (layer.values, source_layer.values)):
                    buffer[into, :, :padding] = 0
                    if longest:
                        buffer[into, :, padding : self.end] = states[source, :, end - longest : end]

    def remember(self, slot: int) -> None:
        """Keep the keys and values of a row for prompts that begin with its ids."""
        row, start = self.rows[slot], self.starts[slot]
        length = self.end - start
        if self._sliding is None or not self.prefixes.accepts(length, length * self.bytes_per_token):
            return
        layers = [
            (layer.keys[slot, :, start : self.end].clone(), layer.values[slot, :, start : self.end].clone())
            for layer in self.cache.layers
        ]
        experts = b"" if row.experts is None else bytes(row.experts.cached)
        self.prefixes.put(Prefix(list(row.ids), length, layers, experts))

    def cache_of_prefixes(self, prefixes: Sequence[PrefixMatch], room: int) -> Cache:
        """A cache of one row for each of these prefixes, aligned at their ends, with room for so many more tokens."""
        longest = max(common for _, common in prefixes)
        cache = self.new_cache(len(prefixes))
        rows_of: dict[tuple[int, int], list[int]] = {}
        for row, (prefix, common) in enumerate(prefixes):
            rows_of.setdefault((id(prefix), common), []).append(row)
        for index, layer in enumerate(cache.layers):
            buffers = [
                states.new_zeros((len(prefixes), states.shape[0], longest + room, states.shape[2]))
                for states in prefixes[0][0].layers[index]
            ]
            for rows in rows_of.values():
                prefix, common = prefixes[rows[0]]
                for buffer, states in zip(buffers, prefix.layers[index], strict=True):
                    buffer[self._index(rows), :, longest - common : longest] = states[:, :common]
            layer.set_buffers(*buffers, longest)
        return cache

    def keep(self, rows: Sequence[int]) -> None:
        """Leave out all other rows: the last ones that stay move into their places."""
        if len(rows) == len(self.rows):
            return
        if not rows:
            self.clear()
            return
        kept_rows = set(rows)
        targets = [index for index in range(len(rows)) if index not in kept_rows]
        sources = [index for index in rows if index >= len(rows)]
        first = self._first(rows)
        if targets and any(self._buffer_size):
            into, source = self._index(targets), self._index(sources)
            for layer in self.cache.layers:
                for buffer in (layer.keys, layer.values):
                    buffer[into, :, first : self.end] = buffer[source, :, first : self.end]
                    buffer[into, :, :first] = 0
        for target, moved in zip(targets, sources, strict=True):
            self.rows[target], self.starts[target] = self.rows[moved], self.starts[moved]
        del self.rows[len(rows) :], self.starts[len(rows) :]

    def grow(self, count: int) -> None:
        """Add columns, which the next pass fills: one, unless the family has a cache of its own."""
        if self._sliding is not None:
            if self.end == self._buffer_size[1] > 0:
                going = self.active_rows
                self._copy(going, len(going), 0, self.cache)
            self._window.rows, self._window.first = len(self.rows), self._first(self.active_rows)
        self.end += count

    def mask(self) -> Tensor | None:
        """[B, T] of the window, False where a column is not a row's; None if all are."""
        first = self._window.first
        if self._sliding is None or all(start <= first for start in self.starts):
            return None
        columns_T = torch.arange(first, self.end, device=self._device)
        return columns_T >= torch.tensor(self.starts, device=self._device)[:, None]

    def _cache(self, window: Window) -> Cache:
        assert self._sliding is not None
        return Cache(layers=[PaddedLayer(each, window) for each in self._sliding])

    def _first(self, rows: Sequence[int]) -> int:
        return min((self.starts[row] for row in rows), default=self.end)

    @property
    def _buffer_size(self) -> tuple[int, int]:
        """The rows and columns of the buffers."""
        keys = None if self.cache is None else self.cache.layers[0].keys
        return (0, 0) if keys is None else (keys.shape[0], keys.shape[2])

    def _index(self, rows: Sequence[int]) -> Any:
        if list(rows) == list(range(rows[0], rows[0] + len(rows))):
            return slice(rows[0], rows[0] + len(rows))
        return torch.tensor(rows, device=self._device)

    def _copy(self, going: list[int], rows: int, longest: int, like: Cache) -> None:
        """Copy these rows into buffers with room for `rows` rows, and for prompts of so many columns. The buffers are like
        those of `like`.
        """
        used = self.end - self._first(going)
        length = max(used, longest)
        capacity, spare = with_room(rows, MIN_GROWTH_ROWS), MIN_GROWTH_TOKENS
        if capacity * (spare + with_room(length)) * self.bytes_per_token > self._limit:
            capacity, spare = rows, 0
        end, columns = spare + length, spare + with_room(length)
        self.prefixes.shrink(max(0, self._limit - capacity * columns * self.bytes_per_token))
        old, self.cache = self.cache, self._cache(self._window)
        for index, (layer, one) in enumerate(zip(self.cache.layers, like.layers, strict=True)):
            if one.keys is None:
                layer.end = end = 0
                continue
            buffers = []
            for name in ("keys", "values"):
                states = getattr(one, name)
                buffer = states.new_empty((capacity, states.shape[1], columns, states.shape[3]))
                buffer[: len(going), :, : end - used] = 0
                if used:
                    before = getattr(old.layers[index], name)
                    buffer[: len(going), :, end - used : end] = before[
                        self._index(going), :, self.end - used : self.end
                    ]
                buffers.append(buffer)
            layer.set_buffers(*buffers, end)
            if old is not None:
                old.layers[index].keys = old.layers[index].values = None
        self.rows = [self.rows[index] for index in going]
        self.starts = [self.starts[index] - self.end + end for index in going]
        self.end = end


def sample(rows: Sequence[Row], logits_BV: Tensor, draw: torch.Generator) -> tuple[list[int], list[float]]:
    """A token of each row and its log-probability, by the Gumbel-max trick. draw: of the rows without a seed."""
    logits_BV = logits_BV.float()
    greedy = [index for index, row in enumerate(rows) if row.sampling.temperature == 0]
    temperatures = [row.sampling.temperature or 1.0 for row in rows]
    if any(each != 1 for each in temperatures):
        logits_BV = logits_BV / torch.tensor(temperatures, device=logits_BV.device)[:, None]
    for index, row in enumerate(rows):
        if row.is_filtered and row.sampling.temperature > 0:
            logits_BV[index] = filter_logits(logits_BV[index], row.sampling)
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


def filter_logits(logits_V: Tensor, sampling: Sampling) -> Tensor:
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
