"""`ng_train --environment NAME`: the recipe and overrides that train on a gym server of the config."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from ngym import ConfigError, UsageError
from ngym.cli import init
from ngym.cli.init import project
from ngym.cli.train import main, of_environment
from ngym.supervise.placement import Machine
from ngym.trainer.online.services import config_for, place_beside_trainer

MODEL = "model.path=Qwen/Qwen3-0.6B"
MEMORY = "gpu_memory_utilization"
SHARED = "'policy' and the trainer share a GPU: vLLM takes {} of its memory for each replica (docs/gpus.md)"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project of `ng_init my_env`, in the working directory."""
    for path, text in project("my_env").items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_environment_of_ng_init_can_be_trained(here: Path) -> None:
    files, overrides = of_environment("my_env", [], [MODEL])
    assert files == ["grpo.yaml"]
    assert overrides == [
        "rollouts.agent=my_env_agent",
        "rollouts.tasks=gym_servers/my_env/data/example.jsonl",
        "rollouts.services=global_config.yaml",
        "rollouts.policy=policy",
        "rollouts.policy_app=models/vllm",
        "output=runs/my_env",
        "evaluation=null",
        "optimizer.lr=1e-6",
        "schedule.warmup_steps=0",
        MODEL,
    ]
    result = CliRunner().invoke(main, ["--environment", "my_env", MODEL, "--dry-run"])
    assert result.exit_code == 0, result.stderr
    assert result.stderr.startswith("the same as: ng_train grpo.yaml rollouts.agent=my_env_agent ")


def test_what_is_given_wins_and_train_and_validation_files_are_used(here: Path) -> None:
    data = here / "gym_servers" / "my_env" / "data"
    for name in ("train", "validation"):
        (data / f"{name}.jsonl").write_text((data / "example.jsonl").read_text())
    (here / "mine.yaml").write_text("{}\n")
    arguments = [MODEL, "output=runs/other", "optimizer.lr=1e-5"]
    files, overrides = of_environment("my_env", ["mine.yaml"], arguments)
    assert files == ["mine.yaml"]
    assert overrides[-3:] == arguments
    assert "rollouts.tasks=gym_servers/my_env/data/train.jsonl" in overrides
    assert not {"evaluation=null", "output=runs/my_env", "schedule.warmup_steps=0"} & set(overrides)


def test_the_weights_of_the_configs_own_policy_are_trained(here: Path) -> None:
    config = here / "global_config.yaml"
    policy = "policy: {kind: model, app: models/vllm, model: Qwen/Qwen3-8B}\n"
    config.write_text(policy + "my_env: " + config.read_text().partition("\nmy_env:")[2])
    overrides = of_environment("my_env", [], [])[1]
    assert "model.path=Qwen/Qwen3-8B" in overrides
    assert not [each for each in overrides if each.startswith("rollouts.policy_app")]


def test_what_is_missing_is_one_line(here: Path) -> None:
    with pytest.raises(
        UsageError, match=r"global_config.yaml:\d+: the weights of 'policy' \(models/scripted\) cannot be"
    ):
        of_environment("my_env", [], [])
    with pytest.raises(ConfigError, match=r"no service named 'my_en' \(did you mean 'my_env'\?\)"):
        of_environment("my_en", [], [MODEL])
    with pytest.raises(ConfigError, match="'policy' is a model, not a gym_server"):
        of_environment("policy", [], [MODEL])
    config = here / "global_config.yaml"
    config.write_text(config.read_text().partition("\nmy_env_agent:")[0] + "\n")
    with pytest.raises(ConfigError, match=r"no agent uses 'my_env'; add a stanza such as `my_env_agent: \{kind: agent"):
        of_environment("my_env", [], [MODEL])
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 2
    assert "missing argument 'RECIPE...'; to train on your own environment: --environment NAME" in result.stderr


def test_a_policy_app_replaces_the_stanza_and_its_options(here: Path) -> None:
    options = ["model=/a/policy", "engine.enable_sleep_mode=true"]
    config = config_for(Path("global_config.yaml"), "policy", "models/vllm", options)
    policy = config.services["policy"]
    assert policy.app == "models/vllm"
    assert policy.options == {"model": "/a/policy", "engine": {"enable_sleep_mode": True}, "bundle_tokens": "auto"}
    scripted = config_for(Path("global_config.yaml"), "policy", None, ["latency_s=1"]).services["policy"].options
    assert scripted["replies"] and "bundle_tokens" not in scripted


@pytest.mark.parametrize("app", [None, "models/vllm"])
def test_a_policy_that_is_not_a_model_is_refused_before_anything_starts(here: Path, app: str | None) -> None:
    with pytest.raises(
        ConfigError, match=r"yaml:\d+: rollouts\.policy names 'my_env', which is a gym_server, not a model"
    ):
        config_for(Path("global_config.yaml"), "my_env", app, ["model=/a/policy"])


@pytest.mark.parametrize(("written", "bundles"), [("", "auto"), ("bundle_tokens: false", False)])
def test_the_policy_of_a_run_bundles_tokens_unless_its_stanza_decides(
    tmp_path: Path, written: str, bundles: object
) -> None:
    file = tmp_path / "global_config.yaml"
    file.write_text(f"policy: {{kind: model, app: models/vllm, model: a, {written}}}\n")
    assert config_for(file, "policy", None, ["model=/b"]).services["policy"].options == {
        "model": "/b",
        "bundle_tokens": bundles,
    }


def test_ng_init_names_the_files_that_it_wrote_or_would_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    would = CliRunner().invoke(init.main, ["my_env", "--dry-run"]).output.partition("\nnext:")[0].split("\n")
    assert not any(tmp_path.iterdir())
    wrote_lines = CliRunner().invoke(init.main, ["my_env"]).output.partition("\nnext:")[0].split("\n")
    assert [line.replace("would write ", "wrote ") for line in would] == wrote_lines
    named = {tmp_path / line.removeprefix("wrote ") for line in wrote_lines if line}
    assert named == {path for path in tmp_path.rglob("*") if path.is_file()} and len(named) > 3


def test_vllm_leaves_memory_for_a_trainer_on_the_only_gpu(here: Path) -> None:
    messages: list[str] = []
    config = config_for(here / "global_config.yaml", "policy", "models/vllm", ["model=tiny"])
    shared = place_beside_trainer(config, "policy", 1, messages.append, Machine(("3",), 8, 64))
    assert shared.stanza("policy").options == {"model": "tiny", "bundle_tokens": "auto", "engine": {MEMORY: 0.4}}
    assert messages == [SHARED.format(0.4)]
    again = place_beside_trainer(config, "policy", 8, messages.append, Machine(("3", "4"), 8, 64))
    assert again == shared and len(messages) == 2
    options = ["engine.weight_transfer_config.backend=ipc"]
    config = config_for(here / "global_config.yaml", "policy", "models/vllm", options)
    within = place_beside_trainer(config, "policy", 1, messages.append, Machine(("3", "4"), 8, 64)).stanza("policy")
    assert within.resources is None and within.options["engine"][MEMORY] == 0.4


@pytest.mark.parametrize(
    ("replicas", "parallel", "ranks", "gpus", "message"),
    [
        (1, 1, 1, 1, "'policy' gets GPU 3, the trainer 0"),
        (2, 1, 2, 1, "'policy' gets GPU 2, 3, the trainer 0, 1"),
        (1, 2, 2, 2, "'policy' gets GPU 2, 3, the trainer 0, 1"),
        (2, 2, 1, None, SHARED.format(0.2)),
        (1, 1, 4, None, SHARED.format(0.4)),
    ],
)
def test_vllm_gets_gpus_that_no_rank_uses_if_there_are_enough(
    here: Path, replicas: int, parallel: int, ranks: int, gpus: int | None, message: str
) -> None:
    messages: list[str] = []
    file = here / "policy.yaml"
    file.write_text(f"policy: {{kind: model, app: models/vllm, model: tiny, replicas: {replicas}}}\n")
    config = config_for(file, "policy", None, [f"engine.tensor_parallel_size={parallel}"])
    placed = place_beside_trainer(config, "policy", ranks, messages.append, Machine(tuple("0123"), 8, 64)).stanza(
        "policy"
    )
    assert (placed.resources.gpus if placed.resources else None) == gpus
    assert (MEMORY in placed.options["engine"]) == (gpus is None)
    assert messages == [message]


def test_a_judge_gets_the_gpu_that_does_not_suffice_for_the_policy_too(here: Path) -> None:
    messages: list[str] = []
    file = here / "policy.yaml"
    stanza = "{kind: model, app: models/vllm, model: tiny}"
    file.write_text(f"policy: {stanza}\njudge: {stanza}\n")
    config = config_for(file, "policy", None, [])
    placed = place_beside_trainer(config, "policy", 1, messages.append, Machine(("0", "1"), 8, 64))
    assert placed.stanza("policy").resources is None and placed.stanza("policy").options["engine"] == {MEMORY: 0.4}
    assert placed.stanza("judge").resources.gpus == 1 and "engine" not in placed.stanza("judge").options
    assert messages == [SHARED.format(0.4)]


def test_a_stanza_that_decides_or_needs_no_gpu_is_kept(here: Path) -> None:
    machine, messages = Machine(("0", "1"), 8, 64), list[str]()
    file = here / "policy.yaml"
    for app, more, gpus in (
        ("models/vllm", "resources: {gpus: 1}", machine),
        ("models/vllm", f"engine: {{{MEMORY}: 0.5}}", machine),
        ("models/vllm", f"engine: {{{MEMORY}: 0.7}}", Machine(("0",), 8, 64)),
        ("models/vllm", "engine: {enable_sleep_mode: true}", machine),
        ("models/vllm", "replicas: 2", Machine((), 8, 64)),
        ("models/transformers", "replicas: 2", machine),
    ):
        file.write_text(f"policy: {{kind: model, app: {app}, model: tiny, {more}}}\n")
        config = config_for(file, "policy", None, [])
        assert place_beside_trainer(config, "policy", 1, messages.append, gpus) == config
    assert not messages
