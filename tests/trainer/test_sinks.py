"""Metrics in TensorBoard, W&B and MLflow; a sink that is down, slow or full stops nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from paths import SUPPORT
from waiting import reserved_port

from ngym.cli.train import main
from ngym.trainer.recipe import recipe
from ngym.trainer.recipe.recipe import SWEEP
from ngym.trainer.reporting import metrics, sinks

Values = dict[str, Any]
RESOLVED = "seed: 1\noptimizer: {lr: 0.5, betas: [0.9, 0.95]}\nrollouts: null\n"


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's tables, which take seconds to make."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def database(empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a new database for MLflow, which then sends nothing to its makers."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


def log(folder: Path, options: Values, capsys: pytest.CaptureFixture[str], steps: int = 3, close_s: float = 60) -> str:
    """A run with these sinks; what it says. Entries: one before the first step, then `steps`."""
    (folder / "recipe.yaml").write_text(RESOLVED, "utf-8")
    opened = sinks.open_sinks(recipe.LoggingOptions(**options), folder, folder / "recipe.yaml")
    return run(folder, sinks.Sinks(opened._threads, close_s), capsys, steps)


def run(folder: Path, metric_sinks: Any, capsys: pytest.CaptureFixture[str], steps: int = 3) -> str:
    with metrics.Metrics(folder / "metrics.jsonl", steps, True, sinks=metric_sinks) as log:
        log.note(0, {"eval/sums/avg@4": 0.25}, "held-out after 0 steps")
        for step in range(1, steps + 1):
            log.log(step, {"loss": 1 / step, "grad_norm": float("nan"), "time/generation": 0.0})
    return capsys.readouterr().out


def rows(folder: Path) -> list[Values]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The scalars that TensorBoard's own reader finds."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_reads_what_was_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stderr = log(tmp_path, {"tensorboard": True}, capsys)
    found = scalars(tmp_path / "tensorboard")
    assert found["eval/sums/avg@4"] == [(0, 0.25)]
    assert found["loss"] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert len(found["grad_norm"]) == 3 and "logging" not in stderr
    log(tmp_path, {"tensorboard": str(tmp_path / "elsewhere")}, capsys)
    assert len(scalars(tmp_path / "elsewhere")["loss"]) == 3


def test_steps_that_a_killed_run_wrote_and_a_resumed_one_takes_again_are_there_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.yaml").write_text(RESOLVED, "utf-8")
    options = recipe.LoggingOptions(tensorboard=True)
    for first, last in ((1, 28), (26, 30)):
        opened = sinks.open_sinks(options, tmp_path, tmp_path / "recipe.yaml", first - 1)
        with metrics.Metrics(tmp_path / "metrics.jsonl", 30, True, sinks=opened) as log:
            log.note(first - 1, {"val/loss": 0.5}, "evaluated")  # again, from the checkpoint of this step
            for step in range(first, last + 1):
                log.log(step, {"loss": 1 / step})
    assert [step for step, _ in scalars(tmp_path / "tensorboard")["loss"]] == list(range(1, 31))


def test_a_folder_that_cannot_be_made_costs_its_entries_and_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    stderr = log(tmp_path, {"tensorboard": str(tmp_path / "file" / "below")}, capsys)
    assert stderr.count("logging.tensorboard: entries are lost: NotADirectoryError") == 1
    assert "4 of 4 entries were not written; metrics.jsonl has them" in stderr
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3]


FULL_DISK = """
import json, resource, sys
from pathlib import Path
from ngym.trainer.reporting import metrics, sinks
folder = Path(sys.argv[1])
(folder / "recipe.yaml").write_text("{}")
kept = sinks.open_sinks(sinks.LoggingOptions(tensorboard=True), folder, folder / "recipe.yaml")
with metrics.Metrics(folder / "metrics.jsonl", 60, True, sinks=kept) as log:
    log.log(1, {"loss": 1.0})
    while kept._threads[0]._written < 1: pass
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))  # as good as a disk that is full
    for step in range(2, 51): log.log(step, {"loss": 1.0})
    assert (folder / "metrics.jsonl").read_bytes().endswith(b"}\\n")  # as a checkpoint would find it
    while kept._threads[0]._queue.qsize(): pass
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for step in range(51, 61): log.log(step, {"loss": 1.0})
print("trained to the end")
"""


def test_a_full_disk_loses_entries_and_neither_the_run_nor_what_comes_later(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, tmp_path], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0 and done.stdout.endswith("trained to the end\n"), done.stderr
    assert done.stdout.count("metrics.jsonl: entries are lost: No space left on device; training continues") == 1
    assert done.stdout.count("logging.tensorboard: entries are lost: OSError: ") == 1
    written = [row["step"] for row in rows(tmp_path)]
    assert written[0] == 1 and written[-10:] == list(range(51, 61)) and len(written) < 30
    steps = {step for step, _ in scalars(tmp_path / "tensorboard")["loss"]}
    assert {1, *range(52, 61)} < steps and len(steps) < 60
    assert f"{60 - len(steps)} of 60 entries were not written" in done.stdout


class Stuck:
    """A sink that takes one entry and never comes back."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.abandoned = False

    def open(self) -> None:
        return None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.started.set()
        threading.Event().wait()

    def close(self) -> None:
        raise AssertionError("it is stuck")

    def abandon(self) -> None:
        self.abandoned = True


def test_a_sink_that_hangs_holds_nothing_up_and_its_losses_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stuck = Stuck()
    thread = sinks.SinkThread("stuck", stuck, waiting=5)
    stderr = run(tmp_path, sinks.Sinks([thread], close_s=0.1), capsys, steps=300)
    assert stuck.started.wait(60) and stuck.abandoned
    assert stderr.count("logging.stuck: entries are lost: it accepted no entry while 5 arrived") == 1
    assert "logging.stuck: 301 of 301 entries were not written; metrics.jsonl has them" in stderr
    assert len(rows(tmp_path)) == 301


class FlakySink:
    """A sink that refuses every second entry."""

    def __init__(self) -> None:
        self.written_steps: list[int] = []
        self.closed = False

    def open(self) -> None:
        return None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step % 2:
            raise ConnectionError("server says 503\nand more")
        self.written_steps.append(step)

    def close(self) -> None:
        self.closed = True

    def abandon(self) -> None:
        raise AssertionError("there was time enough")


def test_a_sink_that_raises_gets_the_next_entry_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moody = FlakySink()
    stderr = run(tmp_path, sinks.Sinks([sinks.SinkThread("moody", moody)], close_s=60), capsys, steps=6)
    assert moody.written_steps == [0, 2, 4, 6] and moody.closed
    assert stderr.count("logging.moody: entries are lost: ConnectionError: server says 503; training continues") == 1
    assert "logging.moody: 3 of 7 entries were not written" in stderr


def test_a_run_ends_though_a_sink_does_not(tmp_path: Path) -> None:
    program = (
        "from ngym.trainer.reporting import sinks; from test_sinks import Stuck\n"
        "kept = sinks.Sinks([sinks.SinkThread('stuck', Stuck())], 0.1)\n"
        "print(list(kept.put(1, {})), list(kept.close()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0 and "[] [" in done.stdout, done.stderr
    assert "logging.stuck: 1 of 1 entries were not written" in done.stdout


def test_a_sink_in_a_process_that_dies_costs_its_entries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remote = sinks.SubprocessSink("mlflow", recipe.MlflowOptions(uri="x", experiment="e"), tmp_path, {})
    remote.abandon()
    stderr = run(tmp_path, sinks.Sinks([sinks.SinkThread("mlflow", remote)], close_s=60), capsys)
    assert stderr.count("logging.mlflow: entries are lost: ") == 1 and "4 of 4 entries were not written" in stderr


def test_a_sink_whose_process_ends_before_it_has_answered_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlflow.py").write_text("import os; os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    remote = sinks.SubprocessSink("mlflow", recipe.MlflowOptions(uri="x", experiment="e"), tmp_path, {})
    stderr = run(tmp_path, sinks.Sinks([sinks.SinkThread("mlflow", remote)], close_s=60), capsys)
    assert stderr.count("logging.mlflow: entries are lost: its process is gone; training continues") == 1
    assert "4 of 4 entries were not written" in stderr


def test_what_goes_wrong_in_the_process_of_a_sink_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlflow.py").write_text("raise ModuleNotFoundError(\"No module named 'mlflow'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    remote = sinks.SubprocessSink("mlflow", recipe.MlflowOptions(uri="x", experiment="e"), tmp_path, {})
    stderr = run(tmp_path, sinks.Sinks([sinks.SinkThread("mlflow", remote)], close_s=60), capsys)
    assert (
        stderr.count("logging.mlflow: entries are lost: ModuleNotFoundError: No module named 'mlflow'; training") == 1
    )
    assert remote._process.returncode is not None, "the process is gone"


@pytest.mark.parametrize("by_variable", [False, True])
def test_wandb_keeps_an_offline_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    if by_variable:
        monkeypatch.setenv("WANDB_MODE", "offline")
    stderr = log(tmp_path, {"wandb": {"project": "p"} | ({} if by_variable else {"mode": "offline"})}, capsys)
    assert "logging" not in stderr
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    content = file.read_bytes()
    for word in (b"eval/sums/avg@4", b"grad_norm", b"optimizer", tmp_path.name.encode()):
        assert word in content


def test_mlflow_gets_metrics_and_the_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str], database: str) -> None:
    from mlflow.tracking import MlflowClient

    uri = database
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        assert "logging" not in log(tmp_path / name, {"mlflow": {"uri": uri, "experiment": "e", "name": "n"}}, capsys)
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("e")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert [(run.info.run_name, run.info.status) for run in runs] == [("n", "FINISHED")] * 2
    losses = [(metric.step, metric.value) for metric in client.get_metric_history(runs[0].info.run_id, "loss")]
    assert losses == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert runs[0].data.metrics["eval/sums/avg_at_4"] == 0.25
    assert runs[0].data.params == {
        "seed": "1",
        "optimizer.lr": "0.5",
        "optimizer.betas.0": "0.9",
        "optimizer.betas.1": "0.95",
        "rollouts": "None",
    }


def test_a_resumed_run_continues_its_wandb_run_unless_the_project_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWEEP, str(tmp_path / "rates-of-learning"))
    for project in ("p", "p", "other"):
        assert "logging" not in log(tmp_path, {"wandb": {"project": project, "mode": "offline"}}, capsys)
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    ids = [file.stem for file in files]
    assert len(ids) == 3 and len(set(ids)) == 2, ids
    assert f"run-{json.loads((tmp_path / 'wandb_run.json').read_text('utf-8'))['id']}" in ids
    assert all(b"rates-of-learning" in file.read_bytes() for file in files), "the sweep is the group"


def test_a_resumed_run_continues_its_mlflow_run_below_that_of_its_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, database: str
) -> None:
    from mlflow.tracking import MlflowClient

    uri, sweep = database, tmp_path / "rates"
    monkeypatch.setenv(SWEEP, str(sweep))
    for name in ("lr=1", "lr=2", "lr=1"):
        (sweep / name).mkdir(parents=True, exist_ok=True)
        assert "logging" not in log(sweep / name, {"mlflow": {"uri": uri, "experiment": "e"}}, capsys)
    client = MlflowClient(uri)
    runs = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    by_name = {run.info.run_name: run for run in runs}
    assert sorted(by_name) == ["lr=1", "lr=2", "rates"] and len(runs) == 3
    assert {run.info.status for run in runs} == {"FINISHED"}
    for name in ("lr=1", "lr=2"):
        assert by_name[name].data.tags["mlflow.parentRunId"] == by_name["rates"].info.run_id
    assert len(client.get_metric_history(by_name["lr=1"].info.run_id, "loss")) == 6


def test_an_mlflow_server_that_is_down_holds_nothing_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its client tries again for minutes; the run ends without it."""
    with reserved_port() as port:
        options = {"mlflow": {"uri": f"http://127.0.0.1:{port}", "experiment": "e"}}
        stderr = log(tmp_path, options, capsys, close_s=0.1)
    assert "logging.mlflow: 4 of 4 entries were not written; metrics.jsonl has them" in stderr
    assert len(rows(tmp_path)) == 4


def test_a_database_that_mlflow_skinny_cannot_open_is_said_when_the_recipe_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recipe, "find_spec", lambda package: None if package == "sqlalchemy" else object())
    database = "logging.mlflow={uri: 'sqlite:///mlflow.db', experiment: e}"
    result = CliRunner().invoke(main, ["sft.yaml", "--dry-run", database])
    assert result.exit_code == 2
    assert "'sqlite:///mlflow.db' is a database, which the package mlflow-skinny cannot open" in result.stderr
    server = recipe.MlflowOptions(uri="http://127.0.0.1:5000", experiment="e")
    assert recipe.LoggingOptions(mlflow=server).mlflow == server


@pytest.mark.parametrize(
    ("package", "option"),
    [
        ("tensorboard", "logging.tensorboard=true"),
        ("wandb", "logging.wandb.project=p"),
        ("mlflow", "logging.mlflow={uri: x, experiment: e}"),
    ],
)
def test_a_package_that_is_missing_is_said_when_the_recipe_is_read(
    package: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "find_spec", lambda name: None if name == package else object())
    result = CliRunner().invoke(main, ["sft.yaml", "--dry-run", option])
    assert result.exit_code == 2
    assert f"logging.{package}: the package {package} is not installed; `pip install {package}`" in result.stderr
