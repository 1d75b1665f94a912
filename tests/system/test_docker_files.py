"""The container files, without a Docker engine: they are valid, and the files that they name exist."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from waiting import PATIENCE_S

from ngym.config.service_config import Config, load_config
from ngym.supervise.supervisor import Supervisor

PORT = 8000


@pytest.fixture(scope="module")
def compose(root: Path) -> dict[str, Any]:
    """docker-compose.yml with its anchors and merges resolved."""
    content: dict[str, Any] = yaml.safe_load((root / "docker-compose.yml").read_text())
    return content


@pytest.fixture(scope="module")
def stages(root: Path) -> dict[str, list[tuple[str, str]]]:
    """The Dockerfile: stage -> its instructions and those of the stages that it is built from, first to last."""
    text = re.sub(r"\\\n", " ", (root / "Dockerfile").read_text())
    found: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            origin, _, name = rest.split()
            current = found[name] = list(found.get(origin, []))
        elif word and not word.startswith("#"):
            current.append((word, rest.strip()))
    return found


@pytest.fixture(scope="module")
def config(root: Path) -> Config:
    return load_config([root / "docker" / "global_config.yaml"])


def started_services(compose: dict[str, Any], **environment: str) -> set[str]:
    """The services that `docker compose up` starts: without a profile or with an active one, and not scaled to 0."""
    active = set(filter(None, environment.get("COMPOSE_PROFILES", "").split(",")))

    def scale(service: dict[str, Any]) -> int:
        found = re.fullmatch(r"\$\{(\w+):-(\d+)\}", str(service.get("scale", "${_:-1}")))
        assert found is not None
        return int(environment.get(found[1], found[2]))

    return {
        name
        for name, service in compose["services"].items()
        if ("profiles" not in service or active & set(service["profiles"])) and scale(service) > 0
    }


def command(service: dict[str, Any]) -> list[str]:
    words: list[str] = service["command"]
    return words


def test_the_compose_file_is_valid_by_the_compose_specification(root: Path) -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml"]
    result = subprocess.run(check, cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_every_image_is_a_stage_of_the_dockerfile(compose: dict[str, Any], stages: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert service["build"]["target"] in stages
        assert service["image"] == f"ngym-{service['build']['target']}"


def test_every_container_runs_a_command_that_the_package_installs(root: Path, compose: dict[str, Any]) -> None:
    scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
    for service in compose["services"].values():
        assert command(service)[0] in scripts


def test_every_container_serves_a_service_of_the_mounted_config(compose: dict[str, Any], config: Config) -> None:
    serving = [words for words in map(command, compose["services"].values()) if words[0] == "ng_serve"]
    assert {words[1] for words in serving} == set(config.services)
    for words in serving:
        assert words[2:] == ["--config", "/app/global_config.yaml", "--host", "0.0.0.0", "--port", str(PORT)]


def test_the_others_find_each_service_under_the_name_of_its_container(compose: dict[str, Any], config: Config) -> None:
    for stanza in config.services.values():
        address = urlsplit(stanza.url or "")
        assert (address.hostname, address.port) == (stanza.name, PORT)
        for name, service in compose["services"].items():
            if command(service)[:2] == ["ng_serve", stanza.name]:
                aliases = service.get("networks", {}).get("default", {}).get("aliases", [])
                assert stanza.name in (name, *aliases)


def test_the_mounted_config_passes_ng_validate(root: Path) -> None:
    validate = [Path(sys.executable).with_name("ng_validate"), "--config", "docker/global_config.yaml"]
    result = subprocess.run(validate, cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_dependency_is_a_service_with_a_health_check_that_starts_with_it(
    compose: dict[str, Any], stages: dict[str, list[tuple[str, str]]]
) -> None:
    services = compose["services"]
    for service in services.values():
        for name, dependency in service.get("depends_on", {}).items():
            assert dependency["condition"] == "service_healthy"
            assert "HEALTHCHECK" in dict(stages[services[name]["build"]["target"]])
            assert "profiles" not in services[name] or not dependency.get("required", True)


def test_plain_compose_up_starts_the_cpu_stack_and_profiles_are_for_gpus_and_jobs(compose: dict[str, Any]) -> None:
    assert started_services(compose) == {"policy", "calculator", "calculator_agent"}
    profiles = {name: service["profiles"] for name, service in compose["services"].items() if "profiles" in service}
    jobs = {name: [name] for name in ("collect", "train", "train-gpu")}
    assert profiles == {"policy-gpu": ["gpu"], **jobs}


def test_with_gpus_one_policy_takes_the_place_of_the_other(root: Path, compose: dict[str, Any]) -> None:
    (line,) = re.findall(r"printf '(COMPOSE_PROFILES=.*)' >> \.env", (root / "docker-compose.yml").read_text())
    environment = dict(pair.split("=") for pair in line.split("\\n") if pair)
    assert started_services(compose, **environment) == {"policy-gpu", "calculator", "calculator_agent"}
    assert compose["services"]["policy"]["ports"] == compose["services"]["policy-gpu"]["ports"]  # never both


def test_the_policy_and_the_trainer_of_a_gpu_have_its_image_and_take_turns_on_the_same_gpus(
    compose: dict[str, Any], config: Config
) -> None:
    asking = {name: service["deploy"] for name, service in compose["services"].items() if "deploy" in service}
    assert asking.keys() == {"policy-gpu", "train-gpu"}
    assert asking["policy-gpu"] == asking["train-gpu"]
    (device,) = asking["train-gpu"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert {service["image"] for name, service in compose["services"].items() if name in asking} == {"ngym-gpu"}
    assert "rollouts.colocated=true" in command(compose["services"]["train-gpu"])
    assert config.services["policy"].options["engine"]["enable_sleep_mode"] is True


def test_the_files_that_containers_mount_are_in_the_project(root: Path, compose: dict[str, Any]) -> None:
    mounts = [mount for service in compose["services"].values() for mount in service["volumes"]]
    for mount in mounts:
        if isinstance(mount, str) and mount.startswith("./"):
            assert (root / mount.split(":")[0]).is_file()
        elif isinstance(mount, str):
            assert mount.split(":")[0] in compose["volumes"]
        else:
            assert mount["bind"] == {"create_host_path": False}


@pytest.mark.parametrize("name", ["train", "train-gpu"])
def test_the_job_that_trains_is_a_recipe_of_the_mounted_config(root: Path, compose: dict[str, Any], name: str) -> None:
    job = compose["services"][name]
    config = "rollouts.services=/app/global_config.yaml"
    assert job["environment"]["NGYM_ADMIN_TOKEN"] == compose["services"]["policy"]["environment"]["NGYM_ADMIN_TOKEN"]
    words = [word for word in command(job) if not word.startswith("model.path=")]
    assert config in words
    words[words.index(config)] = "rollouts.services=docker/global_config.yaml"
    dry_run = [sys.executable, "-m", "ngym", "train", *words[1:], "model.path=owner/model", "--dry-run"]
    result = subprocess.run(dry_run, cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_collector_reads_a_file_that_the_image_has(root: Path, compose: dict[str, Any]) -> None:
    words = command(compose["services"]["collect"])
    source = words[words.index("--input") + 1]
    assert source.startswith("data/")
    assert (root / source).is_file()


def test_no_secret_is_in_the_compose_file(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for name, value in service.get("environment", {}).items():
            if not re.search("TOKEN|KEY|SECRET|PASSWORD", name):
                continue
            from_outside_or_not_at_all = re.fullmatch(rf"\$\{{{name}:\?[^}}]+\}}", value or "")
            assert value is None or from_outside_or_not_at_all


def test_every_container_is_locked_by_the_same_token(compose: dict[str, Any]) -> None:
    tokens = {service["environment"]["NGYM_TOKEN"] for service in compose["services"].values()}
    assert len(tokens) == 1 and tokens.pop().startswith("${NGYM_TOKEN:?")


def test_every_container_reads_the_mounted_config_with_the_same_variables(root: Path, compose: dict[str, Any]) -> None:
    text = (root / "docker" / "global_config.yaml").read_text()
    variables = dict(re.findall(r"\$\{oc\.env:(\w+),([^}]+)\}", text))
    assert variables.keys() == {"NGYM_MODEL"}
    for service in compose["services"].values():
        for name, default in variables.items():
            assert service["environment"].get(name) == f"${{{name}:-{default}}}"


async def test_the_health_check_opens_a_locked_service(
    root: Path, stages: dict[str, list[tuple[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (words,) = [rest for word, rest in stages["core"] if word == "HEALTHCHECK"]
    _python, _c, program = json.loads(words.partition("CMD ")[2])
    monkeypatch.setenv("NGYM_TOKEN", "the-token-of-this-run")
    async with Supervisor(load_config([root / "global_config.yaml"], ["ngym.head.port=0"]).only(["counter"])) as stack:
        probe = program.replace("http://127.0.0.1:8000", stack.urls["counter"][0])
        assert probe != program
        probe = probe.replace("timeout=4", f"timeout={PATIENCE_S}")
        for token, code in (("the-token-of-this-run", 0), ("the-token-of-that-run", 1)):
            check = [sys.executable, "-c", probe]
            ran = await asyncio.create_subprocess_exec(*check, env={"NGYM_TOKEN": token}, stderr=subprocess.DEVNULL)
            assert await ran.wait() == code


def test_every_image_runs_as_a_user_without_privileges(
    compose: dict[str, Any], stages: dict[str, list[tuple[str, str]]]
) -> None:
    for service in compose["services"].values():
        users = [rest for word, rest in stages[service["build"]["target"]] if word == "USER"]
        assert users[-1] == "ngym"
        assert service["cap_drop"] == ["ALL"]


def test_every_folder_in_the_users_home_is_the_users_own(stages: dict[str, list[tuple[str, str]]]) -> None:
    """vLLM writes what it compiles into ~/.cache. `install -d` leaves the parents of a named folder to root."""
    (install,) = [rest for word, rest in stages["base"] if word == "RUN" and "install -d" in rest]
    owned = {Path(word) for word in install.partition("install -d -o ngym -g ngym ")[2].split()}
    home = Path("/home/ngym")
    inside = {folder for each in owned for folder in (each, *each.parents) if home in folder.parents}
    assert home / ".cache" in inside and inside <= owned


def test_what_the_dockerfile_copies_exists_and_is_sent_to_the_builder(
    root: Path, stages: dict[str, list[tuple[str, str]]]
) -> None:
    ignore = (root / ".dockerignore").read_text().split()
    sent = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    assert ignore[0] == "*"
    assert all((root / name).exists() for name in sent)
    copied = {
        source
        for instructions in stages.values()
        for word, rest in instructions
        if word == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    for source in copied - {"."}:
        assert (root / source).exists()
        assert Path(source).parts[0] in sent


def test_what_a_build_from_the_sources_needs_is_sent_to_the_builder(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())
    shipped = runpy.run_path(str(root / "hatch_build.py"))["SHIPPED"]
    metadata = {"README.md", *project["project"]["license-files"]}
    needed = {"ngym", "pyproject.toml", "hatch_build.py", *shipped, *metadata}
    sent = {line.removeprefix("!") for line in (root / ".dockerignore").read_text().split() if line.startswith("!")}
    assert {Path(each).parts[0] for each in needed} <= sent
