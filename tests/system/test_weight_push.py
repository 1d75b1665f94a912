"""Weight pushes into the real engine: exact afterwards, and without effect after any error."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import importlib.util
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from anyio.from_thread import start_blocking_portal
from bad_network import BREAKING, KINDS, Kind, proxy
from documents import snippets
from paths import ROOT
from pushed_policy import PROMPT, Experts, Policy, Weights, write_experts
from safetensors.torch import save
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from vllm_service import (
    CONTEXT,
    ENDLESS,
    Server,
    Servers,
    endless,
    generating,
    metric,
    tokens_of,
    write_checkpoint,
)
from waiting import PATIENCE_S, reserved_port, wait_until

from ngym.errors import BadRequest, ServiceError, Unauthorized, UsageError
from ngym.trainer.weights import push, push_files

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

VLLM = "models/vllm"
TOKEN = "a token for this test only"
OWN = "copied_weights.py:CopiedWeights"
LEASE_S = 2.0
LONG = "what is hello world? " * 40  # more than one block of the prefix cache
HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def experts_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_experts(tmp_path_factory.mktemp("experts"), checkpoint)


@pytest.fixture(scope="module", params=[VLLM, "models/transformers"])
def back_end(request: pytest.FixtureRequest) -> str:
    app: str = request.param
    return app


@pytest.fixture(scope="module")
def servers(
    checkpoint: Path,
    experts_checkpoint: Path,
    shared: Path,
    tmp_path_factory: pytest.TempPathFactory,
    root: Path,
    back_end: str,
) -> Iterator[Servers]:
    policy = {"model": str(checkpoint), "weights_root": str(shared)}
    experts = {"model": str(experts_checkpoint), "push_token": TOKEN, "push_lease_s": LEASE_S}
    stanzas = {"policy": {"options": policy, "admin_token": TOKEN}, "experts": {"options": experts}}
    for stanza in stanzas.values():
        stanza |= {"app": back_end, "fresh": back_end != VLLM}
    with Servers(tmp_path_factory.mktemp("service"), root, stanzas) as servers:
        yield servers


@pytest.fixture
def server(servers: Servers) -> Server:
    return servers["policy"]


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Policy:
    return Policy(checkpoint)


@pytest.fixture(scope="module")
def experts(experts_checkpoint: Path) -> Experts:
    return Experts(experts_checkpoint)


@pytest.fixture
def pusher(server: Server) -> Iterator[Any]:
    pusher = push.Pusher([server.url], TOKEN, patience_s=PATIENCE_S)
    yield pusher
    pusher.finish()


def is_updating(server: Server) -> bool:
    updating: bool = server.get("/weights").json()["updating"]
    return updating


def version_of(server: Server) -> int:
    version: int = server.get("/weights").json()["policy_version"]
    return version


def sampled_logprobs(policy: Policy, response: dict[str, Any]) -> tuple[list[float], list[float]]:
    """(the engine's, transformers') of an answer's tokens."""
    prompt, sampled, logprobs = tokens_of(response)
    return logprobs, policy.logprobs(prompt + sampled, len(prompt))


# A push that works


@pytest.mark.parametrize("transport", ["http", "filesystem", OWN])
def test_after_a_push_the_engine_computes_with_the_new_weights(
    server: Server,
    policy: Policy,
    shared: Path,
    transport: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    back_end: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    page = snippets(ROOT / "docs" / "training.md")
    (tmp_path / OWN.partition(":")[0]).write_text(next(each.text for each in page if "(PushTransport)" in each.text))
    before = server.answer(input=LONG, max_output_tokens=4)
    cached = server.answer(input=LONG, max_output_tokens=4)["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached
    folder = shared if transport != "http" else None
    pusher = push.Pusher([server.url], TOKEN, transport=transport, folder=folder)
    version = pusher.prepare() + 1
    done = pusher.push(version, policy.change(version), policy.proof())
    pusher.finish()
    assert done.version == version and done.difference < 1e-5
    status = server.get("/weights").json()
    assert (status["policy_version"], status["updating"], status["asleep"]) == (version, False, [])
    assert status["transport"] == ["http", "delta", "filesystem", *([] if back_end == VLLM else ["ipc"])]
    after = server.answer(input=LONG, max_output_tokens=20, ignore_eos=True)
    assert after["ng"] == {"policy_version": [[0, 20, version]]}
    assert not after["usage"]["input_tokens_details"]["cached_tokens"], "keys and values of the old weights"
    assert tokens_of(after)[0] == tokens_of(before)[0]
    engine, reference = sampled_logprobs(policy, after)
    assert engine == pytest.approx(reference, abs=1e-4)
    assert list(shared.iterdir()) == []


def test_a_generation_in_flight_continues_with_the_new_weights_and_says_where(
    server: Server, policy: Policy, pusher: Any
) -> None:
    for tokens in (600, 2400, 9600):
        version = pusher.prepare() + 1
        pusher.push(version, policy.change(version), policy.proof())
        with generating(server, tokens) as answer:
            pusher.push(version + 1, policy.change(version + 1), policy.proof())
        response = answer.result().json()
        if response["ng"]["policy_version"] != [[0, tokens, version]]:  # it had not ended before the push came
            break
    (start_0, end_0, first), (start_1, end_1, second) = response["ng"]["policy_version"]
    assert (start_0, end_1, first, second) == (0, tokens, version, version + 1) and 0 < end_0 == start_1 < tokens
    engine, new = sampled_logprobs(policy, response)
    policy.change(version)
    _, old = sampled_logprobs(policy, response)
    assert engine[:end_0] == pytest.approx(old[:end_0], abs=1e-4)
    assert engine[start_1:] == pytest.approx(new[start_1:], abs=1e-4), "not even the context is of the old weights"


def test_in_mode_wait_generations_end_before_the_push(server: Server, policy: Policy) -> None:
    pusher = push.Pusher([server.url], TOKEN, mode="wait")
    version = pusher.prepare()
    with generating(server, 200) as answer:
        pusher.push(version + 1, policy.change(version), policy.proof())
        assert answer.result().json()["ng"] == {"policy_version": [[0, 200, version]]}
    pusher.finish()


@pytest.mark.parametrize("stream", [False, True])
def test_in_mode_abort_generations_end_at_once_and_are_not_answers(
    server: Server, policy: Policy, stream: bool
) -> None:
    pusher = push.Pusher([server.url], TOKEN, mode="abort")
    version = pusher.prepare()
    with generating(server, ENDLESS, stream=stream) as answer:
        pusher.push(version + 1, policy.change(version), policy.proof())
    pusher.finish()
    if stream:
        assert "event: response.completed" not in answer.result().text
        assert "event: response.failed" in answer.result().text
        return
    assert answer.result().status_code == 503
    assert answer.result().json()["retryable"] and "mode abort" in answer.result().json()["detail"]


def test_many_pushes_under_load_lose_no_answer_and_mix_no_versions(server: Server, policy: Policy, pusher: Any) -> None:
    version = pusher.prepare()
    answers: list[dict[str, Any]] = []
    over = threading.Event()

    def ask(number: int) -> None:
        while not over.is_set():
            answers.append(server.answer(input=f"{number} {LONG}", max_output_tokens=16, ignore_eos=True))

    def answers_of(served: int) -> list[dict[str, Any]]:
        return [answer for answer in answers if answer["ng"]["policy_version"] == [[0, 16, served]]]

    def enough_answered_by(served: int) -> bool:
        return len(answers_of(served)) >= 2 or any(client.done() for client in asking)

    with ThreadPoolExecutor(8) as clients:
        asking = [clients.submit(ask, number) for number in range(8)]
        try:
            for step in range(1, 6):
                pusher.push(version + step, policy.change(1000 + step), policy.proof())
                wait_until(partial(enough_answered_by, version + step))
        finally:
            over.set()
    assert all(client.result() is None for client in asking)
    for step in range(1, 6):
        policy.change(1000 + step)
        for answer in answers_of(version + step)[:4]:
            engine, reference = sampled_logprobs(policy, answer)
            assert engine == pytest.approx(reference, abs=1e-4)


def test_the_proof_catches_a_trainer_that_has_other_weights(server: Server, policy: Policy, pusher: Any) -> None:
    weights = {name: tensor.clone() for name, tensor in policy.change(1).items() if name != HEAD}
    policy.change(2)
    with pytest.raises(push.PushFailed, match="not the weights that were trained"):
        pusher.push(pusher.prepare() + 1, weights, policy.proof())


def test_a_server_sleeps_takes_weights_half_awake_and_continues_with_them(
    server: Server, policy: Policy, pusher: Any
) -> None:
    version = pusher.prepare() + 1
    with generating(server, 100) as answer:
        pusher.sleep()
        response = answer.result(PATIENCE_S)  # though no one wakes it
        assert len(tokens_of(response.json())[1]) == 100, "what was in flight ends first"
    assert server.get("/weights").json()["asleep"] == ["kv_cache", "weights"]
    assert server.get("/ready").status_code == 503 and "asleep" in server.get("/ready").json()["detail"]
    with ThreadPoolExecutor(1) as client:
        waiting = client.submit(lambda: server.answer(input=LONG, max_output_tokens=20, ignore_eos=True))
        pusher.wake("weights")
        assert pusher.prepare() == version - 1

        def wake() -> None:
            assert not waiting.done() and version_of(server) == version
            pusher.wake("weights", "kv_cache")

        assert pusher.push(version, policy.change(version), policy.proof(), wake).difference < 1e-5
        after = waiting.result()
    assert server.get("/ready").status_code == 200
    assert after["ng"] == {"policy_version": [[0, 20, version]]}
    engine, reference = sampled_logprobs(policy, after)
    assert engine == pytest.approx(reference, abs=1e-4)


def test_after_a_sleep_that_drops_the_weights_nothing_is_generated_before_a_push(
    server: Server, policy: Policy, pusher: Any
) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    version = pusher.prepare() + 1
    with httpx.Client(base_url=server.url, headers=headers, timeout=PATIENCE_S) as client:
        assert client.post("/weights/sleep", json={"level": 3}).status_code == 422
        client.post("/weights/sleep", json={"level": 2}).raise_for_status()
    pusher.wake("weights")
    with pytest.raises(push.PushFailed, match="and push new ones"):
        pusher.wake("kv_cache")
    done = pusher.push(version, policy.change(version), policy.proof(), lambda: pusher.wake("kv_cache"))
    assert done.difference < 1e-5 and server.get("/ready").status_code == 200


def test_sleep_and_wake_want_the_token_and_twice_is_once(server: Server, pusher: Any) -> None:
    for path in ("/weights/sleep", "/weights/wake"):
        assert server.post(path).status_code == 401
    for act in (pusher.sleep, pusher.sleep, lambda: pusher.wake("weights", "kv_cache"), pusher.wake):
        act()
    assert server.answer(input=LONG, max_output_tokens=2)["status"] in ("completed", "incomplete")


def test_experts_and_an_untied_head_take_new_weights_too(servers: Servers, experts: Experts) -> None:
    pusher = push.Pusher([servers["experts"].url], TOKEN)
    first = pusher.prepare() + 1
    for version in (first, first + 1):
        weights = experts.change(version)
        assert HEAD in weights
        assert pusher.push(version, weights, experts.proof()).difference < 1e-5
    pusher.finish()


# Pushes that break


class Session:
    """The routes by hand."""

    def __init__(self, server: Server, weights: Weights) -> None:
        self.http = httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=PATIENCE_S)
        self.weights = push_files.checkpoint(weights)
        self.version = version_of(server) + 1
        self.id = ""

    def begin(self, **changes: Any) -> httpx.Response:
        tensors = [{"name": name, "shape": list(tensor.shape), "dtype": "F32"} for name, tensor in self.weights.items()]
        reply = self.http.post("/weights", json={"version": self.version, "tensors": tensors, **changes})
        self.id = reply.json().get("push", "")
        return reply

    def send(self, content: bytes, sha256: str | None = None) -> httpx.Response:
        params = {"push": self.id, "sha256": sha256 or hashlib.sha256(content).hexdigest()}
        return self.http.put("/weights/files", params=params, content=content)

    def name(self, path: str, sha256: str) -> httpx.Response:
        return self.http.put("/weights/files", params={"push": self.id, "sha256": sha256}, json={"path": path})

    def commit(self, mode: str = "keep") -> httpx.Response:
        return self.http.post("/weights/commit", params={"push": self.id}, json={"mode": mode})


@pytest.fixture
def session(server: Server, policy: Policy) -> Iterator[Session]:
    with assert_unchanged(server, policy) as session:
        yield session


@pytest.fixture
def hasty(servers: Servers, experts: Experts) -> Iterator[Session]:
    """At the server whose lease is short."""
    with assert_unchanged(servers["experts"], experts) as session:
        yield session


@contextmanager
def assert_unchanged(server: Server, policy: Policy) -> Iterator[Session]:
    """For a push that must change nothing: the server then serves what it served, and takes the next push."""
    pusher = push.Pusher([server.url], TOKEN, patience_s=PATIENCE_S)
    old = pusher.prepare() + 1
    pusher.push(old, policy.change(old), policy.proof())
    proof = policy.proof()
    session = Session(server, policy.change(old + 1))
    with session.http:
        yield session
    wait_until(lambda: not is_updating(server))
    assert version_of(server) == old
    assert pusher.prove(proof) < 1e-5, "the old weights"
    pusher.push(old + 1, policy.change(old + 1), policy.proof())
    pusher.finish()


def damage(weights: Weights, value: float) -> bytes:
    name = list(weights)[-1]
    tensor = weights[name].clone()
    tensor.view(-1)[-1] = value
    return save({**weights, name: tensor})


BROKEN_FILES: dict[str, tuple[Callable[[Weights], bytes], str]] = {
    "nan": (lambda weights: damage(weights, float("nan")), "not every value is finite"),
    "infinite": (lambda weights: damage(weights, float("-inf")), "not every value is finite"),
    "another shape": (lambda weights: save({**weights, "model.norm.weight": torch.ones(2)}), "announced as F32 [32]"),
    "another dtype": (lambda weights: save({name: tensor.half() for name, tensor in weights.items()}), "is F16"),
    "an unknown name": (lambda weights: save({**weights, "model.x": torch.ones(2)}), "model.x: was not announced"),
    "a cut file": (lambda weights: save(weights)[:-7], "not a safetensors file"),
    "no safetensors": (lambda weights: b"\xff" * 100, "not a safetensors file"),
    "a huge header": (lambda weights: b"\xff" * 7 + b"\0" + b"{}", "not a safetensors file"),
    "nothing": (lambda weights: b"", "not a safetensors file"),
    "too much": (lambda weights: bytes(3 << 20), "larger than announced"),
}


@pytest.mark.parametrize("kind", BROKEN_FILES)
def test_a_broken_file_ends_the_push_and_the_old_weights_serve(session: Session, kind: str) -> None:
    make, problem = BROKEN_FILES[kind]
    assert session.begin().status_code == 201
    reply = session.send(make(session.weights))
    assert reply.status_code in (413, 422) and problem in reply.json()["detail"]
    assert session.send(save(session.weights)).status_code == 404
    assert session.commit().status_code == 404


def test_a_wrong_checksum_ends_the_push(session: Session) -> None:
    session.begin()
    reply = session.send(save(session.weights), "0" * 64)
    assert reply.status_code == 422 and "SHA-256" in reply.json()["detail"]
    assert session.send(save(session.weights), "ÿ").status_code == 422
    assert session.commit().status_code == 404


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_pusher_that_dies_while_it_sends_ends_its_push(server: Server, session: Session, share: float) -> None:
    session.begin()
    content = save(session.weights)
    digest = hashlib.sha256(content).hexdigest()
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":")[-1]))) as connection:
        head = (
            f"PUT /weights/files?push={session.id}&sha256={digest} HTTP/1.1\r\nhost: localhost\r\n"
            f"authorization: Bearer {TOKEN}\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        connection.sendall(head.encode() + content[: int(len(content) * share)])
    wait_until(lambda: not is_updating(server))
    assert session.commit().status_code == 404


def test_a_commit_before_everything_has_come_ends_the_push(session: Session) -> None:
    session.begin()
    names = list(session.weights)
    half = {name: session.weights[name] for name in names[::2]}
    assert session.send(save(half)).status_code == 200
    reply = session.commit()
    assert reply.status_code == 422 and names[1] in reply.json()["detail"]


def test_the_same_tensor_twice_ends_the_push(session: Session) -> None:
    session.begin()
    assert session.send(save(session.weights)).status_code == 200
    assert "was already sent" in session.send(save(session.weights)).json()["detail"]


def test_what_is_not_a_checkpoint_of_this_model_is_refused_before_any_byte(session: Session) -> None:
    weights = dict(session.weights)
    session.weights = {**weights, HEAD: weights["model.embed_tokens.weight"]}
    assert "lm_head.weight is not a tensor of this model" in session.begin().json()["detail"]
    session.weights = {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}
    assert "model.norm.weight is missing" in session.begin().json()["detail"]
    session.weights = {**weights, "model.norm.weight": torch.ones(31)}
    assert "has the shape [31], expected [32]" in session.begin().json()["detail"]
    session.weights = weights
    for body in ({"tensors": []}, {"tensors": [{"name": "x", "shape": [-1], "dtype": "F32"}]}, {"tensors": "x"}):
        assert session.begin(**body).status_code == 422
    assert session.begin(version="new").status_code == 422


def test_a_stale_version_is_refused(session: Session) -> None:
    for version in (session.version - 1, session.version - 2):
        reply = session.begin(version=version) if version > 0 else None
        assert reply is None or (reply.status_code == 409 and "stale" in reply.json()["detail"])


def test_the_second_of_two_pushers_has_to_wait(session: Session) -> None:
    session.begin()
    first = session.id
    reply = session.begin()
    assert reply.status_code == 409 and reply.json()["retryable"]
    session.id = "guessed"
    assert session.send(save(session.weights)).status_code == 404
    assert session.commit().status_code == 404
    session.id = first
    assert session.http.delete("/weights", params={"push": first}).status_code == 204
    assert session.begin().status_code == 201
    assert session.http.delete("/weights", params={"push": session.id}).status_code == 204


def test_a_pusher_that_is_silent_loses_its_lease(servers: Servers, hasty: Session) -> None:
    began = time.monotonic()
    assert hasty.begin().json()["lease_s"] == LEASE_S
    wait_until(lambda: not is_updating(servers["experts"]))
    assert time.monotonic() - began >= LEASE_S
    assert hasty.send(save(hasty.weights)).status_code == 404
    reply = hasty.commit()
    assert reply.status_code == 404 and reply.json()["retryable"], "a pusher begins again by itself"


def test_a_push_names_only_files_under_weights_root(session: Session, shared: Path, tmp_path: Path) -> None:
    content = save(session.weights)
    digest = hashlib.sha256(content).hexdigest()
    target = tmp_path / "w.safetensors"
    target.write_bytes(content)
    (shared / "link").symlink_to(target)
    for path in (
        str(target),
        f"../{tmp_path.name}/w.safetensors",
        "link",
        "/etc/passwd",
        "",
        ".",
        "gone",
        "a\0b",
        "x/" * 2500,
        "x" * 5000,
    ):
        session.begin()
        reply = session.name(path, digest)
        assert reply.status_code == 422 and "field 'path'" in reply.json()["detail"], path
    (shared / "link").unlink()


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer", "ÿ"])
def test_without_the_token_no_route_of_the_push_answers(session: Session, authorization: str | None) -> None:
    session.http.headers.pop("authorization")
    headers = {"authorization": authorization.encode("latin-1")} if authorization else {}
    for method, path in [
        ("POST", "/weights"),
        ("PUT", "/weights/files"),
        ("POST", "/weights/commit"),
        ("DELETE", "/weights"),
        ("POST", "/weights/proof"),
    ]:
        reply = session.http.request(method, path, headers=headers, content=b"not even read")
        assert reply.status_code == 401 and ".ngym/head.json" in reply.json()["detail"]
        assert reply.headers["www-authenticate"] == "Bearer"


def test_a_wait_that_takes_too_long_is_given_up(servers: Servers, hasty: Session) -> None:
    server = servers["experts"]
    with endless(server), generating(server, 300) as answer:
        reply = None
        while reply is None or reply.status_code == 404:  # the machine was so busy that the lease ran out before
            hasty.begin()
            hasty.send(save(hasty.weights))
            reply = hasty.commit("wait")
        assert reply.status_code == 409 and "keep or abort" in reply.json()["detail"]
        assert answer.result().json()["ng"] == {"policy_version": [[0, 300, hasty.version - 1]]}
        before = metric(server, "generation_tokens_total")
        wait_until(lambda: metric(server, "generation_tokens_total") > before)


# More


def test_a_commit_is_brought_to_its_end_when_the_pusher_has_gone(
    server: Server, policy: Policy, pusher: Any, back_end: str
) -> None:
    if back_end != VLLM:
        pytest.skip("only vLLM's log says that a commit waits")
    session = Session(server, policy.change(7))
    session.begin()
    session.send(save(session.weights))
    commit = session.http.build_request("POST", "/weights/commit", params={"push": session.id}, json={"mode": "wait"})
    waits = server.log.read_text().count("PAUSED_NEW")
    with endless(server):
        with socket.create_connection(("127.0.0.1", commit.url.port)) as connection:
            head = [f"POST {commit.url.raw_path.decode()} HTTP/1.1", *(f"{k}: {v}" for k, v in commit.headers.items())]
            connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + commit.read())
            wait_until(lambda: server.log.read_text().count("PAUSED_NEW") > waits)  # vLLM says that it waits
        assert version_of(server) < session.version
    wait_until(lambda: version_of(server) == session.version)
    assert pusher.prove(policy.proof(), session.version) < 1e-5
    assert server.answer(input="hi", max_output_tokens=2)["ng"]["policy_version"][0][2] == session.version


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_over_a_bad_network_the_old_or_the_new_weights_serve_and_never_a_mixture(
    servers: Servers, experts: Experts, kind: Kind
) -> None:
    server = servers["experts"]  # its lease is short: what breaks off is soon given up
    with start_blocking_portal() as portal:
        bad = proxy(server.url, kind, latency_s=0.05, bytes_per_s=1_000_000, share=0.4)
        with portal.wrap_async_context_manager(bad) as between:
            for _ in range(4):
                before = version_of(server)
                pusher = push.Pusher([between.url], TOKEN, patience_s=4 if kind == "black hole" else 20)
                with suppress(push.PushFailed):
                    pusher.push(before + 1, experts.change(before + 1), experts.proof())
                    assert version_of(server) == before + 1
                pusher.finish()
                wait_until(lambda: not is_updating(server))
                served = version_of(server)
                assert served in (before, before + 1)
                experts.change(served)
                answer = server.answer(input=LONG, max_output_tokens=10, ignore_eos=True)
                engine, reference = sampled_logprobs(experts, answer)
                assert engine == pytest.approx(reference, abs=1e-4)
            assert between.connections > 4 and (between.broken or kind not in BREAKING)
    pusher = push.Pusher([server.url], TOKEN, patience_s=PATIENCE_S)
    version = pusher.prepare() + 1
    assert pusher.push(version, experts.change(version), experts.proof()).version == version
    pusher.finish()


def test_if_one_replica_is_away_no_replica_changes(server: Server, policy: Policy) -> None:
    with reserved_port() as port:
        away = f"http://127.0.0.1:{port}"
        before = version_of(server)
        pusher = push.Pusher([away, server.url], TOKEN, patience_s=2)
        with pytest.raises(push.PushFailed, match=f"{away}: POST /weights: ConnectionRefusedError"):
            pusher.push(before + 1, policy.change(3), policy.proof())
        pusher.finish()
    status = server.get("/weights").json()
    assert (status["policy_version"], status["updating"], status["asleep"]) == (before, False, [])


def test_a_push_may_come_in_many_files(server: Server, policy: Policy, pusher: Any) -> None:
    session = Session(server, policy.change(8))
    session.begin()
    files = list(push_files.safetensors_files(session.weights, limit=20_000))
    assert len(files) > 4
    assert {session.send(file.content, file.sha256).status_code for file in files} == {200}
    assert session.commit().json()["policy_version"] == session.version
    assert pusher.prove(policy.proof(), session.version) < 1e-5


def test_a_proof_of_no_prompt_of_this_model_is_refused(session: Session) -> None:
    for ids in ([1], [1, -1], [1, 10**6], [1] * (CONTEXT + 1), "x"):
        assert session.http.post("/weights/proof", json={"prompt_token_ids": ids}).status_code == 422


def test_a_pusher_says_what_it_lacks(server: Server, policy: Policy, tmp_path: Path) -> None:
    with pytest.raises(push.PushFailed, match=r"401: .*\.ngym/head\.json"):
        push.Pusher([server.url], "another token").prepare()
    with pytest.raises(UsageError, match=r"dtype torch\.float64"):
        push.Pusher([server.url], TOKEN).push(99, {"x": torch.ones(1, dtype=torch.float64)}, policy.proof())
    with pytest.raises(ValueError, match="filesystem"):
        push.Pusher([server.url], TOKEN, transport="filesystem")


def test_an_engine_that_was_killed_fails_the_push_in_words_and_stops_the_server(
    server: Server, policy: Policy, back_end: str
) -> None:
    import psutil

    if back_end != VLLM:
        pytest.skip("its engine is a thread of the server")
    pusher = push.Pusher([server.url], TOKEN, patience_s=3)
    version = pusher.prepare() + 1
    before = stages()
    session = Session(server, policy.change(version))
    session.begin()
    staged = stages() - before
    assert staged
    [engine] = psutil.Process(server.process.pid).children()
    os.kill(engine.pid, signal.SIGKILL)
    with suppress(httpx.TransportError):  # on a slow machine the server may be gone, too
        reply = session.http.post("/weights/proof", json={"prompt_token_ids": PROMPT})
        assert (reply.status_code, reply.json()["retryable"]) == (503, True), "a trainer is to come again, not to end"
    with pytest.raises(push.PushFailed, match=server.url):
        pusher.push(version, policy.change(version), policy.proof())
    assert server.process.wait(PATIENCE_S) == 1
    assert not staged & stages(), "it takes them away when it ends"
    pusher.finish()


def stages() -> set[Path]:
    places = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return {folder for place in places for folder in place.glob("ngym-weights-*")}


# Without an engine


@pytest.fixture(scope="module")
def staging() -> Any:
    return importlib.import_module("ngym.weight_push.stage")


@pytest.mark.parametrize("second", [TOKEN, "another one"])
def test_a_repeated_token_header_is_not_accepted(second: str) -> None:
    routes = importlib.import_module("ngym.weight_push.routes")
    headers = [(b"authorization", f"Bearer {token}".encode()) for token in (TOKEN, second)]
    routes.check_token(Request({"type": "http", "headers": headers[:1]}), TOKEN)
    with pytest.raises(Unauthorized, match="the weight push needs the header"):
        routes.check_token(Request({"type": "http", "headers": headers}), TOKEN)


def test_a_stage_that_a_killed_server_left_behind_is_swept_away_and_no_other(staging: Any, tmp_path: Path) -> None:
    names = ("living", "dead", "young")
    living, dead, young = (tmp_path / f"{staging.PREFIX}{name}" for name in names)
    for folder in (living, dead, young):
        folder.mkdir()
        (folder / "00000.safetensors").write_bytes(b"x")
    for folder in (living, dead):
        os.utime(folder, (0, 0))
    lock = os.open(living, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    staging._sweep(tmp_path)
    os.close(lock)
    assert sorted(tmp_path.iterdir()) == sorted([living, young])


def test_a_push_that_fits_nowhere_is_refused_with_the_room_there_is(staging: Any) -> None:
    huge = staging.AnnouncedTensor(name="x", shape=(1 << 30, 1 << 20), dtype="F32")
    with pytest.raises(ServiceError, match=r"a push needs 4294967297 MiB, but there are only \d+ MiB in /"):
        staging.Stage([huge], torch.float32)


async def test_a_push_waits_for_the_lock_of_a_stage_outside_of_the_event_loop(
    staging: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = importlib.import_module("ngym.weight_push.routes")

    async def policy_version() -> int:
        return 0

    engine = SimpleNamespace(dtype=torch.float32, asleep=frozenset(), policy_version=policy_version)
    pushes = routes.WeightPush(engine, {"x": (2,)}, routes.PushOptions(TOKEN, None, 60.0))
    starlette = Starlette(routes=[Route(path, route, methods=[how]) for how, path, route, _ in pushes.routes])
    locked_in: list[threading.Thread] = []
    flocked = staging._try_lock

    def recorded(lock: int) -> bool:
        locked_in.append(threading.current_thread())
        return bool(flocked(lock))

    monkeypatch.setattr(staging, "STAGE_FOLDERS", [tmp_path])
    monkeypatch.setattr(staging, "_try_lock", recorded)
    begin = {"version": 1, "tensors": [{"name": "x", "shape": [2], "dtype": "F32"}]}
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(starlette), base_url="http://policy") as client:
        begun = [client.post("/weights", json=begin, headers=headers) for _ in range(2)]
        first, second = await asyncio.gather(*begun, return_exceptions=True)
        assert isinstance(first, httpx.Response) and first.status_code == 201
        assert isinstance(second, ServiceError) and second.status == 409
        assert pushes._current is not None
        pushes._end(pushes._current)
    assert len(locked_in) == 1 and locked_in[0] is not threading.current_thread()


def lock_of(staging: Any, place: Path) -> Path:
    return place / f".{staging.PREFIX}{os.getuid()}.lock"


def test_a_planted_link_in_place_of_the_lock_is_not_followed(
    staging: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "STAGE_FOLDERS", [tmp_path])
    (tmp_path / "victim").write_text("precious")
    lock_of(staging, tmp_path).symlink_to("victim")
    with pytest.raises(ServiceError, match=r"none in /.* \(another process or user has /.*\.lock\)"):
        staging.PrivateFolder(1)
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_lock_that_a_process_keeps_does_not_block_a_push_for_ever(
    staging: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(staging, "STAGE_FOLDERS", [tmp_path, tmp_path / "other"])
    monkeypatch.setattr(staging, "LOCK_TRIES", 2)
    with lock_of(staging, tmp_path).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        private = staging.PrivateFolder(1)
    assert private.path.parent == tmp_path / "other"
    private.remove()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of another user")
def test_files_of_another_user_neither_claim_space_nor_lock(
    staging: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "STAGE_FOLDERS", [tmp_path])
    claim = tmp_path / f"{staging.PREFIX}x"
    claim.mkdir()
    with (claim / staging.PROMISED).open("wb") as promised:
        promised.truncate(1 << 43)
    with pytest.raises(ServiceError, match="there are only -"):
        staging.PrivateFolder(1)
    os.chown(claim, 12345, 12345)
    staging.PrivateFolder(1).remove()
    os.chown(lock_of(staging, tmp_path), 12345, 12345)
    with pytest.raises(ServiceError, match="another process or user has"):
        staging.PrivateFolder(1)


@pytest.mark.parametrize("value", [65_500.0, 1e5])
def test_a_value_that_the_engines_dtype_cannot_hold_is_refused(staging: Any, value: float) -> None:
    tensor = torch.tensor([1.0, value])
    stage = staging.Stage([staging.AnnouncedTensor(name="x", shape=(2,), dtype="F32")], torch.float16)
    content = save({"x": tensor})
    stage.next_file().write_bytes(content)
    try:
        stage.accept(stage.next_file(), hashlib.sha256(content).hexdigest())
        assert value < 65_504
    except BadRequest:
        assert value > 65_504
    finally:
        stage.remove()
