"""ng_collect_rollouts as a process: discovery of services, output and exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest
from aiohttp import web
from click.testing import CliRunner
from stub_agents import head, problem, scored_row, task
from waiting import PATIENCE_S, until

from ngym.cli.rollouts.collect import hint, main, translate_flags
from ngym.collect.plan import CollectionPlan, input_rows, plan_rollouts
from ngym.errors import UsageError
from ngym.files.jsonl import read
from ngym.schema import Json
from ngym.supervise.head_file import HeadFile, RunningHead


@dataclass(frozen=True)
class ProcessResult:
    code: int
    out: str
    err: str


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b"".join(orjson.dumps(task(n)) + b"\n" for n in range(20)))
    return path


SIGNALLED = """
import os, sys
from ngym.cli.rollouts import collect_run

number, echo = int(sys.argv.pop(1)), collect_run.Command._echo

def signalled(self, text, nl=True):
    echo(self, text, nl)
    if text.startswith("resumed run"):
        os.kill(os.getpid(), number)

collect_run.Command._echo = signalled
from ngym.cli.shell.main import main
main(prog_name="ng")
"""


async def start(*arguments: object, cwd: Path) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "ngym", "collect_rollouts", *map(str, arguments)]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, cwd=cwd, stdout=pipe, stderr=pipe)


async def run_to_end(*arguments: object, cwd: Path) -> ProcessResult:
    process = await start(*arguments, cwd=cwd)
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode is not None
    return ProcessResult(process.returncode, out.decode(), err.decode())


def count(path: Path) -> int:
    return sum(1 for _ in read(path))


async def test_rollouts_from_a_running_head(tasks: Path, tmp_path: Path) -> None:
    async with head(lambda row: scored_row(row, row["n"] % 2)) as url:
        run = ("--head", url, "--agent", "agent", "--input", tasks, "--output", "out.jsonl", "--repeats", 2)
        done = await run_to_end(*run, cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert count(tmp_path / "out.jsonl") == 40
    for words in ("agent: 40 rollouts of 20 tasks", "mean reward", "0.500", "pass@2", "done: 40 of 40 rollouts in"):
        assert words in done.out
    assert "out_run.json" in done.out and "out_failures.jsonl" not in done.out


async def test_who_is_not_ready_is_said_while_nothing_else_is_to_be_seen(tasks: Path, tmp_path: Path) -> None:
    reported = asyncio.Event()

    async def late(row: Json) -> Json:
        await reported.wait()
        return scored_row(row)

    loading = {
        "name": "env",
        "kind": "gym_server",
        "url": "http://127.0.0.1:1",
        "status": "starting",
        "detail": "loading",
    }
    async with head(late, others=[loading]) as url:
        run = ("--head", url, "--agent", "agent", "--input", tasks, "--output", "out.jsonl")
        process = await start(*run, cwd=tmp_path)
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            while (line := await process.stdout.readline()) != b"not ready yet: env (loading)\n":
                assert line, "it ended"
            reported.set()
            rest, _ = await process.communicate()
    assert process.returncode == 0 and b"not ready yet" not in rest


async def test_no_text_of_a_row_is_markup_or_moves_the_terminals_cursor(tasks: Path, tmp_path: Path) -> None:
    hostile = "[/red] [link=x]y \x1b]0;title\x07"

    def answer(row: Json) -> Json:
        return scored_row(row, 1e30, ng={"stop_reason": hostile}, reward_components={hostile: 1.0}, level=hostile)

    async with head(answer) as url:
        options = ("--head", url, "--agent", "agent", "--by", "level", "--limit", "1")
        done = await run_to_end(*options, "--input", str(tasks), "--output", "out.jsonl", cwd=tmp_path)
    assert done.code == 0, done.err
    assert not {"\x1b", "\x07"} & set(done.out + done.err)
    assert "[/red]" in done.out and "1e+30" in done.out


async def test_json_is_all_that_is_on_standard_output(tasks: Path, tmp_path: Path) -> None:
    async with head() as url:
        run = ("--head", url, "--agent", "agent", "--input", tasks, "--output", "out.jsonl", "--json")
        done = await run_to_end(*run, cwd=tmp_path)
    status = json.loads(done.out)
    assert (status["status"], status["rollouts"], status["done"], status["given_up"]) == ("done", 20, 20, 0)
    assert status["agents"][0]["mean_reward"] == 1.0 and status["files"]["output"] == "out.jsonl"


async def test_nemo_gyms_flags_and_its_head_are_understood(tasks: Path, tmp_path: Path) -> None:
    sent: list[Json] = []

    def answer(row: Json) -> Json:
        sent.append(row)
        return scored_row(row)

    async with head(answer, nemo=True) as url:
        flags = (
            "+agent_name=agent",
            f"+input_jsonl_fpath={tasks}",
            "+output_jsonl_fpath=out.jsonl",
            "+num_repeats=2",
            "+limit=3",
            "+num_samples_in_parallel=null",
            "++responses_create_params.temperature=0.5",
        )
        done = await run_to_end("--head", url, *flags, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "understood as: ng_collect_rollouts --head" in done.err and "--set temperature=0.5" in done.err
    assert count(tmp_path / "out.jsonl") == 6
    assert {"input": "task 0", "temperature": 0.5} in [row["responses_create_params"] for row in sent]


def small_config(folder: Path) -> Path:
    """A config with one agent, whose environment rewards odd tasks."""
    (folder / "gym_servers").mkdir()
    (folder / "gym_servers" / "odd.py").write_text(
        '"""odd: reward 1 for odd tasks."""\n'
        "from ngym import VerifyRequest, gym_server\n\n\n"
        "class Task(VerifyRequest):\n    n: int\n\n\n"
        "def verify(task: Task) -> float:\n    return float(task.n % 2)\n\n\n"
        "app = gym_server(verify=verify)\n"
    )
    config = folder / "global_config.yaml"
    config.write_text(
        "ngym: {head: {port: 0}}\n"
        "policy: {kind: model, app: models/scripted}\n"
        "odd: {kind: gym_server, app: gym_servers/odd}\n"
        "agent: {kind: agent, app: agents/simple, gym: odd, model: policy}\n"
    )
    return config


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("odd.prt=1", "unknown key 'prt'"),
        ("policy.replies=none.jsonl", "none.jsonl"),
        ("odd.port=TAKEN", "is in use by another program"),
        ("ngym.head.prt=1", "unknown key 'head.prt'"),
    ],
)
async def test_an_overwrite_that_cannot_start_touches_nothing_and_shows_only_its_reason(
    tasks: Path, tmp_path: Path, override: str, reason: str
) -> None:
    config = small_config(tmp_path)
    (tmp_path / "out.jsonl").write_bytes(b'{"old": "rows"}\n')
    (tmp_path / "out_run.json").write_bytes(b'{"old": "run"}')
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        run = ("--config", config, "--agent", "agent", "--input", tasks, "--output", "out.jsonl", "--overwrite")
        done = await run_to_end(*run, override.replace("TAKEN", str(listener.getsockname()[1])), cwd=tmp_path)
    assert done.code in (1, 2) and reason in done.err, done
    assert "--resume" not in done.out + done.err and "out.jsonl" not in done.out and "rollouts" not in done.out
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


async def test_an_overwrite_that_is_interrupted_before_its_first_row_says_that_the_old_rows_are_there(
    tasks: Path, tmp_path: Path
) -> None:
    started = asyncio.Event()

    async def answer(row: Json) -> Json:
        started.set()
        await asyncio.sleep(3600)
        return scored_row(row)

    async with head() as url:
        run = ("--agent", "agent", "--input", tasks, "--output", "out.jsonl")
        assert (await run_to_end("--head", url, *run, cwd=tmp_path)).code == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    async with head(answer) as url:
        process = await start("--head", url, *run, "--overwrite", cwd=tmp_path)
        await asyncio.wait_for(started.wait(), PATIENCE_S)
        process.send_signal(signal.SIGINT)
        out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert (process.returncode, err) == (130, b"")
    assert out.decode().splitlines()[-1] == "interrupted before the first new row; out.jsonl is unchanged"
    assert (tmp_path / "out.jsonl").read_bytes() == before and not (tmp_path / "out.jsonl.new").exists()


async def test_services_of_a_config_are_started_and_stopped(tasks: Path, tmp_path: Path) -> None:
    small_config(tmp_path)
    run = (
        "--config",
        "global_config.yaml",
        "--agent",
        "agent",
        "--input",
        tasks,
        "--output",
        "out.jsonl",
        "--repeats",
        2,
    )
    done = await run_to_end(*run, "policy.model=echo", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "0.500" in done.out and "done: 40 of 40 rollouts" in done.out
    record = json.loads((tmp_path / "out_run.json").read_text())
    assert record["config"]["services"]["policy"] == {"kind": "model", "app": "models/scripted", "model": "echo"}
    assert not (tmp_path / ".ngym" / "head.json").exists()
    again = await run_to_end(*run, "--resume", "policy.model=echo", cwd=tmp_path)
    assert again.code == 0 and "40 of 40 rollouts are done; 0 to go" in again.out
    other = await run_to_end(*run, "--resume", cwd=tmp_path)
    assert other.code == 2 and "first difference: services.policy.model: 'echo' then, None now" in other.err


async def test_rollouts_that_were_given_up_are_reported_and_give_exit_code_1(tasks: Path, tmp_path: Path) -> None:
    def answer(row: Json) -> Json | web.Response:
        upstream = {"service": "policy", "url": "http://x", "status": 401}
        return (
            problem(502, failure="model_error", detail="the API\nkey is wrong", upstream=upstream, retryable=False)
            if row["n"]
            else scored_row(row)
        )

    async with head(answer) as url:
        done = await run_to_end(
            "--head", url, "--agent", "agent", "--input", tasks, "--output", "out.jsonl", cwd=tmp_path
        )
    assert done.code == 1
    assert len(re.findall(r"first model_error \(task \d+, policy\): the API key is wrong", done.out)) == 1
    assert "  agent: first model_error: the API key is wrong\n" in done.out, "at the end, too"
    assert "model_error 19" in done.out and "to continue" not in done.out
    assert count(tmp_path / "out_failures.jsonl") == 19


async def test_a_row_that_its_environment_refuses_is_named_by_file_and_line(tmp_path: Path) -> None:
    rows = [task(n) for n in range(3)]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(orjson.dumps(row) for row in rows) + b"\n")
    wrong = problem(422, detail="row 2: field 'word': Field required", retryable=False)
    async with head(lambda row: wrong if row["n"] == 2 else scored_row(row)) as url:
        run = ("--head", url, "--agent", "agent", "--input", "rows.jsonl", "--output", "out.jsonl")
        done = await run_to_end(*run, cwd=tmp_path)
    assert re.search(r"  agent: first \w+: rows\.jsonl:3: field 'word': Field required\n", done.out), done.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_an_interrupted_run_keeps_what_is_finished_and_can_be_resumed(
    tasks: Path, tmp_path: Path, number: signal.Signals
) -> None:
    hanging = True

    async def answer(row: Json) -> Json:
        if hanging and row["n"] >= 5:
            await asyncio.sleep(3600)
        return scored_row(row)

    async with head(answer) as url:
        run = ("--head", url, "--agent", "agent", "--input", tasks, "--output", "out.jsonl")
        process = await start(*run, cwd=tmp_path)
        await until(lambda: (tmp_path / "out.jsonl").exists() and count(tmp_path / "out.jsonl") == 5)
        process.send_signal(number)
        out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
        assert (process.returncode, err) == (130, b"")
        assert b"interrupted: 5 of 20 rollouts" in out and b"--resume" in out
        assert count(tmp_path / "out.jsonl") == 5
        hanging = False
        done = await run_to_end(*run, "--resume", cwd=tmp_path)
    assert done.code == 0 and "5 of 20 rollouts are done; 15 to go" in done.out
    assert count(tmp_path / "out.jsonl") == 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_before_the_first_rollout_ends_a_run_as_ctrl_c_does(
    tasks: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """It comes as the command says that the run is resumed: no event loop turns yet."""
    async with head(scored_row) as url:
        run = ("--head", url, "--agent", "agent", "--input", tasks, "--output", "out.jsonl")
        assert (await run_to_end(*run, "--limit", 3, cwd=tmp_path)).code == 0
        words = ["collect_rollouts", *map(str, run), "--resume"]
        command = [sys.executable, "-c", SIGNALLED, str(int(number)), *words]
        process = await asyncio.create_subprocess_exec(*command, cwd=tmp_path)
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 130
    assert count(tmp_path / "out.jsonl") == 3


async def test_a_second_collector_ends_at_once_and_names_the_first(tasks: Path, tmp_path: Path) -> None:
    async def answer(row: Json) -> Json:
        await asyncio.sleep(3600)
        return scored_row(row)

    async with head(answer) as url:
        run = ("--head", url, "--agent", "agent", "--input", tasks, "--output", "out.jsonl")
        first = await start(*run, cwd=tmp_path)
        await until((tmp_path / "out_run.json").exists)
        second = await run_to_end(*run, "--resume", cwd=tmp_path)
        first.kill()
        await first.communicate()
    assert second.code == 1
    assert f"out.jsonl is being written by process {first.pid}" in second.err


async def test_a_dry_run_shows_what_would_be_sent_and_touches_nothing(tasks: Path, tmp_path: Path) -> None:
    first, *others = tasks.read_text().splitlines()
    noted = json.dumps({**json.loads(first), "note": "A\x9d0;title\x9c"}, ensure_ascii=False)
    tasks.write_text("\n".join([noted, *others]))
    async with head(lambda row: problem(500)) as url:
        run = (
            "--head",
            url,
            "--agent",
            "agent",
            "--input",
            tasks,
            "--output",
            "out.jsonl",
            "--repeats",
            4,
            "--dry-run",
        )
        done = await run_to_end(*run, "--temperature", 0.7, cwd=tmp_path)
    assert done.code == 0
    assert done.out.startswith("80 rollouts into out.jsonl; the first, by agent:\n")
    assert '"temperature": 0.7' in done.out
    assert r'"note": "A\x9d0;title\x9c"' in done.out  # control characters do not reach the terminal
    assert list(tmp_path.iterdir()) == [tasks]


def write_agent_rows(tmp_path: Path, *names: str | None) -> None:
    """Write `rows.jsonl`, a row for each of these agents."""
    refs = [{} if name is None else {"agent_ref": {"type": "responses_api_agents", "name": name}} for name in names]
    lines = [orjson.dumps(task(n, **ref)) + b"\n" for n, ref in enumerate(refs)]
    (tmp_path / "rows.jsonl").write_bytes(b"".join(lines))


def agents_in(path: Path) -> dict[int, str]:
    """Task index -> the agent of its row."""
    written = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    return {row["_ng_task_index"]: row["agent_ref"]["name"] for row in written}


async def test_rows_that_name_another_agent_run_with_the_one_that_replaces_it(tmp_path: Path) -> None:
    write_agent_rows(tmp_path, "theirs", "agent")
    async with head(scored_row) as url:
        run = ("--head", url, "--input", "rows.jsonl", "--output", "out.jsonl")
        result = await run_to_end(*run, cwd=tmp_path)
        wrong = await run_to_end(*run, "--map-agent", "theirs=agnt", cwd=tmp_path)
        done = await run_to_end(*run, "--map-agent", "theirs=agent", cwd=tmp_path)
    assert result.code == wrong.code == 2
    assert "rows.jsonl:1: no agent named 'theirs'" in result.err
    assert "--agent NAME runs all rows with another agent, --map-agent theirs=NAME only its rows" in result.err
    assert "--map-agent: no agent named 'agnt' (did you mean 'agent'?)" in wrong.err
    assert done.code == 0, done.err
    assert agents_in(tmp_path / "out.jsonl") == {0: "agent", 1: "agent"}


async def test_the_agent_of_the_command_runs_every_row_and_says_which_ones_named_another(tmp_path: Path) -> None:
    write_agent_rows(tmp_path, "theirs", None, "agent", "theirs", "other")
    run = ("--agent", "agent", "--input", "rows.jsonl", "--output", "out.jsonl")
    async with head(scored_row) as url:
        result = await run_to_end("--head", url, *run, "--dry-run", cwd=tmp_path)
        first = await run_to_end("--head", url, *run, "--limit", 1, cwd=tmp_path)
        rest = await run_to_end("--head", url, *run, "--resume", cwd=tmp_path)
    note = "note: --agent agent also runs rows that name another agent: 1 name 'other', 2 name 'theirs'"
    assert note in result.out and note in rest.out
    assert "1 name 'theirs'" in first.out
    assert "resumed run" in rest.out and "1 of 5 rollouts are done" in rest.out
    assert agents_in(tmp_path / "out.jsonl") == dict.fromkeys(range(5), "agent")
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 5


async def test_a_mapped_agent_wins_over_the_agent_of_the_command(tmp_path: Path) -> None:
    write_agent_rows(tmp_path, "theirs", "kept")
    recipe = CollectionPlan("agent", agents={"kept": "kept"})
    replaced: Counter[str] = Counter()
    rows = input_rows([tmp_path / "rows.jsonl"], recipe, {"agent", "kept"}, replaced)
    assert [rollout.agent for rollout in plan_rollouts(rows, recipe)] == ["agent", "kept"]
    assert replaced == {"theirs": 1}


async def test_bad_lines_are_named_before_anything_is_run(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b'{"responses_create_params": {}}\n{"x"\n{"responses_create_param": {}}\n')
    requests: list[Json] = []
    async with head(lambda row: requests.append(row)) as url:
        done = await run_to_end(
            "--head", url, "--agent", "agent", "--input", "bad.jsonl", "--output", "out.jsonl", cwd=tmp_path
        )
    assert done.code == 2 and not requests
    lines = done.err.splitlines()
    assert lines[0].startswith("bad.jsonl:2: not JSON: ")
    assert lines[1].startswith("bad.jsonl:3: no responses_create_params in this row (is 'responses_create_param' meant")
    assert list(tmp_path.iterdir()) == [bad]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume", "--overwrite"], "--resume and --overwrite contradict each other"),
        (["--config", "c.yaml", "--head", "http://127.0.0.1:1"], "--config starts services here and --head uses"),
        (["policy.model=x"], "overrides of the config need --config FILE"),
        (["--set", "temperature"], "--set temperature: write --set key=value"),
        (["--overwrite", "--set", "temperature=hot"], "field 'temperature': must be a number from 0 to 2, not 'hot'"),
        (["--set", "temprature=1"], "field 'temprature': is not known (did you mean 'temperature'?)"),
        (["--set", "resoning.effort=low"], "field 'resoning': is not known (did you mean 'reasoning'?)"),
        (["--head", "http://127.0.0.1:1"], "nothing answers at http://127.0.0.1:1: start the services with ng_run"),
        (["--input", "none.jsonl", "--head", "http://127.0.0.1:1"], "none.jsonl: no such file (--input)"),
        (["--config", "none.yaml"], "none.yaml: no such file"),
        (["--map-agent", "theirs"], "--map-agent theirs: write --map-agent OLD=NEW"),
        (["--repeats", "0"], "0 is not in the range x>=1"),
        (["+prompt_config=a.yaml"], "+prompt_config: this flag of NeMo Gym's has no counterpart here"),
        (
            ["+num_repeat=4"],
            "+num_repeat: this flag of NeMo Gym's has no counterpart here (did you mean 'num_repeats'?)",
        ),
        (["+limit=many"], "'many' is not a valid integer range"),
    ],
)
def test_a_wrong_command_is_one_clear_line(
    tasks: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tasks.parent)
    result = CliRunner().invoke(
        main, ["--input", "tasks.jsonl", "--output", "out.jsonl", "--agent", "agent", *arguments]
    )
    assert result.exit_code == 2
    assert message in result.output
    assert [path.name for path in tasks.parent.iterdir()] == ["tasks.jsonl"]


def test_an_agent_that_does_not_exist_is_named(tasks: Path) -> None:
    (tasks.parent / "c.yaml").write_text("math_agent: {kind: agent, url: http://127.0.0.1:1}\n")
    files = [
        "--config",
        str(tasks.parent / "c.yaml"),
        "--input",
        str(tasks),
        "--output",
        str(tasks.parent / "out.jsonl"),
    ]
    result = CliRunner().invoke(main, [*files, "--agent", "maths_agent"])
    assert result.exit_code == 2
    assert "--agent: no agent named 'maths_agent' (did you mean 'math_agent'?)" in result.output
    assert not (tasks.parent / "out.jsonl").exists()


async def test_without_a_run_in_the_folder_no_other_is_used(tasks: Path, tmp_path: Path) -> None:
    done = await run_to_end("--agent", "agent", "--input", tasks, "--output", "out.jsonl", cwd=tmp_path)
    assert done.code == 2 and done.out == ""
    assert done.err == (
        f"nothing runs in {tmp_path}: start the services there with ng_run, name a run with --head URL, or add --config "
        "FILE and they are started and stopped here\n"
    )
    assert not (tmp_path / "out.jsonl").exists()
    async with head() as url:
        claimed = HeadFile.claim(tmp_path, RunningHead(url, os.getpid(), "admin"))
        assert (await run_to_end("--agent", "agent", "--input", tasks, "--output", "out.jsonl", cwd=tmp_path)).code == 0
        claimed.remove()


async def test_an_agent_that_the_run_does_not_have_is_reported_with_the_run(tasks: Path, tmp_path: Path) -> None:
    async with head(lambda row: row) as url:
        done = await run_to_end(
            "--head", url, "--agent", "agnt", "--input", tasks, "--output", "out.jsonl", cwd=tmp_path
        )
    assert done.code == 2
    assert done.err.startswith(f"--agent: no agent named 'agnt' in the run at {url} (did you mean 'agent'?); ")


def test_nemo_gyms_flags_in_our_spelling() -> None:
    words = [
        "+config_paths=[a.yaml,b.yaml]",
        "agent_name=math",
        "+resume_from_cache=true",
        "+num_repeats_add_seed=true",
        "+upload_rollouts=false",
        "+limit=null",
        "+responses_create_params={temperature: 0.5, reasoning: {effort: low}}",
        "--json",
        "policy.model=x",
    ]
    assert translate_flags(words) == [
        *("--config", "a.yaml", "--config", "b.yaml", "--agent", "math", "--resume", "--seed", "0"),
        *("--set", "temperature=0.5", "--set", 'reasoning={"effort": "low"}', "--json", "policy.model=x"),
    ]
    assert hint(["--agent", "math", "policy.model=x"]) is None
    with pytest.raises(UsageError, match="must be a mapping"):
        translate_flags(["+responses_create_params=3"])
