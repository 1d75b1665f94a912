"""A model by its name on the Hugging Face Hub: what is checked before anything heavy is loaded."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from ngym.files.hub_download import hub_model_problem


@pytest.fixture(autouse=True)
def _online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may use the Hub, with an empty cache; what the function sets is undone."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Hub that refuses connections: its URL."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        yield url


class Unknown(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None: ...


def put_in_cache(cache: Path, name: str) -> None:
    """Put a model into the cache as huggingface_hub does."""
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text("{}")


def test_without_the_hub_an_unknown_model_is_one_line_after_one_attempt(nobody: str, tmp_path: Path) -> None:
    problem = hub_model_problem("nobody/nothing")
    assert problem is not None and "\n" not in problem
    assert problem.startswith(f"nobody/nothing is neither a folder nor in {tmp_path}, and {nobody} is not reached: ")
    assert "refused" in problem


@pytest.mark.usefixtures("nobody")
def test_without_the_hub_a_cached_model_is_loaded_from_the_cache(tmp_path: Path) -> None:
    put_in_cache(tmp_path, "some/model")
    assert hub_model_problem("some/model") is None
    assert constants.HF_HUB_OFFLINE


def test_a_hub_that_answers_is_left_to_say_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HTTPServer(("127.0.0.1", 0), Unknown)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    assert hub_model_problem("nobody/nothing") is None
    assert not constants.HF_HUB_OFFLINE
    server.shutdown()
    server.server_close()


def test_a_process_that_is_offline_by_choice_does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    problem = hub_model_problem("nobody/nothing")
    assert problem is not None and problem.endswith("HF_HUB_OFFLINE is set")


def test_training_an_unknown_model_without_the_hub_ends_with_one_line(nobody: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ngym", "train", "grpo.yaml", "model.path=nobody/nothing", "output=out"]
    own = {"HF_ENDPOINT": nobody, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        command, env=os.environ | own, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("model.path: nobody/nothing is neither a folder nor in ")
    assert line.endswith("; name a folder")
