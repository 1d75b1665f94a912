"""An agent that answers every /run at once with the same rollout: what is left to measure is the collector's own work.

`python benchmarks/stub_agent.py [EXTRA_BYTES]` binds a free port of 127.0.0.1, prints its URL, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop

BODY = (
    b'{"responses_create_params":{"input":"What is 17 + 25?","temperature":1.0},"expected_answer":"42",'
    b'"response":{"id":"resp_0123456789abcdef","object":"response","created_at":1700000000,"model":"stub",'
    b'"status":"completed","incomplete_details":null,"output":[{"id":"msg_1","type":"message","role":"assistant",'
    b'"status":"completed","content":[{"type":"output_text","text":"The answer is 42.","annotations":[]}]}],'
    b'"usage":{"input_tokens":24,"output_tokens":9,"total_tokens":33}},"reward":1.0,"extracted_answer":"42"}'
)
EXTRA_BYTES = int(sys.argv[1]) if len(sys.argv) > 1 else 0
if EXTRA_BYTES:
    BODY = BODY[:-1] + b',"notes":"%s"}' % (b"x" * EXTRA_BYTES)


def reply(status: bytes, body: bytes) -> bytes:
    """One HTTP/1.1 response that keeps the connection open."""
    return b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


ROLLOUT, READY = reply(b"200 OK", BODY), reply(b"200 OK", b'{"status":"ready"}')


class Agent(asyncio.Protocol):
    """As much HTTP as one client needs that sends one request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self.waiting = b""

    def data_received(self, data: bytes) -> None:
        self.waiting += data
        while (end := self.waiting.find(b"\r\n\r\n")) >= 0:
            head = self.waiting[:end].lower()
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.waiting) < end + 4 + size:
                return
            self.transport.write(READY if head.startswith(b"get") else ROLLOUT)
            self.waiting = self.waiting[end + 4 + size :]


async def main() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Agent, "127.0.0.1", 0, backlog=4096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main())
