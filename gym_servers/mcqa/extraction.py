"""Reads the chosen option from an answer. Mode `any` is ours (ngym.grading.answers), the others are NeMo Gym's."""

import re
from typing import Literal

from ngym.grading.answers import boxed, canonical, letter_of, option_letter, option_of, unwrapped

Mode = Literal["any", "strict_single_letter_boxed", "lenient_boxed", "lenient_answer_colon"]
Options = dict[str, str]

MAX_CHARS = 20_000

_ALONE = re.compile(r"[^A-Za-z]*([A-Z])[^A-Za-z]*")  # a capital and no other letter, as those rows ask for
_LABELLED = re.compile(r"[^A-Za-z]*([A-Z])\s*[.:)\]]\s*(.+)", re.DOTALL)  # `B: London`
_ANSWER_COLON = re.compile(r"answer[ \t]*:[ \t]*(\S[^\n]*)", re.IGNORECASE)


def extract_choice(text: str, options: Options, mode: Mode) -> str | None:
    """The letter of the chosen option, or None."""
    if mode == "any":
        return option_letter(text, options)
    if mode == "lenient_answer_colon":
        return _after_answer_colon(text, options)
    box = boxed(text)
    if box is None:
        return None
    alone = _ALONE.fullmatch(unwrapped(box))
    if alone and alone[1] in options:
        return alone[1]
    labelled = _LABELLED.fullmatch(unwrapped(box))
    if labelled and options.get(labelled[1]) and canonical(labelled[2]) == canonical(options[labelled[1]]):
        return labelled[1]
    return letter_of(box, options) or _contained(box, options) if mode == "lenient_boxed" else None


def _contained(box: str, options: Options) -> str | None:
    hits = [letter for letter, text in options.items() if canonical(text) and canonical(text) in canonical(box)]
    return hits[0] if len(hits) == 1 else None


def _after_answer_colon(text: str, options: Options) -> str | None:
    matches = _ANSWER_COLON.findall(text[-MAX_CHARS:])
    answer = unwrapped(matches[-1]).strip() if matches else ""
    if len(answer) == 1 and answer.upper() in options:
        return answer.upper()
    hits = [
        letter
        for letter, option in options.items()
        if " ".join(option.casefold().split()) == " ".join(answer.casefold().split())
    ]
    return hits[0] if answer and len(hits) == 1 else None


def search(patterns: list[str], text: str) -> list[str]:
    """The first group of the last match of each pattern that is valid and matches, in the patterns' order.

    Runs in a worker, because a pattern may backtrack for very long on model text.
    """
    options_found = []
    for pattern in patterns:
        try:
            matches = [match for match in re.finditer(pattern, text, re.IGNORECASE) if match.lastindex]
        except re.error:
            continue
        if matches and matches[-1].group(1) is not None:
            options_found.append(matches[-1].group(1))
    return options_found


def first_option(texts: list[str], options: Options) -> str | None:
    """The letter of the first captured text that is an option's letter or its whole text."""
    for match in texts:
        if match.strip().upper() in options:
            return match.strip().upper()
        if letter := option_of(match, options):
            return letter
    return None
