"""The output of ng_submit: golden files in tests/data/submit, KubeRay's own schema, and the syntax of the scripts.

Write the golden files again: python tests/unit/test_submit.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner, Result

from ngym.cli import submit
from ngym.cluster import kuberay, skypilot, slurm
from ngym.cluster.target import Target, on_ray, read_target
from ngym.errors import ConfigError, UsageError

DATA = Path(__file__).resolve().parents[1] / "data"
TARGET = Target(
    name="grpo",
    nodes=2,
    gpus=8,
    cpus=64,
    memory_gb=400,
    time="04:00:00",
    partition="h100",
    pool="h100",
    image="registry.example/ngym:1",
    claim="runs",
    accelerator="H100",
    secrets=("HF_TOKEN",),
    setup="source /shared/ngym/.venv/bin/activate",
)
SMALL = Target(name="small")
TRAIN = ["ng_train", "grpo.yaml", "engine.zero_stage=2"]
FOLDER = Path("/shared/project")


def render_all() -> dict[str, str]:
    """File name -> what it should hold."""
    logs = FOLDER / ".ngym" / "submit"
    return {
        "slurm.sh": slurm.render(TARGET, TRAIN, FOLDER, logs / "grpo"),
        "slurm_small.sh": slurm.render(SMALL.model_copy(update={"chain": 2}), ["ng_run"], FOLDER, logs / "small"),
        "kuberay.yaml": submit._yaml(kuberay.render(TARGET, TRAIN)),
        "skypilot.yaml": submit._yaml([skypilot.render(TARGET, TRAIN)]),
    }


@pytest.mark.parametrize("name", render_all())
def test_a_rendered_file_is_the_golden_one(name: str) -> None:
    assert render_all()[name] == (DATA / "submit" / name).read_text()


def strict(schema: Any) -> Any:
    """The schema, which also refuses unknown keys, as `kubectl apply --validate=strict` does."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    if schema.get("type") == "object" and schema.get("properties"):
        closed.setdefault("additionalProperties", False)
    return closed


@pytest.mark.parametrize("target", [TARGET, SMALL.model_copy(update={"image": "i"})])
@pytest.mark.parametrize("command", [TRAIN, []])
def test_kuberay_manifests_fit_its_schema(target: Target, command: list[str]) -> None:
    job = json.loads((DATA / "kuberay" / "rayjob_v1.json").read_text())
    job["properties"]["metadata"] = {"type": "object"}  # the schema leaves it to the API server
    manifest = kuberay.render(target, command)[-1]
    cluster = job["properties"]["spec"]["properties"]["rayClusterSpec"]
    for group in (cluster["properties"]["headGroupSpec"], cluster["properties"]["workerGroupSpecs"]["items"]):
        group["properties"]["template"]["properties"]["metadata"] = {"type": "object"}
    if command:
        jsonschema.validate(manifest, strict(job))
    else:
        jsonschema.validate(manifest["spec"], strict(cluster))
    wrong = json.loads(json.dumps(manifest).replace("rayStartParams", "rayStartParam"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong if command else wrong["spec"], strict(job if command else cluster))


@pytest.mark.process
@pytest.mark.parametrize("name", ["slurm.sh", "slurm_small.sh", "skypilot.yaml"])
def test_bash_can_parse_the_scripts(name: str) -> None:
    text = (DATA / "submit" / name).read_text()
    script = yaml.safe_load(text)["run"] if name.endswith(".yaml") else text
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False).stderr == ""


def run_script(folder: Path, chain: int, command: str) -> tuple[int, str]:
    """Run a rendered script with stubs for Ray, Slurm and the command. Returns its exit code and the calls of Slurm.

    command: the shell lines that ng_run executes.
    """
    logs, stubs = folder / "logs", folder / "bin"
    logs.mkdir()
    stubs.mkdir()
    for name, line in {
        "ray": '[ "$1" = health-check ] || exec sleep 1000',
        "python": "echo 127.0.0.1",
        "ng_run": f'case "$*" in *--dry-run*) exit 2;; esac\n{command}',
        "scancel": 'echo scancel "$@" >> calls',
        "scontrol": 'echo scontrol "$@" >> calls',
    }.items():
        (stubs / name).write_text(f"#!/bin/bash\n{line}\n")
        (stubs / name).chmod(0o755)
    script = slurm.render(SMALL.model_copy(update={"chain": chain}), ["ng_run"], folder, logs)
    slurm_names = {"SLURM_JOB_ID": f"{os.getpid()}", "SLURM_NNODES": "1", "SLURMD_NODENAME": "n1"}
    variables = {**os.environ, **slurm_names, "PATH": f"{stubs}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash"],
        input=script,
        text=True,
        env=variables,
        stdout=subprocess.DEVNULL,
        check=False,
        # Bash cannot trap a signal that its parent ignores; an ng_train that ran in this process ignores SIGUSR1.
        preexec_fn=lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL),
    )
    calls = folder / "calls"
    return done.returncode, calls.read_text() if calls.exists() else ""


CUT = """# Slurm's signal comes when the script can handle it
sleep 1000 &
trap 'kill $!; exit 1' TERM
until (( 0x$(sed -n 's/^SigCgt:\\s*//p' /proc/$PPID/status) & 0x200 )); do sleep 0.01; done
kill -USR1 $PPID
wait
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("command", "code", "cancelled"),
    [
        ("exit 2", 2, True),  # a mistake in a recipe
        ("exit 1", 1, True),
        ("exit 0", 0, True),
        ("exit 75", 75, False),
        ("kill -KILL $$", 137, False),
        (CUT, 1, False),
    ],
)
def test_a_chain_continues_only_after_a_job_that_was_cut_or_killed_or_may_succeed_later(
    tmp_path: Path, command: str, code: int, cancelled: bool
) -> None:
    ended, calls = run_script(tmp_path, 5, command)
    assert ended == code
    assert ("--name=small --state=PENDING" in calls) == cancelled and calls.count("scancel") == cancelled


@pytest.mark.process
def test_a_job_without_a_chain_is_requeued_only_if_it_was_cut(tmp_path: Path) -> None:
    for name, command, expected in (
        ("cut", CUT, (0, f"scontrol requeue {os.getpid()}\n")),
        ("wrong", "exit 2", (2, "")),
    ):
        (tmp_path / name).mkdir()
        assert run_script(tmp_path / name, 0, command) == expected


def test_a_secret_is_only_in_what_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    assert "hf_secret_value" not in "".join(render_all().values())
    values = kuberay.secrets(TARGET)
    assert kuberay.render(TARGET, TRAIN, values)[0]["stringData"]["HF_TOKEN"] == "hf_secret_value"
    assert len({*values.values()}) == 3
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UsageError, match="not set here: HF_TOKEN"):
        kuberay.secrets(TARGET)


def put_program(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, line: str) -> None:
    """This folder, with settings and a program in it, is the working directory."""
    (folder / name).write_text(f"#!/bin/bash\n{line}\n")
    (folder / name).chmod(0o755)
    (folder / "cluster.yaml").write_text("name: one\nimage: i\nsecrets: [HF_TOKEN]\n")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    monkeypatch.chdir(folder)


@pytest.mark.process
def test_kubectl_gets_the_manifests_and_the_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_program(tmp_path, monkeypatch, "kubectl", 'echo "$@" > arguments; cat > applied; echo rayjob created')
    result = CliRunner().invoke(submit.main, ["kuberay", "cluster.yaml", "ng_train", "sft.yaml"])
    assert (result.exit_code, result.stdout) == (0, "rayjob created\n")
    applied = list(yaml.safe_load_all((tmp_path / "applied").read_text()))
    assert (tmp_path / "arguments").read_text() == "apply -f -\n"
    assert "hf_secret_value" in str(applied) and "RayJob" in [manifest["kind"] for manifest in applied]
    put_program(tmp_path, monkeypatch, "kubectl", "echo denied >&2; exit 3")
    result = CliRunner().invoke(submit.main, ["kuberay", "cluster.yaml", "ng_train", "sft.yaml"])
    assert (result.exit_code, result.stderr.strip()) == (1, "kubectl failed (3): denied")


READ_TWICE = 'for word; do file=$word; done; cat "$file" > first; cat "$file" > launched; env > names; echo "$@"'


@pytest.mark.process
def test_skypilot_gets_the_task_in_a_file_that_it_can_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    put_program(tmp_path, monkeypatch, "sky", READ_TWICE)
    result = CliRunner().invoke(submit.main, ["skypilot", "cluster.yaml", "ng_train", "sft.yaml"])
    assert result.exit_code == 0, result.output
    target = read_target(tmp_path / "cluster.yaml", [])
    assert yaml.safe_load((tmp_path / "launched").read_text()) == skypilot.render(target, ["ng_train", "sft.yaml"])
    names = [line.partition("=")[0] for line in (tmp_path / "names").read_text().splitlines()]
    assert "RAY_AUTH_TOKEN" in names and "RAY_AUTH_TOKEN" not in os.environ
    words = capfd.readouterr().out.split()
    assert words[:5] == ["launch", "--yes", "--detach-run", "--cluster", "one"]
    assert words[5:-1] == ["--secret", "RAY_AUTH_TOKEN", "--secret", "HF_TOKEN"]
    put_program(tmp_path, monkeypatch, "sky", "exit 3")
    result = CliRunner().invoke(submit.main, ["skypilot", "cluster.yaml", "ng_train", "sft.yaml"])
    assert (result.exit_code, result.stderr.strip()) == (1, "sky failed (3)")


def test_the_cluster_s_own_command_must_be_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_program(tmp_path, monkeypatch, "unused", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    for to, program in (("slurm", "sbatch"), ("kuberay", "kubectl"), ("skypilot", "sky")):
        result = CliRunner().invoke(submit.main, [to, "cluster.yaml", "ng_run"])
        assert (result.exit_code, f"{program} is not installed here" in result.stderr) == (2, True)


def test_commands_run_on_ray_unless_they_say_where() -> None:
    assert on_ray(["ng_train", "x"]) == ["ng_train", "--on", "ray", "x"]
    assert on_ray(["ng_run", "--on=local"]) == ["ng_run", "--on=local"]
    assert on_ray(["ng_collect_rollouts", "--input", "x"])[1] == "--input"


def test_another_program_is_not_run_to_ask_whether_it_continues() -> None:
    """It could ignore --resume and --dry-run, and do all its work twice."""
    for command, expected in ((["bash", "run.sh"], False), (["ng_run"], True)):
        for script in (slurm.render(SMALL, command, FOLDER, FOLDER), skypilot.render(SMALL, command)["run"]):
            assert ('[@]}" --resume' in script) == expected


def test_settings_are_checked_and_overridden(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("name: one\nnodes: 2\n")
    assert read_target(file, ["nodes=3"]).nodes == 3
    file.write_text("name: One Job\nnods: 2\n")
    with pytest.raises(ConfigError, match=r"cluster.yaml:2: unknown key 'nods' \(did you mean 'nodes'"):
        read_target(file, [])
    with pytest.raises(UsageError, match=r"clustr\.yaml: no such settings file \(did you mean .*cluster\.yaml"):
        read_target(file.with_name("clustr.yaml"), [])


def test_a_dry_run_prints_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "cluster.yaml"
    file.write_text("name: one\n")
    words = ["--dry-run", "slurm", str(file), "time=00:10:00", "ng_train", "sft.yaml"]
    result = CliRunner().invoke(submit.main, words)
    assert result.exit_code == 0 and "#SBATCH --time=00:10:00" in result.stdout
    assert "command=(ng_train --on ray sft.yaml)" in result.stdout
    assert sorted(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("to", ["kuberay", "skypilot"])
def test_a_dry_run_shows_everything_and_fails_where_the_command_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    file = tmp_path / "cluster.yaml"
    file.write_text("name: one\nimage: i\nsecrets: [HF_TOKEN]\n")
    words = ["--dry-run", to, str(file), "ng_train", "sft.yaml"]
    result = CliRunner().invoke(submit.main, words)
    assert (result.exit_code, "name: one" in result.stdout) == (2, True)
    assert "secrets: not set here: HF_TOKEN" in result.stderr
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    result = CliRunner().invoke(submit.main, words)
    assert result.exit_code == 0 and "hf_secret_value" not in result.output


@pytest.mark.parametrize("to", ["slurm", "kuberay", "skypilot"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ng_trian", "sft.yaml"], "ng_trian: no such command (did you mean 'ng_train'?)"),
        (["ng_run", "--bogus"], "ng_run: no option '--bogus'"),
    ],
)
def test_the_command_and_its_options_are_checked_for_each_cluster(
    tmp_path: Path, to: str, words: list[str], message: str
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("name: one\nimage: i\n")
    result = CliRunner().invoke(submit.main, ["--dry-run", to, str(file), *words])
    assert (result.exit_code, result.stdout) == (2, "") and message in result.stderr


def run_submit(file: Path, *words: str, dry_run: bool = True) -> Result:
    return CliRunner().invoke(submit.main, [*["--dry-run"] * dry_run, "slurm", str(file), *words])


def test_a_text_stays_as_it_is_written_even_if_yaml_takes_it_for_a_number(tmp_path: Path) -> None:
    """In YAML 1.1, 12:00:00 is 43200, 0123 is 83, and `on` is true."""
    file = tmp_path / "cluster.yaml"
    file.write_text("name: one\ntime: 12:00:00\npartition: 0123\naccount: 1_0\nimage: null\nnodes: 2\n")
    target = read_target(file, [])
    assert (target.time, target.partition, target.account) == ("12:00:00", "0123", "1_0")
    assert (target.image, target.nodes) == (None, 2)
    target = read_target(file, ["time=13:00:00", "partition=on", "account=null", "nodes=3"])
    assert (target.time, target.partition, target.account, target.nodes) == ("13:00:00", "on", None, 3)


def test_a_folder_may_have_braces_spaces_and_percent_signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a {b} %j c"
    folder.mkdir()
    monkeypatch.chdir(folder)
    calls: list[list[str]] = []
    monkeypatch.setattr(submit, "_require_program", lambda program: None)
    monkeypatch.setattr(submit, "_output", lambda words: calls.append(words) or f"{len(calls)};cluster\n")
    (folder / "cluster.yaml").write_text("name: one\nchain: 1\n")
    result = run_submit(folder / "cluster.yaml", "ng_run", dry_run=False)
    assert result.exit_code == 0, result.output
    logs = folder / ".ngym" / "submit" / "one"
    script = str(logs / "job.sh")
    assert calls == [["sbatch", "--parsable", script], ["sbatch", "--parsable", "--dependency=afternotok:1", script]]
    lines, pattern = (logs / "job.sh").read_text(), str(logs).replace("%", "%%")
    assert f"#SBATCH '--output={pattern}/%j.log'\n" in lines and f"--output='{pattern}/%j-%N.log'" in lines
    assert f"logs='{logs}'\n" in lines and f"cd '{folder}'\n" in lines


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ng_trian", "sft.yaml"], "ng_trian: no such command (did you mean 'ng_train'?)"),
        (["no_such_program"], "no_such_program: no such command here"),
        (["ng_run", "--bogus"], "ng_run: no option '--bogus'"),
        (["ng_train", "sft.yaml", "optimizer.lrr=1"], "unknown key 'optimizer.lrr' (did you mean 'lr'?)"),
        (["ng_train", "sft.yaml", "--sweep", "seed=0,1"], "--sweep runs on one machine: submit ng_train --on local"),
        (
            ["ng_train", "sft.yaml", "--overwrite"],
            "ng_train --overwrite: a job that continues the run would begin it again",
        ),
        (["secrets=[NOT_SET]", "ng_run"], "secrets: not set here: NOT_SET"),
        (["time=00:03:00", "ng_run"], "time: 00:03:00 leaves nothing before Slurm's warning"),
    ],
)
def test_a_mistake_is_found_before_slurm_gets_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(submit, "_output", lambda words: pytest.fail(f"submitted: {words}"))
    monkeypatch.setattr(submit, "_require_program", lambda program: None)
    file = tmp_path / "cluster.yaml"
    file.write_text("name: one\n")
    for dry_run in (True, False):
        result = run_submit(file, *words, dry_run=dry_run)
        assert result.exit_code == 2 and message in result.stderr, result.output
    assert sorted(tmp_path.iterdir()) == [file]


def test_what_setup_or_an_earlier_job_brings_need_not_be_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "cluster.yaml"
    file.write_text("name: one\nsetup: module load ours\n")
    assert run_submit(file, "no_such_program").exit_code == 0
    later = ["ng_train", "grpo.yaml", "model.path=runs/sft/policy"]
    assert "there is no folder" in run_submit(file, *later).stderr
    assert run_submit(file, "options=[--dependency=afterok:1]", *later).exit_code == 0
    assert run_submit(file, "ng_train", "--on", "local", "sft.yaml", "--sweep", "seed=0,1").exit_code == 0


def test_a_recipe_may_need_a_variable_that_setup_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file, words = tmp_path / "cluster.yaml", ["ng_train", "sft.yaml", "output=${oc.env:SHARED_DISK}/run"]
    file.write_text("name: one\nsetup: module load ours; export OTHER=1 SHARED_DISK=/mnt/disk\n")
    result = run_submit(file, *words)
    assert result.exit_code == 0 and "it needs SHARED_DISK, which `setup` exports" in result.stderr, result.output
    assert "'output=${oc.env:SHARED_DISK}/run'" in result.stdout
    for setup in ("source ours", "SHARED_DISK=/mnt/disk; export OTHER=1", "export NOT_SHARED_DISK=1"):
        refusal = run_submit(file, f"setup={setup}", *words)
        assert refusal.exit_code == 2 and "or in `setup` with `export SHARED_DISK=...`" in refusal.stderr
    assert run_submit(file, *words, "optimizer.lrr=1").exit_code == 0  # the job checks the whole recipe
    monkeypatch.setenv("SHARED_DISK", str(tmp_path))
    assert "unknown key 'optimizer.lrr'" in run_submit(file, *words, "optimizer.lrr=1").stderr


if __name__ == "__main__":
    for file_name, content in render_all().items():
        (DATA / "submit" / file_name).write_text(content)
