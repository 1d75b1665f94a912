"""Code that a config or recipe names by import path: the documented examples work, and mistakes are one line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from documents import snippets

from ngym.cli.train import main
from ngym.errors import ConfigError, UsageError
from ngym.sandbox import SandboxOptions, choose_sandbox
from ngym.sandbox.providers import CustomOptions
from ngym.services.base.options import ServiceOptions, parse_options
from ngym.trainer.losses.advantages import advantages
from ngym.trainer.recipe import recipe_reader
from ngym.trainer.recipe.objective import Advantage
from ngym.trainer.reporting import metrics, sinks

MISTAKES = """
import collections

from ngym.sandbox import Sandbox
from ngym.trainer.recipe.extensions import MetricSink, PushTransport

number = 3


def short(rewards, groups):
    return rewards[1:]


def infinite(rewards, groups):
    return [float("inf")] * len(rewards)


def nothing(rewards, groups):
    return None


class NoSend(PushTransport):
    pass


class NoWrite(MetricSink):
    pass


class Demanding(MetricSink):
    def __init__(self, output, recipe, *, url):
        super().__init__(output, recipe)

    def write(self, step, values):
        pass


class Half(Sandbox):
    async def start(self):
        pass
"""


@pytest.fixture
def folder(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files of the documentation, and one full of mistakes."""
    monkeypatch.chdir(tmp_path)
    for page in ("algorithms", "training", "toolbox"):
        for snippet in snippets(root / "docs" / f"{page}.md"):
            if snippet.language == "python" and "file" in snippet.remarks:
                (tmp_path / snippet.remarks["file"]).write_text(snippet.text)
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    (tmp_path / "broken.py").write_text("import json\n1 / 0\n")
    (tmp_path / "unclosed.py").write_text("def estimator(\n")
    return tmp_path


def recipe(*words: str) -> Any:
    overrides = ["model.path=data/letters/tokenizer", "evaluation=null", *words]
    return recipe_reader.read_recipe(["grpo.yaml"], overrides)[0]


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        recipe(*words)
    return str(caught.value)


def test_an_estimator_of_the_users_gives_the_advantages(folder: Path) -> None:
    advantage = recipe("algorithm.advantage.estimator=median_advantage.py:above_median").algorithm.advantage
    assert advantages(advantage, [1.0, None, 3.0, 8.0, 5.0], [0, 0, 0, 1, 0]) == [-2.0, 0.0, 0.0, 0.0, 2.0]
    assert advantages(advantage, [None, None], [0, 0]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", "mistakes.py:short returned 2 values for 3 rollouts; return a list with one number for each reward"),
        ("nothing", "mistakes.py:nothing returned NoneType for 3 rollouts; return a list"),
        ("infinite", "mistakes.py:infinite returned inf for rollout 0 of 3; return finite numbers"),
    ],
)
def test_what_an_estimator_returns_is_checked(folder: Path, name: str, message: str) -> None:
    options = Advantage(estimator=f"mistakes.py:{name}")
    with pytest.raises(UsageError) as caught:
        advantages(options, [1.0, 0.0, 0.5], [0, 0, 0])
    assert str(caught.value).startswith(f"algorithm.advantage.estimator: {message}")
    assert "\n" not in str(caught.value)


def test_an_estimator_of_the_users_may_compare_across_groups_of_one(folder: Path) -> None:
    words = ["algorithm.advantage.estimator=median_advantage.py:above_median", "rollouts.group_size=1"]
    assert "algorithm.shaping.skip_equal_groups: every group of one" in refusal(*words)
    assert recipe(*words, "algorithm.shaping.skip_equal_groups=false").live.group_size == 1
    assert "rollouts.group_size: group_std compares the attempts" in refusal("rollouts.group_size=1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm.advantage.estimator=group_sdt"], "Input should be 'group_std', 'group_mean'"),
        (["algorithm.advantage.estimator=none.py:f"], "none.py cannot be imported: there is no file"),
        (["algorithm.advantage.estimator=median_advantag.py:f"], "did you mean 'median_advantage.py'?"),
        (["algorithm.advantage.estimator=no_such_module:f"], "no_such_module cannot be imported: No module named"),
        (["algorithm.advantage.estimator=median_advantage.py:below"], "has no function called 'below'"),
        (["algorithm.advantage.estimator=mistakes.py:number"], "mistakes.py has no function called 'number'"),
        (["algorithm.advantage.estimator=broken.py:f"], "ZeroDivisionError: division by zero (broken.py:2)"),
        (["algorithm.advantage.estimator=unclosed.py:f"], "unclosed.py:1: '(' was never closed"),
        (["rollouts.transport=pigeon"], "or an import path such as my_file.py:MyTransport"),
        (["rollouts.transport=copied_weights.py:Copied"], "(did you mean 'CopiedWeights'?)"),
        (["rollouts.transport=mistakes.py:short"], "mistakes.py has no subclass of PushTransport called 'short'"),
        (["rollouts.transport=mistakes.py:NoSend"], "does not define send, which PushTransport requires"),
        (["logging.sinks=[{sink: csv}]"], "Input should be an import path such as my_file.py:MySink"),
        (["logging.sinks=[{sink: 'csv_sink.py:Csv'}]"], "has no subclass of MetricSink called 'Csv'"),
        (["logging.sinks=[{sink: 'mistakes.py:NoWrite'}]"], "does not define write, which MetricSink requires"),
        (["logging.sinks=[{sink: 'mistakes.py:Demanding'}]"], "mistakes.py:Demanding needs the option 'url'"),
        (
            ["logging.sinks=[{sink: 'csv_sink.py:CsvSink', options: {fil: a.csv}}]"],
            "csv_sink.py:CsvSink has no option 'fil' (did you mean 'file'?)",
        ),
    ],
)  # fmt: skip
def test_the_dry_run_reports_a_wrong_import_path_in_one_line(folder: Path, words: list[str], message: str) -> None:
    arguments = ["grpo.yaml", "model.path=data/letters/tokenizer", "evaluation=null", *words, "--dry-run"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"command line: {words[0].partition('=')[0]}") and message in line


def test_a_transport_of_the_users_hands_over_files_from_its_folder(folder: Path) -> None:
    options = recipe("rollouts.transport=copied_weights.py:CopiedWeights", f"rollouts.push_folder={folder}").rollouts
    from ngym.trainer.weights import push

    pusher = push.Pusher(["http://127.0.0.1:9"], "token", transport=options.transport, folder=options.push_folder)
    named: list[tuple[str, str, bytes]] = []
    server = SimpleNamespace(name=lambda name, digest: named.append((name, digest, (folder / name).read_bytes())))
    transport: Any = pusher._files
    transport.send(
        SimpleNamespace(content=b"tensors", sha256="5a"), [server], lambda servers, call: [*map(call, servers)]
    )
    pusher.finish()
    assert named == [("5a.safetensors", "5a", b"tensors")]
    assert not (folder / "5a.safetensors").exists()


def test_a_sink_of_the_users_receives_the_metrics(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = recipe("logging.sinks=[{sink: 'csv_sink.py:CsvSink', options: {file: curves.csv}}]").logging
    (folder / "recipe.yaml").write_text("seed: 1\n")
    opened = sinks.open_sinks(options, folder, folder / "recipe.yaml")
    with metrics.Metrics(folder / "metrics.jsonl", 2, True, sinks=opened) as log:
        for step in (1, 2):
            log.log(step, {"loss": 1 / step})
    lines = [line.split(",") for line in (folder / "curves.csv").read_text().splitlines()]
    assert [(step, value) for step, name, value in lines if name == "loss"] == [("1", "1.0"), ("2", "0.5")]
    assert "lost" not in capsys.readouterr().out


class Options(ServiceOptions):
    sandbox: SandboxOptions = CustomOptions.model_construct()


def sandbox(root: Path, **keys: Any) -> Any:
    lines = {"sandbox": "c.yaml:3", "sandbox.provider": "c.yaml:4"}
    return parse_options(Options, {"sandbox": keys}, lines, "c.yaml:1", [], root).sandbox


def test_a_sandbox_of_the_users_is_found_next_to_the_config(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    chosen = choose_sandbox(sandbox(folder, provider="command_sandbox.py:CommandSandbox", command=["nice"]))
    assert type(chosen).__name__ == "CommandSandbox" and chosen.command == ["nice"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"provider": "dokcer"}, "unknown provider; use local, docker, gvisor, remote, or the import path"),
        ({"provider": "none.py:Mine"}, "none.py cannot be imported: there is no file"),
        ({"provider": "command_sandbox.py:Mine"}, "has no subclass of Sandbox called 'Mine'"),
        ({"provider": "mistakes.py:Half"}, "mistakes.py:Half does not define aclose, execute, which Sandbox requires"),
        ({"provider": "command_sandbox.py:CommandSandbox"}, "CommandSandbox needs the option 'command'"),
        (
            {"provider": "command_sandbox.py:CommandSandbox", "commnd": "a secret"},
            "CommandSandbox has no option 'commnd' (did you mean 'command'?)",
        ),
    ],
)
def test_a_wrong_sandbox_is_one_line_without_its_other_keys(folder: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sandbox(folder, **keys)
    line = str(caught.value)
    assert line.startswith(("c.yaml:3: sandbox", "c.yaml:4: sandbox")) and message in line and "\n" not in line
    assert "secret" not in line
