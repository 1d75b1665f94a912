"""`ng_plot`: the curves of a run as text, JSON and pictures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from ngym.cli.plot import main
from ngym.errors import UsageError
from ngym.plot.figure import (
    Line,
    Panel,
    as_text,
    default_metrics,
    default_series,
    matching_metrics,
    picture,
    smooth,
    together,
    write_picture,
)
from ngym.plot.runs import History, PlottedRun, Series, by_seed, distinct, read_history

PNG = b"\x89PNG"
Entry = dict[str, Any]
Written = Callable[..., Path]


@pytest.fixture(scope="module", autouse=True)
def the_list_of_fonts() -> None:
    """matplotlib runs fc-list at the first import for a user, which no test of this folder may do."""
    import matplotlib.font_manager  # noqa: F401


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """A run's folder with these entries and this recipe."""

    def write(name: str, entries: Sequence[Entry], recipe: str | None = None, end: str = "\n") -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, entries)) + end)
        if recipe is not None:
            (folder / "recipe.yaml").write_text(recipe)
        return folder

    return write


def steps(count: int, gain: float = 0.1, offset: float = 0.0) -> list[Entry]:
    return [
        {"step": n, "reward/mean": offset + gain * n, "loss": 1 / n, "time/elapsed": 2.0 * n}
        for n in range(1, count + 1)
    ]


def plot(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_of_a_step_that_was_logged_twice_the_later_entry_counts() -> None:
    history = History.of(
        [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "loss": 1.5, "val/loss": 9.0}]
    )
    assert history.series("loss") == Series("loss", (1, 2), (3.0, 1.5))
    assert history.series("val/loss").x == (2,) and history.resume_steps == []


def test_what_was_logged_after_the_step_to_which_a_run_went_back_is_void() -> None:
    history = History.of([*steps(5), *steps(3, gain=0.2)[1:]])
    assert history.series("reward/mean").y == pytest.approx((0.1, 0.4, 0.6))
    assert list(history.steps) == [1, 2, 3] and history.resume_steps == [2]


def test_a_resumed_run_continues_in_time_where_it_was() -> None:
    later = [{"step": 4, "reward/mean": 1.0, "time/elapsed": 3.0}]
    history = History.of([*steps(3), *later])
    assert history.resume_steps == [4]
    assert history.series("reward/mean", "time").x == (2.0, 4.0, 6.0, 9.0)


def test_a_line_that_is_still_being_written_is_not_read(written: Written) -> None:
    folder = written("run", steps(2), end='\n{"step": 3, "reward/m')
    assert read_history(folder / "metrics.jsonl").series("loss").x == (1, 2)


def test_a_damaged_line_is_named(written: Written) -> None:
    folder = written("run", steps(2), end='\n{"step": 3, "rew\n')
    result = plot(folder)
    assert result.exit_code == 2 and f"{folder}/metrics.jsonl:3: not JSON" in result.output


def test_rollouts_are_not_metrics(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text('{"reward": 1.0}\n')
    result = plot(tmp_path / "out.jsonl")
    assert result.exit_code == 2 and "out.jsonl:1: not an entry of a run's metrics: it has no 'step'" in result.output


def test_what_is_not_a_number_is_not_drawn() -> None:
    history = History.of([{"step": 1, "loss": 1.0}, {"step": 2, "loss": None}, {"step": 3, "loss": 2.0, "note": "x"}])
    assert history.series("loss") == Series("loss", (1, 3), (1.0, 2.0)) and history.names == ["loss"]


def test_bounds_are_the_band_of_their_metric() -> None:
    row = {"step": 1, "eval/a/greedy": 0.5, "eval/a/greedy/low": 0.4, "eval/a/greedy/high": 0.6}
    assert History.of([row]).series("eval/a/greedy") == Series("eval/a/greedy", (1,), (0.5,), (0.4,), (0.6,))


def test_rewards_and_evaluations_tell_most_and_losses_where_there_are_none() -> None:
    names = ["loss", "reward/mean", "eval/b/greedy", "eval/a/avg@4", "eval/a/avg@4/low", "eval/a/pass@4"]
    assert default_metrics(names) == ["reward/mean", "eval/a/avg@4", "eval/b/greedy"]
    assert default_metrics(["lr", "val/loss", "loss"]) == ["loss", "val/loss"]
    assert [series.name for series in default_series(steps(3))] == ["reward/mean"]


def test_the_share_of_unscored_rollouts_is_drawn_only_where_there_are_any() -> None:
    row = {"reward/mean": 0.5, "frac_unscored": 0.0}
    assert [series.name for series in default_series([{"step": n, **row} for n in range(3)])] == ["reward/mean"]
    some = [{"step": n, **row, "frac_unscored": n / 4} for n in range(3)]
    assert [series.name for series in default_series(some)] == ["reward/mean", "frac_unscored"]


def test_a_pattern_leaves_out_what_belongs_to_another_metric_unless_it_names_it() -> None:
    names = ["eval/a/greedy", "eval/a/greedy/low", "eval/a/greedy/count", "loss"]
    assert matching_metrics(["eval/*"], names) == ["eval/a/greedy"]
    assert matching_metrics(["eval/*/count", "loss"], names) == ["eval/a/greedy/count", "loss"]
    assert matching_metrics(["odd[1]"], ["odd[1]", "odd1"]) == ["odd[1]"]


def test_an_unknown_metric_gets_the_nearest_one() -> None:
    with pytest.raises(
        UsageError, match=r"--metric reward/maen: no run has logged it \(did you mean 'reward/mean'\?\)"
    ):
        matching_metrics(["reward/maen"], ["loss", "reward/mean"])


def test_smoothing_has_no_bias_towards_the_first_values() -> None:
    found = smooth(Series("x", (0, 1, 2), (1.0, 0.0, 4.0)), 0.5)
    assert found.y == pytest.approx((1.0, 0.25 / 0.75, (0.125 + 2.0) / 0.875))
    assert smooth(Series("x", (0, 1), (3.0, 3.0)), 0.9).y == pytest.approx((3.0, 3.0))


def test_evaluations_are_not_smoothed(written: Written) -> None:
    rows = [{"step": n, "reward/mean": n % 2, "eval/a/greedy": n % 2} for n in range(4)]
    found = [json.loads(line) for line in plot(written("run", rows), "--smooth", 0.9, "--json").output.splitlines()]
    assert [y for _, y in found[1]["points"]] == [0, 1, 0, 1] and [y for _, y in found[0]["points"]] != [0, 1, 0, 1]


def test_seeds_are_averaged_where_all_of_them_are() -> None:
    found = together("both", [Series("a", (0, 1, 2), (0.0, 1.0, 2.0)), Series("b", (1, 2, 3), (3.0, 4.0, 5.0))])
    assert found == Series("both", (1, 2), (2.0, 3.0), (1.0, 2.0), (3.0, 4.0))


def test_runs_are_the_same_but_for_their_seed_by_their_recipes() -> None:
    def run(name: str, seed: int, lr: float) -> PlottedRun:
        recipe = {"seed": seed, "output": f"runs/{name}", "optimizer.lr": lr, "model.path": f"runs/sft-{seed}/policy"}
        return PlottedRun(name, History(), recipe)

    runs = [run("lr3-seed0", 0, 0.3), run("lr3-seed1", 1, 0.3), run("lr1-seed0", 0, 0.1)]
    assert {name: len(group) for name, group in by_seed(runs).items()} == {"lr3 (2 seeds)": 2, "lr1-seed0": 1}
    bare = [PlottedRun(name, History(), {}) for name in ("a-0", "a-12", "b-0")]
    assert list(by_seed(bare)) == ["a (2 seeds)", "b-0"]


def test_a_seed_that_is_in_a_models_name_parts_no_runs() -> None:
    paths = [("0.6B", n) for n in range(4)] + [("4B", n) for n in range(4)]
    runs = [
        PlottedRun(f"{size}-seed{n}", History(), {"seed": n, "model.path": f"Qwen/Qwen3-{size}", "data": f"part-{n}"})
        for size, n in paths
    ]
    assert {name: len(group) for name, group in by_seed(runs).items()} == {"0.6B (4 seeds)": 4, "4B (4 seeds)": 4}


def test_two_groups_of_one_stem_are_called_by_their_runs() -> None:
    runs = [PlottedRun(f"x-{n}", History(), {"seed": n, "optimizer.lr": 0.1 if n < 2 else 0.3}) for n in range(4)]
    assert {name: len(group) for name, group in by_seed(runs).items()} == {"x-0, x-1": 2, "x-2, x-3": 2}


def test_a_run_is_called_by_as_much_of_its_folder_as_it_takes() -> None:
    files = [Path(f"/runs/{name}/metrics.jsonl") for name in ("x/grpo", "y/grpo", "y/sft")]
    assert distinct(files) == ["x/grpo", "y/grpo", "y/sft"] and distinct(files[1:]) == ["grpo", "sft"]


def test_a_run_is_a_plot_of_characters_and_its_last_values(written: Written) -> None:
    rows = [*steps(8), {"step": 8, "eval/a/greedy": 0.25, "eval/a/greedy/count": 4}]
    result = plot(written("run", rows))
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert "· reward/mean: 0.100 -> 0.800" in result.output and "# eval/a/greedy: 0.250 -> 0.250" in result.output
    assert ["loss", "0.125"] in [line.split() for line in lines] and "greedy/count" not in result.output
    assert "run" in next(line for line in lines if line.startswith("last value"))


def test_several_runs_are_drawn_over_each_other(written: Written) -> None:
    result = plot(written("a", steps(4)), written("b", steps(6, offset=0.3)), "--metric", "reward/*")
    lines = [line.split() for line in result.output.splitlines()]
    assert ["·", "a:", "0.100", "->", "0.400"] in lines and ["#", "b:", "0.400", "->", "0.900"] in lines
    assert ["step", "4", "6"] in lines and ["reward/mean", "0.400", "0.900"] in lines


def test_json_holds_the_points_and_nothing_else(written: Written) -> None:
    folder = written("run", steps(3))
    found = [json.loads(line) for line in plot(folder, "--metric", "loss", "--x", "time", "--json").output.splitlines()]
    assert found == [{"run": "run", "metric": "loss", "x": "time", "points": [[2.0, 1.0], [4.0, 0.5], [6.0, 1 / 3]]}]


def test_a_band_has_no_steps_in_time(written: Written) -> None:
    result = plot(written("run", steps(3)), "--band", "--x", "time")
    assert result.exit_code == 2 and "--band compares runs at the same steps" in result.output


def test_the_folder_of_a_sweep_and_everything_in_it_opens_its_runs(written: Written) -> None:
    folders = [written(f"rates/lr={rate}", steps(4, offset=rate)) for rate in (0.1, 0.2)]
    folder = folders[0].parent
    (folder / "sweep.jsonl").write_text("{}\n")
    (folder / "lr=0.1.log").write_text("loading torch\n")
    (folder / "lr=9").mkdir()  # failed before its first step
    expected = plot(*folders, "--metric", "loss", "--json").output
    for places in ([folder], sorted(folder.iterdir())):
        found = plot(*places, "--metric", "loss", "--json")
        assert (found.exit_code, found.output) == (0, expected)
    nothing = plot(folder / "lr=9")
    assert nothing.exit_code == 2 and "no run of the sweep has a metrics.jsonl" in nothing.output


def test_a_folder_without_metrics_is_reported(tmp_path: Path) -> None:
    result = plot(tmp_path)
    assert result.exit_code == 2 and "no metrics.jsonl there; give a run's folder" in result.output


def test_a_run_that_has_logged_nothing_is_reported(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    result = plot(tmp_path)
    assert result.exit_code == 2 and result.output.endswith("no values to draw; nothing was logged yet\n")


def test_a_hostile_name_does_not_reach_the_terminal(written: Written) -> None:
    output = plot(written("run", [{"step": 1, "loss\x1b]0;x\x07": 1.0}]), "--metric", "loss*").output
    assert "\x1b" not in output and "\x07" not in output and r"loss\x1b]0;x\x07" in output


def test_a_single_point_and_a_constant_are_drawn() -> None:
    assert "x: 0 -> 0" in as_text([Series("x", (3,), (0.0,))])
    assert "step 7" in as_text([Series("x", (3, 7), (-2.0, -2.0))])


def test_a_picture_is_a_png_or_an_svg(written: Written, tmp_path: Path) -> None:
    folders = [written(f"lr3-seed{n}", steps(30, offset=n), f"seed: {n}\noptimizer: {{lr: 0.3}}\n") for n in range(3)]
    for name, begin in (("curve.png", PNG), ("curve.svg", b"<?xml")):
        result = plot(*folders, "--band", "--smooth", 0.5, "--metric", "reward/mean,loss", "--output", tmp_path / name)
        assert result.output == f"{tmp_path / name}: 2 curves of 3 runs\n"
        assert (tmp_path / name).read_bytes().startswith(begin)
    words = "".join(ElementTree.parse(tmp_path / "curve.svg").getroot().itertext())
    assert "reward/mean" in words and "lr3 (3 seeds)" in words


def test_another_kind_of_picture_is_refused(written: Written, tmp_path: Path) -> None:
    result = plot(written("run", steps(3)), "--output", tmp_path / "curve.pdf")
    assert result.exit_code == 2 and "a picture is a .png or an .svg file" in result.output


def test_the_words_of_a_picture_are_not_formulas_and_no_markup() -> None:
    series = Series("a$_x$ <b>&\x1b", (1, 2), (1.0, 2.0))
    image = picture([Panel("$\\frac{1", [Line(series)])], "svg")
    words = "".join(ElementTree.fromstring(image).itertext())
    assert "a$_x$ <b>&\\x1b" in words and "$\\frac{1" in words


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_same_curves_are_the_same_bytes(kind: str) -> None:
    panel = Panel(
        "t",
        [Line(Series("x", (1, 4, 16), (1.0, 2.0, 3.0), (0.5, 1.0, 2.0), (2.0, 3.0, 4.0)), dashed=True)],
        x_scale="log4",
    )
    assert picture([panel], kind) == picture([panel], kind)


def test_a_logarithm_of_what_is_not_positive_is_not_an_error(tmp_path: Path) -> None:
    zeros = Panel("zeros", [Line(Series("x", (1, 2), (0.0, 0.0)))], y_scale="log")
    write_picture([zeros, Panel("time", [Line(Series("x", (5.0,), (1.0,)))], x="seconds")], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def in_a_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MPL", "XDG"))}
    return subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        env={**variables, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.process
def test_a_home_that_cannot_be_written_is_not_an_obstacle(tmp_path: Path) -> None:
    code = (
        "from ngym.plot.figure import *; from pathlib import Path;"
        f"write_picture([Panel('t', [Line(Series('x', (1, 2), (1.0, 2.0)))])], Path({str(tmp_path / 'a.svg')!r}))"
    )
    done = in_a_process(code, HOME="/dev/null", MATPLOTLIBRC="/dev/null")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "a.svg").read_bytes() == picture([Panel("t", [Line(Series("x", (1, 2), (1.0, 2.0)))])], "svg")


@pytest.mark.process
def test_text_needs_no_matplotlib(written: Written) -> None:
    code = (
        f"import sys; from click.testing import CliRunner; from ngym.cli.plot import main;"
        f"said = CliRunner().invoke(main, [{str(written('run', steps(3)))!r}]);"
        "print(said.exit_code, 'matplotlib' in sys.modules, 'reward/mean' in said.output)"
    )
    assert in_a_process(code).stdout == "0 False True\n"


def bins(*, of: float) -> Entry:
    """An evaluation of a reward model; the bin from 0.8 on has no row."""
    each = {"0.6": (0.65, of, 0.25), "0.9": (0.95, 0.9, 0.75), "0.8": (None, None, 0.0)}
    parts = ("confidence", "accuracy", "share")
    return {
        f"val/calibration/{low}/{part}": value
        for low, values in each.items()
        for part, value in zip(parts, values, strict=True)
        if value is not None
    }


def test_the_calibration_of_a_reward_model_is_that_of_its_last_evaluation(written: Written) -> None:
    run = written("scores", [{"step": 1, **bins(of=0.1)}, {"step": 2, "loss": 1.0}, {"step": 3, **bins(of=0.5)}])
    table = plot(run, "--calibration").output.splitlines()
    assert [line.split() for line in table[1:]] == [
        ["confidence", "accuracy", "share"], ["0.650", "0.500", "25.0%"], ["0.950", "0.900", "75.0%"]
    ]  # fmt: skip
    calibration = json.loads(plot(run, "--calibration", "--json").output)
    assert (
        calibration["bins"][0] == {"confidence": 0.65, "accuracy": 0.5, "share": 0.25} and len(calibration["bins"]) == 2
    )
    picture_file = run / "calibration.svg"
    assert plot(run, "--calibration", "--output", picture_file).exit_code == 0
    words = "".join(ElementTree.fromstring(picture_file.read_bytes()).itertext())
    assert "confidence" in words and "calibrated" in words and "accuracy on held-out rows" in words


def test_a_run_without_a_calibration_is_named(written: Written) -> None:
    run = written("grpo", steps(3))
    mixed = plot(run, "--calibration", "--metric", "loss")
    assert mixed.exit_code == 2 and "--calibration draws one diagram" in mixed.output
    result = plot(run, "--calibration")
    assert result.exit_code == 2 and "grpo: no val/calibration/... was logged" in result.output
