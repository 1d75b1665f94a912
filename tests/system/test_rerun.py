"""The rerun of failed tests: a test that passes alone is flaky and does not fail the run; one that fails twice does."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
from pathlib import Path
import pytest

def fails_once(name):
    mark = Path(__file__).with_name(name)
    if not mark.exists():
        mark.touch()
        raise AssertionError("the machine was busy")

@pytest.fixture
def slow_service():
    fails_once("service")

def test_first(): fails_once("first")
def test_service(slow_service): pass
def test_right(): pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, root: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A separate suite with the plugin and the tests above; it is run in a process."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # most of the time of a pytest that runs three tests
    pytester.makeconftest('pytest_plugins = ["rerun"]')
    pytester.makeini(f"[pytest]\npythonpath = {root / 'tests' / 'support'}")
    pytester.makepyfile(test_busy=TESTS)
    return pytester


def test_a_test_that_passes_alone_is_reported_as_flaky_and_does_not_fail_the_run(suite: pytest.Pytester) -> None:
    result = suite.runpytest_subprocess()
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["*flaky: failed, and passed alone*", "*test_busy.py::test_service*", "*1 passed, 2 flaky*"]
    )
    report = (suite.path / "build" / "flaky.txt").read_text()
    assert "test_busy.py::test_first\n" in report and "AssertionError: the machine was busy" in report


def test_a_test_that_fails_twice_fails_the_run(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_wrong="def test_wrong(): assert 1 == 2")
    result = suite.runpytest_subprocess()
    assert result.ret == 1
    result.stdout.fnmatch_lines(["FAILED test_wrong.py::test_wrong*", "*1 failed, 1 passed, 2 flaky*"])


def test_more_failures_than_luck_explains_are_not_run_again(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_wrong="def test_a(): assert 0\ndef test_b(): assert 0")
    result = suite.runpytest_subprocess()
    assert result.ret == 1
    result.stdout.no_fnmatch_line("*runs once more alone*")
    assert (suite.path / "build" / "flaky.txt").read_text() == ""


def test_the_rerun_can_be_turned_off(suite: pytest.Pytester) -> None:
    assert suite.runpytest_subprocess("--no-rerun").ret == 1
