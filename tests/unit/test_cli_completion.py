"""Shell completion of `key=value`: the keys of recipes and configs, without heavy imports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from ngym.cli.init import project
from ngym.cli.shell import completion_names
from ngym.cli.shell.main import main as ng
from ngym.config.service_config import Settings

HEAVY = {"fastapi", "numpy", "omegaconf", "pydantic", "rich", "torch"}
MAX_MODULES = 500  # a Python with click alone has 250; each hundred more take 30 to 50 ms


def complete(*words: str) -> list[str]:
    """The completions of the last word."""
    environment = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1), "_NG_COMPLETE": "bash_complete"}
    result = CliRunner(env=environment).invoke(ng, [], prog_name="ng")
    assert result.exit_code == 0 and result.stderr == ""
    return [line.removeprefix("plain,") for line in result.stdout.split()]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project, in the working directory."""
    for path, text in project("my_env").items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def in_schema(schema: dict[str, Any], part: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys of a JSON schema; in lists and maps there are none."""
    kinds = [part, *part.get("anyOf", ()), *part.get("oneOf", ())]
    models = [schema["$defs"][kind["$ref"].rpartition("/")[2]] if "$ref" in kind else kind for kind in kinds]
    nested = [each for model in models for each in (model, *model.get("anyOf", ())) if "properties" in each]
    if not nested:
        yield prefix
    for model in nested:
        for name, inside in model["properties"].items():
            yield from in_schema(schema, inside, f"{prefix}.{name}" if prefix else name)


@pytest.mark.parametrize("name", ["recipe", "settings"])
def test_the_keys_are_those_of_the_models_that_check_them(name: str) -> None:
    from ngym.trainer.recipe import recipe

    schema = (recipe.Recipe if name == "recipe" else Settings).model_json_schema()
    found = (
        completion_names.of_recipe()
        if name == "recipe"
        else completion_names.of_model(completion_names.PACKAGE / "config" / "service_config.py", "Settings")
    )
    assert sorted(found) == sorted(set(in_schema(schema, schema)))


def test_each_key_of_each_shipped_recipe_and_config_is_known(root: Path) -> None:
    known = set(completion_names.of_recipe())
    for file in (root / "trainer" / "recipes").glob("*.yaml"):
        assert set(_written(yaml.safe_load(file.read_text()), known)) <= known
    stanzas = {
        name: each for name, each in yaml.safe_load((root / "global_config.yaml").read_text()).items() if "kind" in each
    }
    unread = {name: {"app": each["app"]} for name, each in stanzas.items() if "app" in each}
    known = set(completion_names.of_config(unread, root))
    assert {f"{name}.{key}" for name in unread for key in stanzas[name]} <= known


def _written(values: dict[str, Any], known: set[str], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in known:
            yield from _written(value, known, f"{key}.")
        else:
            yield key


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train sft.yaml optimizer.muon_", ["optimizer.muon_lr=", "optimizer.muon_momentum="]),
        ("train sft.yaml optimi", ["optimizer."]),
        ("train s", ["sft.yaml", "seed=", "schedule."]),
        ("train sft.yaml data.path = ma", ["file,ma"]),
        ("train sft.yaml data.path =", ["file,"]),
        ("train sft.yaml data.path=ma", ["file,data.path=ma"]),
        ("train sft.yaml seed = 1 max_st", ["max_steps="]),
        ("train sft.yaml --sweep optimizer.l", ["optimizer.lr="]),
        ("run my", ["my_env.", "my_env_agent."]),
        ("run policy.repl", ["policy.replies=", "policy.replicas="]),
        ("run my_env_agent.max_", ["my_env_agent.max_body_mib=", "my_env_agent.max_json_weight=", "my_env_agent.max_tool_calls=", "my_env_agent.max_steps="]),
        ("run ngym.head.", ["ngym.head.host=", "ngym.head.port="]),
        ("run policy.latency_s=", []),
        ("run --config other.yaml o", ["other."]),
        ("serve my_env my_env.dep", ["my_env.depth="]),
        ("validate broken", ["broken."]),
        ("run broken.app", ["broken.app="]),
        ("run --config none.yaml po", []),
    ],
)  # fmt: skip
def test_a_key_is_completed_up_to_its_next_dot_or_equals_sign(here: Path, line: str, words: list[str]) -> None:
    app = here / "gym_servers" / "my_env" / "app.py"
    options = "class Mine(ServiceOptions):\n    depth: int = 1\n\n"
    text = app.read_text().replace("app = gym_server(", f"{options}app = gym_server(options=Mine, ")
    app.write_text(f"from ngym.services.base.options import ServiceOptions\n{text}")
    (here / "gym_servers" / "broken.py").write_text("class Options(:")
    with (here / "global_config.yaml").open("a") as config:
        config.write("broken: {kind: gym_server, app: gym_servers/broken}\n")
    (here / "other.yaml").write_text("other: {kind: gym_server, app: 3}\n")
    assert complete("ng", *line.split(" ")) == words


@pytest.mark.parametrize(("line", "heavy"), [("train sft.yaml opt", []), ("run policy.", [])])
@pytest.mark.process
def test_a_completion_imports_little(here: Path, line: str, heavy: list[str]) -> None:
    words = json.dumps(["ng", *line.split()])
    code = f"""
import json, sys
from click.testing import CliRunner
from ngym.cli.shell.main import main
words = json.loads({words!r})
environment = {{"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1), "_NG_COMPLETE": "bash_complete"}}
result = CliRunner(env=environment).invoke(main, [], prog_name="ng")
print(len(sys.modules), len(result.stdout.split()), *sorted(sys.modules.keys() & {HEAVY!r}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules, count, *loaded = result.stdout.split()
    assert int(modules) < MAX_MODULES and int(count) >= 1 and loaded == heavy


@pytest.mark.parametrize(("shell", "what"), [("bash", "compopt -o nospace"), ("zsh", "compadd -U -S ''")])
@pytest.mark.process
def test_no_space_goes_after_what_is_not_yet_whole(shell: str, what: str) -> None:
    script = CliRunner().invoke(ng, ["completion", shell]).stdout
    assert script.count(what) == script.count("_COMPLETE=")
