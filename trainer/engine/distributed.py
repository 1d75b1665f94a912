"""The process group, and the heartbeat that detects dead or hung ranks.

A rank whose process dies breaks the others' next collective (gloo at once, NCCL never); one that hangs breaks nothing.
The signs go through the store where the ranks meet (rank 0, or torchrun's agent, has it), over connections of their own.
Time is counted in this rank's own looks at the others: if all were stopped together, none has missed anything. A store that
did not answer in time is met anew: a rank that was stopped for a while, or a network that was away, ends no run.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
from torch import distributed
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from ngym.errors import NgymError

from ..recipe.recipe import Launch

MEET_S = 90  # from when the first rank is there; none has loaded a model yet
LOOK_S = 1.0
STORE_S = 5  # for an answer of the store
GONE = 5  # looks without a sign, once a collective has failed
SILENT = 45  # looks without a sign while nothing has failed: a straggler is waited for
Told = TypeVar("Told")
# Ranks wait while the first one collects, evaluates, or sits an outage out; one that is lost is found by its signs of life.
PATIENCE = timedelta(days=7)


FIRST, DONE, FAILED = b"0", b"done", b"failed"


class RankGone(NgymError):
    """A rank is dead, hangs or has ended before the others."""


class Seen(NamedTuple):
    """A rank's last sign, and at which look it was new."""

    sign: bytes
    look: int


class Company:
    """This rank among the others, from when they have met until they part.

    Raises:
        RankGone: a rank did not come.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._others = [other for other in range(ranks) if other != rank]
        self._store = self._meet()  # rank 0 has it for as long as it has this
        self._seen = dict.fromkeys(self._others, Seen(FIRST, 0))
        self._looks = 0
        self._parted = threading.Event()
        self._last = FAILED
        # In two threads: whoever asks the store of a rank that was stopped waits for as long as that is.
        self._watch = threading.Thread(target=self._look, name="look for the others", daemon=True)
        self._talk = threading.Thread(target=self._exchange, name="signs of life", daemon=True)
        self._watch.start()
        self._talk.start()

    def _meet(self) -> TCPStore:
        """The store, once each rank's first sign is there."""
        host, port = _address()
        has_it = self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        try:
            store = _in_time(
                lambda: TCPStore(
                    host,
                    port,
                    is_master=has_it,
                    timeout=timedelta(seconds=MEET_S),
                    wait_for_workers=False,
                    multi_tenant=True,
                ),
                MEET_S,
            )
        except RuntimeError as error:
            if has_it:
                why = str(error).splitlines()[0]
                raise NgymError(
                    f"MASTER_PORT: rank 0 cannot listen on {host}:{port}: {why}; choose a free one"
                ) from error
            raise RankGone(self._alone([0])) from error
        try:
            store.set(_key(self._rank), FIRST)  # type: ignore[arg-type]  # bytes, too
            _in_time(lambda: store.wait(list(map(_key, self._others)), timedelta(seconds=MEET_S)), MEET_S)
            store.set_timeout(timedelta(seconds=STORE_S))
        except RuntimeError as error:
            missing = [0]  # unless it answers
            with suppress(RuntimeError):
                missing = _in_time(lambda: [other for other in self._others if not store.check([_key(other)])], STORE_S)
            raise RankGone(self._alone(missing)) from error
        return store

    def _alone(self, missing: list[int]) -> str:
        named = ", ".join(map(str, missing))
        return (
            f"rank {named} did not come to {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} in time (about {MEET_S} s), so "
            f"rank {self._rank} ends, too; the output of the former says why; start all ranks again"
        )

    def part(self, last: bytes) -> None:
        """This rank does nothing more with the others: it is DONE, or has FAILED."""
        self._last = last
        self._parted.set()
        self._watch.join()
        self._talk.join(STORE_S)

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
            if missing := self._missing(SILENT):
                # the main thread may be in a collective that never ends
                print(f"ng_train: {missing}", file=sys.stderr, flush=True)
                os._exit(1)

    def _exchange(self) -> None:
        store: TCPStore | None = self._store
        while not self._parted.wait(LOOK_S):
            try:
                store = store or _met_again()
                store.set(_key(self._rank), str(self._looks))
                signs = store.multi_get(list(map(_key, self._others)))
            except (
                RuntimeError
            ):  # it has gone with its rank, and the others' last signs grow old; or it is out of reach
                store = None  # what comes late over this connection would answer another question
                continue
            for other, sign in zip(self._others, signs, strict=True):
                if sign != self._seen[other].sign:
                    self._seen[other] = Seen(sign, self._looks)
        if store is not None:
            with suppress(RuntimeError):
                store.set(_key(self._rank), self._last)  # type: ignore[arg-type]

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


def _in_time(ask: Callable[[], Told], within_s: float) -> Told:
    """What the store is asked. Its own timeout does not hold where somebody listens and says nothing: the thread is left behind then.

    Raises:
        RuntimeError: nobody answered.
    """
    told: Future[Told] = Future()

    def run() -> None:
        try:
            told.set_result(ask())
        except BaseException as error:  # noqa: BLE001 (whoever waits is told)
            told.set_exception(error)

    threading.Thread(target=run, name="meet", daemon=True).start()
    try:
        return told.result(within_s + STORE_S)
    except TimeoutError:
        raise RuntimeError("nothing answers there") from None


def _met_again() -> TCPStore:
    """A new connection to the store. RuntimeError: nobody is there."""
    store = TCPStore(*_address(), is_master=False, timeout=timedelta(seconds=LOOK_S), wait_for_workers=False)
    store.set_timeout(timedelta(seconds=STORE_S))
    return store


def _address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


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


@contextmanager
def joined(launch: Launch) -> Iterator[None]:
    """In the company of the other ranks (the launcher's environment says where they meet), or alone without one."""
    os.environ.setdefault("LOCAL_RANK", str(launch.local_rank))
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(launch.local_rank)
    try:
        with watched(launch.rank, launch.ranks):
            if launch.launched:
                distributed.init_process_group(backend, timeout=PATIENCE)
            else:
                distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=PATIENCE)
            yield
    finally:
        _leave()


def _leave() -> None:
    """Through DeepSpeed, where it was used: it remembers groups, and would use dead ones in the next company."""
    comm: Any = sys.modules.get("deepspeed.comm")
    if comm is not None and comm.is_initialized():
        comm.destroy_process_group()
    elif distributed.is_initialized():
        distributed.destroy_process_group()


def wait_for_all() -> None:
    """Return when every rank has come here."""
    distributed.barrier()
