"""The suite on several workers: tests marked `alone` overlap with no other, and slow folders come first."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ALONE = """
import os, pathlib, time
import pytest

def logged(name):
    with open("log", "a") as log:
        log.write(f"begin {name}\\n")
    time.sleep(0.05)
    with open("log", "a") as log:
        log.write(f"end {name}\\n")

@pytest.mark.alone
def test_alone_first(): logged("alone")
def test_shared_first(): logged("shared")
@pytest.mark.alone
def test_alone_second(): logged("alone")
def test_shared_second(): logged("shared")
def test_no_pytest_below_takes_itself_for_a_worker():
    assert not [name for name in os.environ if name.startswith("PYTEST_XDIST_")]
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, root: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A separate suite with the plugin; it is run in a process."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # most of the time of a pytest that runs three tests
    pytester.makeconftest('pytest_plugins = ["parallel"]')
    support = root / "tests" / "support"
    pytester.makeini(f"[pytest]\npythonpath = {support}")
    return pytester


def test_a_test_that_is_marked_alone_overlaps_with_no_other(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_one=ALONE, test_two=ALONE, test_three=ALONE)
    options = ["-p", "xdist.plugin", "-n", "3", "--dist", "loadfile", "--strict-markers"]
    suite.runpytest_subprocess(*options).assert_outcomes(passed=15)
    running: list[str] = []
    for line in (suite.path / "log").read_text().splitlines():
        what, name = line.split()
        if what == "begin":
            assert not running or (name == "shared" and "alone" not in running), "it was not alone"
            running.append(name)
        else:
            running.remove(name)


def test_slow_folders_come_first(suite: pytest.Pytester) -> None:
    for folder in ("services", "system", "trainer", "unit"):
        (suite.mkdir(folder) / f"test_{folder}.py").write_text("def test_a(): pass\ndef test_b(): pass\n")
    lines = suite.runpytest_subprocess("--collect-only", "-q").outlines
    names = [line.split("/")[0] for line in lines if "::" in line]
    assert names == [name for name in ("system", "trainer", "services", "unit") for _ in range(2)]
