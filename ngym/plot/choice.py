"""Which curves of a run are worth a look? Those that are asked for, or the ones that show whether it learns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from ngym.did_you_mean import did_you_mean
from ngym.errors import UsageError

OF_ANOTHER = ("low", "high", "count", "failed", "unscored")  # bounds of a metric, and how many attempts it is of
UNSCORED = "frac_unscored"
REWARDS, LOSSES = ("reward/mean", UNSCORED), ("loss", "val/loss")


def telling(names: Sequence[str]) -> list[str]:
    """The metrics that show whether a run learns: with rewards, those, the share of rollouts without one and the mean rewards
    on held-out tasks; without, its losses.
    """
    evaluations = sorted(name for name in names if is_evaluation(name))
    return [name for name in (*REWARDS, *evaluations) if name in names] or [name for name in LOSSES if name in names]


def is_evaluation(name: str) -> bool:
    last = _last(name)
    return name.startswith("eval/") and (last == "greedy" or last.startswith("avg@"))


def asked(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """The metrics that match, in the order of the patterns (`reward/mean`, `eval/*`); what belongs to another one only if
    the pattern ends in it (`eval/*/count`).

    Raises:
        UsageError: a pattern matches none.
    """
    found: list[str] = []
    for pattern in patterns:
        matching = [pattern] if pattern in names else [name for name in names if _matches(name, pattern)]
        if not matching:
            raise UsageError(f"--metric {pattern}: no run has logged it{did_you_mean(pattern, filter(is_own, names))}")
        found += sorted(matching)
    return list(dict.fromkeys(found))


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) and (is_own(name) or _last(name) == _last(pattern))


def is_own(name: str) -> bool:
    return _last(name) not in OF_ANOTHER


def _last(name: str) -> str:
    return name.rpartition("/")[2]
