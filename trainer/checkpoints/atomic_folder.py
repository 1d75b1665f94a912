"""A folder is there whole or not at all: written aside, synced, renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ngym.files.jsonl import sync_folder


@contextmanager
def committed(folder: Path) -> Iterator[Path]:
    """A new folder to write into; when the block ends well it takes the place of `folder`.

    What an interrupted writer left behind is swept away first. An old folder of this name goes only when the new one is
    complete on the disk.
    """
    aside = folder.with_name(f".{folder.name}.partial")
    old = folder.with_name(f".{folder.name}.old")
    if old.exists() and not folder.exists():
        old.rename(folder)  # it was to be replaced, and the writer was killed between the two renames
    for left_behind in (aside, old):
        shutil.rmtree(left_behind, ignore_errors=True)
    aside.mkdir(parents=True)
    yield aside
    _sync(aside)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(folder: Path) -> None:
    for entry in sorted(folder.rglob("*")):
        if entry.is_file():
            with entry.open("rb") as file:
                os.fsync(file.fileno())
        else:
            sync_folder(entry)
    sync_folder(folder)
