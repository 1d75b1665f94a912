"""What was probably meant? The nearest of the names that there are."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

LONGEST = 100  # characters of a word that is looked for
MOST_CHOICES = 1000  # that it is compared with, at some microseconds each


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that the writer most likely meant, or None. A long word is not taken for a misspelling."""
    if len(word) > LONGEST:
        return None
    found = difflib.get_close_matches(word, islice(choices, MOST_CHOICES), n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """` (did you mean 'policy'?)`, or a list of the choices when none is near and there are few."""
    choices = sorted(set(choices))
    near = nearest(word, choices)
    if near:
        return f" (did you mean {near!r}?)"
    return f" (known: {', '.join(choices)})" if 0 < len(choices) <= 12 else ""


def near_file(path: Path) -> str:
    """` (did you mean 'global_config.yaml'?)`, of the files that lie where this one does not; of a folder or a pipe, that it is one."""
    if path.is_dir():
        return ", it is a folder"
    if path.exists():
        return ", it is a device or a pipe; put what comes from it into a file"
    try:
        others = [name for name in os.listdir(path.parent) if name != path.name]  # a link that leads nowhere
        near = difflib.get_close_matches(path.name, others, n=1, cutoff=0.8)  # endings are alike anyway
    except OSError:
        return ""
    return f" (did you mean {str(path.with_name(near[0]))!r}?)" if near else ""
