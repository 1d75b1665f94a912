"""The transport `ipc` on a CPU: models/transformers copies the weights from the trainer's shared memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from pushed_policy import Experts, Policy, Weights
from vllm_service import Server, endless, start, tokens_of, wait_until_ready, write_checkpoint
from waiting import PATIENCE_S, wait_until

from ngym.errors import BadRequest
from ngym.trainer.weights import push, push_files, replica, transfer
from ngym.weight_push.shared_memory import SharedTensor, SharedTensors, device_id, open_tensor, share
from ngym.weight_push.stage import SHARED_MEMORY

TOKEN = "a token for this test only"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("policy"))


def serve(checkpoint: Path, folder: Path, root: Path) -> Iterator[Server]:
    options = {"model": str(checkpoint), "push_lease_s": 60.0}
    running = start(folder, root, "policy", options, app="models/transformers", fresh=True, admin_token=TOKEN)
    try:
        wait_until_ready(running)
        yield running
    finally:
        running.end()


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Server]:
    yield from serve(checkpoint, tmp_path_factory.mktemp("service"), root)


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Policy:
    return Policy(checkpoint)


@pytest.fixture
def pusher(server: Server) -> Iterator[Any]:
    pusher = push.Pusher([server.url], TOKEN, transport="ipc", patience_s=PATIENCE_S)
    yield pusher
    pusher.finish()


def test_after_a_push_the_server_computes_with_copies_of_the_new_weights(
    server: Server, policy: Policy, pusher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = []

    def share_weights(weights: Weights) -> Any:
        shared_tensors = share(weights)
        folders.append(SHARED_MEMORY / shared_tensors.tensors[0].memory.folder)
        return shared_tensors

    monkeypatch.setattr(transfer, "share", share_weights)
    for _ in range(2):
        version = pusher.prepare() + 1
        done = pusher.push(version, policy.change(version), policy.proof())
        assert done.version == version and done.difference < 1e-5
        answer = server.answer(input="hello", max_output_tokens=20, ignore_eos=True)
        assert answer["ng"] == {"policy_version": [[0, 20, version]]}
        prompt, sampled, logprobs = tokens_of(answer)
        assert logprobs == pytest.approx(policy.logprobs(prompt + sampled, len(prompt)), abs=1e-4)
    status = server.get("/weights").json()
    assert "ipc" in status["transport"] and status["workers"] == 1 and not status["updating"]
    assert len(folders) == 2 and not any(map(Path.exists, folders)), "the trainer's shared memory is freed"


def test_a_generation_in_flight_continues_with_the_new_weights(server: Server, policy: Policy, pusher: Any) -> None:
    version = pusher.prepare() + 1
    with endless(server):
        assert pusher.push(version, policy.change(version), policy.proof()).difference < 1e-5


def test_a_push_that_fails_after_its_start_is_ended_on_the_servers_at_once(
    server: Server, policy: Policy, pusher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generation has paused: without that, it would stay so until the lease ends."""
    version = pusher.prepare() + 1
    pusher.push(version, policy.change(version), policy.proof())

    def fails(replica: Any, info: Any) -> None:
        raise push.PushFailed("another server died")

    with monkeypatch.context() as patched:
        patched.setattr(replica.Replica, "update", fails)
        with pytest.raises(push.PushFailed, match="another server died"):
            pusher.push(version + 1, policy.change(version + 1), policy.proof())
    assert not server.get("/weights").json()["updating"]
    answer = server.answer(input="hello", max_output_tokens=4, ignore_eos=True)
    assert answer["ng"] == {"policy_version": [[0, 4, version]]}
    assert pusher.push(version + 1, policy.change(version + 1), policy.proof()).difference < 1e-5


def test_tensors_that_the_model_has_fused_are_loaded_like_a_checkpoint(
    checkpoint: Path, tmp_path: Path, root: Path
) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shutil.copytree(checkpoint, tmp_path / "experts")
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape |= {"head_dim": 32, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(
        **shape, vocab_size=512, max_position_embeddings=512, eos_token_id=2, tie_word_embeddings=False
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "experts")
    experts = Experts(tmp_path / "experts")
    for running in serve(tmp_path / "experts", tmp_path, root):
        pusher = push.Pusher([running.url], TOKEN, transport="ipc", patience_s=PATIENCE_S)
        for version in (1, 2):
            assert pusher.push(version, experts.change(version), experts.proof()).difference < 1e-5
        pusher.finish()


class Session:
    """The routes by hand, at a server that has begun a transfer of a next version."""

    def __init__(self, http: httpx.Client, version: int, weights: Weights) -> None:
        self.http = http
        self.weights = push_files.checkpoint(weights)
        tensors = [{"name": name, "shape": list(tensor.shape), "dtype": "F32"} for name, tensor in self.weights.items()]
        response = http.post("/weights", json={"version": version, "tensors": tensors, "transfer": True})
        self.params = {"push": response.json()["push"]}

    def connect(self, device: str = "cpu") -> httpx.Response:
        return self.http.post("/weights/transfer/connect", params=self.params, json={"info": {"device": device}})

    def start(self) -> httpx.Response:
        return self.http.post("/weights/transfer/start", params=self.params, json={"mode": "keep"})

    def update(self, tensors: Any) -> httpx.Response:
        return self.http.post("/weights/transfer/update", params=self.params, json={"info": {"tensors": tensors}})

    def commit(self) -> httpx.Response:
        return self.http.post("/weights/commit", params=self.params, json={"mode": "keep"})


@pytest.fixture
def session(server: Server, policy: Policy) -> Iterator[Session]:
    """For a push that must change nothing: the server then serves what it served, and takes the next push."""
    pusher = push.Pusher([server.url], TOKEN, transport="ipc", patience_s=PATIENCE_S)
    old = pusher.prepare() + 1
    pusher.push(old, policy.change(old), policy.proof())
    proof = policy.proof()
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=PATIENCE_S) as http:
        yield Session(http, old + 1, policy.change(old + 1))
    wait_until(lambda: not server.get("/weights").json()["updating"])
    assert server.process.poll() is None and pusher.prepare() == old and pusher.prove(proof) < 1e-5
    answer = server.answer(input="hello", max_output_tokens=4, ignore_eos=True)
    assert answer["ng"] == {"policy_version": [[0, 4, old]]}, "it generates"
    pusher.push(old + 1, policy.change(old + 1), policy.proof())
    pusher.finish()


Changed = Callable[[list[dict[str, Any]]], Any]
WRONG: dict[str, tuple[Changed, str]] = {
    "another shape": (lambda tensors: tensors[0].update(shape=[2, 2], stride=[2, 1]), "is not one that is missing"),
    "an unknown name": (lambda tensors: tensors[0].update(name="x"), "is not one that is missing"),
    "twice": (lambda tensors: tensors.append(tensors[0]), "is not one that is missing"),
    "a path": (lambda tensors: tensors[0]["memory"].update(folder="../etc"), "there is no shared memory"),
    "a folder that is gone": (
        lambda tensors: tensors[0]["memory"].update(folder="ngym-weights-gone"),
        "there is no shared memory",
    ),
    "beyond the end": (
        lambda tensors: tensors[0]["memory"].update(offset=1 << 40),
        "is not a part of the shared memory",
    ),
    "not aligned": (lambda tensors: tensors[0]["memory"].update(offset=3), "is not a part of the shared memory"),
    "a GPU": (
        lambda tensors: tensors[0].update(
            memory={
                "handle": "eA==",
                "bytes": 1,
                "offset": 0,
                "counter": "eA==",
                "counter_offset": 0,
                "event": "eA==",
                "waits": False,
            }
        ),
        "is on a GPU, and this server's weights are on the cpu",
    ),
    "no base64": (lambda tensors: tensors[0].update(memory={"handle": "?"}), "the tensors of a transfer"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_memory_ends_the_push_and_the_old_weights_serve(session: Session, kind: str) -> None:
    change, problem = WRONG[kind]
    assert session.connect().status_code == session.start().status_code == 200
    shared_tensors = share(session.weights)
    tensors = [tensor.model_dump(mode="json") for tensor in shared_tensors.tensors]
    change(tensors)
    reply = session.update(tensors)
    assert reply.status_code == 422 and problem in reply.json()["detail"], reply.text


def test_a_commit_before_all_tensors_have_come_ends_the_push(session: Session) -> None:
    session.connect(), session.start()
    shared_tensors = share(session.weights)
    assert session.update([shared_tensors.tensors[0].model_dump(mode="json")]).status_code == 200
    reply = session.commit()
    assert (
        reply.status_code == 422 and f"{len(shared_tensors.tensors) - 1} tensors are missing" in reply.json()["detail"]
    )


def test_a_trainer_that_gives_up_after_the_start_changes_nothing(session: Session) -> None:
    session.connect(), session.start()
    assert session.http.delete("/weights", params=session.params).status_code == 204


def test_a_trainer_on_another_device_is_refused(session: Session) -> None:
    reply = session.connect("GPU-1")
    assert reply.status_code == 422 and "this server's on cpu; use http" in reply.json()["detail"]


# Without a server


def test_shared_tensors_are_read_back_and_freed() -> None:
    weights = {
        "matrix": torch.randn(3, 5),
        "transposed": torch.randn(7, 2).bfloat16().T,
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5, dtype=torch.float16),
    }
    shared_tensors = share(weights)
    sent = SharedTensors(tensors=shared_tensors.tensors).model_dump_json()
    for tensor_info in SharedTensors.model_validate_json(sent).tensors:
        tensor = open_tensor(tensor_info, CPU)
        assert tensor.dtype == weights[tensor_info.name].dtype and torch.equal(tensor, weights[tensor_info.name])
    (folder,) = {SHARED_MEMORY / tensor_info.memory.folder for tensor_info in shared_tensors.tensors}
    assert device_id(CPU) == "cpu" and folder.is_dir()
    del shared_tensors
    assert not folder.exists()


def test_a_link_is_not_opened(tmp_path: Path) -> None:
    shared_tensors = share({"x": torch.zeros(4)})
    info = shared_tensors.tensors[0].model_dump()
    folder = SHARED_MEMORY / info["memory"]["folder"]
    (tmp_path / "secret").write_bytes(bytes(64))
    (folder / "tensors").unlink()
    (folder / "tensors").symlink_to(tmp_path / "secret")
    with pytest.raises(BadRequest, match="tensor x: there is no shared memory"):
        open_tensor(SharedTensor.model_validate(info), CPU)
