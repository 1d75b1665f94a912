"""A policy server and an agent in one, in a thread; it samples from the pushed weights, so that a trainer can learn.

A rollout is six tokens after a prompt of four; its reward is the share of tokens below 512. Sampling depends on the task,
the rollout and the weights alone. What goes wrong, goes wrong on purpose: see `Stub`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import orjson
import torch
from aiohttp import web
from safetensors.torch import load

from ngym.schema import Json

SAMPLED = 6
GOOD = 512


class Stub:
    """url: of everything.

    restarts_after: at this /run it forgets what was pushed, as a server that died and came back. Rollout 0 of every fifth
    task is unscored, rollout 1 of every seventh fails. equal_share: of eight tasks, so many are rewarded with 0.5 always.
    slow_commit_s: from when new weights are served to when the pusher gets the answer.
    """

    def __init__(
        self, folder: Path, restarts_after: int | None = None, equal_share: int = 0, slow_commit_s: float = 0
    ) -> None:
        self.url = ""
        self.runs = 0
        self.pushes: list[int] = []
        self._folder = folder
        self._restarts_after = restarts_after
        self._equal_share = equal_share
        self._slow_commit_s = slow_commit_s
        self._staged: dict[str, torch.Tensor] = {}
        self._forget()

    def _forget(self) -> None:
        from transformers import AutoModelForCausalLM

        self._network = AutoModelForCausalLM.from_pretrained(self._folder)
        self._version = 0

    async def run(self, request: web.Request) -> web.Response:
        row = orjson.loads(await request.read())
        self.runs += 1
        if self.runs == self._restarts_after:
            self._forget()
        task, index = row["_ng_task_index"], row["_ng_rollout_index"]
        if task % 7 == 1 and index == 1:
            problem = {"title": "no", "status": 500, "detail": "the tool broke", "service": "agent", "retryable": False}
            return web.Response(status=500, body=orjson.dumps(problem), content_type="application/problem+json")
        answer = self._rollout(row, task, index)
        return web.Response(body=orjson.dumps(answer))

    @torch.no_grad()
    def _rollout(self, row: Json, task: int, index: int) -> Json:
        generator = torch.Generator().manual_seed(task * 1000 + index)
        temperature = row["responses_create_params"]["temperature"]
        ids, logprobs = list(row["prompt"]), []
        start = len(ids)
        for _ in range(SAMPLED):
            logits = self._network(torch.tensor([ids])).logits[0, -1]
            log_p = (logits / (temperature or 1.0)).log_softmax(-1)
            token = int(torch.multinomial(log_p.exp(), 1, generator=generator) if temperature else log_p.argmax())
            ids.append(token)
            logprobs.append(float(log_p[token]))
        reward = sum(token < GOOD for token in ids[start:]) / SAMPLED if task % 8 >= self._equal_share else 0.5
        spans = {"mask": [[start, len(ids)]], "policy_version": [[start, len(ids), self._version]]}
        segment = {"token_ids": ids, "logprobs": logprobs, **spans}
        return {
            "responses_create_params": row["responses_create_params"],
            "response": {"id": "r", "object": "response", "status": "completed", "output": []},
            "reward": None if task % 5 == 2 and index == 0 else reward,
            "ng": {"segments": [segment], "turns": 1, "tool_calls": 0, "tool_errors": 0, "stop_reason": "answer"},
        }

    async def weights(self, request: web.Request) -> web.Response:
        return web.json_response({"policy_version": self._version, "transport": ["http"], "updating": False})

    async def begin(self, request: web.Request) -> web.Response:
        self._next = orjson.loads(await request.read())["version"]
        self._staged = {}
        return web.json_response({"push": "p", "lease_s": 60}, status=201)

    async def file(self, request: web.Request) -> web.Response:
        self._staged |= load(await request.read())
        return web.json_response({"push": "p"})

    async def commit(self, request: web.Request) -> web.Response:
        missing, unexpected = self._network.load_state_dict(self._staged, strict=False)
        assert missing == ["lm_head.weight"] and not unexpected  # tied
        self._version = self._next
        self.pushes.append(self._version)
        await asyncio.sleep(self._slow_commit_s)  # what is sampled meanwhile is of the new version already
        return web.json_response({"policy_version": self._version, "seconds": {}})

    @torch.no_grad()
    def _logprobs(self, ids: list[int]) -> list[float]:
        log_p = self._network(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return log_p.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    async def prove(self, request: web.Request) -> web.Response:
        logprobs = self._logprobs(orjson.loads(await request.read())["prompt_token_ids"])
        return web.json_response({"policy_version": self._version, "dtype": "float32", "logprobs": logprobs})

    async def ready(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ready"})

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        routes: list[Any] = [
            web.get("/ready", self.ready),
            web.post("/run", self.run),
            web.get("/weights", self.weights),
            web.post("/weights", self.begin),
            web.put("/weights/files", self.file),
            web.post("/weights/commit", self.commit),
            web.post("/weights/proof", self.prove),
        ]
        app.add_routes(routes)
        return app


class _Thread(threading.Thread):
    def __init__(self, stub: Stub) -> None:
        super().__init__(name="stub policy", daemon=True)
        self._stub = stub
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()

    def run(self) -> None:
        self._loop.run_until_complete(self._serve())

    def begin(self) -> Self:
        self.start()
        self._listening.wait()
        return self

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self.join()

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        runner = web.AppRunner(self._stub.application(), access_log=None, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._listening.set()
        await self._over.wait()
        await runner.cleanup()


@contextmanager
def serving(stub: Stub) -> Iterator[Stub]:
    thread = _Thread(stub).begin()
    try:
        yield stub
    finally:
        thread.end()
