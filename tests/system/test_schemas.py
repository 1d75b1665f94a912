"""The JSON Schemas that ship: they agree with the code; accepted and refused documents."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft7Validator
from paths import ROOT

SCHEMAS = ROOT / "ngym" / "schemas"


def validator(name: str) -> Draft7Validator:
    return Draft7Validator(json.loads((SCHEMAS / f"{name}.json").read_text()))


def test_the_shipped_schemas_are_what_the_code_gives(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "scripts" / "schemas.py"), str(tmp_path)], check=True)
    changed = [file.name for file in tmp_path.iterdir() if file.read_bytes() != (SCHEMAS / file.name).read_bytes()]
    assert changed == [], "run: make schemas"


@pytest.mark.parametrize(
    "file",
    [
        "global_config.yaml",
        "bridges.yaml",
        "nemo_gym.yaml",
        *sorted(map(str, (ROOT / "trainer/recipes").glob("*.yaml"))),
    ],
)
def test_shipped_files_name_their_schema_and_fit_it(file: str) -> None:
    path = ROOT / file
    first = path.read_text().partition("\n")[0]
    schema = (path.parent / first.removeprefix("# yaml-language-server: $schema=")).resolve()
    assert schema.parent == SCHEMAS
    assert [error.message for error in validator(schema.stem).iter_errors(yaml.safe_load(path.read_text()))] == []


def test_a_new_project_fits_its_own_schema(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "ngym", "init", "my_env"], cwd=tmp_path, check=True, capture_output=True)
    config = yaml.safe_load((tmp_path / "my_env" / "global_config.yaml").read_text())
    schema = json.loads((tmp_path / "my_env" / "schemas" / "global_config.json").read_text())
    assert list(Draft7Validator(schema).iter_errors(config)) == []
    rows = (tmp_path / "my_env/gym_servers/my_env/data/example.jsonl").read_text().splitlines()
    assert all(validator("row").is_valid(json.loads(row)) for row in rows)


@pytest.mark.parametrize(
    ("schema", "document"),
    [
        ("global_config", {"policy": {"kind": "modell", "app": "models/scripted"}}),
        ("global_config", {"policy": {"app": "models/scripted"}}),
        ("global_config", {"policy": {"kind": "model", "app": "models/scripted", "latency": 1}}),
        ("global_config", {"policy": {"kind": "model", "app": "models/scripted", "replicas": 0}}),
        ("global_config", {"ngym": {"ready_timeout": 3}}),
        ("recipe", {"algorithm": {"name": "grpo", "clipp": 1}}),
        ("recipe", {"max_step": 3}),
        ("row", {"reward": 1}),
        ("row", {"responses_create_params": {"input": "x"}, "reward": "high"}),
    ],
)
def test_a_mistake_is_found(schema: str, document: dict) -> None:
    assert not validator(schema).is_valid(document)


def test_an_interpolation_may_replace_any_value() -> None:
    stanza = {"kind": "model", "app": "models/vllm", "model": "${oc.env:MODEL}", "threads": "${policy.replicas}"}
    assert validator("global_config").is_valid({"policy": stanza})
