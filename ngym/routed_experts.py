"""The experts to which a mixture of experts sent each token, for the replay of its routing in training.

An engine and a trainer compute the same router's logits with small differences, so that some tokens get other experts
in training than in sampling. A trainer that uses the recorded experts computes the policy that sampled (rollout routing
replay, R3: arXiv 2510.11370).
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ngym.schema import RoutedExperts

ITEM_BYTES = {"uint8": 1, "uint16": 2}


def is_router(module: object) -> bool:
    """Whether a module of a network chooses the experts of tokens: its class has "Router" in its name, and it has the
    numbers of all and of chosen experts (`num_experts`, `top_k`).
    """
    sizes = (getattr(module, name, None) for name in ("num_experts", "top_k"))
    return "Router" in type(module).__name__ and all(isinstance(size, int) for size in sizes)


@dataclass(slots=True)
class ExpertRows:
    """The chosen experts of the first tokens of a context.

    layers: of the decoder; those without experts have zeros. chosen: experts of a token and layer. dtype: of an expert's
    number, little-endian. raw: [R, layers, chosen], without padding.
    """

    layers: int
    chosen: int
    dtype: str
    raw: bytearray = field(default_factory=bytearray)

    @classmethod
    def read(cls, record: Any, tokens: int) -> ExpertRows:
        """A record of an answer or segment. tokens: of the context; a record has no more rows than that.

        Raises:
            ValueError: it is not a RoutedExperts, or has more rows than tokens.
        """
        match record:
            case {
                "shape": [int(rows), int(layers), int(chosen)],
                "dtype": "uint8" | "uint16" as dtype,
                "data": str(data),
            }:
                pass
            case _:
                raise ValueError("routed_experts must have shape [R, L, K], dtype (uint8 or uint16) and data")
        if not 0 <= rows <= tokens or min(layers, chosen) < 1:
            raise ValueError(f"routed_experts of the shape {[rows, layers, chosen]} for {tokens} tokens")
        try:
            raw = bytearray(base64.b64decode(data, validate=True))
        except (binascii.Error, ValueError):
            raise ValueError("the data of routed_experts is not base64") from None
        if len(raw) != prod((rows, layers, chosen, ITEM_BYTES[dtype])):
            raise ValueError(f"routed_experts of the shape {[rows, layers, chosen]} with {len(raw):,} bytes")
        return cls(layers, chosen, dtype, raw)

    @property
    def row_bytes(self) -> int:
        return self.layers * self.chosen * ITEM_BYTES[self.dtype]

    @property
    def rows(self) -> int:
        return len(self.raw) // self.row_bytes

    def add(self, later: ExpertRows) -> None:
        """Add the rows of a later call for the tokens that have none yet: the others keep those that sampled them.

        Raises:
            ValueError: they are of another model.
        """
        if (later.layers, later.chosen, later.dtype) != (self.layers, self.chosen, self.dtype):
            raise ValueError("the routed_experts of two calls of a context have different shapes")
        self.raw += later.raw[len(self.raw) :]

    def between(self, start: int, end: int) -> ExpertRows:
        """The rows of these tokens."""
        size = self.row_bytes
        return ExpertRows(self.layers, self.chosen, self.dtype, self.raw[start * size : end * size])

    def cut(self, tokens: int) -> None:
        """Keep the rows of the first tokens only."""
        del self.raw[tokens * self.row_bytes :]

    def record(self) -> RoutedExperts:
        data = base64.b64encode(self.raw).decode()
        return RoutedExperts(shape=[self.rows, self.layers, self.chosen], dtype=self.dtype, data=data)
