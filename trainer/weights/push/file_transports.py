"""The transports that bring a push to the servers as safetensors files."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from ...recipe.extensions import PushTransport
from .replica import File, OnAll, Replica


class HttpTransport(PushTransport):
    """Sends the bytes to each server."""

    def send(self, file: File, replicas: Sequence[Replica], on_all: OnAll) -> None:
        on_all(replicas, lambda replica: replica.send(file.content, file.sha256))


class LoraTransport(HttpTransport):
    """The same with the files of an adapter, which the servers load next to their checkpoint."""

    server_transport = "lora"


class FilesystemTransport(PushTransport):
    """Writes into `folder`, the servers' weights_root; a file exists until every server has copied it.

    Nothing is synced or renamed: the server gets the name after the file is closed, and copies and checks it at once.
    """

    server_transport = "filesystem"

    def send(self, file: File, replicas: Sequence[Replica], on_all: OnAll) -> None:
        assert self.folder is not None
        path = self.folder / f"{secrets.token_hex(8)}.safetensors"
        try:
            path.write_bytes(file.content)
            on_all(replicas, lambda replica: replica.name(path.name, file.sha256))
        finally:
            path.unlink(missing_ok=True)
