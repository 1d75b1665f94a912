"""Suggestions for misspelled names: the nearest of the known ones."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

MAX_WORD_CHARS = 100  # limit of the characters of a word
MAX_CHOICES = 1000  # limit of the choices, at some microseconds each


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The choice that the writer most likely meant, or None. A long word does not count as a misspelling.

    cutoff: least similarity, as of difflib; 1 is equality.
    """
    if len(word) > MAX_WORD_CHARS:
        return None
    matches = difflib.get_close_matches(word, islice(choices, MAX_CHOICES), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """` (did you mean 'policy'?)`, or a list of the choices when no name is near and there are few."""
    choices = sorted(set(choices))
    near = nearest(word, choices)
    if near:
        return f" (did you mean {near!r}?)"
    return f" (known: {', '.join(choices)})" if 0 < len(choices) <= 12 else ""


def near_file(path: Path) -> str:
    """A hint for a missing file: ` (did you mean 'global_config.yaml'?)` from its folder, or that the path is a folder
    or pipe.
    """
    if path.is_dir():
        return ", it is a folder"
    if path.exists():
        return ", it is a device or a pipe; save its output to a file"
    try:
        others = [name for name in os.listdir(path.parent) if name != path.name]  # also finds dangling links
        near = difflib.get_close_matches(path.name, others, n=1, cutoff=0.8)  # high cutoff: endings are alike anyway
    except OSError:
        return ""
    return f" (did you mean {str(path.with_name(near[0]))!r}?)" if near else ""
