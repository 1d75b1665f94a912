"""Whose turn is it, of several with different weights? Their shares hold at every moment, not only on average."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


class Turns:
    """After any number n of turns each has had n times its share, by less than one more or less.

    taken: the turns that each has had. A turn goes to the one that must have it soonest, of those that may have it already:
    number j of one with the share s belongs into the turns floor(j / s) to ceil((j + 1) / s) - 1. Earliest deadline first
    keeps all deadlines, since that can be done at all (Tijdeman, 10.1016/0012-365X(80)90269-1).
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]
        self._periods = [sum(exact) / weight for weight in exact]
        self.taken = [0] * len(weights)

    def next(self) -> int:
        turn = sum(self.taken)
        places = [
            (math.ceil((taken + 1) * period), place)
            for place, (taken, period) in enumerate(zip(self.taken, self._periods, strict=True))
            if math.floor(taken * period) <= turn
        ]
        _, place = min(places)
        self.taken[place] += 1
        return place
