"""Wordle: six guesses at a word of five letters. Finding it scores 1. Any five letters are a valid guess."""

from __future__ import annotations

import random
import re
from collections import Counter

from .game import IllegalMove

GUESSES = 6
WORDS = re.findall(
    "[a-z]{5}",
    """
    about above actor adult after again agree ahead alarm album alive allow alone along amber angle angry apple apron
    arena armor arrow aside asset audio avoid awake award bacon badge baker basic beach beard begin below bench berry
    birth black blade blank blend bless block bloom board boost bored brain brave bread break brick bride brief bring
    broad brown brush build bunch cabin cable camel candy cargo carry catch cause chain chair chalk charm chase cheap
    check cheek chess chest child chill civic claim class clean clear climb clock cloth cloud coach coast cover craft
    crane crash cream crisp crowd crown curve daily dairy dance delay depth diary dough dozen draft drain dream dress
    drink drive eager eagle early earth elbow empty enemy enjoy equal error event exact fable faith false favor fence
    ferry fever field fifth final flame flash fleet float flood floor flour focus force forty frame fresh front frost
    fruit giant glass globe glove grace grain grand grape graph grass green group guard guest guide habit happy harsh
    heart heavy hedge honey horse hotel house human humor ideal image index inner issue ivory jelly jewel joint judge
    juice kneel knife label large laser later laugh layer lemon level light limit local logic lunar lunch magic maple
    march match mayor medal mercy metal meter minor model money month moral motor mount mouse mouth movie music naval
    nerve night noble noise north novel nurse ocean offer olive onion orbit order organ other outer owner paint panel
    paper party patch peace pearl penny phone photo piano pilot pitch place plain plant plate point polar pound power
    press price pride prize proud pulse queen quick quiet radio raise range rapid reach ready river roast robin rough
    round route royal rural salad scale scarf scene score sense serve seven shade shape share sharp sheep shelf shell
    shift shine shore short sight skill sleep slice slope small smart smile smoke snake solar solid sound south space
    spare speak spice spoon sport stage stamp stand start steam steel stone store storm story sugar sunny swift table
    taste teach thank theme thick thing tiger title toast token torch total touch tower trade train treat trend trial
    trust truth uncle under union urban usual valid value video visit vital voice wagon waste watch water whale wheat
    wheel white whole woman world worry wound write wrong yacht young youth zebra
    """,
)


class Wordle:
    rules = (
        f"Wordle. Find an English word of five letters in {GUESSES} guesses. After each guess a letter is marked G where it is right, "
        "Y where it is in the word at another place, and - where it is not. Your move is five letters."
    )

    def __init__(self, seed: int) -> None:
        self.score: float | None = None
        self.secret = random.Random(f"wordle {seed}").choice(WORDS)
        self.guesses: list[str] = []

    def show(self) -> str:
        history = "\n".join(f"{guess} {marks(guess, self.secret)}" for guess in self.guesses)
        return f"{history}\nGuesses left: {GUESSES - len(self.guesses)}.".lstrip()

    def play(self, move: str) -> str:
        if not re.fullmatch("[a-z]{5}", move):
            raise IllegalMove("a guess is five letters from a to z")
        self.guesses.append(move)
        if move == self.secret:
            self.score = 1.0
        elif len(self.guesses) == GUESSES:
            self.score = 0.0
            return f"The word was {self.secret}."
        return ""


def marks(guess: str, secret: str) -> str:
    """A letter is marked at most as often as it occurs in the word, right places first."""
    right = [g == s for g, s in zip(guess, secret, strict=True)]
    unmatched = Counter(letter for letter, hit in zip(secret, right, strict=True) if not hit)
    result = ""
    for letter, hit in zip(guess, right, strict=True):
        near = not hit and unmatched[letter] > 0
        unmatched[letter] -= near
        result += "G" if hit else "Y" if near else "-"
    return result
