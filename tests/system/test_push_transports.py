"""Pushes of adapters, and by vLLM's own weight transfer, into the real engine: exact, checked before, all or
nothing."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import torch
from safetensors.torch import save
from trainer_service import free_port
from vllm_service import Server, endless, generating, start, tokens_of, wait_until_ready, write_checkpoint
from waiting import PATIENCE_S, reserved_port

from ngym.errors import UsageError
from ngym.services.base.app import load
from ngym.trainer.model import lora
from ngym.trainer.model import policy as model
from ngym.trainer.recipe import recipe
from ngym.trainer.recipe.extensions import TransientPushError
from ngym.trainer.weights import push, replica, transfer
from ngym.weight_push import shared_memory

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or importlib.util.find_spec("peft") is None, reason="needs vLLM and PEFT"
)

TOKEN = "a token for this test only"
LEASE_S = 60.0
RANK, ALPHA = 3, 6
PROMPT = [1, 40, 41, 42, 2, 1, 77, 90, 50, 60, 61, 62, 63]
LONG = "what is hello world? " * 40  # more than one block of the prefix cache
Weights = dict[str, torch.Tensor]


class Policy:
    """A policy of the trainer with an adapter."""

    def __init__(self, checkpoint: Path, rank: int = RANK) -> None:
        from transformers import AutoTokenizer

        options = recipe.ModelOptions(path=str(checkpoint), lora={"rank": rank, "alpha": ALPHA})
        self._network = model.load_policy(options, AutoTokenizer.from_pretrained(checkpoint), 0).network
        self._network.set_attn_implementation("sdpa")

    def change(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in lora.adapter_tensors(self._network):
                tensor.parameters[0].copy_(torch.randn(tensor.parameters[0].shape, generator=generator) * 0.2)

    def adapter(self) -> Weights:
        return {tensor.name: tensor.compute() for tensor in lora.adapter_tensors(self._network)}

    def weights(self) -> Weights:
        return {tensor.name: tensor.compute() for tensor in lora.checkpoint_tensors(self._network)}

    @torch.no_grad()
    def logprobs(self, ids: list[int], first: int = 1) -> list[float]:
        logits_TV = self._network(torch.tensor([ids])).logits[0, first - 1 : -1]
        result: list[float] = logits_TV.log_softmax(-1).gather(1, torch.tensor(ids[first:])[:, None])[:, 0].tolist()
        return result

    def proof(self) -> Any:
        return replica.LogprobProof(PROMPT, self.logprobs(PROMPT))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Policy:
    return Policy(checkpoint)


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Server]:
    """With adapters, and with the weight transfer of a plugin of vLLM."""
    plugins = tmp_path_factory.mktemp("plugins")
    (plugins / "gloo_transfer.py").symlink_to(root / "tests" / "support" / "gloo_transfer.py")
    described = plugins / "gloo_transfer-1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: gloo-transfer\nVersion: 1\n")
    (described / "entry_points.txt").write_text("[vllm.general_plugins]\ngloo = gloo_transfer:register\n")
    options = {
        "model": str(checkpoint),
        "push_lease_s": LEASE_S,
        "lora_rank": 4,
        "engine": {"weight_transfer_config": {"backend": "gloo"}},
    }
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(plugins))
        running = start(tmp_path_factory.mktemp("service"), root, "policy", options, fresh=True, admin_token=TOKEN)
    try:
        wait_until_ready(running)
        yield running
    finally:
        running.end()


def adapters(*servers: Server | str, patience_s: float = PATIENCE_S) -> Any:
    urls = [server if isinstance(server, str) else server.url for server in servers]
    shape = replica.AdapterShape(RANK, ALPHA)
    return push.Pusher(urls, TOKEN, transport="lora", adapter=shape, patience_s=patience_s)


@pytest.fixture
def pusher(server: Server) -> Iterator[Any]:
    pusher = adapters(server)
    yield pusher
    pusher.finish()


def weights_status(server: Server) -> dict[str, Any]:
    answer: dict[str, Any] = server.get("/weights").json()
    return answer


# Adapters; while the server has its first weights


def test_before_an_adapter_was_pushed_the_checkpoint_is_served(server: Server, pusher: Any, checkpoint: Path) -> None:
    assert weights_status(server)["transport"] == ["http", "delta", "lora", "gloo"]
    assert pusher.prepare() == 0 and pusher.prove(Policy(checkpoint).proof(), 0) < 1e-5


def test_after_a_push_of_an_adapter_the_engine_computes_with_it(server: Server, policy: Policy, pusher: Any) -> None:
    before = server.answer(input=LONG, max_output_tokens=4)
    for _ in range(2):
        version = pusher.prepare() + 1
        policy.change(version)
        done = pusher.push(version, policy.adapter(), policy.proof())
        assert done.version == version and done.difference < 1e-5
        assert done.bytes == sum(tensor.nbytes for tensor in policy.adapter().values()), "the adapter and no more"
        after = server.answer(input=LONG, max_output_tokens=20, ignore_eos=True)
        assert after["ng"] == {"policy_version": [[0, 20, version]]}
        assert after["usage"]["input_tokens_details"]["cached_tokens"] == 0, "keys and values of the old adapter"
        prompt, sampled, logprobs = tokens_of(after)
        assert prompt == tokens_of(before)[0]
        assert logprobs == pytest.approx(policy.logprobs(prompt + sampled, len(prompt)), abs=1e-4)


def test_a_generation_in_flight_continues_with_the_new_adapter(server: Server, policy: Policy, pusher: Any) -> None:
    for tokens in (600, 2400, 9600):
        version = pusher.prepare() + 1
        policy.change(version)
        pusher.push(version, policy.adapter(), policy.proof())
        with generating(server, tokens) as answer:
            policy.change(version + 1)
            pusher.push(version + 1, policy.adapter(), policy.proof())
        response = answer.result().json()
        if response["ng"]["policy_version"] != [[0, tokens, version]]:  # it had not ended before the push came
            break
    (_, end_0, first), (start_1, _, second) = response["ng"]["policy_version"]
    assert (first, second) == (version, version + 1)
    prompt, sampled, logprobs = tokens_of(response)
    new = policy.logprobs(prompt + sampled, len(prompt))
    policy.change(version)
    old = policy.logprobs(prompt + sampled, len(prompt))
    assert logprobs[:end_0] == pytest.approx(old[:end_0], abs=1e-4)
    assert logprobs[start_1:] == pytest.approx(new[start_1:], abs=1e-4), "not even the context is of the old adapter"
    policy.change(version + 1)


def test_what_is_not_an_adapter_of_this_model_is_refused_before_any_byte(
    server: Server, policy: Policy, pusher: Any, checkpoint: Path
) -> None:
    version, tensors = pusher.prepare(), policy.adapter()
    proof = policy.proof()
    some = next(iter(tensors))
    wrong: dict[str, tuple[Weights, str]] = {
        "half of a pair": ({name: one for name, one in tensors.items() if name != some}, f"{some} is missing"),
        "another layer": ({**tensors, "base_model.model.x.lora_A.weight": torch.ones(RANK, 2)}, "belongs to no matrix"),
        "the embedding": (
            {"base_model.model.model.embed_tokens.lora_A.weight": torch.ones(RANK, 32)},
            "belongs to no matrix",
        ),
        "another name": ({**tensors, "x": torch.ones(2)}, "x belongs to no matrix"),
        "another shape": ({**tensors, some: torch.ones(RANK, 2)}, r"has the shape \[3, 2\], expected \[3, 32\]"),
        "nothing": ({}, "it has no tensors"),
    }
    for tensors, problem in wrong.values():
        with pytest.raises(push.PushFailed, match=problem):
            pusher.push(version + 1, tensors, proof)
    large = push.Pusher([server.url], TOKEN, transport="lora", adapter=replica.AdapterShape(5, ALPHA))
    with pytest.raises(push.PushFailed, match="5 is more than this server's lora_rank 4"):
        large.push(version + 1, Policy(checkpoint, 5).adapter(), proof)
    large.finish()
    assert pusher.prove(proof, version) < 1e-5


def test_half_a_push_of_an_adapter_leaves_the_old_one(server: Server, policy: Policy, pusher: Any) -> None:
    version, proof, tensors = pusher.prepare(), policy.proof(), policy.adapter()
    some = next(iter(tensors))
    broken = {
        "not finite": {**tensors, some: torch.full_like(tensors[some], float("nan"))},
        "incomplete": dict(list(tensors.items())[::2]),
    }
    shape = {"rank": RANK, "alpha": ALPHA}
    declared = [{"name": name, "shape": list(one.shape), "dtype": "F32"} for name, one in tensors.items()]
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=PATIENCE_S) as http:
        for sent in broken.values():
            response = http.post(
                "/weights", json={"version": version + 1, "tensors": declared, "adapter": shape}
            ).json()
            content = save(sent)
            params = {"push": response["push"], "sha256": hashlib.sha256(content).hexdigest()}
            http.put("/weights/files", params=params, content=content)
            assert http.post("/weights/commit", params={"push": response["push"]}, json={}).status_code in (404, 422)
    with pytest.raises(push.PushFailed, match="401"):
        push.Pusher(
            [server.url], "another token", transport="lora", adapter=replica.AdapterShape(RANK, ALPHA)
        ).prepare()
    with reserved_port() as nobody:
        away = adapters(f"http://127.0.0.1:{nobody}", server, patience_s=1)  # of equal errors the first is reported
        with pytest.raises(push.PushFailed, match="ConnectionRefusedError"):
            away.push(version + 1, policy.adapter(), proof)
        away.finish()
    assert pusher.prepare() == version and pusher.prove(proof, version) < 1e-5
    policy.change(77)
    assert pusher.push(version + 1, policy.adapter(), policy.proof()).difference < 1e-5


# Whole weights; from here on the server has others than its checkpoint


def test_whole_weights_take_the_place_of_weights_and_adapter(server: Server, policy: Policy, pusher: Any) -> None:
    full_pusher = push.Pusher([server.url], TOKEN)
    version = full_pusher.prepare() + 1
    policy.change(version)
    with endless(server):  # a generation that began with the adapter
        assert full_pusher.push(version, policy.weights(), policy.proof()).difference < 1e-5
    full_pusher.finish()
    with pytest.raises(push.PushFailed, match=f"the weights of version {version} were pushed over it; restart"):
        pusher.push(version + 1, policy.adapter(), policy.proof())


def test_vllms_own_transfer_is_exact_and_meets_once(server: Server, policy: Policy, gloo: Any) -> None:
    server.answer(input=LONG, max_output_tokens=4)
    for _ in range(2):
        version = gloo.prepare() + 1
        policy.change(version)
        done = gloo.push(version, policy.weights(), policy.proof())
        assert done.version == version and done.difference < 1e-5
        after = server.answer(input=LONG, max_output_tokens=20, ignore_eos=True)
        assert after["ng"] == {"policy_version": [[0, 20, version]]}
        assert after["usage"]["input_tokens_details"]["cached_tokens"] == 0
        prompt, sampled, logprobs = tokens_of(after)
        assert logprobs == pytest.approx(policy.logprobs(prompt + sampled, len(prompt)), abs=1e-4)
    import gloo_transfer

    assert gloo_transfer.Sender.meetings == 1 and weights_status(server)["workers"] == 1


def test_a_transfer_is_refused_before_it_starts_when_it_is_not_this_models(
    server: Server, policy: Policy, gloo: Any
) -> None:
    version, proof, weights = gloo.prepare(), policy.proof(), policy.weights()
    norm = "model.norm.weight"
    with pytest.raises(push.PushFailed, match=f"{norm} is missing"):
        gloo.push(version + 1, {name: one for name, one in weights.items() if name != norm}, proof)
    with pytest.raises(UsageError, match=f"{norm}: not every value is finite"):
        gloo.push(version + 1, {**weights, norm: weights[norm] * float("nan")}, proof)
    with pytest.raises(push.PushFailed, match=f"version {version} is served, so {version} is stale"):
        gloo.push(version, weights, proof)
    assert gloo.prove(proof, version) < 1e-5


def test_a_transfer_that_is_not_brought_to_its_end_ends_the_server(server: Server, policy: Policy, gloo: Any) -> None:
    """The last test here: nothing that is loaded partly may be served."""
    weights = policy.weights()
    gloo.push(gloo.prepare() + 1, weights, policy.proof())  # so that someone is connected
    declared = [{"name": name, "shape": list(one.shape), "dtype": "F32"} for name, one in weights.items()]
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=PATIENCE_S) as http:
        body = {"version": gloo.prepare() + 1, "tensors": declared, "transfer": True}
        params = {"push": http.post("/weights", json=body).json()["push"]}
        assert "nothing has been received" in http.post("/weights/commit", params=params, json={}).json()["detail"]
        params = {"push": http.post("/weights", json=body).json()["push"]}
        assert "not started" in http.post("/weights/transfer/update", params=params, json={"info": {}}).json()["detail"]
        params = {"push": http.post("/weights", json=body).json()["push"]}
        assert http.post("/weights/transfer/start", params=params, json={"mode": "keep"}).status_code == 200
        assert http.delete("/weights", params=params).status_code == 204
        assert server.process.wait(PATIENCE_S) == 1
    assert "the push did not end; the server must restart" in server.log.read_text()


@pytest.fixture(scope="module")
def gloo(server: Server, root: Path) -> Iterator[Any]:
    import gloo_transfer

    from ngym.trainer.weights import vllm_transfer

    gloo_transfer.register()
    vllm_transfer.TRAINER_INIT_INFO["gloo"] = lambda address, world: gloo_transfer.SenderInfo(
        rank=0, master_address=address, master_port=int(free_port()), world_size=world
    )
    pusher = push.Pusher([server.url], TOKEN, transport="gloo", patience_s=PATIENCE_S)
    yield pusher
    pusher.finish()


# Without a server


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it is not refused")
def test_without_a_gpu_nccl_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match=r"^transport nccl: moves weights between GPUs, and torch finds none"):
        push.Pusher(["http://127.0.0.1:9"], TOKEN, transport="nccl")


def test_the_servers_of_a_transfer_follow_the_trainer_in_one_group() -> None:
    assert transfer._offsets([2, 1, 4]) == [1, 3, 4]


def test_a_transfer_that_a_dead_server_breaks_is_tried_again() -> None:
    """The collective fails first, with an error of its own; the call of the server that has died follows."""
    collective_failed = threading.Event()

    def on_all(replicas: Any, call: Any) -> list[Any]:
        assert collective_failed.wait(PATIENCE_S)
        raise TransientPushError("http://server: connection reset")

    servers = transfer.Servers([], [1], on_all, "keep")

    class Sender:
        def send(self, tensors: Weights) -> None:
            threading.Thread(target=self.call).start()
            collective_failed.set()
            raise RuntimeError("connection closed by peer")

        def call(self) -> None:
            with contextlib.suppress(TransientPushError):
                servers.update_weights({})

    pushing = transfer.Transfer("nccl", on_all, "keep", PATIENCE_S)
    pushing._servers, pushing._sender = servers, cast(Any, Sender())
    with pytest.raises(TransientPushError, match="connection reset"):
        pushing.push({})
    assert pushing._servers is None, "the next attempt reconnects"


def test_a_server_that_is_gone_before_it_connects_is_tried_again() -> None:
    with reserved_port() as port, pytest.raises(TransientPushError, match="ConnectionRefusedError"):
        transfer._trainer_address(f"http://127.0.0.1:{port}")


def test_handles_of_gpu_memory_become_what_vllm_reads(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments of PyTorch's own function for such a tensor, by the name of the GPU."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

    app = load(root / "models" / "vllm" / "app.py")
    receiver = importlib.import_module(f"{app.__name__}.weights.transfer")
    storage = shared_memory.CudaStorage(
        handle=b"h", bytes=96, offset=512, counter=b"c", counter_offset=3, event=b"e", waits=True
    )
    tensor = shared_memory.SharedTensor(name="x", shape=(2, 3), dtype="BF16", stride=(3, 1), start=4, memory=storage)
    sent = shared_memory.SharedTensors(tensors=[tensor]).model_dump(mode="json")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    tensors = shared_memory.SharedTensors.model_validate(sent).tensors
    read = IPCWeightTransferUpdateInfo(**receiver.to_vllm_request(tensors, "GPU-1"))
    assert (read.names, read.dtype_names, read.shapes) == (["x"], ["bfloat16"], [[2, 3]])
    [handle] = read.ipc_handles
    bound = inspect.signature(rebuild_cuda_tensor).bind(*handle["GPU-1"]).arguments
    assert bound | {"storage_device": 0} == {
        "tensor_cls": torch.Tensor,
        "tensor_size": torch.Size([2, 3]),
        "tensor_stride": (3, 1),
        "tensor_offset": 4,
        "storage_cls": torch.storage.TypedStorage,
        "dtype": torch.bfloat16,
        "storage_device": 0,
        "storage_handle": b"h",
        "storage_size_bytes": 96,
        "storage_offset_bytes": 512,
        "requires_grad": False,
        "ref_counter_handle": b"c",
        "ref_counter_offset": 3,
        "event_handle": b"e",
        "event_sync_required": True,
    }


def test_an_adapter_needs_its_shape_and_nothing_else_has_one() -> None:
    with pytest.raises(ValueError, match="an adapter's shape is only for the transport lora"):
        push.Pusher(["http://127.0.0.1:9"], TOKEN, transport="lora")
