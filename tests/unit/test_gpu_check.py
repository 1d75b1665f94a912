"""`scripts/gpu_check`: stages that fail, hang or cannot start do not end the others, and its table has all of them."""

from __future__ import annotations

import argparse
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from script_module import script_module

pytestmark = pytest.mark.process


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    return script_module("gpu_check", monkeypatch)


def options(out: Path, **more: Any) -> argparse.Namespace:
    defaults = {"device": "cpu", "only": ["tests", "benchmark"], "seconds": 600.0, "k": "", "out": out}
    defaults |= {"shapes": [], "parts": [], "sides": [], "steps": 5, "micro_batch": 8192, "profile": False}
    return argparse.Namespace(**(defaults | more))


def test_each_stage_has_a_row_whatever_the_others_did(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = sys.executable
    rows = [
        gpu_check.Stage("missing", 60, ["/no/such/program"]),
        gpu_check.Stage("failing", 60, [python, "-c", "print('last words'); raise SystemExit(3)"]),
        gpu_check.Stage("hanging", 5, [python, "-c", "import time; time.sleep(3600)"]),
        gpu_check.Stage("late", 0, [python, "-c", "print('never')"]),
        gpu_check.Stage("benchmark", 60, [python, "-c", "print('noise\\n\\n2026-01-02, CPU; a table')"]),
    ]
    monkeypatch.setattr(gpu_check, "stages", lambda *_: iter(rows))
    assert gpu_check.check(options(tmp_path)) == 1
    report = (tmp_path / "report.md").read_text()
    for row in (
        "| missing | [Errno 2] No such file or directory",
        "| failing | exit code 3 |",
        "last words |",
        "| hanging | not done after 5 s |",
        "| late | not begun |",
        "| benchmark | passed |",
    ):
        assert row in report
    assert report.endswith("2026-01-02, CPU; a table\n\n") and "noise" not in report
    assert report in capsys.readouterr().out
    monkeypatch.setattr(gpu_check, "stages", lambda *_: iter(rows[-1:]))
    assert gpu_check.check(options(tmp_path)) == 0


def test_only_some_builds_of_bitsandbytes_travel(gpu_check: Any, tmp_path: Path) -> None:
    wheel, record = tmp_path / "bitsandbytes-1-py3-none-any.whl", "bitsandbytes-1.dist-info/RECORD"
    names = [f"bitsandbytes/libbitsandbytes_{build}.so" for build in ("cpu", "cuda118", "cuda128", "cuda130", "rocm64")]
    files = ["bitsandbytes/__init__.py", *names, record]
    with zipfile.ZipFile(wheel, "w") as written:
        for name in files:
            written.writestr(name, "".join(f"{one},,\n" for one in files) if name == record else name)
    gpu_check.strip(wheel)
    with zipfile.ZipFile(wheel) as read:
        assert read.namelist() == [name for name in files if "118" not in name and "rocm" not in name]
        assert read.read(record).decode().splitlines() == [f"{name},," for name in read.namelist()]
        assert all(read.read(name) == name.encode() for name in read.namelist() if name != record)
    assert list(tmp_path.iterdir()) == [wheel]


def test_the_stages_are_those_that_were_chosen(gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "WHEELS", tmp_path)
    deadline = time.monotonic() + 600
    with pytest.raises(SystemExit, match="has no wheels; make them first"):
        list(gpu_check.stages(options(tmp_path), tmp_path, deadline))
    (tmp_path / "one.whl").touch()
    on_gpu = {
        stage.name: stage.command for stage in gpu_check.stages(options(tmp_path, device="cuda"), tmp_path, deadline)
    }
    assert list(on_gpu) == ["card", "install", "import", "tests", "benchmark"]
    assert on_gpu["tests"][-2:] == ["-m", "gpu"] and "--tiny" not in on_gpu["benchmark"]
    some = options(tmp_path, only=["benchmark"], shapes=["8B"])
    on_cpu = {stage.name: stage.command for stage in gpu_check.stages(some, tmp_path, deadline)}
    assert list(on_cpu) == ["install", "benchmark"]
    assert "--tiny" in on_cpu["benchmark"] and "8B" in on_cpu["benchmark"]
