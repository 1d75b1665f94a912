"""`ng_list`: shipped environments and those of a project; wrong metadata is reported with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from local_services import local_services

from ngym import VerifyRequest, gym_server
from ngym.cli.init import project
from ngym.cli.list import main
from ngym.errors import ConfigError
from ngym.validation import Environment, check_facts, facts_in, readme_of

FACTS = "---\ndescription: Says a word.\ndomain: other\nkind: single_turn\nlicense: MIT\n---\n# words\n"


def run_list(*words: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(main, ["--json", *words])
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.output)
    return found


def readme(folder: Path, text: str) -> Path:
    path = folder / "README.md"
    path.write_text(text)
    return path


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new project, and the folder that commands run in."""
    for path, text in project("mine").items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_shipped_environment_says_what_it_is_and_has_rows(root: Path) -> None:
    found = {each["name"]: each for each in run_list("--config", str(root / "global_config.yaml"))}
    folders = {path.parent.name for path in (root / "gym_servers").glob("*/app.py")}
    assert set(found) == folders - {"sandbox"}
    assert found["calculator"]["reward_range"] == [0, 1] and found["counter"]["reward_range"] is None
    for name, each in found.items():
        assert {"description", "domain", "kind", "license"} <= set(each), name
        if (root / "data" / name).is_dir():
            assert all(each["rows"].values()), name


def test_a_project_shows_its_own_environments_first_and_those_that_ship(mine: Path) -> None:
    first, *others = run_list()
    assert first["name"] == "mine" and first["in_config"] and first["rows"]["example"] == 5
    assert "math" in {each["name"] for each in others} and not any(each["in_config"] for each in others)
    output = CliRunner().invoke(main, []).output
    assert output.index("in global_config.yaml") < output.index("mine") < output.index("shipped;")


def test_a_folder_without_a_config_shows_what_ships_and_a_domain_filters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert {"math", "calculator"} <= {each["name"] for each in run_list("--domain", "math")}
    assert {each["domain"] for each in run_list("--domain", "math", "--domain", "coding")} == {"math", "coding"}
    wrong = CliRunner().invoke(main, ["--domain", "maths"])
    assert wrong.exit_code == 2 and "did you mean 'math'?" in wrong.output


def test_one_environment_without_facts_is_shown_with_the_reason(mine: Path) -> None:
    (mine / "gym_servers" / "mine" / "README.md").write_text("# mine\n")
    (line,) = [line for line in CliRunner().invoke(main, []).output.splitlines() if line.startswith("  mine ")]
    assert "gym_servers/mine/README.md:1: the facts of the environment are missing" in line


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("# words\n", "README.md:1: the facts of the environment are missing"),
        (FACTS.replace("other", "maths"), "README.md:3: domain: "),
        (FACTS.replace("license: MIT\n", ""), "README.md:1: 'license' is missing"),
        (FACTS.replace("license", "licence"), r"README.md:5: unknown key 'licence' \(did you mean 'license'"),
        (FACTS.replace("Says", "Says: "), "README.md:2: not valid YAML"),
        ("---\n- a\n---\n", "README.md:2: expected `key: value` lines"),
    ],
)
def test_facts_that_are_wrong_are_named_with_their_line(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        facts_in(readme(tmp_path, text))


def test_a_single_file_has_its_facts_beside_it(tmp_path: Path) -> None:
    assert readme_of(tmp_path / "words.py") == tmp_path / "words.md"
    assert readme_of(tmp_path / "words" / "app.py") == tmp_path / "words" / "README.md"


@pytest.mark.parametrize(("kind", "mistakes"), [("single_turn", 0), ("tools", 1), ("steps", 1)])
async def test_a_kind_that_is_not_what_the_server_offers_is_reported(tmp_path: Path, kind: str, mistakes: int) -> None:
    async def verify(task: VerifyRequest) -> float:
        return 1.0

    (tmp_path / "gold.jsonl").write_text("")
    path = readme(tmp_path, FACTS.replace("single_turn", kind))
    async with local_services({}, words=gym_server(verify=verify, reward_range=(-0.5, 1))) as peers:
        finding = await check_facts(Environment("words", tmp_path), path, peers["words"])
    assert len(finding.mistakes) == mistakes
    assert mistakes or finding.looked_at.endswith(", rewards -0.5 to 1")
