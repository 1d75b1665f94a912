"""`ng_view --export`: one file with everything in it, which loads nothing and runs only its own modules."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
import pytest
from viewer_process import failure, rollout, run, write

from ngym.view.app import STATIC
from ngym.view.html_report import join_modules

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(1)>"
DATA = re.compile(r'<script type="application/json" id="ngym-data">(.*?)</script>', re.DOTALL)
SCRIPT = re.compile(r'<script type="module">(.*?)</script>', re.DOTALL)
STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rollouts")
    rows = [rollout(task, index, float((task + index) % 3 == 0)) for task in range(10) for index in range(4)]
    lone = json.dumps(rollout(11, 0, None, "\ud83d")).encode()
    write(folder / "out.jsonl", [*rows, rollout(10, 0, 0.5, HOSTILE), lone])
    write(folder / "out_failures.jsonl", [failure(0, 5, "tool_error")])
    write(folder / "other.jsonl", [rollout(task, index, 1.0) for task in range(10) for index in range(4)])
    return folder


def data_of(page: str) -> dict[str, Any]:
    (found,) = DATA.findall(page)
    data: dict[str, Any] = json.loads(found)
    return data


def test_a_report_holds_the_most_telling_rollouts_and_all_numbers(folder: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    found = run(
        folder / "out.jsonl", folder / "other.jsonl", "--export", report, "--rows", "12", "--json", cache=tmp_path / "c"
    )
    assert found.returncode == 0, found.stderr
    summary = json.loads(found.stdout)
    data = data_of(report.read_text())
    assert (summary["full"], summary["listed"], summary["of"]) == (24, 83, 83)
    assert summary["bytes"] == report.stat().st_size
    assert {run["id"]: run["rows"] for run in data["runs"]} == {"r1": 42, "r2": 40}
    assert "f0" in data["full"]["r1"]
    rewards = [row["reward"] for row in data["rows"]["r1"] if row["row"] in data["full"]["r1"]]
    assert {0.0, 1.0} <= set(rewards)
    assert data["full"]["r2"]["0"] == json.loads((folder / "other.jsonl").read_text().splitlines()[0])
    assert data["stats"]["r1"]["failed"] == 1
    assert data["compare"]["r1,r2"]["better"] == 10


def test_hostile_text_ends_no_element_and_only_the_page_s_own_modules_may_run(folder: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    assert run(folder / "out.jsonl", "--export", report, cache=tmp_path / "cache").returncode == 0
    page = report.read_text()
    assert "<img" not in page
    assert data_of(page)["full"]["r1"]["40"]["response"]["output"][0]["content"][0]["text"] == HOSTILE
    (script,), (style,) = SCRIPT.findall(page), STYLE.findall(page)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy == (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    assert not re.search(r"\b(?:src|href)=\"(?!data:)", page[: page.index("<script")])
    assert page.count("<script") == page.count("</script>") == 2


def digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def test_a_filter_decides_what_is_in_a_report(folder: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    found = run(folder / "out.jsonl", "--export", report, "--filter", "reward:1 task<3", cache=tmp_path / "cache")
    assert found.stdout.startswith(f"{report}: ")
    assert "4 of 4 rollouts in full, 4 in the table" in found.stdout
    data = data_of(report.read_text())
    assert {row["reward"] for row in data["rows"]["r1"]} == {1.0}
    assert data["stats"]["r1"]["n"] == 4
    assert data["filter"] == "reward:1 task<3"


def test_the_sample_in_a_report_is_of_the_whole_run(tmp_path: Path) -> None:
    few = [0.1, 0.2, 0.3, 0.7, 0.8, 0.9]  # the worst, the best, and groups that differ: at the beginning
    rows = [rollout(place // 2, place % 2, few[place] if place < 6 else 0.5) for place in range(400)]
    write(tmp_path / "out.jsonl", rows)
    report = tmp_path / "report.html"
    assert run(tmp_path / "out.jsonl", "--export", report, "--rows", "8", cache=tmp_path / "c").returncode == 0
    sampled = [int(row) for row in data_of(report.read_text())["full"]["r1"] if int(row) >= 6]
    assert max(sampled) >= 200


def test_a_report_of_two_runs_holds_what_the_task_on_which_they_differ_most_opens_with(tmp_path: Path) -> None:
    runs = {"before": [0.0, 1.0, 0.0, 1.0], "after": [1.0, 1.0, 1.0, 0.0]}  # of task 7; elsewhere half are right
    for name, rewards in runs.items():
        rows = [rollout(task, i, rewards[i] if task == 7 else float(i % 2)) for task in range(10) for i in range(4)]
        write(tmp_path / f"{name}.jsonl", rows)
    report = tmp_path / "report.html"
    files = (tmp_path / "before.jsonl", tmp_path / "after.jsonl")
    assert run(*files, "--export", report, "--rows", "8", cache=tmp_path / "c").returncode == 0
    data = data_of(report.read_text())
    assert data["compare"]["r1,r2"]["rows"][0]["task"] == 7
    assert "28" in data["full"]["r1"] and "28" in data["full"]["r2"]


def test_a_row_whose_segments_are_not_json_is_in_the_table_alone(tmp_path: Path) -> None:
    damaged = [orjson.dumps(rollout(1)).replace(b"-0.25", value) for value in (b"NaN", b"-", b"1" * 5000)]
    write(tmp_path / "out.jsonl", [rollout(0), *damaged])
    report = tmp_path / "report.html"
    found = run(tmp_path / "out.jsonl", "--export", report, "--json", cache=tmp_path / "cache")
    summary = json.loads(found.stdout)
    assert (summary["full"], summary["listed"], summary["left_out"]) == (1, 4, 3)
    assert list(data_of(report.read_text())["full"]["r1"]) == ["0"]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--export", "report.html", "--filter", "rewrd<1"), 2, "--filter: no field 'rewrd' (did you mean 'reward'?)"),
        (("--filter", "reward<1"), 2, "--filter needs --export FILE"),
        (("--rows", "5"), 2, "--rows needs --export FILE"),
        (("--export", "nowhere/report.html"), 1, "cannot be written"),
        (("--export", "out.jsonl"), 2, "--export out.jsonl: a report is an .html file"),
    ],
)
def test_a_report_that_cannot_be_made_is_said_why(
    folder: Path, tmp_path: Path, options: tuple[str, ...], code: int, message: str
) -> None:
    found = run(folder / "out.jsonl", *options, cache=tmp_path / "cache", cwd=tmp_path)
    assert (found.returncode, message in found.stderr, found.stderr.count("\n")) == (code, True, 1), found.stderr
    assert not (tmp_path / "report.html").exists()


def test_the_modules_of_the_page_can_be_joined_into_one() -> None:
    script = join_modules(STATIC)
    assert "function start()" in script
    assert not re.search(r"^(?:import|export)\b", script, re.MULTILINE)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (
            {
                "main.js": 'import { a } from "./a.js";\n',
                "a.js": 'import { b } from "./main.js";\nexport const a = 1;\n',
            },
            "circle",
        ),
        (
            {"main.js": 'import { a } from "./a.js";\nconst b = a;\n', "a.js": "export const a = 1;\nconst b = 2;\n"},
            "share the top-level names b",
        ),
        ({"main.js": "export default 3;\n"}, "not an import or export that can be joined"),
        ({"main.js": 'const a = "</script>";\n'}, "would end its script"),
    ],
)
def test_modules_that_cannot_be_joined_are_refused(tmp_path: Path, modules: dict[str, str], message: str) -> None:
    for name, text in modules.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        join_modules(tmp_path)
