"""Traces and logs: spans in an OTLP/HTTP receiver, and the log files of real service processes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from otlp_receiver import Received, receiver
from waiting import PATIENCE_S, reserved_port

from ngym.net.request_context import trace_ids
from ngym.telemetry import tracing

CONFIG = """
ngym: {{head: {{port: 0}}, logs: {logs}, tracing: {{endpoint: "{endpoint}", sample: {sample}, contents: {contents}}}}}
policy:
  kind: model
  app: models/scripted
  model: acme-1
  tokens: true
  replies: [{{turn: 1, tool_calls: [{{name: add, arguments: {{amount: 5}}}}]}}, {{turn: 2, text: all done}}]
counter: {{kind: gym_server, app: {gym}}}
counter_agent: {{kind: agent, app: agents/simple, gym: counter, model: policy}}
"""
BROKEN = '''"""broken: says something in every way there is, and then cannot score."""

import logging
import warnings

from pydantic import BaseModel

from ngym import VerifyRequest, gym_server

print("imported")


class Add(BaseModel):
    amount: int


async def add(body: Add) -> dict[str, int]:
    """Add."""
    print("adding")
    warnings.warn("of old age", stacklevel=1)
    logging.getLogger("a.library").info("two\\nlines")
    logging.getLogger("uvicorn.error").error("as uvicorn says it")
    return {"total": 5}


async def verify(task: VerifyRequest) -> float:
    raise ValueError("cannot score this")


app = gym_server(tools=[add], verify=verify)
'''
COMMAND = "collect_rollouts --config global_config.yaml --agent counter_agent --input tasks.jsonl --output out.jsonl"
SPANS = 6  # of a rollout: itself, its agent, two calls of the model, one of a tool, verify


@dataclass(frozen=True)
class CollectionResult:
    """A collection with services of its own that has ended. rows, failures: of its files. log: the gym server's."""

    code: int
    output: str
    rows: list[dict[str, Any]]
    failures: list[dict[str, Any]]
    log: str


def run_collection(
    folder: Path, endpoint: str, rows: int = 1, gym: str = "gym_servers/counter", **settings: Any
) -> CollectionResult:
    fields = {"logs": "text", "sample": 1.0, "contents": "false", **settings}
    (folder / "gym_servers").mkdir()
    (folder / "gym_servers" / "broken.py").write_text(BROKEN)
    (folder / "global_config.yaml").write_text(CONFIG.format(endpoint=endpoint, gym=gym, **fields))
    task = {"responses_create_params": {"input": "Make it five.", "temperature": 0.5}, "target": 5}
    (folder / "tasks.jsonl").write_bytes(b"".join(orjson.dumps({**task, "n": n}) + b"\n" for n in range(rows)))
    command = [sys.executable, "-m", "ngym", *COMMAND.split(), "--max-attempts", "1"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    return CollectionResult(
        ended.returncode,
        ended.stdout + ended.stderr,
        _lines(folder / "out.jsonl"),
        _lines(folder / "out_failures.jsonl"),
        (folder / ".ngym/logs/counter.log").read_text(),
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


@dataclass(frozen=True)
class TracedCollection:
    collection: CollectionResult
    received: Received


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> TracedCollection:
    """One rollout that went well. Processes tell what is left before they end."""
    with receiver() as received:
        return TracedCollection(run_collection(tmp_path_factory.mktemp("good"), received.url), received)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> TracedCollection:
    """One that could not be scored; its contents are reported."""
    with receiver() as received:
        folder = tmp_path_factory.mktemp("broken")
        return TracedCollection(
            run_collection(folder, received.url, gym="gym_servers/broken", contents="true"), received
        )


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> TracedCollection:
    """Thirty of those, of which about half are traced; logs in JSON."""
    with receiver() as received:
        folder = tmp_path_factory.mktemp("half")
        settings: dict[str, Any] = {"gym": "gym_servers/broken", "logs": "json", "sample": 0.5, "rows": 30}
        return TracedCollection(run_collection(folder, received.url, **settings), received)


def test_a_rollout_is_one_trace_across_all_processes(good: TracedCollection) -> None:
    assert good.collection.code == 0, good.collection.output
    received, (row,) = good.received, good.collection.rows
    ids = trace_ids(row["ng"]["rollout_id"])
    assert received.paths == {"/v1/traces"}
    assert {span.trace for span in received.spans} == {ids.trace} and len(received.spans) == SPANS
    assert {span.service for span in received.spans} == {"ng_collect_rollouts", "counter_agent", "policy", "counter"}

    (rollout,), (agent,) = received.spans_named("rollout"), received.spans_named("invoke_agent counter_agent")
    (tool,), (verify,) = received.spans_named("execute_tool add"), received.spans_named("verify")
    first, second = received.spans_named("chat acme-1")
    assert (rollout.id, rollout.parent, agent.parent) == (ids.span, "", rollout.id)
    assert {span.parent for span in (first, second, tool, verify)} == {agent.id}
    assert rollout.start_ns <= agent.start_ns <= first.start_ns <= first.end_ns <= tool.start_ns
    assert tool.end_ns <= second.start_ns <= second.end_ns <= verify.start_ns <= verify.end_ns <= agent.end_ns


def test_spans_carry_the_attributes_of_the_genai_conventions_and_no_contents(good: TracedCollection) -> None:
    received, (row,) = good.received, good.collection.rows
    first, second = (span.attributes for span in received.spans_named("chat acme-1"))
    usage = row["response"]["usage"]
    assert first["gen_ai.operation.name"] == "chat" and first["gen_ai.request.model"] == "acme-1"
    assert first["gen_ai.request.temperature"] == 0.5 and first["ngym.policy_version"] == 0
    assert first["gen_ai.response.finish_reasons"] == ["tool_calls"]
    assert second["gen_ai.response.finish_reasons"] == ["stop"]
    for way in ("input_tokens", "output_tokens"):
        assert first[f"gen_ai.usage.{way}"] + second[f"gen_ai.usage.{way}"] == usage[way] > 0
    tool, verify = received.spans_named("execute_tool add")[0].attributes, received.spans_named("verify")[0].attributes
    assert (tool["gen_ai.operation.name"], tool["gen_ai.tool.name"]) == ("execute_tool", "add")
    assert verify["gen_ai.evaluation.score.value"] == 1.0
    agent, rollout = (
        received.spans_named("invoke_agent counter_agent")[0].attributes,
        received.spans_named("rollout")[0].attributes,
    )
    assert (agent["gen_ai.operation.name"], agent["gen_ai.agent.name"]) == ("invoke_agent", "counter_agent")
    assert (rollout["ngym.status"], rollout["ngym.reward"], rollout["ngym.task.index"]) == ("ok", 1.0, 0)
    assert all(span.attributes["ngym.rollout.id"] == row["ng"]["rollout_id"] for span in received.spans)
    everything = json.dumps([span.attributes for span in received.spans])
    assert not any(text in everything for text in ("Make it five", "all done", "amount"))


def test_contents_are_recorded_where_the_config_wants_them(broken: TracedCollection) -> None:
    first, second = (span.attributes for span in broken.received.spans_named("chat acme-1"))
    tool = broken.received.spans_named("execute_tool add")[0].attributes
    assert "Make it five" in first["ngym.model.input"] and "all done" in second["ngym.model.output"]
    assert "generation_token_ids" not in second["ngym.model.output"]
    assert json.loads(tool["gen_ai.tool.call.arguments"]) == {"amount": 5}
    assert json.loads(json.loads(tool["gen_ai.tool.call.result"])) == {"total": 5}


def test_a_failure_is_a_span_with_its_class(broken: TracedCollection) -> None:
    assert broken.collection.code == 1, broken.collection.output
    (rollout,), (verify,) = broken.received.spans_named("rollout"), broken.received.spans_named("verify")
    assert rollout.failed and rollout.attributes["error.type"] == "verify_error"
    assert verify.failed and verify.attributes["error.type"] == "verify_error"
    assert not broken.received.spans_named("execute_tool add")[0].failed


def test_a_rollout_is_traced_by_every_service_or_by_none(half: TracedCollection) -> None:
    ids = {trace_ids(row["ng"]["rollout_id"]).trace for row in half.collection.failures}
    sampled = {trace for trace in ids if int(trace[16:], 16) < 2**63}
    traced = [span.trace for span in half.received.spans]
    assert len(ids) == 30 and 0 < len(sampled) < 30
    assert set(traced) == sampled and all(traced.count(trace) == SPANS for trace in sampled)


def test_a_collector_that_is_down_costs_nothing_but_spans(tmp_path: Path) -> None:
    with reserved_port() as nobody:
        done = run_collection(tmp_path, f"http://127.0.0.1:{nobody}", rows=20)
    assert done.code == 0, done.output
    assert [row["reward"] for row in done.rows] == [1.0] * 20 and not done.failures


def test_every_line_of_a_log_in_json_is_an_object_that_names_time_level_service_and_rollout(
    half: TracedCollection,
) -> None:
    lines = [json.loads(line) for line in half.collection.log.splitlines()]
    assert all({"time", "level", "service", "message"} <= line.keys() for line in lines)
    assert {line["service"] for line in lines} == {"counter"}
    rollouts = {row["ng"]["rollout_id"] for row in half.collection.failures}
    assert {line["level"] for line in lines if line["message"] in ("imported", "adding")} == {"INFO"}  # printed
    for logger, words in (("a.library", "two\nlines"), ("uvicorn.error", "as uvicorn says it")):
        records = [line for line in lines if line.get("logger") == logger and line["message"] == words]
        assert {line["rollout_id"] for line in records} == rollouts
    (warned,) = [line for line in lines if line.get("logger") == "py.warnings"]  # Python says it once
    assert "of old age" in warned["message"] and warned["rollout_id"] in rollouts
    failed = [line for line in lines if "cannot score this" in line["message"]]
    assert {line["rollout_id"] for line in failed} == rollouts
    assert all('raise ValueError("cannot score this")' in line["exception"] for line in failed)


def test_a_line_of_a_log_in_text_names_its_service_and_rollout(broken: TracedCollection) -> None:
    (failure,) = broken.collection.failures
    rollout_id = failure["ng"]["rollout_id"]
    assert f" WARNING counter ngym.services [{rollout_id}] POST /verify: verify failed" in broken.collection.log
    assert "Traceback" in broken.collection.log


def test_without_a_destination_a_span_is_nothing() -> None:
    assert tracing.span("anything") is tracing.OFF
    with tracing.span("anything") as span:
        span.set("a", 1)
        assert not span.is_recording


def test_opentelemetry_is_only_imported_where_traces_are_configured() -> None:
    code = "import sys, ngym.services.base.runner, ngym.cli.rollouts.collect_run; sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S, check=False).returncode == 0
