"""The global config: every mistake is one line with the place, the problem and the correction."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from ngym.config.service_config import Stanza, common_options, load_config, redacted_config
from ngym.config.yaml_tree import load_tree, parse
from ngym.errors import ConfigError
from ngym.services.base.options import (
    GymServerName,
    InputFile,
    InputFolder,
    ModelName,
    ProjectPath,
    ServiceName,
    ServiceOptions,
    parse_options,
)
from ngym.supervise.supervisor import service_spec

GYM = "kind: gym_server\n  app: gym_servers/env"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "gym_servers").mkdir()
    (tmp_path / "gym_servers" / "env.py").write_text("app = None\n")
    return tmp_path


def config_at(project: Path, text: str, *overrides: str):
    file = project / "global_config.yaml"
    file.write_text(text)
    return load_config([file], overrides)


def test_a_stanza_keeps_what_ngym_knows_apart_from_the_services_own_options(project: Path):
    stanza = config_at(project, f"env:\n  {GYM}\n  replicas: 2\n  level: hard\n").services["env"]
    assert (stanza.kind, stanza.replicas, stanza.options) == ("gym_server", 2, {"level": "hard"})
    assert stanza.key_where["level"].endswith("global_config.yaml:5")


def test_later_files_and_then_overrides_win(project: Path):
    (project / "b.yaml").write_text("env: {level: b}\n")
    (project / "a.yaml").write_text(f"env:\n  {GYM}\n  level: a\n")
    files = [project / "a.yaml", project / "b.yaml"]
    assert load_config(files).services["env"].options["level"] == "b"
    assert load_config(files, ["env.level=c"]).services["env"].options["level"] == "c"
    assert load_config(files, ["+env.level=3"]).services["env"].options["level"] == 3


def test_only_some_services_come_with_all_that_they_need(tmp_path: Path):
    file = tmp_path / "c.yaml"
    (tmp_path / "x.py").touch()
    gyms = "".join(f"{name}: {{kind: gym_server, app: x}}\n" for name in ("a", "b"))
    agents = "".join(f"{name}_agent: {{kind: agent, app: x, gym: {name}, model: policy}}\n" for name in ("a", "b"))
    file.write_text(f"policy: {{kind: model, app: x}}\n{gyms}{agents}")
    config = load_config([file])
    assert list(config.only(["b_agent"]).services) == ["policy", "b", "b_agent"]
    assert list(config.only(["a", "b_agent"]).services) == ["policy", "a", "b", "b_agent"]
    with pytest.raises(ConfigError, match=r"no service named 'a_agnt' \(did you mean 'a_agent'"):
        config.only(["a_agnt"])


def test_interpolation_reaches_other_keys_and_the_environment(project: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NGYM_TEST_LEVEL", "deep")
    text = f"env:\n  {GYM}\n  level: ${{oc.env:NGYM_TEST_LEVEL}}\n  again: ${{env.level}}\n"
    assert config_at(project, text).services["env"].options == {"level": "deep", "again": "deep"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "env:\n  kind: gym_sever\n  app: gym_servers/env\n",
            "global_config.yaml:2: 'gym_sever' is not a service kind (did you mean 'gym_server'?)",
        ),
        ("env:\n  kind: gym_server\n  app: gym_servers/enw\n", "global_config.yaml:3: no service at 'gym_servers/enw'"),
        ("env:\n  kind: gym_server\n", "global_config.yaml:1: service 'env' needs an app"),
        (f"env:\n  {GYM}\n  replicas: none\n", "global_config.yaml:4: replicas: "),
        (
            f"env:\n  {GYM}\n  replicas: 2\n  port: 9\n",
            "global_config.yaml:5: 'env' has 2 replicas and one port; leave `port` out",
        ),
        ("env: 3\n", "global_config.yaml:1: 'env' is not a service"),
        ("env:\n  app: gym_servers/env\n", "global_config.yaml:1: service 'env' has no kind"),
        ("env:\n  kind: model\n  url: ftp://x\n", "global_config.yaml:3: 'ftp://x' is not a service URL"),
        ("env: [\n", "global_config.yaml:2: not valid YAML"),
        ("env:\n  kind: gym_server\n app: gym_servers/env\n", "; is this line indented as the lines around it?"),
        (
            "env:\n\tkind: gym_server\n",
            "global_config.yaml:2: not valid YAML: found character '\\t' that cannot start any token; indent with spaces",
        ),
        (f"env:\n  {GYM}\nenv:\n  {GYM}\n", "global_config.yaml:4: 'env' is twice in this file"),
        (f"env:\n  {GYM}\n  level: ${{nowhere.x}}\n", "global_config.yaml:4: env.level: "),
        (f"env:\n  {GYM}\n  level: ${{oc.env:NGYM_NOT_SET}}\n", "global_config.yaml:4: env.level: "),
        (
            f"env:\n  {GYM}\nngym:\n  head: {{prot: 1}}\n",
            "global_config.yaml:5: unknown key 'head.prot' (did you mean 'port'?)",
        ),
        ("env: !!python/object/apply:os.system [id]\n", "not valid YAML"),
        ("", "no services"),
        ("- a\n", "a config is a mapping"),
    ],
)
def test_a_mistake_is_one_line_with_its_place(project: Path, text: str, message: str):
    with pytest.raises(ConfigError) as caught:
        config_at(project, text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_bad_override_are_reported(project: Path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file"):
        load_config([Path("nowhere.yaml")])
    with pytest.raises(ConfigError, match="'level' is not of the form key=value"):
        config_at(project, f"env:\n  {GYM}\n", "level")
    with pytest.raises(ConfigError, match=r"no service named 'enw' \(did you mean 'env'\?\)"):
        config_at(project, f"env:\n  {GYM}\n", "enw.level=3")


def test_an_option_that_names_a_service_of_the_wrong_kind_is_refused():
    class Options(ServiceOptions):
        model: ModelName
        gym: GymServerName | None = None
        other: ServiceName | None = None

    lines, kinds = {"model": "c.yaml:8", "gym": "c.yaml:9"}, {"policy": "model", "env": "gym_server"}
    services = ["policy", "env", "unknown"]
    values = {"model": "unknown", "gym": "env", "other": "policy"}
    assert parse_options(Options, values, lines, "c.yaml:5", services, kinds=kinds).model == "unknown"
    with pytest.raises(ConfigError) as caught:
        parse_options(Options, {"model": "env", "gym": "policy"}, lines, "c.yaml:5", services, kinds=kinds)
    assert str(caught.value).splitlines() == [
        "c.yaml:8: model: 'env' is of kind gym_server, not model (known: policy)",
        "c.yaml:9: gym: 'policy' is of kind model, not gym_server (known: env)",
    ]


def test_paths_of_options_are_relative_to_the_config_and_input_files_must_exist(tmp_path: Path):
    class Options(ServiceOptions):
        folder: ProjectPath | None = None
        file: InputFile | None = None
        databases: InputFolder | None = None

    (tmp_path / "replies.jsonl").touch()
    there = parse_options(Options, {"folder": "a", "file": "replies.jsonl"}, {}, "c.yaml:5", [], tmp_path)
    assert (there.folder, there.file) == (tmp_path / "a", tmp_path / "replies.jsonl")
    with pytest.raises(ConfigError) as caught:
        parse_options(Options, {"file": "replys.jsonl"}, {"file": "c.yaml:6"}, "c.yaml:5", [], tmp_path)
    expected = f"c.yaml:6: file: there is no file {tmp_path}/replys.jsonl (did you mean '{tmp_path}/replies.jsonl'?); got 'replys.jsonl'"
    assert str(caught.value) == expected
    with pytest.raises(ConfigError) as caught:
        parse_options(Options, {"databases": "replies.jsonl"}, {"databases": "c.yaml:7"}, "c.yaml:5", [], tmp_path)
    assert str(caught.value) == (f"c.yaml:7: databases: {tmp_path}/replies.jsonl is not a folder; got 'replies.jsonl'")


def test_a_missing_service_that_only_a_default_names_is_reported_with_the_key_to_write():
    class Options(ServiceOptions):
        judge: ModelName = "policy"

    assert parse_options(Options, {}, {}, "c.yaml:5", ["env", "policy"]).judge == "policy"
    with pytest.raises(ConfigError) as caught:
        parse_options(Options, {}, {}, "c.yaml:5", ["env"])
    assert str(caught.value) == (
        "c.yaml:5: no service named 'policy', the default of judge (known: env); write `judge: NAME`, which "
        "`ng_run --only` starts, too"
    )


def test_the_hint_for_a_misspelled_service_names_one_that_only_does_not_select(project: Path):
    class Options(ServiceOptions):
        gym: GymServerName

    agent = "env_agent: {kind: agent, app: agents/simple, gym: evn}"
    config = config_at(project, f"env: {{kind: gym_server, app: gym_servers/env}}\n{agent}\n").only(["env_agent"])
    assert list(config.services) == ["env_agent"]
    spec = service_spec(config, config.services["env_agent"], {"env_agent": []})
    with pytest.raises(ConfigError, match=r"global_config.yaml:2: no service named 'evn' \(did you mean 'env'\?\)"):
        parse_options(Options, spec["options"], {}, spec["where"], spec["urls"], project, spec["kinds"])


def test_a_services_own_options_are_checked_against_its_record():
    class Options(ServiceOptions):
        model: ServiceName
        judge: ServiceName | None = None
        steps: int = 3

    lines = {"modle": "c.yaml:7", "model": "c.yaml:8", "steps": "c.yaml:9", "judge": "c.yaml:10"}
    services = ["policy", "env"]
    assert parse_options(Options, {"model": "policy"}, lines, "c.yaml:5", services).model == "policy"
    with pytest.raises(ConfigError, match=r"c.yaml:8: no service named 'polcy' \(did you mean 'policy'\?\)"):
        parse_options(Options, {"model": "polcy"}, lines, "c.yaml:5", services)
    with pytest.raises(ConfigError, match=r"c.yaml:10: no service named 'polcy' \(did you mean 'policy'\?\)"):
        parse_options(Options, {"model": "policy", "judge": "polcy"}, lines, "c.yaml:5", services)
    with pytest.raises(ConfigError, match=r"c.yaml:8: no service named 'polcy' .*\nc.yaml:10: no service named 'nope'"):
        parse_options(Options, {"model": "polcy", "judge": "nope"}, lines, "c.yaml:5", services)
    with pytest.raises(ConfigError, match=r"c.yaml:9: steps: .*\nc.yaml:8: no service named 'polcy'"):
        parse_options(Options, {"model": "polcy", "steps": "x"}, lines, "c.yaml:5", services)
    with pytest.raises(ConfigError) as caught:
        parse_options(
            Options,
            {"modle": "policy", "steps": "many"},
            {"modle": "c.yaml:7", "steps": "c.yaml:9"},
            "c.yaml:5",
            services,
        )
    assert str(caught.value).splitlines() == [
        "c.yaml:5: 'model' is missing",
        "c.yaml:9: steps: Input should be a valid integer, unable to parse string as an integer; got 'many'",
        "c.yaml:7: unknown key 'modle' (did you mean 'model'?)",
    ]


def test_a_typed_tree_names_nested_unknown_keys(tmp_path: Path):
    class Inner(BaseModel, extra="forbid"):
        rate: float = 1.0

    class Outer(BaseModel, extra="forbid"):
        optimizer: Inner = Inner()

    file = tmp_path / "t.yaml"
    file.write_text("optimizer:\n  rat: 3\n")
    with pytest.raises(ConfigError, match=r"t.yaml:2: unknown key 'optimizer.rat' \(did you mean 'rate'\?\)"):
        parse(Outer, load_tree([file]))
    assert parse(Outer, load_tree([], ["optimizer.rate=2"])).optimizer.rate == 2.0


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254",
        "http://169.254.169.254/latest/meta-data",
        "http://2852039166",
        "http://0xa9fea9fe",
        "http://[fe80::1]",
        "http://[::ffff:169.254.169.254]",
        "http://user:secret@host",
        "http://host:port",
        "http://host\\@other",
        "file:///etc/passwd",
        "gopher://host",
        "http://",
        "http://host/?next=http://other",
    ],
)
def test_an_address_that_no_service_has_is_refused_and_a_password_in_it_is_not_shown(tmp_path: Path, url: str) -> None:
    file = tmp_path / "global_config.yaml"
    file.write_text(f"judge:\n  kind: model\n  url: '{url}'\n")
    with pytest.raises(ConfigError, match=r"global_config.yaml:3: ") as caught:
        load_config([file])
    assert "secret" not in str(caught.value)


def test_a_token_of_others_is_named_and_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "global_config.yaml"
    file.write_text("judge:\n  kind: model\n  url: http://host:1\n  token_env: JUDGE_TOKEN\n")
    monkeypatch.delenv("JUDGE_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=r"global_config.yaml:4: the variable 'JUDGE_TOKEN' is not set"):
        load_config([file])
    monkeypatch.setenv("JUDGE_TOKEN", "the-token-of-the-judge")
    config = load_config([file])
    assert config.others == {"judge": "the-token-of-the-judge"}
    assert "the-token-of-the-judge" not in str(redacted_config(config))


@pytest.mark.parametrize("target", ["a", "b"])
def test_a_ring_of_remote_agents_is_refused(tmp_path: Path, target: str) -> None:
    stanzas = (
        f"{name}: {{kind: agent, app: agents/remote, remote: {to}}}\n" for name, to in (("a", target), ("b", "a"))
    )
    (tmp_path / "ring.yaml").write_text("".join(stanzas))
    with pytest.raises(ConfigError, match=rf"ring.yaml:[12]: remote: '[{target}a]' is itself agents/remote"):
        load_config([tmp_path / "ring.yaml"])
    (tmp_path / "ring.yaml").write_text(
        "a: {kind: agent, app: agents/remote, remote: b}\nb: {kind: agent, url: 'http://127.0.0.1:9'}\n"
    )
    assert load_config([tmp_path / "ring.yaml"]).services.keys() == {"a", "b"}


def test_replicas_agree_in_all_options_but_secrets_and_those_that_fit_a_process_to_its_machine() -> None:
    options: dict[str, Any] = {
        "model": "Qwen/Qwen3-8B",
        "threads": 4,
        "api_key": "a-secret",
        "engine": {"seed": 1, "gpu_memory_utilization": 0.5},
        "replies": [{"text": "x" * 100}],
    }
    stanza = Stanza(name="policy", kind="model", app="models/vllm", options=options)
    found = common_options(stanza)
    assert found.keys() == {"model", "api_key", "engine.seed", "replies"}
    assert (found["model"], found["engine.seed"]) == ('"Qwen/Qwen3-8B"', "1")
    assert "a-secret" not in str(found) and found["replies"].startswith("114 characters (")
    options["replies"][0]["text"] = "y" * 100
    assert common_options(stanza)["replies"] != found["replies"]
