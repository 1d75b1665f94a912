"""One replica during a push: its tensors, in chunks, and its answers."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

import orjson
import torch
from safetensors.torch import save
from torch import Tensor

from ngym.errors import NgymError, UsageError
from ngym.net.tls import client_context

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # safetensors' names
FILE_BYTES = 16 << 20  # of tensors; above 32 MiB malloc uses fresh pages for each file, which is three times slower
Json = dict[str, Any]
Mode = Literal["keep", "wait", "abort"]
CONNECT_S = 30.0


Result = TypeVar("Result")


class File(NamedTuple):
    """sha256: in hexadecimal."""

    content: bytes
    sha256: str


def checkpoint(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by name; of tensors that share memory (a tied head) only the first.

    Raises:
        UsageError: a tensor's dtype is not supported.
    """
    tensors: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in weights.items():
        if tensor.dtype not in DTYPES:
            raise UsageError(f"tensor {name}: has the dtype {tensor.dtype}; float32, bfloat16 or float16 can be pushed")
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if place not in seen or tensor.numel() == 0:
            tensors[name] = tensor.detach()
        seen.add(place)
    return tensors


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise UsageError unless all values are finite."""
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise UsageError(f"tensor {name}: not every value is finite")


def files(tensors: Mapping[str, Tensor], limit: int = FILE_BYTES) -> Iterator[File]:
    """Safetensors files of at most `limit` bytes of tensors, or of one tensor; created one at a time."""
    share: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if share and size + tensor.nbytes > limit:
            yield _file(share)
            share, size = {}, 0
        share[name] = tensor.cpu().contiguous()
        size += tensor.nbytes
    if share:
        yield _file(share)


def _file(tensors: dict[str, Tensor]) -> File:
    content = save(tensors)
    return File(content, hashlib.sha256(content).hexdigest())


class PushFailed(NgymError):
    """Some servers do not serve these weights; the message says which and why."""


class Passing(NgymError):
    """A server cannot be reached, is not ready, or is busy: a retry may work."""


class Proof(NamedTuple):
    """A fixed prompt [T], and the trainer's logprobs [T - 1] of its tokens except the first, at temperature 1.

    dtype: of the trainer's computation, in torch's name: `float32`, `bfloat16`.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    dtype: str = "float32"


class AdapterShape(NamedTuple):
    """The shape of a low-rank adapter, which adds alpha / rank * B A to a layer."""

    rank: int
    alpha: int


class Replica:
    """One server, and the current push there. Every method raises PushFailed or Passing."""

    def __init__(self, url: str, token: str, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"}
        self._timeout_s = timeout_s
        self._push = ""
        self._asking: set[socket.socket] = set()
        self._closed = False

    def close(self) -> None:
        """Make no more requests; a request in flight in another thread ends without its answer."""
        self._closed = True
        for connection in list(self._asking):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def weights(self) -> Json:
        """`policy_version` and `transport` of a server that is ready; for a transfer also its `connection` and
        `workers`.

        A sleeping server counts as ready.
        """
        weights = self._call("GET", "/weights")
        if not weights.get("asleep"):
            self._call("GET", "/ready")
        return weights

    def begin(
        self, version: int, tensors: Mapping[str, Tensor], adapter: AdapterShape | None, transfer: bool = False
    ) -> None:
        """adapter: None if the tensors are a whole checkpoint. transfer: vLLM receives the tensors itself, not as
        files.
        """
        announced = [
            {"name": name, "shape": list(tensor.shape), "dtype": DTYPES[tensor.dtype]}
            for name, tensor in tensors.items()
        ]
        self._push = ""
        body: Json = {"version": version, "tensors": announced}
        if adapter is not None:
            body["adapter"] = adapter._asdict()
        if transfer:
            body["transfer"] = True
        self._push = self._call("POST", "/weights", body)["push"]

    def send(self, content: bytes, sha256: str) -> None:
        self._call("PUT", f"/weights/files?push={self._push}&sha256={sha256}", content)

    def name(self, file: str, sha256: str) -> None:
        """file: relative to the server's weights_root."""
        self._call("PUT", f"/weights/files?push={self._push}&sha256={sha256}", {"path": file})

    def commit(self, mode: Mode) -> None:
        self._call("POST", f"/weights/commit?push={self._push}", {"mode": mode})

    def connect(self, info: Json) -> str:
        """Make its engine connect to us; returns the connection's name. info: vLLM's init info for the backend, as in
        `update`.
        """
        answer = self._call("POST", f"/weights/transfer/connect?push={self._push}", {"info": info})
        connection: str = answer["connection"]
        return connection

    def start(self, mode: Mode) -> None:
        """The point of no return for this server: the push must complete, or the server must restart."""
        self._call("POST", f"/weights/transfer/start?push={self._push}", {"mode": mode})

    def update(self, info: Json) -> None:
        self._call("POST", f"/weights/transfer/update?push={self._push}", {"info": info})

    def give_up(self) -> None:
        """Abandon a push that was begun; a server that cannot be reached abandons it when its lease ends."""
        if self._push:
            with contextlib.suppress(PushFailed, Passing):
                self._call("DELETE", f"/weights?push={self._push}")

    def sleep(self) -> None:
        """End its generations in flight and free its GPU memory."""
        self._call("POST", "/weights/sleep", {})

    def wake(self, *parts: str) -> None:
        """Restore parts of its memory: `weights`, `kv_cache`; with both it generates again."""
        self._call("POST", "/weights/wake", {"parts": parts})

    def prove(self, proof: Proof) -> Json:
        """`policy_version`, `dtype` and `logprobs` [T - 1] of the proof's prompt."""
        return self._call("POST", "/weights/proof", {"prompt_token_ids": list(proof.token_ids)})

    def _call(self, method: str, path: str, body: Json | bytes | None = None) -> Json:
        content = orjson.dumps(body) if isinstance(body, dict) else body
        kind = "application/json" if content is not body else "application/octet-stream"
        what = f"{self.url}: {method} {path.partition('?')[0]}"
        try:
            status, answer = self._exchange(method, path, content, {**self._headers, "content-type": kind})
        except (OSError, http.client.HTTPException) as error:
            raise Passing(f"{what}: {type(error).__name__}: {error}") from error
        if status < 400:
            parsed: Json = orjson.loads(answer or b"{}")
            return parsed
        problem = _problem(answer)
        # An error without `retryable` is vLLM's own: its engine has just died, and the server restarts.
        kind_of_error = Passing if problem.get("retryable", status >= 500) else PushFailed
        raise kind_of_error(f"{what}: {status}: {problem['detail']}")

    def _exchange(self, method: str, path: str, content: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        place = urlsplit(self.url)
        timeout_s = min(CONNECT_S, self._timeout_s)
        connection = (
            http.client.HTTPSConnection(place.netloc, timeout=timeout_s, context=client_context())
            if place.scheme == "https"
            else http.client.HTTPConnection(place.netloc, timeout=timeout_s)
        )
        with contextlib.closing(connection):
            connection.connect()
            connection.sock.settimeout(self._timeout_s)
            with self._asking_on(connection.sock):
                # A server may refuse a body without reading it; its answer is more useful than the broken pipe.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.request(method, place.path + path, content, headers)
                reply = connection.getresponse()
                return reply.status, reply.read()

    @contextlib.contextmanager
    def _asking_on(self, connection: socket.socket) -> Iterator[None]:
        self._asking.add(connection)
        try:
            if self._closed:
                raise ConnectionAbortedError("no more pushes")
            yield
        finally:
            self._asking.discard(connection)


class OnAll(Protocol):
    """Calls each replica concurrently; raises an error only after all have answered."""

    def __call__(self, replicas: Sequence[Replica], call: Callable[[Replica], Result]) -> list[Result]: ...


def _problem(answer: bytes) -> Json:
    """A problem document; any other answer becomes its detail."""
    with contextlib.suppress(orjson.JSONDecodeError):
        parsed = orjson.loads(answer)
        if isinstance(parsed, dict) and "detail" in parsed:
            return parsed
    return {"detail": answer[:300].decode(errors="replace")}
