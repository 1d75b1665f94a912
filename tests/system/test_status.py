"""ng_status and the metrics of every service, and Prometheus discovery: on a real run, and as functions."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from prometheus_client.parser import text_string_to_metric_families
from waiting import PATIENCE_S

from ngym.cli.status import tables
from ngym.config.service_config import load_config
from ngym.peers import Peers
from ngym.supervise.head_file import http_get
from ngym.supervise.metrics_scraper import LOAD_METRICS, numbers, quantile, read, together
from ngym.supervise.supervisor import Supervisor

CONFIG = """
ngym: {head: {port: 0}, require_token: true}
policy: {kind: model, app: models/scripted, tokens: true, replies: [{text: done}]}
counter: {kind: gym_server, app: gym_servers/counter}
counter_agent: {kind: agent, app: agents/simple, gym: counter, model: policy, replicas: 2}
far: {kind: model, url: "http://127.0.0.1:9"}
"""
ROW = {"responses_create_params": {"input": "Leave it."}, "target": 0}
UNITS = ("_total", "_seconds", "_bytes", "_bucket", "_count", "_sum", "_created", "_info")


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Supervisor]:
    (tmp_path / "global_config.yaml").write_text(CONFIG)
    async with Supervisor(load_config([tmp_path / "global_config.yaml"])) as running:
        peers = Peers(running.urls, token=running.run_token)
        try:
            for _ in range(5):
                await peers["counter_agent"].post("/run", ROW)
            response = await http_get(f"{running.urls['counter'][0]}/nothing", PATIENCE_S, running.run_token)
            assert response.status == 404
        finally:
            await peers.close()
        yield running


async def text_of(stack: Supervisor, url: str) -> str:
    reply = await http_get(url, PATIENCE_S, stack.run_token)
    assert reply.status == 200, reply.body
    return reply.body.decode()


async def test_the_status_the_targets_and_the_metrics_of_a_locked_run(stack: Supervisor, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ngym", "status", "--json", "--interval", "0.1"]
    run = partial(subprocess.run, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    ended = await asyncio.to_thread(run, command, cwd=tmp_path)
    assert ended.returncode == 1, "far is not ready"
    servers = {server["name"]: server for server in json.loads(ended.stdout)["servers"]}
    agent, gym, policy = (servers[name]["metrics"] for name in ("counter_agent", "counter", "policy"))
    assert agent["requests"] == agent["statuses"]["200"] == 5 and not agent["errors"]
    assert gym["statuses"] == {"200": 10, "404": 1} and gym["errors"] == {"ServiceError": 1}
    assert policy["requests"] == 5 and policy["waiting"] == 0 and policy["policy_version"] == 0
    assert 0 < agent["p50_s"] <= agent["p95_s"] and agent["in_flight"] == 0
    assert servers["counter"]["memory_bytes"] > 1 << 20 and servers["counter"]["restarts"] == 0
    assert servers["far"]["metrics"] is None

    found = json.loads(await text_of(stack, f"{stack.head_url}/prometheus/targets"))
    assert [(one["labels"]["service"], one["labels"].get("replica")) for one in found] == [
        ("head", None),
        ("policy", "0"),
        ("counter", "0"),
        ("counter_agent", "0"),
        ("counter_agent", "1"),
    ]
    documented = (ROOT / "docs" / "operations.md").read_text()
    for one in found:
        (target,) = one["targets"]
        for family in text_string_to_metric_families(await text_of(stack, f"http://{target}/metrics")):
            assert family.documentation, family.name
            if family.name.startswith("ngym_") and not family.name.endswith("_created"):
                assert f"`{family.name}" in documented, f"{family.name} is not in docs/operations.md"
                assert all(sample.name.endswith(UNITS) for sample in family.samples if family.type == "counter")
                assert not re.search(r"_(ms|millis|minutes|kb|mb|percent)(_|$)", family.name)


def scrape(**labelled: int) -> str:
    """A service that has answered so many requests with each status, all within 5 to 10 ms."""
    count = sum(labelled.values())
    lines = [f'ngym_requests_total{{route="/run",status="{status[1:]}"}} {n}' for status, n in labelled.items()]
    for bound, within in (("0.005", 0), ("0.01", count), ("+Inf", count)):
        lines.append(f'ngym_request_seconds_bucket{{le="{bound}",route="/run"}} {within}')
    lines += ['ngym_requests_total{route="/metrics",status="200"} 1000', "ngym_requests_in_flight 3"]
    return "\n".join(lines) + "\n"


def test_rates_are_of_the_interval_and_probes_are_not_requests() -> None:
    now = numbers(read(scrape(_200=100), 10.0), read(scrape(_200=120, _503=4), 12.0))
    assert (now.requests, now.requests_per_s, now.in_flight) == (124, 12.0, 2)
    assert now.statuses == {"200": 120, "503": 4}
    assert now.p50_s == pytest.approx(0.0075) and now.p95_s == pytest.approx(0.00975)
    assert now.waiting is None and "waiting" not in now.as_json()


def test_a_service_that_was_started_again_counts_from_nought() -> None:
    assert numbers(read(scrape(_200=100), 0.0), read(scrape(_200=6), 2.0)).requests_per_s == 3.0


def test_replicas_are_added_and_the_oldest_policy_version_is_shown() -> None:
    one = read(scrape(_200=10) + "ngym_policy_version 3\nngym_calls_waiting 1\n", 0.0)
    other = read(scrape(_200=20) + "ngym_policy_version 4\nngym_calls_waiting 2\n", 0.0)
    both = together([one, other])
    assert (both.statuses["200"], both.in_flight, both.waiting, both.policy_version) == (30, 4, 3, 3)
    assert both.buckets[0.01] == 30


@pytest.mark.parametrize("name", ["ngym_calls_waiting", "ngym_answers_waiting", "vllm:num_requests_waiting"])
def test_the_calls_that_wait_are_those_of_every_kind_of_model_server(name: str) -> None:
    assert name in LOAD_METRICS and read(scrape(_200=1) + f"{name} 7\n", 0.0).waiting == 7


def test_a_quantile_of_nothing_is_undefined_and_one_beyond_all_buckets_is_the_largest_bound() -> None:
    assert quantile(0.5, {}) is None and quantile(0.5, {0.1: 0, float("inf"): 0}) is None
    assert quantile(0.5, {0.1: 0, 1.0: 0, float("inf"): 8}) == 1.0


def test_what_is_not_a_metrics_page_is_refused() -> None:
    with pytest.raises(ValueError):
        read("<html>\n<p>hello{</p>", 0.0)


def test_the_table_shows_work_models_and_failures() -> None:
    measured = {"requests": 9, "requests_per_s": 4.5, "p50_s": 0.012, "p95_s": 2.5, "in_flight": 2, "errors_per_s": 0.5}
    counts = {"statuses": {"200": 8, "503": 1}, "errors": {"timeout": 1}}
    of_model = {"input_tokens_per_s": 100.0, "output_tokens_per_s": 20.0, "waiting": 7, "policy_version": 3}
    server: dict[str, Any] = {
        "name": "policy",
        "kind": "model",
        "status": "ready",
        "detail": "",
        "url": "http://a:1",
        "pids": [5],
        "uptime_seconds": 7300.0,
        "started_at": "2026-01-01",
        "restarts": 1,
        "memory_bytes": 3 << 20,
    }
    text = "\n".join(tables("http://head", [{**server, "metrics": measured | counts | of_model}]))
    for words in ("1 of 1 services ready", "2.0 h", "3 MiB", "4.5", "12 ms", "2.5 s", "timeout 1, 503 1 (0.5/s)"):
        assert words in text
    assert re.search(r"policy +100 +20 +7 +3", text)
    assert "1 of 1" in "\n".join(tables("http://head", [{**server, "metrics": None}]))
    long = "needs chess, which cannot be started: " + "no package " * 20
    lines = list(tables("http://head", [{**server, "status": "not ready", "detail": long, "metrics": None}]))
    assert lines[-2:] == ["reasons:", f"  policy: {long}"] and "chess" not in lines[2], "a long reason widens no column"
