"""Conventions of every command (docs/commands.md): help with examples, errors in a line, exit codes, JSON, dry runs."""

from __future__ import annotations

import errno
import importlib
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import psutil
import pytest
import yaml
from click.testing import CliRunner, Result
from waiting import PATIENCE_S, wait_until

from ngym.cli import offline
from ngym.cli.init import _write, project
from ngym.cli.shell import main as shell
from ngym.cli.shell.main import COMMANDS, GROUPS, OWN, command, context_settings
from ngym.cli.shell.main import main as ng
from ngym.cli.shell.walkthrough import Walkthrough
from ngym.config.service_config import load_config
from ngym.config.shipped_files import shipped_path
from ngym.errors import NgymError, UsageError

HEAVY = {"fastapi", "numpy", "omegaconf", "pydantic", "rich", "starlette", "torch", "uvicorn", "yaml"}
MAX_MODULES = 500  # a Python with click alone has 250; each hundred more take 30 to 50 ms
EVERY = [(name, importlib.import_module(module).main) for name, (module, _) in COMMANDS.items()]
CALL = [sys.executable, "-m", "ngym"]
FULL = "standard output: No space left on device; make room and run it again\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with rollouts, in the working directory."""
    for path, text in project("my_env").items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    rows = [_rollout(task, index, float(index)) for task in range(2) for index in range(2)]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "folder").mkdir()
    (tmp_path / "garbage").write_bytes(b"\x00\xff\xfe\x01[{\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _rollout(task: int, index: int, reward: float) -> dict[str, Any]:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is enots."}]}
    return {
        "responses_create_params": {"input": f"Write the word 'stone' backwards, {task}."},
        "agent_ref": {"type": "responses_api_agents", "name": "my_env_agent"},
        "word": "stone",
        "mark": "\N{GREEK SMALL LETTER ALPHA}",
        "_ng_task_index": task,
        "_ng_rollout_index": index,
        "response": {"output": [message]},
        "reward": reward,
        "ng": {"run_id": "r", "task_id": f"{task:016x}", "stop_reason": "answer", "status": "ok", "segments": []},
    }


def run_cli(*words: str, environment: dict[str, str] | None = None) -> Result:
    return CliRunner(env=environment).invoke(ng, words)


def everything(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


# --- help ---


@pytest.mark.parametrize(("name", "main"), EVERY, ids=COMMANDS)
def test_a_help_has_exit_codes_and_examples_that_can_be_given(name: str, main: click.Command) -> None:
    epilog = " ".join((main.epilog or "").split())
    assert "Exit codes: 0" in epilog and " 2 " in epilog
    examples = list(_examples(main))
    assert examples
    for script, words in examples:
        assert script == f"ng_{name}"
        with main.make_context(script, words):
            pass


def _examples(main: click.Command) -> Iterator[tuple[str, list[str]]]:
    """The lines after `Examples:`, without what is in brackets at their end, and without a launcher."""
    block = (main.help or "").split("Examples:")[1]
    for line in block.split("\n\n")[0].strip().splitlines():
        words = shlex.split(re.sub(r"\s{2,}\(.*\)$", "", line.strip()))
        script = next(place for place, word in enumerate(words) if word.startswith("ng_"))
        yield words[script], words[script + 1 :]


def test_no_help_imports_anything_heavy_or_much(tmp_path: Path) -> None:
    scripts = json.dumps([[module, ["--help"]] for module, _ in COMMANDS.values()] + [["ngym.cli.shell.main", []]])
    code = f"""
import importlib, json, sys
from click.testing import CliRunner
for module, words in json.loads({scripts!r}):
    result = CliRunner().invoke(importlib.import_module(module).main, words)
    print(module, result.exit_code, len(sys.modules), *sorted(sys.modules.keys() & {HEAVY!r}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    lines = [line.split() for line in result.stdout.splitlines()]
    assert len(lines) == len(COMMANDS) + 1
    for module, code_, modules, *heavy in lines:
        assert (code_, heavy) == ("0", []) and int(modules) < MAX_MODULES, (module, modules, heavy)


def test_ng_lists_every_script_in_one_group(root: Path) -> None:
    scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
    assert {f"ng_{name}": f"{module}:main" for name, (module, _) in COMMANDS.items()} == {
        name: target for name, target in scripts.items() if name not in ("ng", "ngym")
    }
    assert scripts["ngym"] == scripts["ng"], "`uvx ngym`, and where NeMo Gym or Angular have installed their own ng"
    assert sorted(name for names in GROUPS.values() for name in names) == sorted([*COMMANDS, *OWN])
    alone = run_cli()
    assert alone.exit_code == 0 and alone.stdout == run_cli("--help").stdout == run_cli("help").stdout
    for name, line in ({name: line for name, (_, line) in COMMANDS.items()} | OWN).items():
        assert re.search(rf"^  {name} +{re.escape(line)}$", alone.stdout, re.MULTILINE)


def test_a_command_is_found_by_each_of_its_names() -> None:
    results = [run_cli(name, "--help") for name in ("collect_rollouts", "collect-rollouts", "ng_collect_rollouts")]
    assert {result.exit_code for result in results} == {0} and len({result.stdout for result in results}) == 1
    assert run_cli("help", "collect-rollouts").stdout == results[0].stdout
    assert run_cli("collect_rollouts", "--version").stdout.startswith("ng collect_rollouts (ngym) ")


# --- mistakes ---

MISTAKES = [
    ("colect", "ng: no command 'colect' (did you mean 'collect_rollouts'?); see ng --help"),
    ("help statsu", "ng: no command 'statsu' (did you mean 'status'?); see ng --help"),
    ("run --onyl x", "ng run: no option '--onyl' (did you mean '--only'?); see ng run --help"),
    ("run --dry-run=3", "ng: option '--dry-run' does not take a value"),
    ("run --only my_en", "global_config.yaml: no service named 'my_en' (did you mean 'my_env'?)"),
    ("run --dry-run polcy.latency_s=1", "command line: no service named 'polcy' (did you mean 'policy'?)"),
    ("run --dry-run policy.replcas=0 policy.replicas=0", "command line: policy: replicas: "),
    ("run --config global_confg.yaml", "global_confg.yaml: no such file (did you mean 'global_config.yaml'?)"),
    ("run --config folder", "folder: cannot be read: Is a directory"),
    ("run --config garbage", "garbage:1: not UTF-8"),
    ("serve my_en", "global_config.yaml: no service named 'my_en' (did you mean 'my_env'?)"),
    ("serve", "ng serve: missing argument 'NAME'"),
    ("serve my_env --differs model", "--differs needs --join URL"),
    ("prepare gsm8k --config none.yaml", "none.yaml: no such file"),  # and nothing is downloaded
    ("serve my_env --port 70000", "ng serve: invalid value for '--port': 70000 is not in the range"),
    ("serve my_env --host 10.255.255.1", "NGYM_TOKEN is not set"),
    ("status --head foo", "--head 'foo' is not a service URL"),
    ("status --interval 0", "ng status: invalid value for '--interval'"),
    ("status extra", "ng status: got unexpected extra argument (extra)"),
    ("collect_rollouts --input a", "ng collect_rollouts: missing option '--output'"),
    ("collect_rollouts --input rollout.jsonl --output o", "rollout.jsonl: no such file (--input) (did you mean 'roll"),
    ("collect_rollouts --input folder --output o", "folder: no such file (--input), it is a folder"),
    ("collect_rollouts --input garbage --output o --repeats 0", "ng collect_rollouts: invalid value for '--repeats'"),
    ("collect_rollouts --config global_config.yaml --input garbage --output o --dry-run", "garbage:1: not JSON"),
    ("collect_rollouts --config global_config.yaml --input rollouts.jsonl --output no/o --dry-run", "no/o: the folder"),
    ("collect_rollouts --head nowhere --input rollouts.jsonl --output o", "--head 'nowhere' is not a service URL"),
    ("collect_rollouts --config global_config.yaml --agent my_agent --input rollouts.jsonl --output o --dry-run",
     "--agent: no agent named 'my_agent' (did you mean 'my_env_agent'?)"),
    ("plot folder --x tim", "(did you mean 'time'?); see ng plot --help"),
    ("export --format demonstration", "'rollouts' (did you mean 'demonstrations'?); see"),
    ("export --format kto --input garbage --output o", "garbage:1: not JSON"),
    ("export --format kto --input rollouts.jsonl --output folder", "folder is a folder; name a file for --output"),
    ("profile rollout.jsonl", "rollout.jsonl: no such file (did you mean 'rollouts.jsonl'?)"),
    ("profile folder", "folder: no such file, it is a folder"),
    ("profile none*.jsonl", "none*.jsonl: no file matches"),
    ("profile garbage", "garbage:1: not JSON"),
    ("reverify --input rollouts.jsonl --output rollouts.jsonl --overwrite", "is both the input and --output"),
    ("profile rollouts.jsonl --output rollouts.jsonl --overwrite", "rollouts.jsonl is both the input and --output"),
    ("profile rollouts.jsonl --output garbage", "garbage exists; add --overwrite to replace it"),
    ("init x --folder garbage/x", "garbage is not a folder; choose another place"),
    ("prepare gsm8k --dry-run --output garbage", "garbage is not a folder; choose another place"),
    ("reverify --input rollouts.jsonl --output no/o", "no/o: the folder no does not exist; make it first"),
    ("train sfft.yaml", "sfft.yaml: no such recipe (did you mean 'sft.yaml'?)"),
    ("train sft.yaml --dry-run optimiser.lr=1", "command line: unknown key 'optimiser' (did you mean 'optimizer'?)"),
    ("train sft.yaml --resume --overwrite", "--resume keeps what the run has, --overwrite removes it"),
    ("train garbage", "garbage:1: not UTF-8"),
    ("list --domain maths", "--domain maths: no such domain (did you mean 'math'?)"),
    ("prepare gsm8", "no public set is called 'gsm8' (did you mean 'gsm8k'?)"),
    ("prepare gsm8k --revision main", "--revision main: must be a commit"),
    ("init 9", "'9' is not a valid name for an environment"),
    ("init policy", "'policy' is another key of global_config.yaml; choose another name, such as my_env"),
    ("init x --folder gym_servers", "gym_servers exists and is not empty; nothing was written"),
    ("quickstart --tasks 0", "ng quickstart: invalid value for '--tasks'"),
    ("quickstart --folder garbage/x", "garbage is not a folder; choose another --folder"),
    ("validate --config global_confg.yaml", "global_confg.yaml: no such file (did you mean 'global_config.yaml'?)"),
    ("completion tcsh", "ng completion: invalid value for '{bash|zsh|fish}': 'tcsh' is not one of 'bash', 'zsh', 'fish'"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(here: Path, line: str, message: str) -> None:
    before = everything(here)
    result = run_cli(*line.split())
    assert result.exit_code == 2 and result.stdout == ""
    assert message in result.stderr and result.stderr.count("\n") == 1
    assert everything(here) == before


@pytest.mark.parametrize(
    "line",
    [
        "collect_rollouts --dry-run --config global_config.yaml --agent my_env_agent --input rollouts.jsonl --output pipe",
        "export --format rollouts --input rollouts.jsonl --output pipe --overwrite",
        "profile rollouts.jsonl --output pipe",
        "reverify --input rollouts.jsonl --output pipe --overwrite",
    ],
)
def test_nothing_takes_the_place_of_a_device_or_a_pipe(here: Path, line: str) -> None:
    """For root, `--output /dev/null` replaced the machine's /dev/null."""
    os.mkfifo(here / "pipe")
    result = run_cli(*line.split())
    assert result.exit_code == 2 and (here / "pipe").is_fifo()
    assert result.stderr == "pipe is not a regular file, but a device or a pipe; name a file\n"


@pytest.mark.parametrize(
    "line",
    [
        "collect_rollouts --dry-run --config global_config.yaml --agent my_env_agent --input rollouts.jsonl --output o",
        "export --format rollouts --input rollouts.jsonl --output o --dry-run",
        "profile rollouts.jsonl --output o",
        "reverify --input rollouts.jsonl --output o --dry-run",
        "init x --dry-run",
        "prepare gsm8k --dry-run",
    ],
)
def test_a_folder_that_cannot_be_written_to_is_named_before_any_work(
    here: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a read-only file system; permissions do not bind root."""
    monkeypatch.setattr("os.access", lambda path, mode, **_: not mode & os.W_OK)
    result = run_cli(*line.split())
    assert result.exit_code == 2 and result.stderr.endswith(
        "cannot be written to: it is read-only, or you have no permission\n"
    )


def test_an_input_that_can_be_read_only_once_is_said_to_be_one(here: Path) -> None:
    os.mkfifo(here / "pipe")
    message = run_cli("collect_rollouts", "--input", "pipe", "--output", "out.jsonl").stderr
    assert message == "pipe: no such file (--input), it is a device or a pipe; save its output to a file\n"


def test_nothing_runs_here_is_a_failure(here: Path) -> None:
    result = run_cli("status")
    assert result.exit_code == 1 and result.stderr.startswith(f"nothing runs in {here}: ") and result.stdout == ""


def test_a_deleted_folder_is_said(tmp_path: Path) -> None:
    line = "mkdir gone && cd gone && rmdir ../gone && "
    for words, code in (("list", 2), ("list --help", 0)):
        call = ["bash", "-c", f"{line} {shlex.join(CALL)} {words}"]
        result = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == code
        assert result.stderr == ("the folder that this shell is in was deleted; cd to another one\n" if code else "")


# --- how commands end ---


def fails(raised: BaseException) -> Result:
    @command("ng_fails")
    def main() -> None:
        raise raised

    return CliRunner().invoke(main, [])


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (NgymError("it died"), 1, "it died\n"),
        (UsageError("it is wrong"), 2, "it is wrong\n"),
        (NgymError("it said \x1b]0;title\x07\x1b[31mred"), 1, "it said \\x1b]0;title\\x07red\n"),
        (KeyboardInterrupt(), 130, "\n"),
        (OSError(errno.ENOSPC, "No space left on device", "out.jsonl"), 75, "out.jsonl: No space left on device; make"),
        (OSError(errno.ENOSPC, "No space left on device"), 75, "ng_fails: No space left on device; make room"),
        (PermissionError(errno.EACCES, "Permission denied", "out.jsonl"), 2, "out.jsonl: Permission denied\n"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, ""),
        (MemoryError(), 1, "ng_fails: out of memory: give it more"),
    ],
)
def test_an_error_ends_a_command_with_its_code(raised: BaseException, code: int, line: str) -> None:
    result = fails(raised)
    assert result.exit_code == code and result.stderr.startswith(line) and result.stderr.count("\n") <= 1


def test_a_full_disk_under_a_file_is_reported_with_the_file(here: Path) -> None:
    """/dev/full behind a link: each write is refused, and the refusal names no file."""
    (here / ".again.jsonl.partial").symlink_to("/dev/full")
    result = run_cli("reverify", "--input", "rollouts.jsonl", "--output", "again.jsonl")
    assert (result.exit_code, result.stderr) == (
        75,
        "again.jsonl: No space left on device; make room and run it again\n",
    )
    assert not (here / "again.jsonl").exists()


def test_a_file_that_a_full_disk_refuses_is_reported_and_can_be_tried_again(here: Path) -> None:
    (here / "tasks.jsonl.tmp").symlink_to("/dev/full")
    result = run_cli("profile", "rollouts.jsonl", "--output", "tasks.jsonl")
    assert (result.exit_code, result.stderr) == (75, "tasks.jsonl: cannot be written: No space left on device\n")


def test_a_full_disk_under_the_config_of_a_walk_is_reported(here: Path) -> None:
    (here / "global_config.yaml").unlink()
    (here / "global_config.yaml").symlink_to("/dev/full")
    result = run_cli("quickstart", "--folder", str(here))
    message = f"{here}/global_config.yaml: No space left on device; make room and run it again\n"
    assert (result.exit_code, result.stderr) == (75, message)


def test_a_full_disk_leaves_nothing_of_a_new_environment(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "full").symlink_to("/dev/full")

    @command("ng_fails")
    def main() -> None:
        _write(folder, {folder / "a" / "b" / "app.py": "x", folder / "full": "y"})

    result = CliRunner().invoke(main, [])
    assert result.exit_code == 75 and result.stderr.startswith(f"{folder}/full: No space left on device; make room")
    assert everything(tmp_path) == {str(folder): None}


STEP = """
import signal, sys, time
from pathlib import Path

signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
try:
    print("begun", flush=True)
    time.sleep(600)
finally:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print("stopping", flush=True)
    time.sleep(float(sys.argv[1]))
    Path("stopped").touch()
"""
WALK = """
import sys
from ngym.cli.shell.main import command
from ngym.cli.shell.walkthrough import Walkthrough

@command("ng_x")
def main():
    walk = Walkthrough(2)
    walk.python("step.py", sys.argv[1])
    walk.python("step.py", sys.argv[1])

sys.exit(main([]))
"""


@contextmanager
def walking(folder: Path, stops_for_s: float) -> Iterator[subprocess.Popen[str]]:
    """A walk whose first step has begun. At the end there must be none of its processes any more."""
    (folder / "step.py").write_text(STEP)
    (folder / "walk.py").write_text(WALK)
    call = [sys.executable, "walk.py", str(stops_for_s)]
    with subprocess.Popen(call, cwd=folder, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            _read_until(process, "begun")
            yield process
            assert process.stdout is not None and "begun" not in process.stdout.read()
            with pytest.raises(ProcessLookupError):
                os.killpg(process.pid, 0)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _read_until(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    while process.stdout.readline() != f"{word}\n":
        assert process.poll() is None


def _waits_without_a_signal(pid: int) -> bool:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return status["State"].split()[0] == "S" and not int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)


def test_ctrl_c_lets_a_step_of_a_walk_stop_what_it_has_started(tmp_path: Path) -> None:
    with walking(tmp_path, stops_for_s=1) as process:
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait() == 130 and (tmp_path / "stopped").exists()


def test_a_second_ctrl_c_ends_a_step_of_a_walk_that_stops_for_long(tmp_path: Path) -> None:
    with walking(tmp_path, stops_for_s=600) as process:
        os.killpg(process.pid, signal.SIGINT)
        _read_until(process, "stopping")
        wait_until(lambda: _waits_without_a_signal(process.pid))  # two pending signals would be one
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait() == 130 and not (tmp_path / "stopped").exists()


@pytest.mark.parametrize(
    ("number", "code", "waits_s"), [(signal.SIGTERM, 143, (PATIENCE_S,)), (signal.SIGINT, 130, (2, 20, PATIENCE_S))]
)
def test_a_step_of_a_walk_gets_what_the_walk_alone_was_given(
    tmp_path: Path, number: int, code: int, waits_s: tuple[float, ...]
) -> None:
    with walking(tmp_path, stops_for_s=0.5) as process:
        for wait_s in waits_s:  # of a Ctrl-C the walk takes the first for one of a terminal, which reaches all
            process.send_signal(number)
            if select.select([process.stdout], [], [], wait_s)[0]:
                break  # the step says that it stops
        assert process.wait() == code and (tmp_path / "stopped").exists()


BESIDE = """
import sys
from pathlib import Path
from ngym.cli.shell.main import command
from ngym.cli.shell.walkthrough import Walkthrough

@command("ng_x")
def main():
    walk = Walkthrough(1)
    with walk.background(Path("log"), "run", "--config", sys.argv[1]):
        walk.python("step.py", "0")

sys.exit(main([]))
"""


@contextmanager
def walking_beside(folder: Path, config: str) -> Iterator[subprocess.Popen[str]]:
    """A walk with `ng_run` in the background and a step that has begun. At the end none of the services is left."""
    (folder / "step.py").write_text(STEP)
    (folder / "walk.py").write_text(BESIDE)
    (folder / "global_config.yaml").write_text(config)
    call = [sys.executable, "walk.py", "global_config.yaml"]
    pipe = subprocess.PIPE
    with subprocess.Popen(call, cwd=folder, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            _read_until(process, "begun")
            yield process
            wait_until(lambda: not _remaining_processes(folder))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for left in _remaining_processes(folder):
                left.kill()


def _remaining_processes(folder: Path) -> list[psutil.Process]:
    """The processes of `ng_run`: it, its zygote and the services, each in the folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if (
                process.cwd() == str(folder)
                and "step.py" not in process.cmdline()
                and "walk.py" not in process.cmdline()
            ):
                found.append(process)
    return found


ONE_GYM = "counter: {kind: gym_server, app: gym_servers/counter}\n"


@pytest.mark.parametrize(
    ("number", "to_all", "code"),
    [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 143), (signal.SIGKILL, False, -signal.SIGKILL)],
)
def test_services_beside_a_walk_end_with_it(tmp_path: Path, number: int, to_all: bool, code: int) -> None:
    with walking_beside(tmp_path, ONE_GYM) as process:
        wait_until(lambda: "ready in" in (tmp_path / "log").read_text())
        assert _remaining_processes(tmp_path)
        (os.killpg if to_all else os.kill)(process.pid, number)
        assert process.wait() == code


def test_services_beside_a_walk_that_cannot_run_end_it(tmp_path: Path) -> None:
    with walking_beside(tmp_path, ONE_GYM + "counter_agent: {kind: agent}\n") as process:
        assert process.wait() == 2 and (tmp_path / "stopped").exists()
        assert process.stderr is not None
        *lines, last = process.stderr.read().splitlines()
        assert last == "ng_run ended with exit code 2; its last lines are above, all in log"
        assert any("global_config.yaml:2" in line for line in lines)


def test_the_documented_exit_codes_are_the_ones_there_are(root: Path) -> None:
    table = re.findall(r"^\| ([\d, ]+) \|", (root / "docs" / "commands.md").read_text(), re.MULTILINE)
    documented = {int(code) for row in table for code in row.split(",")}
    ours = {value for name, value in vars(shell).items() if name.startswith("EXIT_")}
    assert documented - ours == {128 + signal.SIGHUP, 128 + signal.SIGTERM} and ours < documented


def test_an_unexpected_error_is_a_line_after_its_traceback_in_a_log() -> None:
    lines = fails(RuntimeError("no\nsuch luck")).stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("ng_fails: unexpected RuntimeError: no such luck; if ngym is at fault, report it")


def test_on_a_terminal_the_traceback_is_in_a_file_that_the_line_names(tmp_path: Path) -> None:
    code = "from ngym.cli.shell.main import command\n@command('ng_x')\ndef main(): 1 / 0\nmain()"
    reader, terminal = pty.openpty()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], stderr=terminal, env=environment, check=False)
    os.close(terminal)
    output = os.read(reader, 65536).decode()
    os.close(reader)
    [file] = tmp_path.iterdir()
    assert done.returncode == 1 and output.count("\n") == 1 and str(file) in output
    assert "ZeroDivisionError" in output and "Traceback" in file.read_text() and file.stat().st_mode & 0o077 == 0


def test_ctrl_c_while_a_script_still_imports_ends_it_without_a_word() -> None:
    code = "import os, sys; sys.argv[0] = 'bin/ng_run'; import ngym.cli; os.kill(os.getpid(), 2); import ngym.cli.run"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("{ng} help | true; exit ${{PIPESTATUS[0]}}", (0, 1), ""),
        ("{ng} prepare --list >&-", (0,), ""),
        ("{ng} run --onyl 2>&-", (2,), ""),
        ("PYTHONUNBUFFERED= {ng} help >/dev/full", (75,), FULL),
        ("PYTHONUNBUFFERED=1 {ng} help >/dev/full", (75,), FULL),
        ("PYTHONIOENCODING=ascii {ng} profile rollouts.jsonl --by mark", (0,), ""),
        ("HOME=/proc/none {ng} help", (0,), ""),
    ],
)
def test_standard_streams_may_be_closed_full_narrow_or_deaf(
    here: Path, line: str, code: tuple[int, ...], message: str
) -> None:
    call = ["bash", "-c", line.format(ng=shlex.join(CALL))]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode in code and done.stderr == message


# --- for programs ---

DRY = {
    "run": "run --dry-run policy.replicas=2",
    "serve": "serve my_env --dry-run --port 8000",
    "collect_rollouts": "collect_rollouts --dry-run --config global_config.yaml --input gym_servers/my_env/data/example.jsonl "
    "--output results/out.jsonl --repeats 3",
    "export": "export --dry-run --format demonstrations --input rollouts.jsonl --output sft.jsonl",
    "reverify": "reverify --dry-run --input rollouts.jsonl --output again.jsonl",
    "train": "train sft.yaml output=trained --dry-run",
    "live": "train grpo.yaml --dry-run model.path=folder model.tokenizer={root}/data/tiny_policy/tokenizer output=trained "
    "rollouts.services={root}/global_config.yaml",
    "sweep": "train sft.yaml output=trained --dry-run --sweep seed=0,1",
    "prepare": "prepare gsm8k --dry-run --config {root}/global_config.yaml",
    "push": "push rollouts.jsonl me/rollouts --dry-run",
    "init": "init other --dry-run",
    "quickstart": "quickstart --dry-run --folder quick",
}


@pytest.mark.parametrize("name", DRY)
def test_a_dry_run_shows_and_does_nothing(root: Path, here: Path, name: str) -> None:
    words = DRY[name].format(root=root).split()
    before = everything(here)
    result = run_cli(*words)
    assert result.exit_code == 0 and result.output, result.output
    as_json = run_cli(*words, "--json")
    assert as_json.exit_code == 0 and everything(here) == before
    json.loads(as_json.stdout)


def test_a_dry_run_of_a_walk_shows_its_commands(here: Path) -> None:
    plan = json.loads(run_cli("quickstart", "--dry-run", "--json", "--seed", "7").stdout)
    assert plan["folder"] == "runs/quickstart"
    names = [line.split()[0] for line in plan["commands"]]
    assert names == ["python", "ng_run", "ng_train", "ng_collect_rollouts", "ng_train", "kill"]
    assert plan["commands"][1].endswith(" &") and "rollouts.services=runs/quickstart" in plan["commands"][4]
    assert all("7" in plan["commands"][place] for place in (0, 2, 4))


def test_each_step_of_make_offline_is_a_command_that_accepts_its_options(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps themselves take minutes. A step that writes rollouts leaves those of two rewards and an unscored one."""
    names = []

    def check(walk: Walkthrough, name: str, *arguments: str) -> None:
        names.append(name)
        if name == "train":
            result = run_cli(name, *arguments, "--dry-run")
            assert result.exit_code == 0, result.output
            shutil.copytree(shipped_path("data/tiny_policy"), here / "off" / "sft" / "policy", dirs_exist_ok=True)
            return
        main = importlib.import_module(COMMANDS[name][0]).main
        output = main.make_context(name, [*arguments]).params["output"]
        Path(output).write_text('{"reward": 1}\n{"reward": 0}\n{"reward": null}\n')

    monkeypatch.setattr(Walkthrough, "ng", check)
    result = CliRunner().invoke(offline.main, ["--folder", "off"])
    assert result.exit_code == 0, result.output
    assert names == ["train", "collect_rollouts", "collect_rollouts", "export", "train", "collect_rollouts"]
    assert "held-out reward 0.500 (33.3% unscored) -> 0.500 (33.3% unscored)" in result.output
    assert load_config([here / "off" / "global_config.yaml"]).services["policy"].options["model"] == "sft/policy"


def test_a_dry_run_says_what_would_be_started_where(here: Path) -> None:
    result = run_cli("run", "--dry-run", "--only", "my_env", "my_env.port=8123", "ngym.host=127.0.0.2")
    assert list(yaml.safe_load(result.stdout)) == ["ngym", "my_env"]
    assert f"127.0.0.2:8123  {here}/gym_servers/my_env/app.py" in result.stderr
    plan = json.loads(run_cli("run", "--dry-run", "--json", "policy.replicas=2").stdout)
    assert [(each["name"], each["replicas"], each["port"]) for each in plan["services"]] == [
        ("policy", 2, None),
        ("my_env", 1, None),
        ("my_env_agent", 1, None),
    ]
    assert plan["config"]["policy"]["replicas"] == 2


def test_a_dry_run_of_a_collection_counts_what_is_done(here: Path) -> None:
    words = [
        "--config",
        "global_config.yaml",
        "--input",
        "gym_servers/my_env/data/example.jsonl",
        "--output",
        "rollouts.jsonl",
    ]
    result = run_cli("collect_rollouts", *words, "--dry-run", "--repeats", "3")
    assert result.stdout.startswith("15 rollouts into rollouts.jsonl; the first, by my_env_agent:\n")
    assert (
        "5 tasks, 64 rollouts at once" in result.stdout
        and "started here: my_env, my_env_agent, policy" in result.stdout
    )
    assert result.stderr == "rollouts.jsonl already holds rollouts: --resume or --overwrite is needed\n"
    refusal = run_cli("collect_rollouts", *words, "--dry-run", "--resume")
    assert refusal.exit_code == 2 and "rollouts_run.json does not exist" in refusal.stderr


JSON = [
    "list --domain math", "prepare --list", "init other", "validate --environment my_env",
    "export --format kto --input rollouts.jsonl --output kto.jsonl",
    "reverify --input rollouts.jsonl --output again.jsonl",
]  # fmt: skip


@pytest.mark.parametrize("line", JSON)
def test_json_is_all_that_is_on_standard_output(here: Path, line: str) -> None:
    result = run_cli(*line.split(), "--json")
    assert result.exit_code == 0 and json.loads(result.stdout), result.stderr


def test_a_profile_is_json_line_by_line(here: Path) -> None:
    rows = [json.loads(line) for line in run_cli("profile", "rollouts.jsonl", "--json").stdout.splitlines()]
    assert len(rows) == 2


def test_a_json_of_mistakes_names_them(here: Path) -> None:
    (here / "global_config.yaml").write_text("one: {kind: agent, app: agents/simple, gym: x, model: one}\n")
    result = run_cli("validate", "--json")
    assert result.exit_code == 2 and "no service named 'x'" in result.stderr
    assert result.stderr.splitlines() == json.loads(result.stdout)["mistakes"]


# --- shells and colours ---


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_a_shell_completes_commands_options_services_recipes_and_files(here: Path) -> None:
    lines = [
        "ng co",
        "ng run --only my",
        "ng_collect_rollouts --agent ",
        "ng_train grp",
        "ng_export --inp",
        "ng help sta",
    ]
    for name in ("ng", "ng_collect_rollouts", "ng_train", "ng_export"):
        entry = "ngym.cli.shell.main" if name == "ng" else COMMANDS[name.removeprefix("ng_")][0]
        script = here / name
        script.write_text(f"#!{sys.executable}\nfrom {entry} import main\nmain(prog_name={name!r})\n")
        script.chmod(0o755)
    code = 'PATH="$PWD:$PATH"; eval "$(ng completion bash)"\n'
    for line in lines:
        words = shlex.join(re.split(" ", line))
        code += f"COMP_WORDS=({words}); COMP_CWORD={line.count(' ')}; COMPREPLY=()\n"
        code += f'$(complete -p {line.split()[0]} | sed "s/.*-F \\([^ ]*\\).*/\\1/") {line.split()[0]} 2>/dev/null\n'
        code += 'echo "${COMPREPLY[*]}"\n'
    code = code.replace("$(complete", "F=$(complete").replace('/\\1/") ', '/\\1/"); "$F" ')
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "collect_rollouts completion",
        "my_env my_env_agent",
        "my_env_agent",
        "grpo.yaml",
        "--input",
        "status",
    ], done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_is_of_every_script(shell: str) -> None:
    result = run_cli("completion", shell)
    assert result.exit_code == 0
    for name in ("ng", *(f"ng_{name}" for name in COMMANDS)):
        assert f"_{name.upper()}_COMPLETE={shell}_complete" in result.stdout


def test_a_config_that_cannot_be_read_completes_nothing(here: Path) -> None:
    (here / "global_config.yaml").write_bytes(b"\xff: [")
    words = {"COMP_WORDS": "ng run --only ", "COMP_CWORD": "3", "_NG_COMPLETE": "bash_complete"}
    result = CliRunner(env=words).invoke(ng, [], prog_name="ng")
    assert (result.exit_code, result.output.strip()) == (0, "")


@pytest.mark.parametrize(
    ("environment", "color"),
    [
        ({}, None),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, None),
        ({"TERM": "dumb"}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
    ],
)
def test_the_environment_says_whether_there_are_colours(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], color: bool | None
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert context_settings()["color"] is color
