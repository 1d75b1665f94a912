"""`ng_train --sweep`: its runs and folders, refusals before the first run, and failed runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from waiting import running, wait_until

from ngym.cli.train import main
from ngym.errors import UsageError
from ngym.trainer import sweep as grid

TINY = ["hidden_size=32", "intermediate_size=48", "num_key_value_heads=2", "head_dim=8"]
SHAPE = [f"model.from_scratch.{size}" for size in TINY]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_names(*sweeps: str) -> list[tuple[str, dict[str, str]]]:
    return [(run.name, run.values) for run in grid.combinations(grid.axes(sweeps))]


def test_a_sweep_is_every_combination_and_each_has_a_name_that_shows_it() -> None:
    assert run_names("optimizer.lr=1e-6,3e-6", "seed=0,1") == [
        (f"lr={lr},seed={seed}", {"optimizer.lr": lr, "seed": seed}) for lr in ("1e-6", "3e-6") for seed in ("0", "1")
    ]


@pytest.mark.parametrize(
    ("sweep", "names"),
    [
        ("optimizer.betas=[0.9,0.95], [0.9, 0.99]", ["betas=0.9-0.95", "betas=0.9-0.99"]),
        ("model.path=runs/a/policy,../b", ["path=runs-a-policy", "path=..-b"]),
        ("max_steps=null,-1,'2'", ["max_steps=null", "max_steps=-1", "max_steps=2"]),
        ("schedule={name: linear, final: 0.1}", ["schedule=name-linear-final-0.1"]),
        ("a=x/y,x-y", ["a=x-y-", "a=x-y-"]),
        (f"a={'u/' * 200}v", ["a="]),
    ],
)
def test_a_value_of_any_kind_gives_a_name_that_a_folder_can_have(sweep: str, names: list[str]) -> None:
    found = [name for name, _ in run_names(sweep)]
    assert len(found) == len(set(found)) == len(names)
    assert all(name.startswith(expected) for name, expected in zip(found, names, strict=True))
    assert all(len(name) < 100 and not set(name) & set("/\\ '\"[]{}") for name in found)


@pytest.mark.parametrize(
    ("sweeps", "message"),
    [
        (["lr"], "--sweep 'lr' is not of the form key=value,value"),
        (["lr="], "give at least one value"),
        (["lr=1,,2"], "not a list of YAML values"),
        (["lr=1],[2"], "not a list of YAML values"),
        (["lr=1,1"], "the value 1 stands twice"),
        (["lr=1", "lr=2"], "--sweep lr: given 2 times"),
    ],
)
def test_a_sweep_that_cannot_be_read_is_one_line(sweeps: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        grid.axes(sweeps)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_every_run_is_checked_before_one_starts_and_a_mistake_is_reported_once(here: Path) -> None:
    sweeps = ["--sweep", "engine.precision=fp32,bf16", "--sweep", "seed=0,1"]
    result = CliRunner().invoke(main, ["sft.yaml", "optimizer.lrr=1", "output=swept", *sweeps])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[0] == "command line: unknown key 'optimizer.lrr' (did you mean 'lr'?)"
    assert "engine.precision: the float32 master weights" in result.stderr.splitlines()[1]
    assert result.stderr.splitlines()[1].endswith("(in the run precision=bf16,seed=0 and 1 more)")
    assert len(result.stderr.splitlines()) == 2 and not list(here.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seed=3", "--sweep", "seed=0,1"], "--sweep seed: seed is among the overrides, too; keep one of the two"),
        (["--sweep", "output=a,b"], "each run gets a separate folder"),
        (["output=runs/${seed}x", "--sweep", "seed=0,1"], "output depends on a key that is swept"),
    ],
)
def test_a_sweep_that_contradicts_itself_is_refused(here: Path, words: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["sft.yaml", *words])
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1
    assert not list(here.iterdir())


def test_a_launcher_would_start_the_sweep_on_every_rank(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(main, ["sft.yaml", "--sweep", "seed=0,1"])
    assert result.exit_code == 2 and "--sweep starts its runs itself" in result.stderr


def test_a_run_knows_the_folder_of_its_sweep(tmp_path: Path) -> None:
    ended = grid.run_command([sys.executable, "-c", "import os; print(os.environ['NGYM_SWEEP'])"], tmp_path / "a.log")
    assert ended == (0, str(tmp_path))


def test_a_run_whose_output_cannot_be_kept_or_shown_ends(tmp_path: Path) -> None:
    """Nothing read its output after the first line, and it waited for a reader once the pipe was full."""
    (tmp_path / "full.log").symlink_to("/dev/full")
    prints = "for n in range(3000): print(str(n) * 100)"
    program = (
        "import sys; from pathlib import Path; from ngym.trainer import sweep\n"
        f"sweep.run_command([sys.executable, '-c', {prints!r}], Path(sys.argv[1]))\n"
    )
    for name, closed in (("full.log", False), ("run.log", True)):
        command = [sys.executable, "-c", program, str(tmp_path / name)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stderr is not None
            first = process.stdout.readline()
            shown = b"" if closed else process.stdout.read()
            process.stdout.close()
            said = process.stderr.read().decode()
        assert first.startswith(b"0000") and (closed or shown.endswith(b"2999\n"))
        place = "standard output" if closed else str(tmp_path / name)
        assert said.splitlines()[0].startswith(f"{place}: the run's output is lost: "), said
    assert (tmp_path / "run.log").read_text().endswith("2999\n")


def test_a_dry_run_lists_the_runs_and_writes_nothing(here: Path) -> None:
    words = ["sft.yaml", "output=swept", "--sweep", "optimizer.lr=1e-3,4e-3", "--sweep", "seed=0,1", "--dry-run"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0 and not list(here.iterdir())
    assert result.stdout.splitlines()[1] == "swept/lr=1e-3,seed=1  optimizer.lr=1e-3 seed=1"
    assert len(result.stdout.splitlines()) == 4


def demonstrations(root: Path, folder: Path) -> None:
    script = root / "data" / "calculator" / "generate.py"
    subprocess.run(
        [sys.executable, script, "demonstrations", "--output", folder / "few.jsonl", "--count", "32"], check=True
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "swept" / "sweep.jsonl").read_text().splitlines()]


def test_a_run_that_breaks_is_a_row_and_what_is_finished_is_not_run_again(root: Path, here: Path) -> None:
    demonstrations(root, here)
    words = [sys.executable, "-m", "ngym", "train", "sft.yaml", *SHAPE, "data.path=few.jsonl", "output=swept"]
    sweep = ["--sweep", "data.max_tokens=null,1"]
    first = subprocess.run([*words, *sweep], capture_output=True, text=True, timeout=600, check=False)
    assert first.returncode == 1 and "1 of 2 runs failed" in first.stderr, first
    finished, broken = rows(here)
    assert finished["run"] == "max_tokens=null" and finished["values"] == {"data.max_tokens": "null"}
    assert finished["status"] == "finished" and 6 < finished["metrics"]["loss"] < 8 and finished["problem"] is None
    assert broken["status"] == "failed" and broken["exit_code"] == 2 and broken["metrics"] == {}
    assert broken["problem"] == "few.jsonl: no sample to train on: all are longer than 1 tokens (data.max_tokens)"
    assert (here / "swept" / "max_tokens=null" / "policy" / "model.safetensors").exists()
    assert broken["problem"] in (here / "swept" / "max_tokens=1.log").read_text()
    table = first.stdout.splitlines()[-3:]
    assert table[0].split() == ["run", "status", "loss", "seconds"]
    assert table[1].split()[:2] == ["max_tokens=null", "finished"] and table[2].endswith(broken["problem"])

    before = (here / "swept" / "max_tokens=null" / "metrics.jsonl").read_bytes()
    again = CliRunner().invoke(main, [*words[4:], "--sweep", "data.max_tokens=null"])
    assert again.exit_code == 0 and "finished already, skipped" in again.stdout, again.output
    assert (here / "swept" / "max_tokens=null" / "metrics.jsonl").read_bytes() == before and len(rows(here)) == 2
    (here / "swept" / "sweep.jsonl").unlink()  # as if it had been killed before it could write it
    resumed = subprocess.run(
        [*words, "--sweep", "data.max_tokens=null", "--resume"], text=True, timeout=600, check=False
    )
    assert resumed.returncode == 0 and rows(here)[0]["metrics"] == finished["metrics"]
    assert len((here / "swept" / "max_tokens=null" / "metrics.jsonl").read_bytes().splitlines()) == before.count(b"\n")
    other = CliRunner().invoke(main, [*words[4:], "optimizer.lr=1e-3", "--sweep", "data.max_tokens=null"])
    assert other.exit_code == 2 and "max_tokens=null: holds a run of another recipe (optimizer.lr: " in other.stderr
    same = CliRunner().invoke(main, [*words[4:], f"output={here}/swept", "--sweep", "data.max_tokens=null"])
    assert same.exit_code == 0 and "finished already, skipped" in same.stdout, same.output
    longer = [*words[4:], "epochs=2", "--sweep", "data.max_tokens=null"]
    result = CliRunner().invoke(main, longer)
    assert result.exit_code == 2 and "epochs: 1 in the run, 2 now" in result.stderr, result.stderr
    assert "--resume continues it" in result.stderr
    resumed = subprocess.run([*words[:4], *longer, "--resume"], text=True, timeout=600, check=False)
    assert resumed.returncode == 0
    lines = (here / "swept" / "max_tokens=null" / "metrics.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2] and json.loads(lines[0]) == json.loads(before)


def test_ctrl_c_ends_the_sweep_with_its_run_and_shows_what_was_done(root: Path, here: Path) -> None:
    (here / "slow.py").write_text("import time\nprint('making', flush=True)\ntime.sleep(3600)\n")
    words = [sys.executable, "-m", "ngym", "train", "sft.yaml", *SHAPE, "data.path=none.jsonl", "output=swept"]
    sweep = subprocess.Popen(
        [*words, "data.made_by=[slow.py]", "--sweep", "seed=0,1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert sweep.stdout is not None
    output = ""
    while "making\n" not in output:
        line = sweep.stdout.readline()
        assert line, output
        output += line
    started = psutil.Process(sweep.pid).children(recursive=True)
    assert len(started) == 2  # the run, and the script that it waits for
    sweep.send_signal(signal.SIGINT)
    output += sweep.communicate(timeout=600)[0]
    assert sweep.returncode == 130, output
    wait_until(lambda: not running(started))
    table = [line.split() for line in output.splitlines() if line.startswith("seed=")]
    assert [line[:2] for line in table] == [["seed=0", "interrupted"], ["seed=1", "not"]]
    assert [row["status"] for row in rows(here)] == ["interrupted"]


def test_a_schedulers_warning_saves_the_run_in_progress_and_starts_no_other(root: Path, here: Path) -> None:
    demonstrations(root, here)
    words = [sys.executable, "-m", "ngym", "train", "sft.yaml", *SHAPE, "data.path=few.jsonl", "output=swept"]
    sweep = subprocess.Popen(
        [*words, "batch_size=4", "epochs=1000", "checkpoint.every=100000", "--sweep", "seed=0,1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics = here / "swept" / "seed=0" / "metrics.jsonl"
    wait_until(lambda: sweep.poll() is not None or (metrics.exists() and metrics.read_bytes().count(b"\n") > 1))
    sweep.send_signal(signal.SIGUSR1)
    output = sweep.communicate(timeout=600)[0]
    assert sweep.returncode == 130 and "interrupted by SIGUSR1, a scheduler's warning; --resume continues" in output, (
        output
    )
    last = metrics.read_bytes().count(b"\n")
    assert (here / "swept" / "seed=0" / "checkpoints" / f"step-{last:06}").is_dir()
    table = [line.split() for line in output.splitlines() if line.startswith("seed=")]
    assert [line[:2] for line in table] == [["seed=0", "interrupted"], ["seed=1", "not"]]
    assert not (here / "swept" / "seed=1").exists()


def test_a_run_that_the_warning_finds_before_it_can_save_ends_the_sweep_too(tmp_path: Path) -> None:
    warning = grid.TimeWarning()
    warning.note(signal.SIGUSR1, None)  # while the process starts
    ended = grid.run_command([sys.executable, "-c", "import time; time.sleep(3600)"], tmp_path / "a.log", warning)
    assert ended == (-signal.SIGUSR1, "")
