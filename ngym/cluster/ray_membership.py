"""Detects nodes that are silent, and that this machine is no longer a node of its Ray cluster.

A network that is silent ends no connection, so Ray does not report to a driver or an actor that its node was cut off.
A new connection shows it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import NamedTuple

import ray

from ngym.errors import NgymError

CHECK_S = 5.0  # between two checks, and at most for each
SILENT_CHECKS = 2  # without an answer of a node: 10 to 20 s
ACTOR_CHECKS = 4  # without the head node: 20 to 40 s, less than Ray takes to give a node up (65 s)
DRIVER_CHECKS = 9  # 45 to 90 s
ADVICE = "start Ray on this machine again (docs/scale.md), and run the same command with --resume if it has that option"

_lost = False  # `watch_membership` has raised


class Address(NamedTuple):
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        host, _, port = text.rpartition(":")
        return cls(host.strip("[]"), int(port))

    async def answers(self) -> bool:
        """Whether something accepts a connection there in time."""
        try:
            async with asyncio.timeout(CHECK_S):
                _, writer = await asyncio.open_connection(self.host, self.port)
        except OSError:  # such as TimeoutError
            return False
        writer.close()
        return True


class Silence:
    """Counts the checks in a row at which an address did not answer."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.checks = 0

    async def check(self) -> int:
        self.checks = 0 if await self.address.answers() else self.checks + 1
        return self.checks


def head_node() -> Address:
    """The head node of this process's cluster."""
    return Address.parse(ray.get_runtime_context().gcs_address)


async def until_cut_off() -> None:
    """Wait until an actor's node has been cut off from the head node of its cluster."""
    head = Silence(head_node())
    while await head.check() < ACTOR_CHECKS:
        await asyncio.sleep(CHECK_S)


async def report_silent_nodes(hosts: Collection[str], say: Callable[[str], None]) -> None:
    """Say which of the nodes with these addresses does not answer, forever: Ray gives it up up to a minute later."""
    nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] in hosts]
    silences = [Silence(Address(node["NodeManagerAddress"], node["NodeManagerPort"])) for node in nodes]
    while True:
        await asyncio.sleep(CHECK_S)
        checks = await asyncio.gather(*(silence.check() for silence in silences))
        for silence, count in zip(silences, checks, strict=True):
            if count == SILENT_CHECKS:
                say(
                    f"{silence.address.host} does not answer; waiting for it, or until Ray gives this node up (about 65 s)"
                )


def is_lost() -> bool:
    """Whether the cluster is lost for this driver. Calls of Ray would wait a minute for it, and end the process."""
    return _lost


async def watch_membership() -> None:
    """Wait forever, in a driver.

    Raises:
        NgymError: Ray has given up this node, and with it the actors of this process; or the head node is lost.
    """
    global _lost
    identity = ray.get_runtime_context().get_node_id()
    own = next(node for node in ray.nodes() if node["NodeID"] == identity)
    head, here = Silence(head_node()), Silence(Address(own["NodeManagerAddress"], own["NodeManagerPort"]))
    while True:
        await asyncio.sleep(CHECK_S)
        if await here.check() >= SILENT_CHECKS:
            _lost = True
            raise NgymError(
                f"this machine ({here.address.host}) is no longer a node of the Ray cluster: Ray has ended here, as it "
                f"does after the network was down, and with it everything that this command had started; {ADVICE}"
            )
        if await head.check() >= DRIVER_CHECKS:
            _lost = True
            raise NgymError(
                f"the head node of the Ray cluster ({head.address.host}:{head.address.port}) does not answer any more, "
                f"so everything that this command had started ends; {ADVICE}"
            )
