"""Runs a failed test once more, alone, after all others; a test that passes then is reported as flaky.

A machine that is busy elsewhere can fail a test that is right. At most MAX_FLAKY such tests pass a run; they are listed
in the summary and in build/flaky.txt, so that they are fixed. A test that fails twice fails the run, as do more failures than
that. `--no-rerun` turns it off.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MAX_FLAKY = 3
FAILED = ("failed", "error")
REPORT = Path("build") / "flaky.txt"
WITHIN_S = 1800  # of one test, with the start of the services of its file


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-rerun", action="store_true", help="do not run a failed test once more")


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Around the summary: what passes the second time is taken out of what failed."""
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(session.config, "workerinput") and not session.config.option.no_rerun:
        flaky = _rerun_alone(session, terminal)
        report = session.config.rootpath / REPORT
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text("".join(f"{each.nodeid}\n{each.longreprtext}\n\n" for each in flaky), encoding="utf-8")
    return (yield)


def _rerun_alone(session: pytest.Session, terminal: pytest.TerminalReporter) -> list[pytest.TestReport]:
    """The reports of the failed tests that pass when they run alone; they no longer fail the session."""
    failed = {report.nodeid for kind in FAILED for report in terminal.stats.get(kind, ())}
    if session.exitstatus != pytest.ExitCode.TESTS_FAILED or not 0 < len(failed) <= MAX_FLAKY:
        return []
    passed = set()
    for nodeid in sorted(failed):
        terminal.write_line(f"\nfailed, runs once more alone: {nodeid}")
        if _run(session.config, nodeid):
            passed.add(nodeid)
    flaky = [report for kind in FAILED for report in terminal.stats.get(kind, ()) if report.nodeid in passed]
    for kind in FAILED:
        terminal.stats[kind] = [report for report in terminal.stats.get(kind, ()) if report.nodeid not in passed]
    if flaky:
        terminal.stats["flaky"] = flaky
    if passed == failed:
        session.exitstatus = pytest.ExitCode.OK
    return flaky


def _run(config: pytest.Config, nodeid: str) -> bool:
    """Whether a test passes in a separate process."""
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "--no-rerun", "-q", "-m", "", nodeid]
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", *options], cwd=config.rootpath, timeout=WITHIN_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return ended.returncode == pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    flaky = terminalreporter.stats.get("flaky", ())
    if flaky:
        terminalreporter.section(f"flaky: failed, and passed alone ({REPORT} has the tracebacks)", yellow=True)
        for report in flaky:
            terminalreporter.write_line(f"{report.nodeid}: {report.longreprtext.strip().splitlines()[-1]}")
