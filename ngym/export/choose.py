"""Candidates -> the rows to write, and why the others are left out. Nothing is read or written here; a seed decides what is equal."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import islice

from ngym.export.candidate import Candidate, Row, Single
from ngym.export.options import Options
from ngym.export.pairs import Fit, pairing, ranked
from ngym.export.tally import Reason, Tally, used


def choose(candidates: Sequence[Candidate], options: Options, tally: Tally) -> list[Row]:
    """In the order of the candidates. Every candidate is counted: kept, or dropped for a reason."""
    rng = random.Random(options.seed)
    rows = (_pairs if options.format == "preferences" else _singles)(candidates, options, tally, rng)
    rows = _limited(rows, options.limit, tally, rng)
    tally.count(rows)
    return rows


def _singles(candidates: Sequence[Candidate], options: Options, tally: Tally, rng: random.Random) -> list[Row]:
    kept = set(candidates)
    if options.best is not None:
        kept = {best for group in _groups(candidates) for best in ranked(group, rng)[: options.best]}
    tally.drop(Reason.NOT_BEST, len(candidates) - len(kept))
    return [Single(candidate, candidate.exemplary) for candidate in candidates if candidate in kept]


def _pairs(candidates: Sequence[Candidate], options: Options, tally: Tally, rng: random.Random) -> list[Row]:
    fits, pair_up = Fit(options.margin or 0.0), pairing(options.strategy)
    rows: list[Row] = []
    for group in _groups(candidates):
        best_first = ranked(group, rng)
        pairs = list(islice(pair_up(best_first, fits), options.pairs_per_task))
        paired = used(pairs)
        for candidate in group:
            if candidate not in paired:
                tally.drop(_why_unpaired(candidate, group, fits))
        rows += pairs
    return rows


def _why_unpaired(candidate: Candidate, group: Sequence[Candidate], fits: Fit) -> Reason:
    if len(group) == 1:
        return Reason.ALONE
    if any(fits(candidate, other) or fits(other, candidate) for other in group):
        return Reason.SPARE
    return Reason.NO_PARTNER


def _limited(rows: list[Row], limit: int | None, tally: Tally, rng: random.Random) -> list[Row]:
    """A random choice, in order."""
    if limit is None or len(rows) <= limit:
        return rows
    kept = [rows[index] for index in sorted(rng.sample(range(len(rows)), limit))]
    tally.drop(Reason.LIMIT, len(used(rows)) - len(used(kept)))
    return kept


def _groups(candidates: Iterable[Candidate]) -> Iterable[list[Candidate]]:
    groups: dict[int, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.task, []).append(candidate)
    return groups.values()
