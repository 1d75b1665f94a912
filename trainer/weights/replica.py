"""One policy server during a weight push: the client of the routes in ngym/weight_push/routes.py."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import orjson
from torch import Tensor

from ngym.net.keepalive import break_when_silent
from ngym.net.tls import client_context
from ngym.weight_push.delta import Delta

from ..recipe.extensions import File, Mode, PushFailed, TransientPushError
from .push_files import DTYPES

Json = dict[str, Any]
CONNECT_S = 10.0
PART_BYTES = 1 << 20


class LogprobProof(NamedTuple):
    """A fixed prompt [T], and the trainer's logprobs [T - 1] of its tokens except the first, at temperature 1.

    dtype: whose precision the trainer's matrix products have, in torch's name: `float32`, `bfloat16`, `float16`.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    dtype: str = "float32"


class AdapterShape(NamedTuple):
    """The shape of a low-rank adapter, which adds alpha / rank * B A to a layer."""

    rank: int
    alpha: int


class Replica:
    """One server, and the current push there. Every method raises PushFailed or TransientPushError."""

    def __init__(self, url: str, token: str, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"}
        self._timeout_s = timeout_s
        self._push = ""
        self._version = 0
        self._last_commit = (0, "")
        self.takes_delta = False
        self._connections: set[socket.socket] = set()
        self._closed = False
        self._request = ""  # the one in flight
        self._progress_at = 0.0  # when its last part was sent

    def unanswered(self, for_s: float) -> str | None:
        """The request in flight, if for so long it has had no answer and none of its parts was sent; once for each."""
        if not self._request or time.monotonic() - self._progress_at < for_s:
            return None
        request, self._request = self._request, ""
        return request

    def close(self) -> None:
        """Make no more requests; a request in flight in another thread ends without its answer."""
        self._closed = True
        for connection in list(self._connections):
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
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        adapter: AdapterShape | None,
        transfer: bool = False,
        keep: bool = False,
        delta: Delta | None = None,
    ) -> None:
        """adapter: None if the tensors are a whole checkpoint. transfer: vLLM receives the tensors itself, not as
        files. keep: the server keeps the files, as the base of a delta. delta: the one that could be sent; afterwards
        `takes_delta` says whether the server has its base.
        """
        tensor_infos = [
            {"name": name, "shape": list(tensor.shape), "dtype": DTYPES[tensor.dtype]}
            for name, tensor in tensors.items()
        ]
        self._version, self._push = version, ""
        body: Json = {"version": version, "tensors": tensor_infos}
        if adapter is not None:
            body["adapter"] = adapter._asdict()
        if transfer:
            body["transfer"] = True
        if keep:
            body["keep"] = True
        if delta is not None:
            body["delta"] = delta.model_dump()
        answer = self._call("POST", "/weights", body)
        self._push, self.takes_delta = answer["push"], answer.get("delta", False)

    def delta_of(self, version: int, files: Sequence[File]) -> Delta | None:
        """The announcement of these delta files to the weights of this version; None if the server cannot have them."""
        committed, push = self._last_commit
        if committed != version:
            return None
        return Delta(base=push, files=len(files), bytes=sum(len(file.content) for file in files))

    def send(self, content: bytes, sha256: str) -> None:
        self._call("PUT", f"/weights/files?push={self._push}&sha256={sha256}", content)

    def name(self, file: str, sha256: str) -> None:
        """file: relative to the server's weights_root."""
        self._call("PUT", f"/weights/files?push={self._push}&sha256={sha256}", {"path": file})

    def commit(self, mode: Mode) -> None:
        self._last_commit = (self._version, self._push)
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
        """Abandon a push that has started; a server that does not answer abandons it when its lease ends."""
        if self._push:
            with contextlib.suppress(PushFailed, TransientPushError):
                self._call("DELETE", f"/weights?push={self._push}", timeout_s=CONNECT_S)

    def sleep(self) -> None:
        """End its generations in flight and free its GPU memory."""
        self._call("POST", "/weights/sleep", {})

    def wake(self, *parts: str) -> None:
        """Restore parts of its memory: `weights`, `kv_cache`; with both it generates again."""
        self._call("POST", "/weights/wake", {"parts": parts})

    def prove(self, proof: LogprobProof) -> Json:
        """`policy_version`, `dtype` and `logprobs` [T - 1] of the proof's prompt."""
        return self._call("POST", "/weights/proof", {"prompt_token_ids": list(proof.token_ids)})

    def _call(self, method: str, path: str, body: Json | bytes | None = None, timeout_s: float = float("inf")) -> Json:
        content = orjson.dumps(body) if isinstance(body, dict) else body
        kind = "application/json" if content is not body else "application/octet-stream"
        request = f"{self.url}: {method} {path.partition('?')[0]}"
        self._request, self._progress_at = request, time.monotonic()
        try:
            headers = {**self._headers, "content-type": kind}
            status, answer = self._exchange(method, path, content, headers, min(timeout_s, self._timeout_s))
        except (OSError, http.client.HTTPException) as error:
            raise TransientPushError(f"{request}: {type(error).__name__}: {error}") from error
        finally:
            self._request = ""
        if status < 400:
            reply: Json = orjson.loads(answer or b"{}")
            return reply
        problem = _problem(answer)
        # An error without `retryable` is vLLM's own: its engine has just died, and the server restarts.
        kind_of_error = TransientPushError if problem.get("retryable", status >= 500) else PushFailed
        raise kind_of_error(f"{request}: {status}: {problem['detail']}")

    def _exchange(
        self, method: str, path: str, content: bytes | None, headers: dict[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        place = urlsplit(self.url)
        connect_s = min(CONNECT_S, timeout_s)
        connection = (
            http.client.HTTPSConnection(place.netloc, timeout=connect_s, context=client_context())
            if place.scheme == "https"
            else http.client.HTTPConnection(place.netloc, timeout=connect_s)
        )
        with contextlib.closing(connection):
            connection.connect()
            break_when_silent(connection.sock)
            connection.sock.settimeout(timeout_s)
            with self._track(connection.sock):
                # A server may refuse a body without reading it; its answer is more useful than the broken pipe.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self._send(connection, method, place.path + path, content, headers)
                reply = connection.getresponse()
                return reply.status, reply.read()

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        content: bytes | None,
        headers: Mapping[str, str],
    ) -> None:
        """Send a request, in parts: the socket's timeout is of each part, however slow the network is for the whole."""
        if content is None:
            connection.request(method, path, headers=headers)
            return
        connection.request(method, path, self._parts(content), {**headers, "content-length": str(len(content))})

    def _parts(self, content: bytes) -> Iterator[memoryview]:
        view = memoryview(content)
        for start in range(0, len(view), PART_BYTES):
            self._progress_at = time.monotonic()
            yield view[start : start + PART_BYTES]
        self._progress_at = time.monotonic()

    @contextlib.contextmanager
    def _track(self, connection: socket.socket) -> Iterator[None]:
        self._connections.add(connection)
        try:
            if self._closed:
                raise ConnectionAbortedError("no more pushes")
            yield
        finally:
            self._connections.discard(connection)


def _problem(answer: bytes) -> Json:
    """A problem document; any other answer becomes its detail."""
    with contextlib.suppress(orjson.JSONDecodeError):
        content = orjson.loads(answer)
        if isinstance(content, dict) and "detail" in content:
            return content
    return {"detail": answer[:300].decode(errors="replace")}
