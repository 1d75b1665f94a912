"""The wheel in an empty environment elsewhere, and `make install` in a fresh copy of the project."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path

import pytest
from waiting import wait_until

from ngym.supervise import package_indexes

LONG_S = 600  # for what may have to come over a slow network
UV = Path(sys.executable).with_name("uv")
HEAVY = {
    "aiohttp",
    "deepspeed",
    "fastapi",
    "hydra",
    "numpy",
    "omegaconf",
    "pandas",
    "ray",
    "torch",
    "transformers",
    "vllm",
}


@dataclass(frozen=True)
class Elsewhere:
    """An environment with the wheel in it, and a user's own folder; neither knows the project's."""

    environment: Path
    folder: Path

    def run(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A program of the environment, in the folder."""
        program = [self.environment / "bin" / command, *arguments]
        return subprocess.run(program, cwd=self.folder, capture_output=True, text=True, check=False, timeout=LONG_S)

    def python(self, code: str) -> str:
        """The output of this program."""
        result = self.run("python", "-P", "-c", textwrap.dedent(code))
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    @property
    def site_packages(self) -> Path:
        return next(self.environment.glob("lib/python3.*/site-packages"))


@pytest.fixture(scope="module")
def uv_environment() -> Mapping[str, str]:
    """uv configured like the pip of this environment, as `make install` does it."""
    return package_indexes.uv_environment(package_indexes.pip_settings(sys.executable), os.environ)


@pytest.fixture(scope="module")
def elsewhere(root: Path, tmp_path_factory: pytest.TempPathFactory, uv_environment: Mapping[str, str]) -> Elsewhere:
    """The wheel, what it needs, and openai-agents, which has a package named `agents`."""
    here = tmp_path_factory.mktemp("elsewhere")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", here]
    subprocess.run(build, cwd=root, check=True, capture_output=True)
    (wheel,) = here.glob("*.whl")
    environment = here / "environment"

    def uv(*arguments: str | Path) -> None:
        result = subprocess.run(
            [UV, *arguments], env=uv_environment, cwd=here, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr

    into = ("--python", environment / "bin" / "python")
    uv("venv", "--no-project", "--python", sys.executable, environment)
    uv("pip", "install", "--no-config", *into, "--no-deps", "--requirement", root / "locks" / "core.txt", wheel)
    uv("pip", "install", "--no-config", *into, "--constraint", root / "locks" / "cpu.txt", "openai-agents>=0.20")
    return Elsewhere(environment, users_folder(here / "project"))


def users_folder(folder: Path) -> Path:
    """A config, a gym server and an agent of the user's own; the model and the other agent are shipped ones."""
    files = {
        "global_config.yaml": """
            policy: {kind: model, app: models/scripted, replies: [{text: "The answer is 42."}]}
            guess: {kind: gym_server, app: gym_servers/guess}
            simple_agent: {kind: agent, app: agents/simple, gym: guess, model: policy}
            sdk_agent: {kind: agent, app: agents/sdk, gym: guess, model: policy}
            """,
        "gym_servers/guess.py": """
            from ngym import VerifyRequest, gym_server

            class Guess(VerifyRequest):
                answer: str

            def verify(task: Guess) -> float:
                return float(task.answer in task.text)

            app = gym_server(verify=verify)
            """,
        "agents/sdk.py": """
            from agents import Agent, Model, ModelResponse, RunConfig, Runner, Usage
            from openai.types.responses import ResponseOutputMessage

            from ngym import AgentOptions, RolloutContext, agent

            class Policy(Model):
                def __init__(self, rollout: RolloutContext) -> None:
                    self.rollout = rollout

                async def get_response(self, system_instructions, input, *args, **kwargs) -> ModelResponse:
                    self.reply = await self.rollout.sample({"input": input, "instructions": system_instructions})
                    output = [ResponseOutputMessage.model_validate(item) for item in self.reply["output"]]
                    return ModelResponse(output=output, usage=Usage(requests=1), response_id=self.reply["id"])

                def stream_response(self, *args, **kwargs):
                    raise NotImplementedError

            async def respond(request: dict, rollout: RolloutContext) -> dict:
                policy = Policy(rollout)
                answerer = Agent(name="answerer", instructions="Answer.", model=policy)
                await Runner.run(answerer, request["input"], run_config=RunConfig(tracing_disabled=True))
                return rollout.finish(policy.reply, policy.reply["output"], "answer")

            app = agent(respond=respond, options=AgentOptions)
            """,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    task = {"responses_create_params": {"input": "What is the answer?"}, "answer": "42"}
    (folder / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    return folder


def test_the_wheel_adds_one_import_name(elsewhere: Elsewhere) -> None:
    record = next(elsewhere.site_packages.glob("ngym-*.dist-info")) / "RECORD"
    paths = [line.rsplit(",", 2)[0] for line in record.read_text().splitlines()]
    inside = {path.split("/")[0] for path in paths if not path.startswith("../")}
    assert {name for name in inside if not name.endswith(".dist-info")} == {"ngym"}
    assert all(path.startswith("../../../bin/ng") for path in paths if path.startswith("../"))


def test_a_core_install_says_which_extra_is_needed(elsewhere: Elsewhere) -> None:
    trained = elsewhere.run("ng_train", "sft.yaml")
    assert trained.returncode == 2
    assert trained.stderr.startswith('ng_train needs ngym[train]: pip install "ngym[train]" (missing: ')
    (elsewhere.folder / "extras.yaml").write_text(
        "ngym: {head: {port: 0}}\npolicy: {kind: model, app: models/transformers, model: owner/name}\n"
    )
    started = elsewhere.run("ng_run", "--config", "extras.yaml")
    assert started.returncode == 2
    assert "extras.yaml:2: service 'policy' needs ngym[train]: pip install \"ngym[train]\"" in started.stderr
    result = elsewhere.run("ngym", "doctor")
    assert re.search(r'ngym\[train\] +missing: .*torch.*; pip install "ngym\[train\]"', result.stdout)


def test_the_wheel_ships_every_service_recipe_and_data_file_and_nothing_that_was_built(
    root: Path, elsewhere: Elsewhere
) -> None:
    shipped = elsewhere.site_packages / "ngym" / "_shipped"
    for name in runpy.run_path(str(root / "hatch_build.py"))["SHIPPED"]:
        assert files_in(shipped / name) == files_in(root / name)


def test_a_source_archive_has_every_shipped_file(root: Path, tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", tmp_path]
    subprocess.run(build, cwd=root, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        inside = {Path(*Path(name).parts[1:]) for name in archive.getnames()}
    for name in runpy.run_path(str(root / "hatch_build.py"))["SHIPPED"]:
        assert {(root / name).relative_to(root).parent / file for file in files_in(root / name)} <= inside
    assert not any(file.match("data/counter/*.jsonl") for file in inside)


def test_a_release_has_project_urls_and_a_readme_with_absolute_links(root: Path, tmp_path: Path) -> None:
    unset = {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}
    github = {"SERVER_URL": "https://github.com", "REPOSITORY": "owner/name", "REF_NAME": "v1.2.3"}
    readmes = {}
    for name, variables in {"release": {f"GITHUB_{key}": value for key, value in github.items()}, "other": {}}.items():
        build = [sys.executable, "-m", "hatchling", "build", "--directory", tmp_path / name]
        subprocess.run(build, cwd=root, check=True, capture_output=True, env={**unset, **variables})
        (wheel,), (archive,) = (tmp_path / name).glob("*.whl"), (tmp_path / name).glob("*.tar.gz")
        with zipfile.ZipFile(wheel) as inside:
            (path,) = [each for each in inside.namelist() if each.endswith("/METADATA")]
            metadata = message_from_bytes(inside.read(path))
        with tarfile.open(archive) as inside_archive:
            package_info = inside_archive.extractfile(f"ngym-{metadata['Version']}/PKG-INFO")
            assert package_info is not None
            assert message_from_bytes(package_info.read()).get_all("Project-URL") == metadata.get_all("Project-URL")
        readmes[name] = metadata.get_payload()
        urls = dict(each.split(", ") for each in metadata.get_all("Project-URL", []))
        assert set(urls) == ({"Source", "Documentation", "Changelog", "Issues"} if name == "release" else set())
    assert "(https://github.com/owner/name/raw/v1.2.3/docs/images/run.png)" in readmes["release"]
    assert "(https://github.com/owner/name/blob/v1.2.3/docs/quickstart.md)" in readmes["release"]
    links = re.findall(r"\]\(([^)]*)\)", readmes["release"])
    assert links and all(link.startswith(("https://", "#")) for link in links)
    assert readmes["other"] == (root / "README.md").read_text()


def files_in(path: Path) -> set[Path]:
    """The files of a folder, or the file itself, without caches."""
    found = {file.relative_to(path.parent) for file in (path, *path.rglob("*")) if file.is_file()}
    return {file for file in found if not any(part.startswith((".", "__pycache__")) for part in file.parts)}


def test_importing_ngym_loads_little_and_nothing_heavy(elsewhere: Elsewhere) -> None:
    code = """
        import ngym
        import sys
        print(*sys.modules)
        """
    modules = elsewhere.python(code).split()
    assert not HEAVY & set(modules) and len(modules) < 250


def test_all_that_a_service_imports_from_ngym_loads_no_learner_and_no_engine(elsewhere: Elsewhere) -> None:
    code = "import ngym, sys; [getattr(ngym, name) for name in ngym.__all__]; print(*sys.modules)"
    light = {"aiohttp", "fastapi", "omegaconf"}
    assert not (HEAVY - light) & set(elsewhere.python(code).split())


def test_every_command_is_installed_and_answers_help_without_its_extras(elsewhere: Elsewhere) -> None:
    for script in sorted((elsewhere.environment / "bin").glob("ng*")):
        result = elsewhere.run(script.name, "--help")
        assert result.returncode == 0, result.stderr
        assert "Usage:" in result.stdout


def test_shipped_services_are_found_in_the_wheel(elsewhere: Elsewhere) -> None:
    code = """
        from ngym.config.service_config import load_config
        from ngym.config.shipped_files import shipped
        config = load_config([shipped() / "global_config.yaml"])
        print(shipped(), *config.services)
        """
    folder, *services = elsewhere.python(code).split()
    assert Path(folder) == elsewhere.site_packages / "ngym" / "_shipped"
    assert {"policy", "calculator", "calculator_agent"} <= set(services)


def test_the_wheel_has_the_data_of_an_environment_once_and_finds_it_by_both_names(elsewhere: Elsewhere) -> None:
    code = """
        from ngym.config.shipped_files import shipped_path
        from ngym.prepare import find_sets
        from ngym.config.shipped_files import shipped
        print(shipped_path("data/counter/train.jsonl"), shipped_path("data/tiny_policy/tokenizer"), *find_sets([shipped()]))
        """
    tasks, tokenizer, *sets = elsewhere.python(code).split()
    shipped = elsewhere.site_packages / "ngym" / "_shipped"
    assert Path(tasks) == shipped / "gym_servers" / "counter" / "data" / "train.jsonl" and Path(tasks).is_file()
    assert Path(tokenizer).is_dir() and "gsm8k" in sets
    assert [each.name for each in (shipped / "data").iterdir()] == ["tiny_policy"]


@pytest.mark.parametrize("agent", ["simple_agent", "sdk_agent"])
def test_a_users_own_folder_gives_scored_rollouts_even_with_openais_agents_inside_an_agent(
    elsewhere: Elsewhere, agent: str
) -> None:
    output = elsewhere.folder / f"{agent}.jsonl"
    collect = ("--config", "global_config.yaml", "--agent", agent, "--input", "tasks.jsonl", "--output", str(output))
    result = elsewhere.run("ng_collect_rollouts", *collect)
    assert result.returncode == 0, result.stderr
    (row,) = [json.loads(line) for line in output.read_text().splitlines()]
    assert row["reward"] == 1.0


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """The project with a lock of what its own installation needs: all but the gigabytes."""
    for name in ("LICENSE", "Makefile", "README.md", "hatch_build.py", "pyproject.toml"):
        shutil.copy(root / name, tmp_path / name)
    for name in ("ngym", "scripts"):
        shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    needed = {"editables", "hatchling", "packaging", "pathspec", "pluggy", "trove-classifiers", "uv"}
    lock = [line.split()[0] for line in (root / "locks" / "cpu.txt").read_text().splitlines()]
    (tmp_path / "locks").mkdir()
    pins = [pin for pin in lock if pin.split("==")[0] in needed]
    (tmp_path / "locks" / "cpu.txt").write_text("\n".join(pins) + "\n")
    return tmp_path


def make(checkout: Path, target: str, **environment: str) -> subprocess.CompletedProcess[str]:
    outer = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}  # of the `make test` that this may run in: it would report its folders
    variables = {name: value for name, value in os.environ.items() if name not in outer}
    command, settings = ["make", target], {**variables, **environment}
    return subprocess.run(
        command, cwd=checkout, env=settings, capture_output=True, text=True, check=False, timeout=LONG_S
    )


def test_make_install_starts_again_after_it_was_killed_and_is_done_once(checkout: Path) -> None:
    stamp = checkout / ".venv" / "installed"
    killed = subprocess.Popen(["make", "install"], cwd=checkout, start_new_session=True, stdout=subprocess.DEVNULL)
    wait_until((checkout / ".venv" / "bin" / "python").exists)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not stamp.exists()

    first = make(checkout, "install")
    assert first.returncode == 0, first.stderr
    command = [checkout / ".venv" / "bin" / "python", "-P", "-c", "import ngym; print(ngym.__file__)"]
    imported = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True).stdout.strip()
    assert imported == str(checkout / "ngym" / "__init__.py")

    written = stamp.stat().st_mtime_ns
    second = make(checkout, "install")
    assert (second.returncode, second.stdout) == (0, "")
    assert stamp.stat().st_mtime_ns == written


def test_make_names_the_problem_when_there_is_not_a_python(checkout: Path) -> None:
    result = make(checkout, "install", PYTHON="python2")
    assert result.returncode != 0
    assert result.stderr.splitlines()[0].startswith("make: no Python 3.11 to 3.14 among: python2;")


def test_pips_configuration_is_passed_to_uv_unless_uv_has_its_own() -> None:
    settings = {"index-url": ["https://mirror/simple"], "find-links": ["/wheels", "/more"], "cert": ["/ca.pem"]}
    environment = package_indexes.uv_environment(settings, {"SSL_CERT_FILE": "/mine.pem"})
    assert environment["UV_INDEX_URL"] == "https://mirror/simple"
    assert environment["UV_FIND_LINKS"] == "/wheels,/more"
    assert environment["SSL_CERT_FILE"] == "/mine.pem"
