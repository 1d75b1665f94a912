"""models/vllm (or another model server) as a separate process, and the tiny checkpoint that it serves."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
from forked import MODEL_SERVER, FdAtStart, Forked
from waiting import PATIENCE_S, wait_until

from ngym.runtime.event_loop import exit_process
from ngym.services.base.runner import ServiceSpec, run

# In tokens. One answer of so many takes half a minute where tokens come fast: it ends when a test ends it.
CONTEXT = 32_768
ENDLESS = CONTEXT - 100
LOADED_S = 5 * PATIENCE_S  # two of them, on an overloaded machine
SERVE = """
import json, socket, sys
from ngym.runtime.event_loop import exit_process
from ngym.services.base.runner import ServiceSpec, run
exit_process(run(ServiceSpec(**json.loads(sys.argv[2])), [socket.socket(fileno=int(sys.argv[1]))]))
"""
TEMPLATE = r"""{%- for m in messages -%}
<|im_start|>{{ m.role if m.role != 'tool' else 'user' }}
{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% else %}
{%- if m.reasoning %}<think>
{{ m.reasoning }}
</think>
{% endif %}{{ m.content or '' }}{% endif %}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass
class Server:
    """A service process, what it answered on its way to ready, and how long that took."""

    process: subprocess.Popen[bytes] | Forked
    url: str
    log: Path
    while_loading: list[httpx.Response] = field(default_factory=list)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE_S)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=PATIENCE_S)

    def answer(self, **body: Any) -> dict[str, Any]:
        reply = self.post("/v1/responses", **body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def end(self) -> None:
        """Have it end, and wait until it has."""
        self.process.terminate()
        self.process.wait(PATIENCE_S)


TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def write_tokenizer(folder: Path, template: str, special: list[str], tags: tuple[str, ...]) -> int:
    """A byte-level tokenizer, as Hugging Face writes it; its number of ids.

    special: left out of texts; the first pads, the last ends a turn, and their ids count from 0. tags: seen in texts.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = 'user assistant tool hello world what is {"name": "add", "arguments": {"a": 1}}'
    bpe.train_from_iterator(
        [words] * 9, trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=alphabet)
    )
    bpe.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=special[0], eos_token=special[-1])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def write_checkpoint(folder: Path) -> Path:
    """A random Qwen3 of 40,000 parameters with a byte-level tokenizer, as Hugging Face writes it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed

    ids = write_tokenizer(folder, TEMPLATE, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], TAGS)
    set_seed(0)
    config = Qwen3Config(
        vocab_size=ids,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.2,  # sharper than a fresh model's: its errors show
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def start(
    folder: Path,
    root: Path,
    name: str,
    options: dict[str, Any],
    *,
    fresh: bool = False,
    app: str = "models/vllm",
    **more: Any,
) -> Server:
    """A model server that loads.

    fresh: a new Python, which imports vLLM itself: where the start is the subject, or the environment is not the tests'
    own. Otherwise the process is forked from one that has imported vLLM: a seventh of the CPU time.
    """
    app_file = root / app / "app.py"
    spec = {"name": name, "kind": "model", "app_file": str(app_file), "options": options, "where": "", "key_where": {}}
    spec |= more
    log = folder / f"{name}.log"
    process: subprocess.Popen[bytes] | Forked
    with socket.socket() as listener, log.open("wb") as output:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        if fresh:
            command = [sys.executable, "-c", SERVE, str(listener.fileno()), json.dumps(spec)]
            process = subprocess.Popen(command, pass_fds=[listener.fileno()], stdout=output, stderr=output, cwd=folder)
        else:
            arguments = (FdAtStart(listener.fileno()), spec)
            process = Forked(MODEL_SERVER, _serve, arguments, folder, os.environ, output.fileno())
        return Server(process, f"http://127.0.0.1:{listener.getsockname()[1]}", log)


def _serve(listener: int, spec: dict[str, Any]) -> None:
    """SERVE, in a forked process."""
    exit_process(run(ServiceSpec(**spec), [socket.socket(fileno=listener)]))


class Servers:
    """`with Servers(...) as servers`: by name, loaded at the same time; one that a test has ended is started again.

    stanzas: what `start` is given of each.
    """

    def __init__(self, folder: Path, root: Path, stanzas: dict[str, dict[str, Any]]) -> None:
        self._start = lambda name: start(folder, root, name, **stanzas[name])
        # Fresh ones last: the first forked one waits for vLLM's imports, and a fresh one would load unobserved meanwhile.
        order = sorted(stanzas, key=lambda name: bool(stanzas[name].get("fresh")))
        started = {name: self._start(name) for name in order}
        self._running = {name: started[name] for name in stanzas}

    def __enter__(self) -> Self:
        try:
            for server in self._running.values():
                wait_until_ready(server)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for server in self._running.values():
            server.end()

    def __getitem__(self, name: str) -> Server:
        if self._running[name].process.poll() is not None:
            self._running[name] = self._start(name)
            wait_until_ready(self._running[name])
        return self._running[name]


def wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + LOADED_S
    while time.monotonic() < deadline:
        try:
            alive, ready = (server.get(path) for path in ("/health", "/ready"))
        except httpx.TransportError:
            with suppress(subprocess.TimeoutExpired):
                server.process.wait(10)
            assert server.process.poll() is None, f"it died:\n{server.log.read_text()[-3000:]}"
            raise
        assert alive.json() == {"status": "ok"}
        if ready.status_code == 200:
            return
        server.while_loading.append(ready)
        time.sleep(0.2)
    raise AssertionError(f"not ready after {LOADED_S} s:\n{server.log.read_text()[-3000:]}")


def tokens_of(response: dict[str, Any]) -> tuple[list[int], list[int], list[float]]:
    last = response["output"][-1]
    return last["prompt_token_ids"], last["generation_token_ids"], last["generation_log_probs"]


def user(content: str | list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "user", "content": content}


def metric(server: Server, name: str) -> float:
    metrics = server.get("/metrics").text
    return float(re.findall(rf"^(?:vllm:|ngym_){name}(?:{{.*}})? (.*)$", metrics, re.MULTILINE)[0])


@contextmanager
def endless(server: Server) -> Iterator[Iterator[str]]:
    """An answer is being generated for as long as the block lasts, however fast the machine is. Yields its further lines."""
    body = {"input": "hi", "max_output_tokens": ENDLESS, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/responses", json=body, timeout=PATIENCE_S) as reply:
        lines = reply.iter_lines()  # when no one holds it any more, the connection is closed
        while next(lines) != "event: response.output_text.delta":
            pass
        yield lines


class generating:
    """A long answer in another thread, of which the first tokens are there."""

    def __init__(self, server: Server, tokens: int, **more: Any) -> None:
        self._server = server
        self._body = {"input": "hi", "max_output_tokens": tokens, "ignore_eos": True, **more}
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> Future[httpx.Response]:
        before = metric(self._server, "generation_tokens_total")
        future = self._thread.submit(lambda: self._server.post("/v1/responses", **self._body))
        wait_until(lambda: future.done() or metric(self._server, "generation_tokens_total") >= before + 10)
        return future

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()
