"""Fixtures of tests in a browser: one Chromium a file, and pages without errors."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from viewer_process import Viewer, viewer
from waiting import wait_until

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
EXPECT_MS, LONG_MS = 20_000, 60_000  # on an overloaded machine

Page = Any


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """CHROMIUM, or the first that is installed."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need the package playwright")
    playwright.expect.set_options(timeout=EXPECT_MS)
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed, and CHROMIUM names none")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=found, args=["--no-sandbox"], timeout=2 * LONG_MS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Page]:
    """A new page; what it complains about, and whatever it fetches from elsewhere, fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    opened = context.new_page()
    opened.set_default_timeout(LONG_MS)
    complaints: list[str] = []
    opened.on(
        "console",
        lambda message: (
            message.type == "error" and complaints.append(f"{message.text} {message.location.get('url', '')}")
        ),
    )
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("request", lambda request: is_elsewhere(request.url) and complaints.append(request.url))
    yield opened
    context.close()
    assert complaints == []


@contextmanager
def viewer_of(page: Page, *arguments: str | Path, cache: Path) -> Iterator[Viewer]:
    """A viewer until the end of the block; the page, which polls its server, leaves it before the server ends."""
    with viewer(*arguments, cache=cache) as served:
        yield served
        page.goto("about:blank")


def is_elsewhere(url: str) -> bool:
    return not url.startswith(("http://127.0.0.1:", "file:", "data:", "blob:"))


def eventually(page: Page, condition: Callable[[], object]) -> None:
    """wait_until, while the browser continues."""

    def holds() -> object:
        page.wait_for_timeout(20)
        return condition()

    wait_until(holds)


AXE = ROOT / "build" / "axe.min.js"  # scripts/browser fetches it
ASKED = "() => axe.run({ resultTypes: ['violations'] })"


def findings(page: Page) -> list[str]:
    """The critical and serious findings of axe-core on this page: the rule, and the first elements."""
    if not AXE.is_file():
        pytest.skip("no axe-core: scripts/browser fetches it")
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate(ASKED)["violations"]
    bad = [one for one in found if one["impact"] in ("critical", "serious")]
    return [f"{one['id']}: {[node['html'][:200] for node in one['nodes'][:3]]}" for one in bad]
