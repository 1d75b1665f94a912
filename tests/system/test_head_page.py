"""The page of the head in a browser: services, load, failures, and a long rollout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import pytest
from browser_pages import Page, eventually, findings, is_elsewhere
from viewer_process import rollout, viewer, write
from waiting import PATIENCE_S

playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need the package playwright")
LOCAL = build_opener(ProxyHandler({}))
TOKEN = "a-token-of-the-page"
CONFIG = """
ngym: {head: {port: 0}, require_token: LOCKED}
policy:
  kind: model
  app: models/scripted
  latency_s: 600
  replies: [{text: done}]
quick: {kind: model, app: models/scripted, replies: [{text: "<b>done</b>"}]}
counter: {kind: gym_server, app: gym_servers/counter}
slow_agent: {kind: agent, app: agents/simple, gym: counter, model: policy}
quick_agent: {kind: agent, app: agents/simple, gym: counter, model: quick}
judge: {kind: model, url: "http://127.0.0.1:9/<b>"}
"""
ROW = {
    "responses_create_params": {"input": "<img src=x onerror=alert(1)> Leave it."},
    "target": 0,
    "_ng_task_index": 7,
    "_ng_rollout_index": 2,
}


@contextmanager
def ng_run(folder: Path, locked: bool) -> Iterator[dict[str, Any]]:
    """The head's record of a run whose services of ours are ready."""
    (folder / "global_config.yaml").write_text(CONFIG.replace("LOCKED", str(locked).lower()))
    command = [sys.executable, "-m", "ngym", "run", "--json"]
    env = {**os.environ, **({"NGYM_TOKEN": TOKEN} if locked else {})}
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert any(json.loads(line)["event"] == "ready" for line in process.stdout), "it ended before all were ready"
        yield json.loads((folder / ".ngym" / "head.json").read_text())
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)


def post(url: str, body: dict[str, Any]) -> None:
    request = Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        LOCAL.open(request, timeout=PATIENCE_S).close()
    except OSError:
        return  # refused, or the run has ended


def services(head: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = json.loads(LOCAL.open(f"{head['url']}/servers", timeout=PATIENCE_S).read())
    return {server["name"]: server for server in found}


def check_link_of_viewer(page: Page, folder: Path, head: str) -> None:
    """A viewer of a file that grows in the run's folder leads to this page."""
    with viewer(write(folder / "out.jsonl", [rollout()]), cache=folder / "cache") as web_viewer:
        other = page.context.new_page()
        other.goto(web_viewer.report["address"])
        link = other.get_by_role("link", name="rollouts that run now")
        playwright.expect(link).to_have_attribute("href", head)
        other.close()


def test_the_page_shows_load_failures_logs_and_running_rollouts_in_place(page: Page, tmp_path: Path) -> None:
    with ng_run(tmp_path, locked=False) as head:
        urls = {name: server["url"] for name, server in services(head).items()}
        page.goto(head["url"])
        playwright.expect(page.locator("h1")).to_have_text("5 of 6 services ready")
        row = page.locator("#services tr[data-key=quick_agent]")
        playwright.expect(row).to_contain_text("ready")
        page.evaluate("document.querySelector('#services tr[data-key=quick_agent]').mark = 1")
        threading.Thread(target=post, args=(f"{urls['slow_agent']}/run", ROW), daemon=True).start()
        for _ in range(3):
            post(f"{urls['quick_agent']}/run", ROW)
        post(f"{urls['counter']}/no-such-route", {})
        playwright.expect(page.locator("#failures")).to_contain_text("HTTP 404")
        eventually(page, lambda: "ms" in row.inner_text())
        assert page.evaluate("document.querySelector('#services tr[data-key=quick_agent]').mark") == 1
        playwright.expect(page.locator("#models")).to_contain_text("policy")
        playwright.expect(page.locator("#services")).to_contain_text("http://127.0.0.1:9/<b>")
        running = page.locator("#rollouts tbody tr")
        playwright.expect(running).to_have_count(1)
        playwright.expect(running).to_contain_text("slow_agent72model")
        running.get_by_role("button").click()
        playwright.expect(page.locator("dialog")).to_contain_text("<img src=x onerror=alert(1)> Leave it.")
        page.get_by_role("button", name="Close").click()
        check_link_of_viewer(page, tmp_path, head["url"])
        page.locator("#logs summary", has_text="counter").click()
        playwright.expect(page.locator("#logs details[open] .muted")).to_contain_text("counter.log")
        playwright.expect(page.locator("#logs details[open] pre")).not_to_be_empty()
        assert page.locator("img, b b").count() == 0
        try:
            for width, scheme in ((1280, "light"), (390, "dark")):
                page.set_viewport_size({"width": width, "height": 844})
                page.emulate_media(color_scheme=scheme)
                assert findings(page) == []
                assert page.evaluate("document.documentElement.scrollWidth") <= width
        finally:  # a skipped check, too, leaves the page before the run ends
            page.goto("about:blank")


def test_the_interface_is_documented_without_internet(page: Page, browser: Any, tmp_path: Path) -> None:
    with ng_run(tmp_path, locked=False) as head, browser.new_context() as context:
        fetched: list[str] = []
        context.route(is_elsewhere, lambda route: (fetched.append(route.request.url), route.abort()))
        other = context.new_page()  # the logo of ReDoc's maker, which is not fetched, is logged to its console
        named = {head["url"]: ("the head", "/status"), services(head)["counter"]["url"]: ("counter", "/verify")}
        for url, (title, route) in named.items():
            page.goto(f"{url}/docs")
            playwright.expect(page.locator(f".opblock-summary-path[data-path='{route}']")).to_be_visible()
            other.goto(f"{url}/redoc")
            playwright.expect(other.locator("h1", has_text=title)).to_be_visible()
            other.wait_for_load_state("networkidle")
        assert fetched == []
        page.goto("about:blank")


def test_a_browser_asks_for_the_token_of_a_locked_run_at_its_documentation(browser: Any, tmp_path: Path) -> None:
    known = {"username": "any", "password": TOKEN}
    with ng_run(tmp_path, locked=True) as head, browser.new_context(http_credentials=known) as context:
        page = context.new_page()
        page.goto(f"{head['url']}/docs")
        playwright.expect(page.locator(".opblock-summary-path[data-path='/status']")).to_be_visible()
        page.goto("about:blank")


def test_the_page_of_a_locked_run_asks_for_the_token(browser: Any, tmp_path: Path) -> None:
    with ng_run(tmp_path, locked=True) as head, browser.new_context() as context:  # a 401 is logged to its console
        page = context.new_page()
        page.goto(head["url"])
        playwright.expect(page.locator("#locked")).to_be_visible()
        assert "quick_agent" not in page.content()
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="Open").click()
        playwright.expect(page.locator("h1")).to_have_text("5 of 6 services ready")
        playwright.expect(page.locator("#locked")).to_be_hidden()
