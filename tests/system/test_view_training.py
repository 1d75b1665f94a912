"""The training dashboard: its API for a run's folder, and its page in a browser."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from viewer_process import Json, rollout, viewer, write
from waiting import wait_until

from ngym.errors import UsageError
from ngym.view import training
from ngym.view.training import TrainingRun, training_run

RECIPE = "algorithm: {name: grpo}\nseed: 0\noptimizer: {lr: LR, betas: [0.9, 0.95]}\nrollouts: {max_lag: 1}\n"
HOSTILE = "<img src=x onerror=alert(1)>"


def line(step: int, **values: float | None) -> bytes:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return json.dumps({"step": step, "time/elapsed": 3.0 * step, **named}).encode() + b"\n"


def lines(count: int, gain: float = 0.05) -> bytes:
    """With a learning rate that never changes, and a value that only the first five steps have."""
    phases = {"time__train": 1.0, "time__generation": 2.0}
    return b"".join(
        line(n, reward__mean=gain * n, lr=0.5, **phases, **({"warmup": n / 5} if n <= 5 else {}))
        for n in range(1, count + 1)
    )


@pytest.fixture
def run(tmp_path: Path) -> TrainingRun:
    folder = tmp_path / "grpo"
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes(lines(3))
    return training_run("t1", folder)


def append(run: TrainingRun, more: bytes) -> None:
    with run.metrics.open("ab") as file:
        file.write(more)


def test_entries_come_as_columns_with_null_where_there_is_not_a_number(run: TrainingRun) -> None:
    append(run, line(4, reward__mean=None) + line(4, eval__a__greedy=0.5))
    found = training.metrics(run)
    assert found["columns"]["step"] == [1, 2, 3, 4, 4] and found["entries"] == 5
    assert found["columns"]["reward/mean"] == [0.05, 0.1, pytest.approx(0.15), None, None]
    assert found["columns"]["eval/a/greedy"] == [None, None, None, None, 0.5]


def test_only_what_is_new_comes_behind_a_cursor(run: TrainingRun) -> None:
    first = training.metrics(run)
    assert training.metrics(run, first["next"])["entries"] == 0
    append(run, line(4, reward__mean=0.2))
    second = training.metrics(run, first["next"])
    assert second["columns"]["step"] == [4] and not second["reset"] and not second["more"]


def test_a_torn_last_line_is_not_sent_until_it_is_whole(run: TrainingRun) -> None:
    content = line(4, reward__mean=0.2)
    append(run, content[:20])
    first = training.metrics(run)
    assert first["columns"]["step"] == [1, 2, 3]
    append(run, content[20:])
    assert training.metrics(run, first["next"])["columns"]["step"] == [4]


def test_a_file_that_was_cut_begins_again(run: TrainingRun) -> None:
    before = training.metrics(run)
    os.truncate(run.metrics, len(lines(1)))
    append(run, lines(5, gain=0.07)[:400].rpartition(b"\n")[0] + b"\n")
    found = training.metrics(run, before["next"])
    assert found["reset"] and found["columns"]["step"][0] == 1


def test_a_large_file_comes_in_pieces(run: TrainingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "PIECE_BYTES", 100)
    steps: list[float] = []
    cursor, more = training.BEGINNING, True
    while more:
        piece = training.metrics(run, cursor)
        steps += piece["columns"].get("step", [])
        cursor, more = piece["next"], piece["more"]
    assert steps == [1, 2, 3]


def test_a_damaged_line_is_passed_over(run: TrainingRun) -> None:
    append(run, b"\xff\x00 {\n[1]\n{}\n" + line(4, reward__mean=0.2))
    assert training.metrics(run)["columns"]["step"] == [1, 2, 3, 4]


@pytest.mark.parametrize("cursor", ["x", "-1", "1.5-00", ""])
def test_a_cursor_that_is_invalid_is_refused(run: TrainingRun, cursor: str) -> None:
    with pytest.raises(UsageError, match="no place in a file of metrics"):
        training.metrics(run, cursor)


def test_the_summary_shows_the_last_values_and_whether_more_is_to_be_expected(run: TrainingRun) -> None:
    append(run, line(3, eval__a__greedy=0.5))
    found = training.summary(run)
    assert (found["name"], found["kind"], found["steps"], found["growing"]) == ("grpo", "training", 3, True)
    assert found["last"]["reward/mean"] == pytest.approx(0.15) and found["last"]["eval/a/greedy"] == 0.5
    long_ago = time.time() - 3600
    os.utime(run.metrics, (long_ago, long_ago))
    assert not training.summary(run)["growing"]


def test_a_run_that_has_saved_its_policy_does_not_grow(run: TrainingRun) -> None:
    (run.folder / "policy").mkdir()
    assert not training.summary(run)["growing"]


def test_a_run_of_long_steps_is_given_time(run: TrainingRun) -> None:
    append(run, json.dumps({"step": 4, "time/elapsed": 1000.0}).encode() + b"\n")
    minutes_ago = time.time() - 600
    os.utime(run.metrics, (minutes_ago, minutes_ago))
    assert training.summary(run)["growing"]


def test_the_summary_of_a_large_file_reads_its_end_alone(run: TrainingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "TAIL_BYTES", 120)
    append(run, line(4, loss=1.0))
    assert training.summary(run)["last"].keys() >= {"loss"} and training.summary(run)["steps"] == 4


def test_a_recipe_is_flat_and_as_it_is_written(run: TrainingRun) -> None:
    text = RECIPE.replace("LR", "0.3")
    (run.folder / "recipe.yaml").write_text(text)
    found = training.config(training_run("t1", run.folder))
    assert found["text"] == text and found["recipe"]["optimizer.lr"] == 0.3
    assert found["recipe"]["optimizer.betas"] == [0.9, 0.95] and found["recipe"]["seed"] == 0
    assert training.config(run) == {"recipe": {}, "text": None}


def test_how_the_rollouts_of_a_step_are_found_is_said_and_how_far_it_holds(run: TrainingRun) -> None:
    (run.folder / "recipe.yaml").write_text(RECIPE.replace("LR", "0.3"))
    (run.folder / "rollouts.jsonl").touch()
    found = training.samples(training_run("t1", run.folder))
    assert (found["field"], found["max_lag"]) == ("learned", 1) and "the weights before" in found["note"]
    assert training.samples(run) == {"field": None, "max_lag": None, "note": "this run kept no rollouts"}
    (run.folder / "eval_rollouts.jsonl").touch()
    assert training_run("t1", run.folder).held_out == run.folder / "eval_rollouts.jsonl"


def test_a_run_from_a_file_says_that_its_rows_name_no_step(run: TrainingRun) -> None:
    (run.folder / "recipe.yaml").write_text("data: {path: out.jsonl}\n")
    note = training.samples(training_run("t1", run.folder))["note"]
    assert "a finished file, out.jsonl, whose rows do not say in which step" in note


def test_a_report_holds_some_entries_and_all_evaluations(run: TrainingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "PACKED_ENTRIES", 5)
    append(run, b"".join(line(n, loss=1.0) for n in range(4, 40)) + line(40, eval__a__greedy=0.5))
    found = training.pack_runs([run])
    assert found["runs"][0]["id"] == "t1" and 5 <= found["metrics"]["t1"]["entries"] <= 7
    assert found["metrics"]["t1"]["columns"]["eval/a/greedy"][-1] == 0.5


def test_the_last_step_that_trained_a_rollout_is_found(run: TrainingRun) -> None:
    rollouts = run.folder / "rollouts.jsonl"
    assert training.training_values(rollouts, "r-1") is None
    entries = [{"step": 1, "advantages": {"r-1": 0.5}}, {"step": 2, "advantages": {"r-1": -1.5, "r-2": 1}}]
    torn = '{"step": 3, "advantages": {"r-1'
    (run.folder / "advantages.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in entries) + torn)
    assert training.training_values(rollouts, "r-1") == {"step": 2, "advantage": -1.5}
    assert training.training_values(rollouts, "r-3") == {}


# In a browser, against ng_view itself.


@pytest.fixture(scope="module")
def web_viewer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of an ng_view of two runs, and their folder."""
    folder = tmp_path_factory.mktemp("runs")
    for name, rate in (("slow", "0.1"), ("fast", "0.3")):
        (folder / name).mkdir()
        (folder / name / "metrics.jsonl").write_bytes(
            lines(20, gain=float(rate) / 10) + line(20, **{"eval__a__greedy": 0.5, HOSTILE: 1.0})
        )
        (folder / name / "recipe.yaml").write_text(RECIPE.replace("LR", rate))
        later = time.time() + 3600  # it continues growing for as long as these tests take
        os.utime(folder / name / "metrics.jsonl", (later, later))
    write(folder / "slow" / "rollouts.jsonl", [trained_rollout(count) for count in range(1, 3)])
    write(folder / "slow" / "eval_rollouts.jsonl", [trained_rollout(count) for count in (10, 20)])
    with viewer(folder, cache=folder / "cache") as served:
        yield served.report["url"], folder


def trained_rollout(count: int) -> Json:
    """A rollout of weights that had learned so many batches."""
    prompt = {"input": [{"role": "user", "content": f"<b>task {count}</b>"}]}
    return rollout(count, responses_create_params=prompt, _ng_train={"task": "a/0", "oldest": count})


@pytest.fixture
def dashboard(page: Any, web_viewer: tuple[str, Path]) -> Callable[[str], Any]:
    def go(query: str) -> Any:
        page.goto(f"{web_viewer[0]}#/training{query}")
        page.locator(".training-run .num", has_text="20").first.wait_for()
        return page

    return go


# Of a canvas: how many colours are on it, coarsely.
INK = """(canvas) => {
  if (!canvas.width) return 0;
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const seen = new Set();
  for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 200) seen.add([data[i], data[i + 1], data[i + 2]].map((c) => c >> 5).join());
  return seen.size;
}"""


def chart(page: Any, metric: str) -> Any:
    return page.locator(".training-chart", has=page.locator(f"h3[title='{metric}']")).first


def hover(page: Any, metric: str, share: float) -> list[list[str]]:
    """The words of each line beside the pointer; nothing before the chart is drawn."""
    box = chart(page, metric).locator(".training-plot").bounding_box()
    for y in (80, 81):
        page.mouse.move(box["x"] + 48 + (box["width"] - 60) * share, box["y"] + y)
    return [text.split() for text in page.locator(".training-tip-line").all_inner_texts()]


def test_runs_are_drawn_over_each_other_and_distinguished(dashboard: Callable[[str], Any]) -> None:
    page = dashboard("")
    assert page.locator(".training-run").count() == 2
    chart(page, "reward/mean").locator("canvas[width]").wait_for()
    wait_until(lambda: chart(page, "reward/mean").locator("canvas").evaluate(INK) >= 3)
    wait_until(lambda: hover(page, "reward/mean", 1.0) == [["fast", "0.6"], ["slow", "0.2"]])
    assert page.locator(".training-tip > div").first.inner_text() == "step 20 · 1 min"


def test_a_metric_that_never_changes_is_a_line_with_its_chart_behind_it(dashboard: Callable[[str], Any]) -> None:
    page = dashboard("")
    flat = page.locator(".training-flat")
    flat.first.wait_for()
    assert flat.all_inner_texts() == ["flat: lr 0.5"]
    assert not chart(page, "lr").is_visible()
    flat.locator("summary").click()
    wait_until(lambda: chart(page, "lr").locator("canvas").evaluate(INK) >= 2)


def test_a_chart_spans_the_steps_at_which_its_metric_has_values(dashboard: Callable[[str], Any]) -> None:
    page = dashboard("")
    chart(page, "warmup").scroll_into_view_if_needed()
    wait_until(lambda: hover(page, "warmup", 1.0) == [["fast", "1"], ["slow", "1"]])
    assert page.locator(".training-tip > div").first.inner_text().startswith("step 5 ")


def test_ticks_can_be_distinguished(dashboard: Callable[[str], Any]) -> None:
    page = dashboard("")
    ticks = {
        (0.0, 0.5, 1.0): ["0", "0.5", "1.0"],
        (0.999902, 0.999904): ["0.999902", "0.999904"],
        (22000.0, 22002.0): ["22.000k", "22.002k"],
        (1e6, 1.0005e6): ["1.0000M", "1.0005M"],
        (-2e-6, 0.0, 2e-6): ["\N{MINUS SIGN}2e-6", "0", "2e-6"],
        (12.0,): ["12"],
    }
    found = page.evaluate(
        "async (all) => { const { trainingTicks } = await import('/static/training/axes.js'); return all.map(trainingTicks); }",
        [list(marks) for marks in ticks],
    )
    assert found == list(ticks.values())


def test_evaluations_come_first_and_phases_are_stacked(dashboard: Callable[[str], Any]) -> None:
    page = dashboard("")
    page.locator(".training-legend").first.wait_for()
    titles = page.locator(".training-group summary").all_inner_texts()
    assert titles[0].startswith("Reward and held-out evaluation") and any(one.startswith("Phases") for one in titles)
    assert page.locator(".training-legend").first.inner_text().split("\n") == ["generation", "train"]


def test_what_is_chosen_is_in_the_address(dashboard: Callable[[str], Any]) -> None:
    page = dashboard("")
    page.get_by_text("by time").click()
    page.get_by_text("log", exact=True).click()
    page.locator(".training-run").nth(1).click()
    alone = page.evaluate("location.href")  # page.url is reported later
    assert "x=time" in alone and "log=1" in alone
    page.goto("about:blank")
    page.goto(alone)
    page.locator(".training-run[aria-pressed=false]").wait_for()
    assert page.locator("[data-key=time][aria-pressed=true]").count() == 1


def test_recipes_are_compared(dashboard: Callable[[str], Any]) -> None:
    page = dashboard("?tab=config")
    rows = page.locator(".training-table tbody tr")
    wait_until(lambda: rows.all_inner_texts() == ["optimizer.lr\t0.3\t0.1"])
    page.get_by_text("also what is the same").click()
    assert rows.count() == 5


def test_the_last_values_of_two_runs_are_compared(dashboard: Callable[[str], Any]) -> None:
    page = dashboard("?tab=values")
    reward = page.locator(".training-table tr", has_text="reward/mean")
    wait_until(lambda: reward.inner_text().split("\t") == ["reward/mean", "0.6", "0.2", "\N{MINUS SIGN}0.4"])


def test_rollouts_of_a_step_are_a_click_away(dashboard: Callable[[str], Any]) -> None:
    page = dashboard("?step=3")
    # What the growing run brings every two seconds waits for the finger.
    page.locator(".training-step a").click(delay=3000)
    page.locator(".table-row", has_text="<b>task 2</b>").wait_for()
    assert "learned%3A2" in page.url and page.locator(".table-row", has_text="task 1").count() == 0


def test_held_out_rollouts_of_an_evaluation_are_a_click_away(dashboard: Callable[[str], Any]) -> None:
    page = dashboard("?step=20")
    page.locator(".training-step a", has_text="held-out").click(delay=3000)
    page.locator(".table-row", has_text="<b>task 20</b>").wait_for()
    assert "learned%3A20" in page.url and page.locator(".table-row", has_text="task 10").count() == 0
    dashboard("?tab=samples").locator(
        ".training-steps a[title='held-out rollouts of the weights after step 20']"
    ).wait_for()


def test_the_page_of_a_rollout_says_how_it_was_trained(
    dashboard: Callable[[str], Any], web_viewer: tuple[str, Path]
) -> None:
    entry = {"step": 2, "advantages": {"r-1-0": -0.25}}
    (web_viewer[1] / "slow" / "advantages.jsonl").write_text(json.dumps(entry) + "\n")
    page = dashboard("?step=2")
    page.locator(".training-step a").first.click(delay=3000)
    page.locator(".table-row").first.click()
    page.locator(".trained").wait_for()
    assert page.locator(".trained").inner_text() == "trained in step 2 with the advantage \N{MINUS SIGN}0.25"


def test_a_metric_with_a_hostile_name_is_only_text(dashboard: Callable[[str], Any]) -> None:
    page = dashboard("?find=onerror")
    page.locator(".training-chart h3").wait_for()
    assert page.locator(".training-chart h3").inner_text() == HOSTILE and page.locator("img").count() == 0


def test_the_page_follows_a_run_and_its_way_back_to_a_checkpoint(
    dashboard: Callable[[str], Any], web_viewer: tuple[str, Path]
) -> None:
    page, file = dashboard(""), web_viewer[1] / "fast" / "metrics.jsonl"
    before = file.read_bytes()
    try:
        with file.open("ab") as grown:
            grown.write(line(21, reward__mean=0.7) + line(22, reward__mean=0.75))
        page.locator(".training-run .num", has_text="22").wait_for()
        wait_until(lambda: hover(page, "reward/mean", 1.0)[:1] == [["fast", "0.75"]])
        os.truncate(file, len(lines(5, gain=0.03)))
        with file.open("ab") as grown:
            grown.write(json.dumps({"step": 6, "time/elapsed": 1.0, "reward/mean": 0.9}).encode() + b"\n")
        page.locator(".training-run .num", has_text="6").wait_for()
        wait_until(lambda: hover(page, "reward/mean", 5 / 19)[:1] == [["fast", "0.9"]])
        assert "resumed" in page.locator(".training-tip > div").first.inner_text()
    finally:
        file.write_bytes(before)
