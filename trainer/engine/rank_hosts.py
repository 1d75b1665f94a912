"""Checks that the machines of all ranks have equal versions, recipes, data and models, and one output folder."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from torch import distributed

from ngym.errors import UsageError

from ..recipe.recipe import Launch
from .distributed import RankHost, machine_names

LOOKS, LOOK_PAUSE_S = 10, 0.5  # a network disk may show another machine's file late


def check_equal(launch: Launch, values: Mapping[str, str], remedy: str) -> None:
    """Check that these values, by name, are equal on all ranks. Every rank calls it.

    Raises:
        UsageError: one differs; on every rank.
    """
    if not launch.launched:
        return
    everywhere = _gather(launch, dict(values))
    first, of_first = everywhere[0]
    for rank, (host, of_rank) in enumerate(everywhere):
        for name in dict.fromkeys([*of_first, *of_rank]):
            there, expected = of_rank.get(name, "nothing"), of_first.get(name, "nothing")
            if there != expected:
                raise UsageError(f"{name}: {there} on rank {rank} ({host}), {expected} on rank 0 ({first}); {remedy}")


def check_shared(launch: Launch, folder: Path) -> None:
    """Check that all ranks see the same folder, in which rank 0 may write. Every rank calls it.

    Raises:
        UsageError: a rank does not; on every rank.
    """
    if not launch.launched:
        return
    name = f".seen-by-all-{secrets.token_hex(8)}"
    with _marked(folder, name) if launch.rank == 0 else nullcontext():
        (_, marker), *_ = _gather(launch, {"name": name})
        sees = "yes" if _appears(folder / marker["name"]) else "no"
        everywhere = _gather(launch, {"folder": str(folder.resolve()), "sees": sees})
    first, of_first = everywhere[0]
    for rank, (host, of_rank) in enumerate(everywhere):
        if of_rank["sees"] == "no":
            raise UsageError(
                f"output: {of_rank['folder']} on rank {rank} ({host}) is not {of_first['folder']} of rank 0 ({first}); "
                "all machines need the same folder: set output to one on a shared disk"
            )


@contextmanager
def _marked(folder: Path, name: str) -> Iterator[None]:
    """With an empty file of this name in the folder."""
    (folder / name).touch()
    try:
        yield
    finally:
        (folder / name).unlink(missing_ok=True)


def _appears(file: Path) -> bool:
    for _ in range(LOOKS):
        if file.exists():
            return True
        time.sleep(LOOK_PAUSE_S)
    return False


def _gather(launch: Launch, values: dict[str, str]) -> list[tuple[str, dict[str, str]]]:
    """The values of each rank, with the name of its machine."""
    everywhere: list[tuple[RankHost, dict[str, str]]] = [(RankHost("", ""), {})] * launch.ranks
    distributed.all_gather_object(everywhere, (RankHost.this(), values))
    hosts, of_ranks = zip(*everywhere, strict=True)
    return list(zip(machine_names(hosts), of_ranks, strict=True))
