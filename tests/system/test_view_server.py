"""`ng_view` as a process: its answers, its authorization, and its end."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from statistics import fmean

import orjson
import pytest
from viewer_process import Viewer, command, environment, failure, of_task, rollout, run, segment, viewer, write
from waiting import reserved_port, wait_until

from ngym.collect.collection_files import CollectionPaths
from ngym.view.runs import open_runs

TOKEN = "a-token-that-nobody-guesses"
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
HOSTILE = "<script>alert(1)</script>\x1b[2J\u202e\u2028</textarea>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of the same tasks, one with failures, hostile text, a lone surrogate and corrupt lines."""
    folder = tmp_path_factory.mktemp("rollouts")
    write(folder / "before.jsonl", [rollout(task, index, float(index == 0)) for task in range(5) for index in range(2)])
    after = [rollout(task, index, float(task != 1), level="easy") for task in range(4) for index in range(2)]
    lone = json.dumps(rollout(9, 0, None, "\ud83d alone")).encode()
    write(folder / "after.jsonl", [*after, rollout(8, 0, 0.5, HOSTILE), lone, b"{corrupt", rollout(9, 1, -1.0)])
    write(folder / "after_failures.jsonl", [failure(0, 5), failure(3, 5, "tool_error"), failure(3, 6)])
    return folder


@pytest.fixture(scope="module")
def web_viewer(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    with viewer(folder / "before.jsonl", folder / "after.jsonl", cache=tmp_path_factory.mktemp("cache")) as served:
        wait_until(lambda: all(each["indexed_bytes"] == each["bytes"] for each in served.get("/api/runs")["runs"]))
        yield served


def test_runs_say_what_they_hold(web_viewer: Viewer, folder: Path) -> None:
    before, after = web_viewer.get("/api/runs")["runs"]
    assert (before["id"], before["name"], before["path"], before["rows"]) == (
        "r1",
        "before",
        str(folder / "before.jsonl"),
        10,
    )
    assert (after["rows"], after["failures"], after["bad_lines"]) == (11, 3, 1)
    assert after["bad"][0].startswith("after.jsonl:11: not JSON")
    assert (after["environments"], after["has_tokens"], after["fields"]) == (["math_agent"], True, ["level"])
    assert (after["run_id"], after["error"], after["note"]) == ("run-1", None, None)
    assert before["mean_reward"] == pytest.approx(web_viewer.get("/api/runs/r1/stats")["mean"])
    assert after["mean_reward"] == pytest.approx(web_viewer.get("/api/runs/r2/stats")["mean"])


def test_a_row_is_the_files_own_bytes(web_viewer: Viewer, folder: Path) -> None:
    lines = (folder / "after.jsonl").read_bytes().splitlines()
    for row in (0, 8, 9, 11):
        status, headers, body = web_viewer.ask(f"/api/runs/r2/rows/{row}")
        assert (status, headers["content-type"], body) == (200, "application/json", lines[row])
    failures = (folder / "after_failures.jsonl").read_bytes().splitlines()
    assert web_viewer.ask("/api/runs/r2/rows/f1")[2] == failures[1]


def test_hostile_text_travels_as_json_and_never_as_a_page(web_viewer: Viewer) -> None:
    (row,) = web_viewer.get("/api/runs/r2/rows?q=task:8")["rows"]
    assert row["answer"] == HOSTILE
    for path in ("/api/runs/r2/rows?q=task:8", "/api/runs/r2/rows/8"):
        _, headers, _ = web_viewer.ask(path)
        assert headers["content-type"] == "application/json"
        assert headers["x-content-type-options"] == "nosniff"


def test_the_rows_of_a_page_are_filtered_and_sorted(web_viewer: Viewer) -> None:
    page = web_viewer.get("/api/runs/r2/rows?q=reward%3E=0&sort=-reward,-task&offset=1&limit=2")
    assert (page["total"], page["indexed"], [row["row"] for row in page["rows"]]) == (9, 14, ["7", "4"])
    assert "searching" not in page


def test_a_group_has_all_rollouts_of_its_task_and_its_failures(web_viewer: Viewer) -> None:
    group = web_viewer.get("/api/runs/r2/groups/3")
    assert group["task"] == 3
    assert [(row["row"], row["status"]) for row in group["rows"]] == [
        ("6", "ok"), ("7", "ok"), ("f1", "failed"), ("f2", "failed")
    ]  # fmt: skip


def test_stats_are_the_numbers_of_the_rows(web_viewer: Viewer) -> None:
    stats = web_viewer.get("/api/runs/r2/stats")
    rewards = [row["reward"] for row in web_viewer.get("/api/runs/r2/rows?q=-reward:null")["rows"]]
    assert (stats["n"], stats["scored"], stats["unscored"], stats["failed"]) == (11, 10, 1, 3)
    assert stats["mean"] == pytest.approx(fmean(rewards))
    assert stats["interval"][0] < stats["mean"] < stats["interval"][1]
    assert stats["pass_at"]["1"] == pytest.approx(fmean([1, 0, 1, 1, 0.5, -1]))
    assert sum(stats["histogram"]["counts"]) == 10
    assert (stats["histogram"]["edges"][0], stats["histogram"]["edges"][-1]) == (-1.0, 1.0)
    assert {each["class"]: each["count"] for each in stats["failures"]} == {"timeout": 2, "tool_error": 1}
    assert stats["length"]["sampled"] is False
    assert len(stats["length"]["points"]) == 10
    failed = web_viewer.get("/api/runs/r2/stats?q=status:failed")
    assert (failed["failures"][0]["example"], failed["tasks"], stats["tasks"]) == ("f0", 2, 6)
    assert web_viewer.get("/api/runs/r1/stats")["binary"] is True


def test_two_runs_are_compared_task_by_task_the_largest_difference_first(web_viewer: Viewer) -> None:
    found = web_viewer.get("/api/compare?a=r1&b=r2")
    assert (found["better"], found["worse"], found["same"], found["only_a"], found["only_b"]) == (3, 1, 0, 1, 2)
    assert (found["mean_a"], found["mean_b"], found["delta"], found["matched_by"]) == (0.5, 0.75, 0.25, "task_id")
    first = found["rows"][0]
    assert (abs(first["delta"]), first["a"]["n"], first["b"]["n"], first["prompt"]) == (0.5, 2, 2, "What is 0 + 2?")
    assert [row["delta"] for row in web_viewer.get("/api/compare?a=r1&b=r2&sort=delta&limit=1")["rows"]] == [-0.5]
    assert found["rows"][-1]["delta"] is None


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    """r1: of 2 tasks that training drew 3 times each; r2: held-out ones; r3, r4: rows without task ids;
    r5: without tasks; r6, r7: rows of two agents without task ids.
    """
    folder = tmp_path_factory.mktemp("training")
    drawn = [("train-a", 0), ("train-b", 1), ("train-b", 2), ("train-a", 3), ("train-a", 4), ("train-b", 5)]
    train = [of_task(name, task, index, float(name == "train-a")) for name, task in drawn for index in range(2)]
    runs = {
        "train": train,
        "held_out": [of_task(f"held-{task}", task, 0, 1.0) for task in range(4)],
        "plain": [of_task(None, task, 0, 0.0) for task in range(2)],
        "plain_later": [of_task(None, task, 0, 1.0) for task in range(2)],
        "foreign": [of_task(None, task, 0, float(task == 0)) for task in range(4)],
        "two_agents": [of_task(None, task, 0, float(task < 2)) for task in range(4)],
        "two_agents_later": [of_task(None, task, 0, float(task >= 2)) for task in range(4)],
    }
    for row in runs["foreign"]:
        del row["_ng_task_index"]
    for row in runs["two_agents"] + runs["two_agents_later"]:
        row["agent_ref"] = {"name": f"agent_{row['_ng_task_index'] // 2}"}
        row["_ng_task_index"] %= 2  # as where the files of two collections are joined
    for name, rows in runs.items():
        write(folder / f"{name}.jsonl", rows)
    files = [folder / f"{name}.jsonl" for name in runs]
    with viewer(*files, cache=tmp_path_factory.mktemp("training_cache")) as served:
        wait_until(lambda: all(each["indexed_bytes"] == each["bytes"] for each in served.get("/api/runs")["runs"]))
        yield served


def test_runs_without_a_common_task_get_no_verdict(training: Viewer) -> None:
    found = training.get("/api/compare?a=r1&b=r2")
    assert (found["better"], found["worse"], found["same"], found["delta"], found["matched_by"]) == (
        0,
        0,
        0,
        None,
        None,
    )
    assert (found["only_a"], found["only_b"]) == (2, 4)
    assert training.get("/api/compare?a=r2&b=r3")["matched_by"] is None  # ids against none: the indices mean nothing


def test_rows_without_task_ids_are_matched_by_their_index_and_that_is_shown(training: Viewer) -> None:
    found = training.get("/api/compare?a=r3&b=r4")
    assert (found["better"], found["delta"], found["matched_by"]) == (2, 1.0, "task")


def test_tasks_of_two_agents_with_the_same_index_are_two_tasks(training: Viewer) -> None:
    found = training.get("/api/compare?a=r6&b=r7&sort=delta")
    assert (found["better"], found["worse"], found["same"], found["matched_by"]) == (2, 2, 0, "task")
    sides = [(row["delta"], row["a"]["agent"], row["a"]["task"], row["a"]["n"]) for row in found["rows"]]
    assert sides == [(-1, "agent_0", 0, 1), (-1, "agent_0", 1, 1), (1, "agent_1", 0, 1), (1, "agent_1", 1, 1)]


def test_rows_that_name_no_task_count_in_the_list_of_runs(training: Viewer) -> None:
    (run,) = [each for each in training.get("/api/runs")["runs"] if each["name"] == "foreign"]
    assert (run["mean_reward"], run["unscored_share"], run["environments"]) == (0.25, 0, ["math_agent"])
    assert training.get("/api/runs/r5/stats")["mean"] == 0.25


def test_a_task_that_training_draws_again_is_one_task(training: Viewer) -> None:
    assert training.get("/api/runs/r1/stats")["tasks"] == 2
    page = training.get("/api/runs/r1/tasks")
    assert page["total"] == 2
    assert [(row["task_id"], row["task"], row["groups"], row["n"], row["mean"]) for row in page["rows"]] == [
        ("train-a", 0, 3, 6, 1.0), ("train-b", 1, 3, 6, 0.0)
    ]  # fmt: skip
    assert [row["task"] for row in training.get("/api/runs/r1/tasks/3")["rows"]] == [0, 0, 3, 3, 4, 4]
    assert [row["task"] for row in training.get("/api/runs/r1/groups/3")["rows"]] == [3, 3]
    assert training.ask("/api/runs/r1/tasks/99")[0] == 404


def test_the_tokens_of_a_row_say_which_were_trained(web_viewer: Viewer) -> None:
    tokens = web_viewer.get("/api/runs/r2/rows/2/tokens")
    (found,) = tokens["segments"]
    assert [token["id"] for token in found["tokens"]] == segment()["token_ids"]
    assert [token["trained"] for token in found["tokens"]] == [False] * 3 + [True] * 2
    assert [token["logprob"] for token in found["tokens"]][3:] == [-0.25, -1.5]
    assert [token["version"] for token in found["tokens"]] == [None, None, None, 3, 4]
    assert "--tokenizer" in tokens["note"]


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/api/runs/r9/rows", 404, "no run 'r9'"),
        ("/api/runs/r1/rows/99", 404, "there is no row 99"),
        ("/api/runs/r1/rows/..%2fsecret", 404, ""),
        ("/api/runs/r1/rows/0x1", 404, "rows are called"),
        ("/api/runs/r1/groups/99", 404, "there is no task 99"),
        ("/api/runs/r1/groups/a", 400, "task='a' is not a whole number"),
        ("/api/runs/r1/rows?limit=5000", 400, "at most 1,000"),
        ("/api/runs/r1/rows?offset=-1", 400, "offset='-1'"),
        ("/api/runs/r1/rows?q=rewrd%3C1", 400, "did you mean 'reward'"),
        ("/api/runs/r1/rows?sort=nothing", 400, "nothing to sort by"),
        ("/api/compare?a=r1", 404, "no run ''"),
        ("/api/nothing", 404, "GET /api/nothing"),
        ("/static/../app.py", 404, ""),
        ("/static/%2e%2e%2fapp.py", 404, ""),
        ("/static/", 404, ""),
        ("/etc/passwd", 404, ""),
    ],
)
def test_what_cannot_be_answered_is_a_problem_document(
    web_viewer: Viewer, path: str, status: int, message: str
) -> None:
    found, headers, body = web_viewer.ask(path)
    problem = json.loads(body)
    assert (found, headers["content-type"], problem["status"]) == (status, "application/problem+json", status)
    assert message in problem["detail"]


def test_every_answer_forbids_what_a_page_need_not_do(web_viewer: Viewer) -> None:
    for path in ("/", "/api/runs", "/static/main.js", "/nothing"):
        _, headers, _ = web_viewer.ask(path)
        assert headers["content-security-policy"].startswith(POLICY)
        assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")
    assert web_viewer.ask("/api/runs", method="POST")[0] == 405


def test_a_name_that_is_not_this_machines_is_refused(web_viewer: Viewer) -> None:
    port = web_viewer.report["address"].rsplit(":", 1)[1].strip("/")
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", ""):
        status, _, body = web_viewer.ask("/api/runs", Host=host)
        assert status in (400, 421)
        assert b"after.jsonl" not in body
    for host in (f"localhost:{port}", "127.0.0.1:9999", "[::1]"):
        assert web_viewer.ask("/api/runs", Host=host)[0] == 200


def test_with_a_token_only_the_page_itself_is_open(folder: Path, tmp_path: Path) -> None:
    with viewer(folder / "before.jsonl", cache=tmp_path, NGYM_TOKEN=TOKEN) as served:
        assert served.report["url"].endswith(f"#token={TOKEN}")
        assert served.ask("/")[0] == 200
        status, headers, body = served.ask("/api/runs")
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert b"before" not in body
        assert served.ask("/api/runs", Authorization="Bearer wrong")[0] == 401
        assert served.ask(f"/api/runs?token={TOKEN}")[0] == 401
        assert served.ask("/api/runs", Authorization=f"Bearer {TOKEN}")[0] == 200


def test_off_loopback_a_token_is_made(folder: Path, tmp_path: Path) -> None:
    with viewer("--host", "0.0.0.0", folder / "before.jsonl", cache=tmp_path) as served:
        port = served.report["address"].rstrip("/").rsplit(":", 1)[1]
        here = Viewer({**served.report, "address": f"http://127.0.0.1:{port}/"}, served.process)
        assert here.ask("/api/runs")[0] == 401
        assert here.ask("/api/runs", Authorization=f"Bearer {served.report['token']}")[0] == 200
        assert len(served.report["token"]) > 40


def test_a_file_that_grows_is_followed(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", [rollout(0)])
    with viewer(path, cache=tmp_path / "cache") as served:
        wait_until(lambda: served.get("/api/runs/r1/rows")["total"] == 1)
        with path.open("ab") as file:
            file.write(orjson.dumps(rollout(1)) + b"\n" + orjson.dumps(rollout(2))[:100])
        wait_until(lambda: served.get("/api/runs/r1/rows")["total"] == 2)
        write(tmp_path / "out_failures.jsonl", [failure(1)])
        wait_until(lambda: served.get("/api/runs")["runs"][0]["failures"] == 1)
        assert served.get("/api/runs")["runs"][0]["growing"] is True
        assert [row["task"] for row in served.get("/api/runs/r1/rows?q=status:ok")["rows"]] == [0, 1]


def test_a_folder_shows_what_is_in_it_but_nothing_that_links_lead_out_to(tmp_path: Path) -> None:
    secret_folder, inside = tmp_path / "outside", tmp_path / "inside"
    secret_folder.mkdir()
    (inside / "runs" / "one").mkdir(parents=True)
    write(secret_folder / "secret.jsonl", [rollout(0)])
    write(inside / "runs" / "one" / "out.jsonl", [rollout(0)])
    write(inside / "runs" / "all_failed_failures.jsonl", [failure(0)])
    write(inside / "tasks.jsonl", [{"responses_create_params": {"input": "x"}}])
    (inside / "link.jsonl").symlink_to(secret_folder / "secret.jsonl")
    (inside / "folder").symlink_to(secret_folder)
    with viewer(inside, cache=tmp_path / "cache") as served:
        paths = [run["path"] for run in served.report["runs"]]
    assert paths == [str(inside / "runs" / "all_failed.jsonl"), str(inside / "runs" / "one" / "out.jsonl")]


@pytest.mark.parametrize("linked", ["metrics.jsonl", "recipe.yaml", "rollouts.jsonl"])
def test_a_training_run_of_which_a_file_is_a_link_that_leads_out_is_passed_over(tmp_path: Path, linked: str) -> None:
    inside, target = tmp_path / "inside", tmp_path / "outside"
    (inside / "run").mkdir(parents=True)
    target.write_bytes(b'{"step": 1}\n')
    (inside / "run" / "metrics.jsonl").write_bytes(b'{"step": 1}\n')
    write(inside / "other.jsonl", [rollout(0)])
    (inside / "run" / linked).unlink(missing_ok=True)
    (inside / "run" / linked).symlink_to(target)
    found = open_runs([inside])
    assert ([run.path.name for run in found.rollouts.values()], found.training) == (["other.jsonl"], {})


def test_a_run_whose_failures_are_a_link_that_leads_out_is_passed_over(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    for name in ("out", "own"):
        write(inside / f"{name}.jsonl", [rollout(0)])
    write(inside / "kept_failures", [failure(0)])
    (inside / "own_failures.jsonl").symlink_to(inside / "kept_failures")
    (inside / "out_failures.jsonl").symlink_to(write(tmp_path / "secret.jsonl", [failure(0)]))
    assert [run.path.name for run in open_runs([inside]).rollouts.values()] == ["own.jsonl"]


def test_the_failures_of_a_run_are_where_the_collector_puts_them(tmp_path: Path) -> None:
    path = write(tmp_path / "a.b.jsonl", [rollout(0)])
    for named in (path, write(CollectionPaths.for_output(path).failures, [failure(0)])):
        (run,) = open_runs([named]).rollouts.values()
        assert list(run.index.paths.values()) == [path, CollectionPaths.for_output(path).failures]


@pytest.mark.parametrize("host", ["192.0.2.1", "x" * 70])
def test_a_host_that_is_not_of_this_machine_is_reported_as_one(folder: Path, tmp_path: Path, host: str) -> None:
    found = run("--no-open", "--host", host, folder / "before.jsonl", cache=tmp_path)
    assert (found.returncode, found.stderr.count("\n")) == (2, 1)
    assert "name an address of this machine with --host" in found.stderr


def test_a_port_that_is_taken_is_reported_and_the_usual_one_has_neighbours(folder: Path, tmp_path: Path) -> None:
    with reserved_port() as port, closing(socket.create_server(("127.0.0.1", port))):
        found = run("--no-open", "--port", str(port), folder / "before.jsonl", cache=tmp_path)
    assert found.returncode == 2
    assert found.stderr.startswith(f"port {port} on 127.0.0.1: ")
    assert "choose another --port" in found.stderr
    start = [each for each in command("--json", "--no-open", folder / "before.jsonl")]
    both = [subprocess.Popen(start, env=environment(tmp_path), stdout=subprocess.PIPE) for _ in range(2)]
    try:
        addresses = {json.loads(each.stdout.readline())["address"] for each in both if each.stdout}
    finally:
        for each in both:
            each.terminate()
            each.communicate()
    assert len(addresses) == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nothing.jsonl", None, "there is no such file or folder"),
        ("tasks.jsonl", b'{"responses_create_params": {"input": "x"}}\n', "its first line is not a rollout"),
        ("notes.txt", b"hello\n", "its first line is not a rollout"),
    ],
)
def test_what_cannot_be_shown_is_said_in_a_line(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    found = run(tmp_path / name, cache=tmp_path / "cache")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.count("\n") == 1
    assert message in found.stderr


def test_a_misspelled_file_is_reported_with_the_nearest_one(folder: Path, tmp_path: Path) -> None:
    found = run(folder / "befor.jsonl", cache=tmp_path)
    assert found.stderr.endswith(f"there is no such file or folder (did you mean '{folder / 'before.jsonl'}'?)\n")


def test_a_run_of_which_every_rollout_failed_is_shown_by_its_name(tmp_path: Path) -> None:
    write(tmp_path / "out_failures.jsonl", [failure(0)])
    with viewer(tmp_path / "out.jsonl", cache=tmp_path / "cache") as served:
        wait_until(lambda: served.get("/api/runs")["runs"][0]["failures"] == 1)
        (entry,) = served.get("/api/runs")["runs"]
        assert (entry["rows"], entry["mean_reward"]) == (0, None)
        assert served.get("/api/runs/r1/rows")["rows"][0]["row"] == "f0"


def test_a_folder_with_nothing_to_show_is_said_to_have_nothing(tmp_path: Path) -> None:
    found = run(cache=tmp_path / "cache", cwd=tmp_path)
    assert found.returncode == 2
    assert "nothing to show" in found.stderr


def test_the_metrics_of_a_run_that_has_just_begun_are_not_taken_for_rollouts(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        (tmp_path / name).touch()
    with viewer(tmp_path, cache=tmp_path / "cache") as served:
        runs = [run for run in served.get("/api/runs")["runs"] if run["kind"] == "rollouts"]
        assert [Path(run["path"]).name for run in runs] == ["rollouts.jsonl"]


def test_help_has_examples_and_imports_nothing_heavy(tmp_path: Path) -> None:
    found = run("--help", cache=tmp_path)
    assert "ng_view yesterday.jsonl today.jsonl" in found.stdout
    code = "import sys; sys.argv = ['ng_view', '--help']; import ngym.cli.view as view\ntry: view.main()\nfinally: print(*sys.modules, file=sys.stderr)"
    loaded = subprocess.run([*command()[:1], "-c", code], capture_output=True, text=True, check=False).stderr.split()
    assert not {"starlette", "uvicorn", "fastapi", "sqlite3", "pydantic"} & set(loaded)
