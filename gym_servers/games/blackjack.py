"""Blackjack against a dealer that stands on 17. A win scores 1, a tie 0.5. Every seed gives a deck that can be won."""

from __future__ import annotations

import random
from itertools import count

from .game import IllegalMove

RANKS = "A23456789TJQK"


class Blackjack:
    rules = (
        "Blackjack. You get cards until you stand; above 21 you lose. Then the dealer draws up to 17 or more. The higher hand wins. "
        "T, J, Q and K count 10, A counts 11 or 1. Your move is: hit, or: stand."
    )

    def __init__(self, seed: int) -> None:
        self.score: float | None = None
        self.deck = next(deck for attempt in count() if winning_hits(deck := _shuffle(seed, attempt)) is not None)
        self.player, self.dealer = [self.deck[0], self.deck[2]], [self.deck[1], self.deck[3]]
        self.drawn = 4

    def show(self) -> str:
        dealer = " ".join(self.dealer) if self.score is not None else f"{self.dealer[0]} ?"
        return f"Your hand: {' '.join(self.player)} ({value(self.player)}). Dealer: {dealer}."

    def play(self, move: str) -> str:
        if move not in ("hit", "stand"):
            raise IllegalMove("the move is 'hit' or 'stand'")
        if move == "hit":
            self._draw(self.player)
            if value(self.player) > 21:
                self.score = 0.0
            return ""
        while value(self.dealer) < 17:
            self._draw(self.dealer)
        self.score = outcome(value(self.player), value(self.dealer))
        return ""

    def _draw(self, hand: list[str]) -> None:
        hand.append(self.deck[self.drawn])
        self.drawn += 1


def value(hand: list[str]) -> int:
    """The value of a hand. An ace counts 11 unless the hand would exceed 21."""
    total = sum(11 if card == "A" else 10 if card in "TJQK" else int(card) for card in hand)
    for _ in range(hand.count("A")):
        total -= 10 if total > 21 else 0
    return total


def outcome(player: int, dealer: int) -> float:
    return 1.0 if dealer > 21 or player > dealer else 0.5 if player == dealer else 0.0


def winning_hits(deck: list[str]) -> int | None:
    """The number of hits that wins with this deck, or None if none does."""
    for hits in range(10):
        player, dealer, rest = [deck[0], deck[2], *deck[4 : 4 + hits]], [deck[1], deck[3]], deck[4 + hits :]
        if value(player) > 21:
            return None
        for card in rest:
            if value(dealer) >= 17:
                break
            dealer.append(card)
        if outcome(value(player), value(dealer)) == 1.0:
            return hits
    return None


def _shuffle(seed: int, attempt: int) -> list[str]:
    deck = list(RANKS * 4)
    random.Random(f"blackjack {seed} {attempt}").shuffle(deck)
    return deck
