"""`--overwrite`: a new collection takes the place of an old one with its first row; until then the old files are untouched.

The new files are written under `.new` names. With the first row (a rollout or a failed attempt) on the disk, each old file
gets an `.old` name and its new one takes its place, `out.jsonl` last. A kill leaves one of three states:

    .new files, none with a row     the old collection is valid; the next one removes the .new files
    .new files, one with a row      the next collection completes the replacement, before it does anything else
    no .new files                   the new collection is valid; the old one has the .old names
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

from ngym.files.file_lock import open_held
from ngym.files.jsonl import READ_BYTES, WriteFailed, sync_folder

NEW, OLD = ".new", ".old"
OTHERWISE = "choose another --output"


class Paths(NamedTuple):
    """Beside `out.jsonl`: out_failures.jsonl and so on."""

    output: Path
    failures: Path
    materialized: Path
    aggregates: Path
    run: Path

    @classmethod
    def beside(cls, output: Path) -> Paths:
        def sibling(ending: str) -> Path:
            return output.with_name(output.stem + ending)

        siblings = ("_failures.jsonl", "_materialized_inputs.jsonl", "_aggregate_metrics.json", "_run.json")
        return cls(output, *map(sibling, siblings))

    def named(self, ending: str) -> Paths:
        """The same files with another ending: NEW or OLD. A link is followed, so that a rename stays on its file system."""
        return Paths(*(Path(os.path.realpath(path) + ending) for path in self))


def recover(paths: Paths) -> None:
    """Complete a replacement that was interrupted, or remove what a collection without a row has left.

    Raises:
        FileLocked: another process collects there. WriteFailed: a file cannot be renamed.
    """
    new = paths.named(NEW)
    if not any(path.exists() for path in new):
        return
    fd = open_held(paths.output, paths.output, OTHERWISE)
    try:
        # `replace` renames the failures before the output, so an output alone is a replacement that has begun
        begun = new.output.exists() and not new.failures.exists()
        if begun or has_row(new.output) or has_row(new.failures):
            replace(paths)
        else:
            discard(paths)
    finally:
        os.close(fd)


def replace(paths: Paths) -> None:
    """Give the old files their `.old` names and the new ones their own; may be called again after a kill at any point.

    Old files without a rollout do not take the place of `.old` files with rollouts.

    Raises:
        WriteFailed: a file cannot be renamed; calling it again goes on there.
    """
    new, old = paths.named(NEW), paths.named(OLD)
    keeps = _size(paths.output) > 0 or _size(old.output) == 0
    try:
        for name in ("aggregates", "run", "materialized", "failures", "output"):
            path, staged = getattr(paths, name), getattr(new, name)
            if not staged.exists():
                continue  # renamed before the kill
            if keeps:
                _keep(path, getattr(old, name))
            staged.rename(os.path.realpath(path))
        for folder in {path.parent for path in new}:
            sync_folder(folder)
    except OSError as error:
        raise WriteFailed(f"{paths.output}: cannot be replaced: {error.strerror}; its rows are untouched") from error


def discard(paths: Paths) -> None:
    """Remove the `.new` files; the output first, see `recover`."""
    for path in paths.named(NEW):
        path.unlink(missing_ok=True)


def has_row(path: Path) -> bool:
    """Whether the file has a whole line."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return any(b"\n" in part for part in iter(lambda: file.read(READ_BYTES), b""))


def _keep(path: Path, old: Path) -> None:
    """The file under its `.old` name as well, so that no kill leaves its own name without a file."""
    old.unlink(missing_ok=True)
    if _size(path) == 0:
        return
    try:
        os.link(os.path.realpath(path), old)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, old)
        with old.open("rb") as file:
            os.fsync(file.fileno())


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
