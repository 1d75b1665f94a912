"""models/sglang against a stub of SGLang's native protocol: requests, weights from disk, sleep and wake."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import torch
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from local_services import local_services
from paths import ROOT
from safetensors.torch import load_file, save
from stub_engines import Sglang, write_stub_model
from waiting import PATIENCE_S

from ngym.errors import UsageError
from ngym.services.base.app import load
from ngym.trainer.weights.push import Pusher, PushFailed
from ngym.trainer.weights.replica import LogprobProof

Json = dict[str, Any]
APP = load(ROOT / "models" / "sglang" / "app.py")
TOKEN = "a token of 16 chars"
KEY = {"authorization": f"Bearer {TOKEN}"}
Stub = TypeVar("Stub", bound=Sglang)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stub_model(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def serving(
    folder: Path, kind: type[Stub] = Sglang, **options: Any
) -> AsyncIterator[tuple[Stub, httpx.AsyncClient]]:
    stub = kind(folder)
    async with local_services(stub=stub.app) as upstream:
        settings = {"model": "m", "base_url": upstream.urls["stub"][0], "api_key_env": None, "max_retries": 0} | options
        async with (
            local_services({"policy": settings}, policy=APP.app) as peers,
            httpx.AsyncClient(base_url=peers.urls["policy"][0], timeout=PATIENCE_S) as client,
        ):
            yield stub, client


async def test_sampling_is_asked_for_in_sglangs_words(folder: Path):
    schema = {"type": "object"}
    async with serving(folder) as (stub, client):
        body: Json = {"input": "hello", "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3}
        body |= {"stop": ["x"], "presence_penalty": 0.5, "min_tokens": 2, "max_output_tokens": 9}
        body["text"] = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
        assert (await client.post("/v1/responses", json=body)).status_code == 200
        request = stub.body
        response = await client.post("/v1/responses", json={"input": "x", "logit_bias": {"1": 1}})
    assert request["sampling_params"] == {
        "max_new_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "ignore_eos": False,
        "skip_special_tokens": False,
        "stop": ["x"],
        "sampling_seed": 3,
        "presence_penalty": 0.5,
        "min_new_tokens": 2,
        "json_schema": '{"type": "object"}',
    }
    assert (request["return_logprob"], request["stream"]) == (True, False)
    assert response.status_code == 400


async def test_new_weights_come_from_disk_and_their_version_is_on_the_answers(folder: Path):
    async with serving(folder, push_token=TOKEN) as (stub, client):
        status = (await client.get("/weights")).json()
        assert status == {"policy_version": 0, "transport": ["disk"], "updating": False, "asleep": []}
        update = {"version": 3, "path": str(folder)}
        assert (await client.post("/weights", json=update)).status_code == 401
        done = await client.post("/weights", json=update, headers=KEY)
        assert (done.status_code, done.json()["policy_version"]) == (200, 3)
        body = next(body for path, body, _ in stub.requests if path == "update_weights_from_disk")
        assert body == {"model_path": str(folder), "weight_version": "3", "flush_cache": True}
        response = (await client.post("/v1/responses", json={"input": "hello"})).json()
        assert [span[2] for span in response["ng"]["policy_version"]] == [3]
        stale = await client.post("/weights", json=update, headers=KEY)
        assert (stale.status_code, stale.json()["detail"]) == (409, "version 3 is already served; 3 is not newer")
        lost = await client.post("/weights", json={"version": 4, "path": "/nowhere"}, headers=KEY)
        assert lost.status_code >= 400
        assert (await client.get("/weights")).json()["policy_version"] == 3


async def test_while_it_sleeps_requests_wait(folder: Path):
    async with serving(folder, push_token=TOKEN) as (stub, client):
        assert (await client.post("/weights/sleep", json={})).status_code == 401
        asleep = (await client.post("/weights/sleep", json={}, headers=KEY)).json()
        assert asleep == {"asleep": ["kv_cache", "weights"]}
        asking = asyncio.create_task(client.post("/v1/responses", json={"input": "hello"}))
        woken = await client.post("/weights/wake", json={"parts": ["weights"]}, headers=KEY)
        assert woken.json() == {"asleep": ["kv_cache"]}
        assert not asking.done()
        assert not any(path == "generate" for path, _, _ in stub.requests)
        wrong = await client.post("/weights/wake", json={"parts": ["soul"]}, headers=KEY)
        assert "soul is not one of kv_cache, weights" in wrong.json()["detail"]
        assert (await client.post("/weights/wake", json={}, headers=KEY)).json() == {"asleep": []}
        assert (await asking).status_code == 200
        assert (await client.post("/weights/flush", json={}, headers=KEY)).status_code == 200
    paths = [path for path, _, _ in stub.requests]
    resumed = [body for path, body, _ in stub.requests if path == "resume_memory_occupation"]
    assert resumed == [{"tags": ["weights"]}, {"tags": ["kv_cache"]}]
    assert paths.index("release_memory_occupation") < paths.index("generate")
    assert "flush_cache" in paths


async def test_without_a_token_no_one_changes_the_weights(folder: Path):
    async with serving(folder) as (_, client):
        assert (await client.get("/weights")).json()["transport"] == []
        for path in ("/weights", "/weights/sleep", "/weights/wake", "/weights/flush"):
            assert (await client.post(path, json={}, headers=KEY)).status_code == 401


async def test_an_answer_that_sglang_aborts_may_be_asked_for_again(folder: Path):
    class Aborting(Sglang):
        def _answer_json(self, ids: list[int], count: int, finish: Json | None) -> Json:
            return super()._answer_json(ids[:1], 1, {"type": "abort", "message": "paused for an update"})

    async with serving(folder, Aborting) as (_, client):
        reply = await client.post("/v1/responses", json={"input": "hello"})
    problem = reply.json()
    assert (problem["status"], problem["retryable"]) == (502, True)
    assert "stopped: paused for an update" in problem["detail"]


async def test_an_answer_that_is_read_after_a_push_does_not_take_its_version_back(folder: Path):
    class Early(Sglang):
        """Its answers are of the first weights. They hang after their first part."""

        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            self.goes_on = asyncio.Event()

        def _answer_json(self, ids: list[int], count: int, finish: Json | None) -> Json:
            reply = super()._answer_json(ids, count, finish)
            reply["meta_info"]["weight_version"] = "1"
            return reply

        def _generate(self, body: Json) -> Response:
            response = super()._generate(body)
            assert isinstance(response, StreamingResponse)

            async def events() -> AsyncIterator[Any]:
                async for part in response.body_iterator:
                    yield part
                    await self.goes_on.wait()

            return StreamingResponse(events(), media_type="text/event-stream")

    async with serving(folder, Early, push_token=TOKEN) as (stub, client):
        asking = {"input": "hello", "stream": True}
        async with client.stream("POST", "/v1/responses", json=asking) as answer:
            lines = answer.aiter_lines()
            while "delta" not in await anext(lines):
                pass
            assert (await client.get("/weights")).json()["policy_version"] == 1
            update = {"version": 2, "path": str(folder)}
            assert (await client.post("/weights", json=update, headers=KEY)).status_code == 200
            stub.goes_on.set()
            assert any(["response.completed" in line async for line in lines])
        assert (await client.get("/weights")).json()["policy_version"] == 2


async def test_a_server_that_does_not_say_whether_it_sleeps_counts_as_asleep_and_is_reported_once(folder: Path):
    class Slow(Sglang):
        async def _handle(self, path: str, request: Request) -> Response:
            answer = await super()._handle(path, request)
            if path == "release_memory_occupation":
                await asyncio.sleep(PATIENCE_S)
            return answer

    async with serving(folder, Slow, push_token=TOKEN, timeout_s=2, max_retries=3) as (stub, client):
        response = await client.post("/weights/sleep", json={}, headers=KEY)
        assert (
            response.status_code,
            "the request may or may not have been processed" in response.json()["detail"],
        ) == (
            502,
            True,
        )
        assert (await client.get("/weights")).json()["asleep"] == ["kv_cache", "weights"]
        assert (await client.post("/weights/wake", json={}, headers=KEY)).json() == {"asleep": []}
        assert (await client.post("/v1/responses", json={"input": "hello"})).status_code == 200
    commands = [path for path, _, _ in stub.requests if path.endswith("_memory_occupation")]
    assert commands == ["release_memory_occupation", "resume_memory_occupation"]


class Loading(Sglang):
    """It loads the checkpoint that it is named; a prompt's logprobs are entries of the tensor `table`."""

    table = torch.zeros(1024)
    loaded: tuple[str, ...] = ()

    def answer(self, route: str, body: Json) -> Response:
        if route == "update_weights_from_disk":
            files = sorted(Path(body["model_path"]).glob("*.safetensors"))
            tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
            self.table, self.loaded = tensors["table"], (*sorted(tensors), f"{len(files)} files")
        if route != "generate":
            return super().answer(route, body)
        prompt: list[int] = body["input_ids"]
        reply = self._answer_json([70], 1, {"type": "length", "length": 1})
        scores = [[float(self.table[token]), token, None] for token in prompt[1:]]
        reply["meta_info"]["input_token_logprobs"] = [[None, prompt[0], None], *scores]
        return JSONResponse(reply)


async def test_the_trainer_pushes_through_a_folder_and_proves_what_sglang_serves(folder: Path, tmp_path: Path):
    table = torch.linspace(-5, -1, 1024)
    tensors = {"table": table, "wide": torch.ones(1000, 5000)}  # more than one file
    prompt = [3, 70, 71, 900]
    proof = LogprobProof(prompt, table[prompt[1:]].tolist())
    async with serving(folder, Loading, push_token=TOKEN, weights_root=str(tmp_path)) as (stub, client):
        pusher = Pusher([str(client.base_url)], TOKEN, transport="filesystem", folder=tmp_path, patience_s=5)
        assert await asyncio.to_thread(pusher.prepare) == 0
        pushed = await asyncio.to_thread(pusher.push, 1, tensors, proof)
        assert (pushed.version, pushed.difference) == (1, pytest.approx(0, abs=1e-6))
        assert stub.loaded == ("table", "wide", "2 files") and not list(tmp_path.iterdir())
        with pytest.raises(PushFailed, match="these are not the weights that were trained"):
            await asyncio.to_thread(pusher.push, 2, {"table": table - 1}, proof)
        assert await asyncio.to_thread(pusher.versions) == [2]
        stub.version = "default"  # SGLang was started again
        assert await asyncio.to_thread(pusher.versions) == [0]
        await asyncio.to_thread(pusher.finish)


async def test_files_of_a_push_that_arrive_at_once_are_all_kept(folder: Path, tmp_path: Path):
    contents = {f"t{number}": save({f"t{number}": torch.full((1 << 18,), float(number))}) for number in range(16)}
    announced = [{"name": name, "shape": [1 << 18], "dtype": "F32"} for name in contents]
    async with serving(folder, Loading, push_token=TOKEN, weights_root=str(tmp_path)) as (_, client):
        begun = (await client.post("/weights", json={"version": 1, "tensors": announced}, headers=KEY)).json()

        async def send(name: str, content: bytes) -> int:
            (tmp_path / name).write_bytes(content)
            where = f"/weights/files?push={begun['push']}&sha256={hashlib.sha256(content).hexdigest()}"
            return (await client.put(where, json={"path": name}, headers=KEY)).status_code

        assert await asyncio.gather(*(send(*each) for each in contents.items())) == [200] * len(contents)
        staged = sorted(path.name for path in tmp_path.glob("push-*/*"))
        assert staged == [f"model-{number:05}.safetensors" for number in range(1, len(contents) + 1)]
        assert (await client.delete(f"/weights?push={begun['push']}", headers=KEY)).status_code == 200
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == contents


async def test_a_push_that_is_not_whole_is_refused_and_leaves_nothing(folder: Path, tmp_path: Path):
    content = save({"table": torch.zeros(4)})
    (tmp_path / "a.safetensors").write_bytes(content)
    tensors = [{"name": name, "shape": [4], "dtype": "F32"} for name in ("table", "other")]
    async with serving(folder, Loading, push_token=TOKEN, weights_root=str(tmp_path)) as (stub, client):
        begin = {"version": 1, "tensors": tensors}
        assert (await client.post("/weights", json=begin)).status_code == 401
        push = (await client.post("/weights", json=begin, headers=KEY)).json()
        other = (await client.post("/weights", json=begin, headers=KEY)).json()
        assert (other["status"], other["retryable"]) == (409, True)

        async def name(path: str, sha256: str) -> tuple[int, str]:
            where = f"/weights/files?push={push['push']}&sha256={sha256}"
            answer = await client.put(where, json={"path": path}, headers=KEY)
            return answer.status_code, answer.json().get("detail", "")

        right = hashlib.sha256(content).hexdigest()
        assert await name("../a.safetensors", right) == (
            422,
            "field 'path': there is no file '../a.safetensors' under weights_root",
        )
        assert (await name("a.safetensors", "0" * 64))[0] == 422
        assert await name("a.safetensors", right) == (200, "")
        assert "'table', which was not announced, or was sent before" in (await name("a.safetensors", right))[1]
        commit = await client.post(f"/weights/commit?push={push['push']}", json={}, headers=KEY)
        assert (commit.status_code, commit.json()["detail"]) == (422, "1 tensors are missing, such as 'other'")
        assert (await client.delete(f"/weights?push={push['push']}", headers=KEY)).status_code == 200
        assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"] and not stub.loaded
    async with serving(folder, Loading, push_token=TOKEN) as (_, client):
        pusher = Pusher([str(client.base_url)], TOKEN, transport="filesystem", folder=tmp_path, patience_s=5)
        with pytest.raises(PushFailed, match="no transport 'filesystem' there; it offers disk"):
            await asyncio.to_thread(pusher.prepare)
        with pytest.raises(UsageError, match=r"rollouts\.push_folder: there is no folder .*gone; name the folder"):
            Pusher([str(client.base_url)], TOKEN, transport="filesystem", folder=tmp_path / "gone")
        await asyncio.to_thread(pusher.finish)
