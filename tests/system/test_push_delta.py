"""The transport `delta` into real engines: few values are sent, and the engine computes with all of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from pushed_policy import Experts, Policy, Weights, write_experts
from starlette.applications import Starlette
from starlette.routing import Route
from torch import Tensor
from vllm_service import Server, Servers, tokens_of, write_checkpoint
from waiting import PATIENCE_S

from ngym.errors import BadRequest, NgymError, ServiceError
from ngym.trainer.weights import push, push_files
from ngym.weight_push import routes, stage

TOKEN = "a token for this test only"
HAS_VLLM = importlib.util.find_spec("vllm") is not None


class Bf16:
    """A policy whose values are numbers of bfloat16; a step changes each 50th of them."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._policy.change(1)
        self._each(lambda values: values)

    @torch.no_grad()
    def _each(self, change: Any) -> None:
        for parameter in self._policy.network.parameters():
            parameter.copy_(change(parameter.detach().clone()).bfloat16())

    def step(self) -> Weights:
        def change(values: Tensor) -> Tensor:
            values.view(-1)[::50] *= 1.02
            return values

        self._each(change)
        return self.weights()

    def weights(self) -> Weights:
        weights = self._policy.network.state_dict()
        if isinstance(self._policy, Experts):
            from transformers.core_model_loading import revert_weight_conversion

            weights = revert_weight_conversion(self._policy.network, dict(weights))
        return {name: tensor.bfloat16() for name, tensor in push_files.checkpoint(weights).items()}

    def proof(self) -> Any:
        return self._policy.proof()

    def logprobs(self, ids: list[int], first: int) -> list[float]:
        return self._policy.logprobs(ids, first)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("models/vllm", marks=pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")),
        "models/transformers",
    ],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Any]:
    """A server and its policy: a dense one in vLLM, and one with experts in transformers, which loads it anew."""
    folder = write_checkpoint(tmp_path_factory.mktemp("policy"))
    is_vllm = request.param == "models/vllm"
    if not is_vllm:
        folder = write_experts(tmp_path_factory.mktemp("experts"), folder)
    stanza = {"options": {"model": str(folder)}, "admin_token": TOKEN, "app": request.param, "fresh": not is_vllm}
    policy = Policy(folder) if is_vllm else Experts(folder)
    stanzas = {"policy": stanza} if is_vllm else {"policy": stanza, "second": stanza}
    with Servers(tmp_path_factory.mktemp("service"), root, stanzas) as servers:
        second = None if is_vllm else servers["second"]
        yield SimpleNamespace(server=servers["policy"], second=second, policy=Bf16(policy))


@pytest.fixture
def server(served: Any) -> Server:
    server: Server = served.server
    return server


@pytest.fixture
def policy(served: Any) -> Bf16:
    policy: Bf16 = served.policy
    return policy


def pusher_to(server: Server, transport: str = "delta") -> Any:
    return push.Pusher([server.url], TOKEN, transport=transport, patience_s=PATIENCE_S)


def assert_served(server: Server, policy: Bf16, version: int) -> None:
    answer = server.answer(input="what is hello world? " * 20, max_output_tokens=20, ignore_eos=True)
    assert answer["ng"] == {"policy_version": [[0, 20, version]]}
    prompt, sampled, logprobs = tokens_of(answer)
    assert logprobs == pytest.approx(policy.logprobs(prompt + sampled, len(prompt)), abs=1e-4)


def test_only_changed_values_travel_and_the_engine_computes_with_all(server: Server, policy: Bf16) -> None:
    pusher = pusher_to(server)
    version = pusher.prepare()
    whole = pusher.push(version + 1, policy.weights(), policy.proof())
    for step in (2, 3, 4):
        done = pusher.push(version + step, policy.step(), policy.proof())
        assert done.difference < 1e-5 and done.bytes < whole.bytes / 4
        assert_served(server, policy, version + step)
    pusher.finish()


def test_a_server_without_the_base_gets_the_checkpoint_and_then_deltas_again(server: Server, policy: Bf16) -> None:
    pusher, other = pusher_to(server), pusher_to(server, "http")
    version = pusher.prepare()
    whole = pusher.push(version + 1, policy.step(), policy.proof())
    other.push(version + 2, policy.step(), policy.proof())
    assert pusher.push(version + 3, policy.step(), policy.proof()).bytes == pytest.approx(whole.bytes)
    assert_served(server, policy, version + 3)
    assert pusher.push(version + 4, policy.step(), policy.proof()).bytes < whole.bytes / 4
    assert_served(server, policy, version + 4)
    for one in (pusher, other):
        one.finish()


def test_a_delta_that_breaks_off_changes_nothing_and_is_sent_again(
    server: Server, policy: Bf16, monkeypatch: pytest.MonkeyPatch
) -> None:
    pusher = pusher_to(server)
    version = pusher.prepare()
    whole = pusher.push(version + 1, policy.step(), policy.proof())
    before = policy.proof()
    weights = policy.step()
    with monkeypatch.context() as broken:
        broken.setattr(push.DeltaTransport, "send", lambda *_: (_ for _ in ()).throw(push.PushFailed("cut")))
        with pytest.raises(push.PushFailed, match="cut"):
            pusher.push(version + 2, weights, policy.proof())
    assert server.get("/weights").json()["policy_version"] == version + 1
    assert pusher.prove(before) < 1e-5
    assert pusher.push(version + 2, weights, policy.proof()).bytes < whole.bytes / 4
    assert_served(server, policy, version + 2)
    pusher.finish()


def test_a_replica_that_joins_gets_the_checkpoint_and_the_others_their_changes(served: Any, policy: Bf16) -> None:
    if served.second is None:
        pytest.skip("one server of models/vllm")
    urls = [served.server.url]
    pusher = push.Pusher(lambda: urls, TOKEN, transport="delta", patience_s=PATIENCE_S)
    version = pusher.prepare()
    whole = pusher.push(version + 1, policy.step(), policy.proof())
    assert pusher.push(version + 2, policy.step(), policy.proof()).bytes < whole.bytes / 4
    urls.append(served.second.url)
    pusher.prepare()
    assert pusher.push(version + 3, policy.step(), policy.proof()).bytes == pytest.approx(whole.bytes)
    assert pusher.push(version + 4, policy.step(), policy.proof()).bytes < whole.bytes / 4
    for server in (served.server, served.second):
        assert_served(server, policy, version + 4)
    pusher.finish()


# Without an engine


class Engine:
    """Loads every version but `fails_at`."""

    dtype = torch.float32
    asleep: frozenset[str] = frozenset()
    weights_dropped = False
    sleep_problem = None

    def __init__(self) -> None:
        self.version = 0
        self.fails_at = 0
        self.folders: list[Path] = []

    async def policy_version(self) -> int:
        return self.version

    async def switch_weights(self, folder: Path, version: int, mode: str, patience_s: float) -> routes.Seconds:
        if version == self.fails_at:
            raise ServiceError("not loaded", status=503)
        self.version = version
        self.folders.append(folder)
        return routes.Seconds(0.0, 0.0)


def client_of(engine: Engine, **options: Any) -> httpx.AsyncClient:
    """A client of the routes of a model whose only tensor is x [2]."""
    pushes = routes.WeightPush(engine, {"x": (2,)}, routes.PushOptions(TOKEN, None, 60.0), **options)  # type: ignore[arg-type]
    app = Starlette(routes=[Route(path, route, methods=[how]) for how, path, route, _ in pushes.routes])
    headers = {"authorization": f"Bearer {TOKEN}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://policy", headers=headers)


async def push_x(client: httpx.AsyncClient, version: int, base: str | None) -> tuple[str, bool]:
    """Push x as a delta to `base` if the server has it. Returns the push's id, and whether it was a delta."""
    body: dict[str, Any] = {"version": version, "keep": True}
    body["tensors"] = [{"name": "x", "shape": [2], "dtype": "F32"}]
    changes = {"x#indices": torch.tensor([1]).int(), "x#values": torch.ones(1)}
    [file] = push_files._files([changes], 1000)
    if base is not None:
        body["delta"] = {"base": base, "files": 1, "bytes": len(file.content)}
    begun = (await client.post("/weights", json=body)).json()
    if not begun["delta"]:
        [file] = push_files.safetensors_files({"x": torch.zeros(2)})
    query = f"push={begun['push']}"
    await client.put(f"/weights/files?{query}&sha256={file.sha256}", content=file.content)
    await client.post(f"/weights/commit?{query}", json={})
    return begun["push"], begun["delta"]


def stages(place: Path) -> list[Path]:
    return [path for path in place.iterdir() if path.is_dir()]


async def test_after_a_commit_that_failed_the_base_is_gone_and_a_new_push_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "SHARED_MEMORY", tmp_path)
    engine = Engine()
    async with client_of(engine) as client:
        first, is_delta = await push_x(client, 1, None)
        assert not is_delta
        _, is_delta = await push_x(client, 2, first)
        assert is_delta and engine.folders[0] == engine.folders[1]
        assert not (await push_x(client, 3, first))[1], "the base is of version 2 now"
        engine.fails_at = 5
        fourth, _ = await push_x(client, 4, None)
        with pytest.raises(NgymError, match="not loaded"):
            await push_x(client, 5, fourth)
        assert stages(tmp_path) == [], "nothing is left of a failed push"
        engine.fails_at = 0
        assert not (await push_x(client, 6, fourth))[1]
        await client.post("/weights", json={"version": 7, "tensors": [{"name": "x", "shape": [2], "dtype": "F32"}]})
        assert len(stages(tmp_path)) == 1, "the base goes with the first push that keeps nothing"


async def test_files_that_other_nodes_read_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "STAGE_FOLDERS", [tmp_path])
    async with client_of(Engine()) as client:
        first, _ = await push_x(client, 1, None)
        assert stages(tmp_path) == []
        assert not (await push_x(client, 2, first))[1]


async def test_only_files_of_whole_weights_are_kept() -> None:
    adapters = routes.Adapters(SimpleNamespace(base_version=0), 4, {"x.weight": (3, 2)})  # type: ignore[arg-type]
    names = {"base_model.model.x.lora_A.weight": [1, 2], "base_model.model.x.lora_B.weight": [3, 1]}
    body: dict[str, Any] = {"version": 1, "keep": True, "adapter": {"rank": 1, "alpha": 1}}
    body["tensors"] = [{"name": name, "shape": shape, "dtype": "F32"} for name, shape in names.items()]
    async with client_of(Engine(), adapters=adapters) as client:
        with pytest.raises(BadRequest, match="fields 'keep' and 'delta': only the files of whole weights are kept"):
            await client.post("/weights", json=body)
