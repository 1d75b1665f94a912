"""A replica on several nodes: one process on each, which start together and end together.

Rank 0 listens for calls. The others compute a part of the same model, so the replica cannot go on without any of them.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ngym.supervise.service import ProcessHost, StartedProcess


class NodeGroup:
    """The hosts of one replica as one host: that of rank 0, for callers.

    Each process finds its place in its option `node` (`models/vllm/options.py`).
    """

    def __init__(self, hosts: Sequence[ProcessHost]) -> None:
        self.hosts = hosts

    @property
    def url(self) -> str:
        return self.hosts[0].url

    @property
    def node(self) -> str:
        return ", ".join(dict.fromkeys(host.node for host in self.hosts if host.node))

    async def rendezvous(self) -> tuple[str, int]:
        return await self.hosts[0].rendezvous()

    async def start(self, title: str, spec: dict[str, Any], log: int, python: Path | None) -> StartedProcess:
        started: list[StartedProcess] = []
        try:
            addresses = [await host.rendezvous() for host in self.hosts]
            address, port = addresses[0]
            shared = {"count": len(self.hosts), "seed": secrets.randbelow(2**31)}
            for rank, (host, (own_address, _)) in enumerate(zip(self.hosts, addresses, strict=True)):
                node = {"rank": rank, "address": own_address, "master_addr": address, "master_port": port, **shared}
                own = spec | {"options": spec["options"] | {"node": node}}
                name = f"{title}.{rank}" if rank else title
                started.append(await host.start(name, own, os.dup(log), python))
        except BaseException:
            for process in started:
                process.signal(signal.SIGKILL)
            raise
        finally:
            os.close(log)
        return _Processes(started)

    async def stop_listening(self) -> None:
        await asyncio.gather(*(host.stop_listening() for host in self.hosts))


class _Processes:
    """The processes of a group as one: when one ends, the others are killed. Its exit code is that of the first."""

    def __init__(self, processes: Sequence[StartedProcess]) -> None:
        self.pid = processes[0].pid
        self._processes = processes
        self.exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._end())

    def signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.signal(number)

    async def _end(self) -> None:
        codes = [process.exit_code for process in self._processes]
        ended, _ = await asyncio.wait(codes, return_when=asyncio.FIRST_COMPLETED)
        self.signal(signal.SIGKILL)
        await asyncio.wait(codes)
        first = next(code for code in codes if code in ended)
        if self.exit_code.done():
            return
        if error := first.exception():
            self.exit_code.set_exception(error)
        else:
            self.exit_code.set_result(first.result())
