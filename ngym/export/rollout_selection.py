"""Chooses the rollouts of each task (demonstrations, and preference pairs), and counts what is kept and dropped.

best-worst   the best with the worst, the second best with the second worst ...: no rollout is in two pairs
best-rest    the best with every other, the worst first
adjacent     by descending reward: the best with the next lower one, that one with the next ...
all          every pair, the largest margin first
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from statistics import fmean
from typing import NamedTuple

from ngym.export.options import Options, Strategy
from ngym.option_names import option
from ngym.schema import Json

SHOWN_NOT_REPRESENTABLE = 5


class LinePosition(NamedTuple):
    """A line of an input: the index of the file, and its bytes [start, end)."""

    file: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A rollout that the format may use.

    task: the number of its group. is_positive: may be imitated (else it can only be a bad example).
    words: fingerprint of the policy's text, over all turns. shape: the number of its columns' types (conversation.ShapeNumbers).
    """

    place: LinePosition
    task: int
    reward: float
    is_positive: bool
    words: bytes
    shape: int


class Single(NamedTuple):
    """One rollout as a row of the output. label: whether it is desirable for KTO."""

    candidate: Candidate
    label: bool

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return (self.candidate,)


class Pair(NamedTuple):
    """Two rollouts of one group as a row of the output."""

    chosen: Candidate
    rejected: Candidate

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self

    @property
    def margin(self) -> float:
        """The difference of the rewards."""
        return round(self.chosen.reward - self.rejected.reward, 9)


Row = Single | Pair


class Reason(Enum):
    """The reason why a rollout is left out. The value is its name in --json."""

    FAILED = "failed"
    UNSCORED = "unscored"
    TORN = "torn"
    CUT = "cut"
    TRUNCATED = "truncated"
    LOW = "low"
    NOT_REPRESENTABLE = "not_representable"
    DUPLICATE = "duplicate"
    NOT_BEST = "not_best"
    ALONE = "alone"
    NO_PARTNER = "no_partner"
    SPARE = "spare"
    LIMIT = "limit"

    @property
    def text(self) -> str:
        return _reason_texts()[self]


def _reason_texts() -> dict[Reason, str]:
    return {
        Reason.FAILED: "failed attempts",
        Reason.UNSCORED: "not scored (reward null)",
        Reason.TORN: "a torn last line: the writer of the file was stopped",
        Reason.CUT: "cut off in mid-turn (token limit or context)",
        Reason.TRUNCATED: f"stopped by the step limit ({option('keep_truncated', True)} keeps them)",
        Reason.LOW: f"reward under {option('min_reward')}",
        Reason.NOT_REPRESENTABLE: "the format cannot represent it",
        Reason.DUPLICATE: f"the same conversation again ({option('dedupe', True)})",
        Reason.NOT_BEST: f"worse than others of the same task ({option('best')})",
        Reason.ALONE: "the only one of its task",
        Reason.NO_PARTNER: "no partner in its task: reward too close, or the same text",
        Reason.SPARE: f"not needed for the pairs of its task ({option('pairs')}, {option('max_pairs')})",
        Reason.LIMIT: f"more than {option('limit')}",
    }


@dataclass
class ExportCounts:
    """The numbers of one export.

    read: rollouts in the input. kept: those in the output. tasks: tasks with usable rollouts.
    not_representable: place and reason of the first few. labels, margins: of the written rows, if the format has them.
    """

    read: int = 0
    kept: int = 0
    rows: int = 0
    tasks: int = 0
    dropped: Counter[Reason] = field(default_factory=Counter)
    not_representable: list[str] = field(default_factory=list)
    labels: Counter[bool] = field(default_factory=Counter)
    margins: list[float] = field(default_factory=list)

    def drop(self, reason: Reason, count: int = 1) -> None:
        self.dropped[reason] += count

    def count_not_representable(self, where: str) -> None:
        self.drop(Reason.NOT_REPRESENTABLE)
        if len(self.not_representable) < SHOWN_NOT_REPRESENTABLE:
            self.not_representable.append(where)

    def count(self, rows: Sequence[Row]) -> None:
        """Count the rows to write."""
        self.rows = len(rows)
        self.kept = len(exported_candidates(rows))
        self.labels = Counter(row.label for row in rows if isinstance(row, Single))
        self.margins = [row.margin for row in rows if isinstance(row, Pair)]

    def as_json(self) -> Json:
        summary: Json = {
            "rows": self.rows,
            "read": self.read,
            "kept": self.kept,
            "tasks": self.tasks,
            "dropped": {reason.value: self.dropped[reason] for reason in Reason if self.dropped[reason]},
            "not_representable": self.not_representable,
        }
        if self.labels:
            summary["labels"] = {"true": self.labels[True], "false": self.labels[False]}
        if self.margins:
            summary["margin"] = {"mean": fmean(self.margins), "min": min(self.margins), "max": max(self.margins)}
        return summary


def exported_candidates(rows: Iterable[Row]) -> set[Candidate]:
    """The rollouts in these rows."""
    return {candidate for row in rows for candidate in row.candidates}


TOLERANCE = 1e-9  # 0.7 - 0.2 is a margin of 0.5


@dataclass(frozen=True)
class PairCriterion:
    """Whether two candidates may be a pair. margin: the least difference of their rewards; 0: any difference."""

    margin: float

    def __call__(self, chosen: Candidate, rejected: Candidate) -> bool:
        difference = chosen.reward - rejected.reward
        apart = difference > TOLERANCE and difference >= self.margin - TOLERANCE
        # equal texts with different rewards come from chance or a flaky verifier, not from the policy
        return apart and chosen.is_positive and chosen.words != rejected.words


Pairing = Callable[[Sequence[Candidate], PairCriterion], Iterator[Pair]]


def rank(group: Sequence[Candidate], rng: random.Random) -> list[Candidate]:
    """Best first; ties in random order, because the order of a file favours rollouts that finished first."""
    shuffled = rng.sample(group, len(group))
    return sorted(shuffled, key=lambda candidate: -candidate.reward)


def _best_worst(group: Sequence[Candidate], fits: PairCriterion) -> Iterator[Pair]:
    free = list(group)
    while free:
        best = free.pop(0)
        rejected = next((other for other in reversed(free) if fits(best, other)), None)
        if rejected is not None:
            free.remove(rejected)
            yield Pair(best, rejected)


def _best_rest(group: Sequence[Candidate], fits: PairCriterion) -> Iterator[Pair]:
    best = next((candidate for candidate in group if candidate.is_positive), None)
    if best is not None:
        yield from (Pair(best, other) for other in reversed(group) if fits(best, other))


def _adjacent(group: Sequence[Candidate], fits: PairCriterion) -> Iterator[Pair]:
    at = 0
    while at < len(group):
        below = next((other for other in range(at + 1, len(group)) if fits(group[at], group[other])), None)
        if below is not None:
            yield Pair(group[at], group[below])
        at = at + 1 if below is None else below


def _all(group: Sequence[Candidate], fits: PairCriterion) -> Iterator[Pair]:
    pairs = [Pair(chosen, other) for other in reversed(group) for chosen in group if fits(chosen, other)]
    yield from sorted(pairs, key=lambda pair: -pair.margin)


def choose(candidates: Sequence[Candidate], options: Options, tally: ExportCounts) -> list[Row]:
    """The rows to write, in the order of the candidates. Every candidate is counted as kept or dropped."""
    rng = random.Random(options.seed)
    rows = (_pairs if options.format == "preferences" else _singles)(candidates, options, tally, rng)
    rows = _limit_rows(rows, options.limit, tally, rng)
    tally.count(rows)
    return rows


def _singles(candidates: Sequence[Candidate], options: Options, tally: ExportCounts, rng: random.Random) -> list[Row]:
    selected = set(candidates)
    if options.best is not None:
        selected = {best for group in _groups(candidates) for best in rank(group, rng)[: options.best]}
    tally.drop(Reason.NOT_BEST, len(candidates) - len(selected))
    return [Single(candidate, candidate.is_positive) for candidate in candidates if candidate in selected]


def _pairs(candidates: Sequence[Candidate], options: Options, tally: ExportCounts, rng: random.Random) -> list[Row]:
    pairings: dict[Strategy, Pairing] = {
        "best-worst": _best_worst,
        "best-rest": _best_rest,
        "adjacent": _adjacent,
        "all": _all,
    }
    fits, pair_up = PairCriterion(options.margin or 0.0), pairings[options.strategy]
    rows: list[Row] = []
    for group in _groups(candidates):
        best_first = rank(group, rng)
        pairs = list(islice(pair_up(best_first, fits), options.pairs_per_task))
        paired = exported_candidates(pairs)
        for candidate in group:
            if candidate not in paired:
                tally.drop(_why_unpaired(candidate, group, fits))
        rows += pairs
    return rows


def _why_unpaired(candidate: Candidate, group: Sequence[Candidate], fits: PairCriterion) -> Reason:
    if len(group) == 1:
        return Reason.ALONE
    if any(fits(candidate, other) or fits(other, candidate) for other in group):
        return Reason.SPARE
    return Reason.NO_PARTNER


def _limit_rows(rows: list[Row], limit: int | None, tally: ExportCounts, rng: random.Random) -> list[Row]:
    """A random choice of rows, in their order."""
    if limit is None or len(rows) <= limit:
        return rows
    selected = [rows[index] for index in sorted(rng.sample(range(len(rows)), limit))]
    tally.drop(Reason.LIMIT, len(exported_candidates(rows)) - len(exported_candidates(selected)))
    return selected


def _groups(candidates: Iterable[Candidate]) -> Iterable[list[Candidate]]:
    groups: dict[int, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.task, []).append(candidate)
    return groups.values()
