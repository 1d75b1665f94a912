"""The keys and values of answers that ended, for prompts that begin with the same tokens: the next turn of a conversation
begins with the earlier ones, and so do other conversations with the same instructions and tools.

A prompt finds them by the hashes of its blocks, each of which covers all blocks before it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

BLOCK = 16  # tokens
MIN_PREFIX_TOKENS = 64  # a shorter prefix costs more to keep than to compute


class Prefix(NamedTuple):
    """Token ids, and for each layer the keys and values [H, T, D] of the first `length` of them. experts: of these, if they
    are recorded, [T, L, K].
    """

    ids: list[int]
    length: int
    layers: list[tuple[Tensor, Tensor]]
    experts: bytes = b""

    @property
    def bytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers) + len(self.experts)


PrefixMatch = tuple[Prefix, int]  # and how many of its tokens


class PrefixCache:
    """The prefixes that were used last, within a limit of bytes."""

    def __init__(self, limit: int) -> None:
        self.bytes = 0
        self._limit = limit
        # by the hash of its last block, the longest unused first
        self._by_last_block: OrderedDict[int, Prefix] = OrderedDict()
        self._holders: defaultdict[int, list[int]] = defaultdict(list)  # by a block: the prefixes with it

    def accepts(self, length: int, size: int) -> bool:
        """Whether a prefix of so many tokens and bytes is worth a copy, and has room."""
        return length >= MIN_PREFIX_TOKENS and size <= self._limit

    def put(self, prefix: Prefix) -> None:
        """Keep a prefix that this cache takes, instead of those with which it begins."""
        blocks = list(_blocks(prefix.ids, prefix.length))
        for block in blocks:
            if block == blocks[-1] or (block in self._by_last_block and _is_prefix(prefix, self._by_last_block[block])):
                self._remove(block)
        self._by_last_block[blocks[-1]] = prefix
        self.bytes += prefix.bytes
        for block in blocks:
            self._holders[block].append(blocks[-1])
        self.shrink(self._limit)

    def find(self, ids: Sequence[int], most: int) -> PrefixMatch | None:
        """The longest stored prefix of these ids, and the number of common tokens: MIN_PREFIX_TOKENS to `most`."""
        match = None
        for block in _blocks(ids, most):
            if block not in self._holders:
                break
            match = self._holders[block][-1]
        if match is None:
            return None
        prefix = self._by_last_block[match]
        most = min(most, prefix.length)
        common = next((place for place in range(most) if prefix.ids[place] != ids[place]), most)
        if common < MIN_PREFIX_TOKENS:
            return None
        self._by_last_block.move_to_end(match)
        return prefix, common

    def shrink(self, limit: int) -> None:
        """Set the limit, and drop those that were used longest ago until it holds."""
        self._limit = limit
        while self.bytes > limit:
            self._remove(next(iter(self._by_last_block)))

    def clear(self) -> None:
        self._by_last_block.clear()
        self._holders.clear()
        self.bytes = 0

    def _remove(self, last: int) -> None:
        prefix = self._by_last_block.pop(last, None)
        if prefix is None:
            return
        self.bytes -= prefix.bytes
        for block in _blocks(prefix.ids, prefix.length):
            self._holders[block].remove(last)
            if not self._holders[block]:
                del self._holders[block]


def _is_prefix(longer: Prefix, shorter: Prefix) -> bool:
    return shorter.length <= longer.length and longer.ids[: shorter.length] == shorter.ids[: shorter.length]


def _blocks(ids: Sequence[int], length: int) -> Iterator[int]:
    """The hash of each whole block of the first `length` ids, with all blocks before it."""
    so_far = 0
    for end in range(BLOCK, length + 1, BLOCK):
        so_far = hash((so_far, *ids[end - BLOCK : end]))
        yield so_far
