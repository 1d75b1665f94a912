"""`ng_push` and `hf://` inputs: huggingface_hub against a local server with the Hub's routes."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from waiting import reserved_port

REPO = "me/mine"
COMMIT = "c" * 40
ROW = {"responses_create_params": {"input": "x"}, "agent_ref": {"name": "sums"}, "response": {"output": []}}

FAILED = {name: value for name, value in ROW.items() if name != "response"} | {"failure": {"class": "timeout"}}


class Hub(ThreadingHTTPServer):
    """Repositories in memory. Weights are uploaded as LFS objects, other files within the commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Routes)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.is_private = True
        self.created: list[dict[str, Any]] = []
        self.objects: dict[str, bytes] = {}
        self.files: dict[str, bytes] = {}  # datasets/me/mine/README.md -> content


class Routes(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.startswith("/api/") and self.headers["Authorization"] != "Bearer hf_right":
            return self.answer({"error": "Invalid username or password."}, 401)
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(text))
            return self.answer({"url": f"{self.server.url}/{REPO}", "id": REPO})
        if self.path.endswith("/preupload/main"):
            modes = [
                {"path": each["path"], "shouldIgnore": False}
                | {"uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular"}
                for each in json.loads(text)["files"]
            ]
            return self.answer({"files": modes})
        if self.path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(text)["objects"]
            action = {"upload": {"href": f"{self.server.url}/put", "header": {}}}
            return self.answer({"transfer": "basic", "objects": [{**each, "actions": action} for each in objects]})
        match = re.fullmatch(r"/api/(models|datasets)/me/mine/commit/main", self.path)
        assert match, self.path
        folder = f"{'datasets/' if match[1] == 'datasets' else ''}{REPO}"
        for line in map(json.loads, text.splitlines()):
            if line["key"] == "file":
                self.server.files[f"{folder}/{line['value']['path']}"] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "lfsFile":
                self.server.files[f"{folder}/{line['value']['path']}"] = self.server.objects[line["value"]["oid"]]
        self.answer({"commitUrl": f"{self.server.url}/{folder}/commit/{COMMIT}", "commitOid": COMMIT})

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.objects[hashlib.sha256(content).hexdigest()] = content
        self.answer({})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.path == f"/api/models/{REPO}":
            return self.answer({"id": REPO, "private": self.server.is_private})
        name = self.path.lstrip("/").replace("/resolve/main/", "/")
        content = self.server.files.get(name)
        if content is None:
            return self.answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        etag = hashlib.sha1(content).hexdigest()
        self.answer(content, more={"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    def answer(self, body: Any, status: int = 200, more: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def ng(url: str, *words: str, token: str = "hf_right") -> tuple[int, str, str]:
    """Runs a command of ng, or a program (-c), that knows this Hub; without Xet, which the server does not speak."""
    own = {"HF_ENDPOINT": url, "HF_TOKEN": token, "HF_HOME": "home", "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, *(words if words[0] == "-c" else ("-m", "ngym", *words))]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout, done.stderr


def push(hub: Hub, *words: str, token: str = "hf_right") -> tuple[int, str, str]:
    return ng(hub.url, "push", *words, token=token)


def facts(card: bytes) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(card.split(b"---\n")[1])
    return found


def test_a_run_becomes_a_model_with_a_card_of_its_recipe_and_last_metrics(hub: Hub, tmp_path: Path) -> None:
    policy = tmp_path / "run" / "policy"
    policy.mkdir(parents=True)
    (policy / "config.json").write_text("{}")
    (policy / "model.safetensors").write_bytes(b"weights" * 1000)
    (policy / ".git").mkdir()
    for hidden in (".git/config", ".env"):
        (policy / hidden).write_text("secret")
    recipe = {
        "algorithm": {"name": "grpo"},
        "teacher": {"api_key": "sk-secret"},
        "model": {"path": "Qwen/Qwen3-0.6B"},
        "data": f"{tmp_path}/rows.jsonl",
    }
    (tmp_path / "run" / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n{"step": 2, "loss": 0.5, "lr": 1}\n')
    code, stdout, stderr = push(hub, "run", REPO, "--private", "--json", token="hf_right\n")
    assert code == 0, stderr
    assert json.loads(stdout) == {
        "kind": "model",
        "repository": REPO,
        "files": ["config.json", "model.safetensors", "README.md"],
        "url": f"{hub.url}/{REPO}",
        "commit": COMMIT,
    }
    assert hub.created[0]["visibility"] == "private" and hub.files[f"{REPO}/model.safetensors"] == b"weights" * 1000
    card = hub.files[f"{REPO}/README.md"]
    assert facts(card)["base_model"] == "Qwen/Qwen3-0.6B" and facts(card)["tags"] == ["ngym", "grpo"]
    assert (
        b"| `loss` | 0.5 |" in card
        and b"data: rows.jsonl" in card
        and b"secret" not in card
        and str(tmp_path).encode() not in card
    )
    hub.is_private = False
    before = dict(hub.files)
    code, _, stderr = push(hub, "run", REPO, "--private")
    assert code == 1 and stderr.startswith(f"{REPO}: exists and is public;") and hub.files == before
    (policy / "README.md").write_text("mine")
    assert push(hub, "run/policy", REPO)[0] == 0 and hub.files[f"{REPO}/README.md"] == b"mine"


def test_rollouts_become_a_dataset_that_is_an_input_by_its_address(hub: Hub, tmp_path: Path) -> None:
    rows = [{**ROW, "reward": 0.5}, {**ROW, "reward": 1}, {**ROW, "reward": None}, FAILED]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rollouts.jsonl").write_text(text)
    code, stdout, stderr = push(hub, "rollouts.jsonl", REPO)
    assert code == 0, stderr
    assert stdout == f"uploaded 2 files to {hub.url}/datasets/{REPO}, commit {COMMIT[:12]}\n"
    card = hub.files[f"datasets/{REPO}/README.md"]
    assert facts(card)["configs"][0]["data_files"] == [{"split": "train", "path": ["data/rollouts.jsonl"]}]
    assert b"| `sums` | 2 | 1 | 1 | 0.75 |" in card

    address = f"hf://datasets/{REPO}/data/rollouts.jsonl"
    program = (
        "import sys; from pathlib import Path; from ngym.files.hub_download import local_copy;"
        "from ngym.trainer.recipe.objective import existing;"
        "copy = local_copy(Path(sys.argv[1])); assert existing(sys.argv[1]) == str(copy.absolute());"
        "sys.stdout.write(copy.read_text())"
    )
    code, stdout, stderr = ng(hub.url, "-c", program, address)
    assert stdout == text, stderr
    collect = ("collect_rollouts", "--agent", "sums", "--output", "out.jsonl", "--dry-run", "--input")
    code, _, stderr = ng(hub.url, *collect, address.replace("rollouts.jsonl", "other.jsonl"))
    assert code == 2 and stderr.startswith(f"hf://datasets/{REPO}/data/other.jsonl: cannot be downloaded: ")
    assert stderr.count("\n") == 1, stderr
    code, _, stderr = ng(hub.url, *collect, "hf://me/mine")
    assert code == 2 and "not of the form hf://datasets/OWNER/NAME/PATH" in stderr


def test_what_cannot_be_pushed_is_one_line(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl").write_text(json.dumps({**ROW, "reward": 1}) + "\n")
    (tmp_path / "tasks.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n  \n")
    for words, code, message in [
        *(
            (("rollouts.jsonl", name), 2, f"{name}: not a repository of the Hub; name it OWNER/NAME")
            for name in ("mine", "me/x..y", "me/x--y", "me/.x", "me/x.git", "mé/x")
        ),
        (("nothing.jsonl", REPO, "--dry-run"), 2, "nothing.jsonl: no rows in it"),
        (("rollouts.jsonl", "blank.jsonl", REPO), 2, "blank.jsonl: no rows in it"),
        (("tasks.jsonl", REPO), 2, "tasks.jsonl:1: not a rollout: it has neither a reward nor a failure"),
        (("empty", REPO), 2, "empty: neither rollouts (a JSONL file) nor a policy"),
        (
            ("rollouts.jsonl", "empty", REPO),
            2,
            "empty is a folder, and rollouts.jsonl is a file of rollouts; push each",
        ),
    ]:
        found = push(hub, *words)
        assert found[0] == code and found[2].startswith(message) and found[2].count("\n") == 1, found
    result = push(hub, "rollouts.jsonl", REPO, token="hf_wrong")
    assert (
        result[0] == 1 and result[2].startswith(f"{REPO}: not uploaded to {hub.url}: ") and result[2].count("\n") == 1
    ), result
    for token in ("hf_right\nx", "hf_é"):
        found = push(hub, "rollouts.jsonl", REPO, token=token)
        assert found[0] == 2 and "so it is no token" in found[2] and token[3:] not in found[2], found
    with reserved_port() as port:
        code, _, stderr = ng(f"http://127.0.0.1:{port}", "push", "rollouts.jsonl", REPO)
    assert code == 1 and stderr.startswith(f"{REPO}: not uploaded to http://127.0.0.1:{port}: "), stderr
    assert stderr.count("\n") == 1, stderr
    before = dict(hub.files)
    code, stdout, stderr = push(hub, "rollouts.jsonl", REPO, "--dry-run")
    assert code == 0 and stdout.startswith("---\ntags:") and "nothing was uploaded" in stderr and hub.files == before
