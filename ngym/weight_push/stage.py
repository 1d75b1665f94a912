"""The files of a weight push: received, checked and staged before they are loaded.

    bytes -> 00000.part -> checks: digest, known tensors, finite values -> 00000.safetensors -> ... -> all tensors there

The engine reads a stage only when it is complete, and no other process can change its files.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from starlette.requests import ClientDisconnect, Request

from ngym.errors import MAX_NAME, BadRequest, ServiceError, shorten
from ngym.files.atomic import file_digest

PREFIX = "ngym-weights-"
PROMISED = "promised"
SHARED_MEMORY = Path("/dev/shm")
STAGE_FOLDERS: list[Path] = []  # of the files of pushes; empty: memory, then TMPDIR
SWEEP_AFTER_S = 60.0
LOCK_TRIES, LOCK_PAUSE_S = 500, 0.01
HEADER_ROOM = 1 << 20  # bytes of a file besides its tensors: names and offsets ...
HEADER_ROOM_PER_TENSOR = 1 << 10
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # safetensors' names
PEFT_PREFIX = "base_model.model."  # PEFT's names of an adapter's tensors
PEFT_ENDS = (".lora_A.weight", ".lora_B.weight")
Shapes = Mapping[str, tuple[int, ...]]


class AnnouncedTensor(BaseModel):
    """One tensor of a push, announced before its bytes are sent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    shape: tuple[Annotated[int, Field(ge=0)], ...]
    dtype: Literal["F32", "BF16", "F16"]

    @property
    def count(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.count * DTYPES[self.dtype].itemsize


def shapes_in(files: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in these safetensors files; reads only the headers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes


def check_announced(announced: list[AnnouncedTensor], own_shapes: Shapes) -> None:
    """Raise BadRequest unless these are the names and shapes of our checkpoint."""
    _compare("the weights of this model", _by_name(announced), own_shapes, "is not a tensor of this model")


def check_adapter(announced: list[AnnouncedTensor], rank: int, matrices: Shapes) -> None:
    """Raise BadRequest unless these are A [rank, in] and B [out, rank] of some of these matrices [out, in]."""
    announced_shapes = _by_name(announced)
    layers = {name.removeprefix(PEFT_PREFIX).removesuffix(end) for name in announced_shapes for end in PEFT_ENDS}
    layers -= {name.removeprefix(PEFT_PREFIX) for name in announced_shapes}
    expected: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        shape = matrices.get(f"{layer}.weight")
        if shape is not None:
            shapes = ((rank, shape[1]), (shape[0], rank))
            expected |= {f"{PEFT_PREFIX}{layer}{end}": expects for end, expects in zip(PEFT_ENDS, shapes, strict=True)}
    what = f"an adapter of rank {rank} for this model"
    if not announced_shapes:
        raise BadRequest(f"field 'tensors': not {what}: it has no tensors")
    _compare(what, announced_shapes, expected, "belongs to no matrix that an adapter may change")


def _by_name(announced: list[AnnouncedTensor]) -> dict[str, tuple[int, ...]]:
    shapes = {tensor.name: tensor.shape for tensor in announced}
    if len(shapes) < len(announced):
        raise BadRequest("field 'tensors': a name occurs twice; announce each tensor once")
    return shapes


def _compare(what: str, shapes: Shapes, expected: Shapes, unknown: str) -> None:
    """Raise BadRequest unless the names and shapes are equal. unknown: what is wrong with another name."""
    wrong = [
        *(f"{name} is missing" for name in expected if name not in shapes),
        *(f"{name} {unknown}" for name in shapes if name not in expected),
        *(
            f"{name} has the shape {list(shape)}, expected {list(expected[name])}"
            for name, shape in shapes.items()
            if name in expected and shape != expected[name]
        ),
    ]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise BadRequest(f"field 'tensors': not {what}: {'; '.join(wrong[:3])}{more}")


class PrivateFolder:
    """A folder that is locked while this process lives; folders of killed processes are removed.

    Attributes:
        remove: deletes the folder; may be called more than once.
    """

    def __init__(self, size: int) -> None:
        """size: bytes of its future files. Raises ServiceError 507 if they fit nowhere."""
        self.path, lock = _make_folder(size)
        self.remove = weakref.finalize(self, _remove, self.path, lock)  # when this process ends, at the latest


class Stage:
    """The files of one push.

    Args:
        dtype: of the engine; values beyond its range are refused.
        size: bytes of the files without their headers; default: of the announced tensors.

    Attributes:
        room: bytes that may still be sent.
        remove: deletes the files; may be called more than once.
    """

    def __init__(self, announced: list[AnnouncedTensor], dtype: torch.dtype, size: int | None = None) -> None:
        self._waiting = {tensor.name: tensor for tensor in announced}
        self._limit = torch.finfo(dtype).max
        self._files = 0
        size = sum(tensor.bytes for tensor in announced) if size is None else size
        self.room = size + HEADER_ROOM + HEADER_ROOM_PER_TENSOR * len(announced)
        self._private = PrivateFolder(self.room)
        self.folder = self._private.path
        self.remove = self._private.remove

    def next_file(self) -> Path:
        """The path for the bytes of the next file. Call `accept` when they are complete."""
        return self.folder / f"{self._files:05}.part"

    def copy(self, source: Path) -> Path:
        """Copy a file, which other processes may still change. Returns the copy, for `accept`."""
        if source.stat().st_size > self.room:
            raise self.too_large()
        return Path(shutil.copyfile(source, self.next_file()))

    def accept(self, part: Path, sha256: str) -> None:
        """Check a file and keep it. Raises BadRequest if it is damaged, or not as announced."""
        digest = file_digest(part)
        if digest != sha256:
            size = part.stat().st_size
            raise BadRequest(f"the file's {size} bytes have the SHA-256 {digest}, expected {sha256}; push again")
        try:
            with safe_open(part, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  # not a dict
                    self._check(name, tensors)
        except SafetensorError as error:
            raise BadRequest(f"this is not a safetensors file: {error}") from None
        self.room -= part.stat().st_size
        part.rename(part.with_suffix(".safetensors"))
        self._files += 1

    def check_complete(self) -> None:
        """Raise BadRequest unless every announced tensor has arrived."""
        if self._waiting:
            names = ", ".join(list(self._waiting)[:3])
            raise BadRequest(f"{len(self._waiting)} announced tensors are missing: {names} ...")

    def too_large(self) -> BadRequest:
        return BadRequest(f"the file is larger than announced (at most {self.room} bytes left)", status=413)

    def _check(self, name: str, tensors: safe_open) -> None:
        announced = self._take(name)
        tensor_slice = tensors.get_slice(name)
        shape, dtype = tuple(tensor_slice.get_shape()), tensor_slice.get_dtype()
        if (shape, dtype) != (announced.shape, announced.dtype):
            want = f"{announced.dtype} {list(announced.shape)}"
            raise BadRequest(f"tensor {name}: is {dtype} {list(shape)}, announced as {want}")
        self._check_finite(name, tensors.get_tensor(name))

    def _take(self, name: str) -> AnnouncedTensor:
        announced = self._waiting.pop(name, None)
        if announced is None:
            raise BadRequest(f"tensor {name}: was not announced, or was already sent")
        return announced

    def _check_finite(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.numel():
            low, high = tensor.aminmax()
            if not (-self._limit <= low and high <= self._limit):  # in this form, nan fails, too
                raise BadRequest(f"tensor {name}: not every value is finite (from {float(low)} to {float(high)})")


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def stage_in(folder: Path) -> None:
    """Stage pushes in this folder instead of in memory: the engine's workers on other nodes read it, too."""
    folder.mkdir(parents=True, exist_ok=True)
    STAGE_FOLDERS[:] = [folder]


def is_on_shared_disk() -> bool:
    """Whether other nodes read the files of pushes."""
    return bool(STAGE_FOLDERS)


def _make_folder(size: int) -> tuple[Path, int]:
    """A new folder for `size` bytes, in memory if they fit, and its lock. Raises ServiceError 507 without space."""
    places = [place for place in STAGE_FOLDERS or (SHARED_MEMORY, Path(tempfile.gettempdir())) if place.is_dir()]
    problems = []
    for place in places:
        with _choosing(place) as is_locked:
            if not is_locked:
                problems.append(f"none in {place} (another process or user has {_lock_file(place)})")
                continue
            _sweep(place)
            free = _free(place)
            problems.append(f"{free >> 20} MiB in {place}")
            if free > size:
                folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
                lock = os.open(folder, os.O_RDONLY)
                fcntl.flock(lock, fcntl.LOCK_EX)
                with (folder / PROMISED).open("wb") as placeholder:
                    placeholder.truncate(size)  # sparse; its length reserves the space among the replicas
                return folder, lock
    raise ServiceError(
        f"a push needs {size >> 20} MiB, but there are only {' and '.join(problems)}; free some space, or set TMPDIR",
        status=507,
    )


def _lock_file(place: Path) -> Path:
    return place / f".{PREFIX}{os.getuid()}.lock"


@contextmanager
def _choosing(place: Path) -> Iterator[bool]:
    """Keep this user's other servers from choosing in this folder; they get the same push at this moment.

    Yields False if the lock cannot be had: the file is a link or of another user, or a process keeps it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        lock = os.open(_lock_file(place), flags, 0o600)
    except OSError:
        yield False
        return
    try:
        yield _is_ours(os.fstat(lock), place) and _try_lock(lock)
    finally:
        os.close(lock)


def _is_ours(status: os.stat_result, place: Path) -> bool:
    """Whether a file belongs to this user, or to the owner of its folder, as everything may on a network disk."""
    return status.st_uid in (os.getuid(), place.stat().st_uid)


def _try_lock(lock: int) -> bool:
    """Lock it within LOCK_TRIES times LOCK_PAUSE_S; a choice takes milliseconds."""
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_PAUSE_S)
        else:
            return True
    return False


def _free(place: Path) -> int:
    """Free bytes that are not reserved for pushes under way."""
    free = shutil.disk_usage(place).free
    for placeholder in place.glob(f"{PREFIX}*/{PROMISED}"):
        with suppress(OSError):  # it was just deleted
            if not _is_ours(placeholder.parent.lstat(), place):
                continue  # an empty claim of another user would keep our pushes out
            received_bytes = sum(path.stat().st_size for path in placeholder.parent.iterdir() if path.name != PROMISED)
            free -= max(0, placeholder.stat().st_size - received_bytes)
    return free


def _sweep(place: Path) -> None:
    """Remove the stages of killed processes, which are not locked any more."""
    for folder in place.glob(f"{PREFIX}*"):
        try:
            if time.time() - folder.stat().st_mtime < SWEEP_AFTER_S:
                continue  # perhaps not locked yet
            lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            continue  # deleted meanwhile, or of another user
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue  # in use
        finally:
            os.close(lock)


async def receive_file(request: Request, stage: Stage, patience_s: float) -> Path:
    """Write the request's body to the next file.

    patience_s: timeout for each chunk.
    """
    part, size, loop = stage.next_file(), 0, asyncio.get_running_loop()
    try:
        with part.open("wb") as file:
            async with asyncio.timeout(patience_s) as waiting:
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > stage.room:
                        raise stage.too_large()
                    file.write(chunk)
                    waiting.reschedule(loop.time() + patience_s)
    except (ClientDisconnect, TimeoutError):
        raise BadRequest(f"the connection ended after {size} bytes of the file; push again", retryable=True) from None
    return part


def file_under_root(path: str, root: Path | None) -> Path:
    """The file of a path, which must be under weights_root after resolving symbolic links."""
    if root is None:
        raise BadRequest("field 'path': this server has no weights_root; set it in the stanza, or send bytes")
    if "\0" in path:
        raise BadRequest("field 'path': a path has no null character")
    try:
        file = (root / path).resolve()
        is_file = file.is_file()
    except (OSError, RuntimeError) as error:  # a name that is too long, or a loop of links
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadRequest(f"field 'path': {shorten(path, MAX_NAME)} is not a valid path: {reason}") from None
    if not file.is_relative_to(root):
        raise BadRequest(f"field 'path': {shorten(path, MAX_NAME)} is not under this server's weights_root {root}")
    if not is_file:
        raise BadRequest(f"field 'path': there is no file {shorten(str(file), MAX_NAME)}")
    return file


class AdapterShape(BaseModel):
    """The adapter adds alpha / rank * B A to a layer's weight."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int = Field(ge=1)
    alpha: int = Field(ge=1)


class AdapterFiles(NamedTuple):
    """An adapter in one or more safetensors files."""

    folder: Path
    shape: AdapterShape
