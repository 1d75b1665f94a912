"""Which rank is gone? Each gives a sign of life every second, so that none waits for a dead or a hanging one for ever.

A rank whose process dies breaks the others' next collective (gloo at once, NCCL never); one that hangs breaks nothing.
The signs go through the store where the ranks met, over connections of their own. Time is counted in this rank's own
looks at the others: if all were stopped together, none has missed anything.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple

from torch import distributed

from ngym.errors import NgymError

LOOK_S = 1.0
GONE = 5  # looks without a sign, once a collective has failed
SILENT = 45  # looks without a sign while nothing has failed: a straggler is waited for
FIRST, DONE, FAILED = b"0", b"done", b"failed"


class RankGone(NgymError):
    """A rank is dead, hangs or has ended before the others."""


class Seen(NamedTuple):
    """A rank's last sign, and at which look it was new."""

    sign: bytes
    look: int


class Company:
    """This rank among the others, from when they have met until they part."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._others = [other for other in range(ranks) if other != rank]
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = distributed.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5))
        self._store.set(_key(rank), FIRST)
        distributed.barrier()
        self._seen = dict.fromkeys(self._others, Seen(FIRST, 0))
        self._looks = 0
        self._reachable = True
        self._parted = threading.Event()
        self._watch = threading.Thread(target=self._look, name="signs of life", daemon=True)
        self._watch.start()

    def part(self, last: bytes) -> None:
        """This rank does nothing more with the others: it is DONE, or has FAILED."""
        self._parted.set()
        self._watch.join()
        if self._reachable:
            with suppress(RuntimeError):
                self._store.set(_key(self._rank), last)

    def gone(self) -> str | None:
        """Who has given no sign since a collective failed, or None if all of them do: a few looks later."""
        failed = self._looks
        while self._looks <= failed + GONE + 3:  # its last sign may have come while this one failed
            if missing := self._missing(GONE):
                return missing
            time.sleep(LOOK_S / 4)
        return None

    def _look(self) -> None:
        while not self._parted.wait(LOOK_S):
            self._looks += 1
            if self._reachable:
                self._exchange()
            if missing := self._missing(SILENT):
                # the main thread may be in a collective that never ends
                print(f"ng_train: {missing}", file=sys.stderr, flush=True)
                os._exit(1)

    def _exchange(self) -> None:
        try:
            self._store.set(_key(self._rank), str(self._looks))
            signs = self._store.multi_get(list(map(_key, self._others)))
        except RuntimeError:
            self._reachable = False  # it has gone with its rank, and the others' last signs grow old
            return
        for other, sign in zip(self._others, signs, strict=True):
            if sign != self._seen[other].sign:
                self._seen[other] = Seen(sign, self._looks)

    def _missing(self, looks: int) -> str | None:
        working = {rank: seen for rank, seen in self._seen.items() if seen.sign != DONE}
        silent = [rank for rank, seen in working.items() if self._looks - seen.look > looks]
        failed = [
            rank for rank, seen in working.items() if seen.sign == FAILED and self._looks - seen.look >= looks - GONE
        ]
        if not silent and not failed:
            return None
        named = "rank " + ", ".join(map(str, failed or silent))
        how = "has failed" if failed else f"has given no sign of life for {looks * LOOK_S:.0f} s"
        return f"{named} {how}, so rank {self._rank} ends, too; the output of the former says why; go on with --resume"


@contextmanager
def watched(rank: int, ranks: int) -> Iterator[None]:
    """In a company whose losses are named; alone there is none.

    Raises:
        RankGone: a collective failed, because a rank is gone.
    """
    if ranks == 1:
        yield
        return
    company, last = Company(rank, ranks), FAILED
    try:
        yield
        last = DONE
    except RuntimeError as error:
        if gone := company.gone():
            raise RankGone(gone) from error
        raise
    finally:
        company.part(last)


def _key(rank: int) -> str:
    return f"ngym/sign of life/{rank}"
