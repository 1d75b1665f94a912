"""Recipes before training: files and overrides, derived sizes, and no secret on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from ngym.cli.train import main
from ngym.config.yaml_tree import all_keys
from ngym.errors import ConfigError
from ngym.trainer.data import samples
from ngym.trainer.model import policy
from ngym.trainer.recipe import recipe as config
from ngym.trainer.recipe import recipe_reader
from ngym.trainer.recipe.algorithms import ALGORITHMS
from ngym.trainer.recipe.other_names import OTHER_NAMES

POLICY = "model.path=data/tiny_policy/tokenizer"


def launch(ranks: int) -> Any:
    return config.Launch(rank=0, local_rank=0, ranks=ranks)


def recipe(*words: str) -> Any:
    return recipe_reader.read_recipe([words[0]], words[1:])[0]


def lengths(*tokens: int) -> list[Any]:
    return [samples.Sample((samples.Segment([0] * count, [(1, count)]),)) for count in tokens]


def resolve(words: list[str]) -> Any:
    result = CliRunner().invoke(main, [*words, "--dry-run"])
    assert result.exit_code == 0, result.stderr
    return yaml.safe_load(result.stdout)


def test_later_files_win_over_earlier_ones_and_the_command_line_over_all(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("optimizer: {lr: 5.0e-3, betas: [0.8, 0.9]}\nbatch_size: 8\n")
    options = resolve(["sft.yaml", str(tmp_path / "mine.yaml"), "batch_size=4", "data.max_tokens=${batch_size}"])
    assert options["optimizer"]["lr"] == 5e-3 and options["optimizer"]["betas"] == [0.8, 0.9]
    assert options["optimizer"]["muon_lr"] == 0.02 and options["batch_size"] == options["data"]["max_tokens"] == 4


@pytest.mark.parametrize(
    ("recipe", "override", "message"),
    [
        ("sft.yaml", "algorithm=dapo", "algorithm: expected a mapping; for this algorithm with its defaults write algorithm.name=dapo"),
        ("sft.yaml", "schedule.warmup_ratio=0.1", "schedule.warmup_ratio: schedule.warmup_steps is 20; set one of the two to null"),
        ("sft.yaml", "optimizer.lr=inf", "optimizer.lr: Input should be a finite number"),
        ("sft.yaml", "max_steps=true", "max_steps: expected a number; got True"),
        ("sft.yaml", "optimizer=adam", "optimizer: expected a mapping with keys such as name, lr, betas, eps, momentum, ...; got 'adam'"),
        ("sft.yaml", "optimizer.betas=0.9", "optimizer.betas: expected a list; got 0.9"),
        ("letters.yaml", "algorithm.kl=1", "algorithm.kl: expected a mapping with keys such as coef, where, estimator, gradient; got 1"),
        ("letters.yaml", "max_steps=0", "max_steps: Input should be greater than 0; got 0"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_says_what_to_write(recipe: str, override: str, message: str) -> None:
    result = CliRunner().invoke(main, [recipe, override, "--dry-run"])
    assert result.exit_code == 2 and result.stderr.startswith(f"command line: {message}"), result.stderr
    assert result.stderr.count("\n") == 1


def test_a_warm_up_as_a_share_replaces_one_in_steps() -> None:
    options = resolve(["sft.yaml", "schedule.warmup_steps=null", "schedule.warmup_ratio=0.1"])
    assert options["schedule"]["warmup_ratio"] == 0.1
    assert recipe("sft.yaml", "schedule.warmup_steps=null").schedule.warmup(100) == 0


def test_every_mistake_is_a_line_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("optimizer:\n  lr: fast\n  beta: 1\nsede: 1\n")
    result = CliRunner().invoke(main, ["sft.yaml", str(tmp_path / "mine.yaml"), "engine.zero_stage=7"])
    lines = sorted(line.rpartition("/")[2] for line in result.stderr.splitlines())
    assert result.exit_code == 2 and len(lines) == 4
    assert lines[0].startswith("command line: engine.zero_stage: Input should be 0, 1, 2 or 3; got 7")
    assert lines[1].startswith("mine.yaml:2: optimizer.lr: Input should be a valid number")
    assert lines[2:] == [
        "mine.yaml:3: unknown key 'optimizer.beta' (did you mean 'betas'?)",
        "mine.yaml:4: unknown key 'sede' (did you mean 'seed'?)",
    ]


@pytest.mark.parametrize(
    ("recipe", "override", "suggested"),
    [
        ("grpo.yaml", "schedule.steps=5", "'max_steps'"),  # a name of others, in a section that has no such key
        ("grpo.yaml", "learning_rate=1e-5", "'optimizer.lr'"),
        ("grpo.yaml", "model.name=a/b", "'model.path'"),
        ("grpo.yaml", "train_batch_size=8", "'batch_size' or 'rollouts.tasks_per_step'"),
        ("grpo.yaml", "lr=1e-5", "'optimizer.lr'"),  # the same name in another section, the shallowest one
        ("grpo.yaml", "group_size=4", "'rollouts.group_size'"),
        ("grpo.yaml", "algorithm.clip_low=0.1", "'algorithm.loss.clip_low'"),
        ("grpo.yaml", "clip_hihg=0.1", "'algorithm.loss.clip_high'"),  # misspelled, in another section
        ("grpo.yaml", "optimizer.beta=0.9", "'betas'"),  # misspelled, in its section
        ("grpo.yaml", "beta=0.1", "'algorithm.kl.coef'"),  # each algorithm has its own keys
        ("dpo.yaml", "beta=0.1", "'algorithm.beta'"),
    ],
)
def test_an_unknown_key_names_the_key_that_was_meant(recipe: str, override: str, suggested: str) -> None:
    result = CliRunner().invoke(main, [recipe, override, "--dry-run"])
    key = override.partition("=")[0]
    assert result.exit_code == 2
    assert f"command line: unknown key {key!r} (did you mean {suggested}?)" in result.stderr.splitlines()


@pytest.mark.parametrize("override", ["foo=1", "name=x"])
def test_an_unknown_key_that_resembles_none_gets_no_suggestion(override: str) -> None:
    result = CliRunner().invoke(main, ["grpo.yaml", override, "--dry-run"])
    assert f"command line: unknown key {override.partition('=')[0]!r}" in result.stderr.splitlines()


def test_every_suggested_key_exists_and_no_key_is_listed_as_anothers_name() -> None:
    keys = {key for name in ALGORITHMS for key in all_keys(config.Recipe, {"algorithm": {"name": name}})}
    assert {key for suggested in OTHER_NAMES.values() for key in suggested} <= keys
    assert not OTHER_NAMES.keys() & keys


def test_what_came_from_the_environment_is_shown_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHERE", "s3cret")
    monkeypatch.setenv("RATE", "0.25")
    words = [
        "sft.yaml",
        "output=${oc.env:WHERE}/run",
        "optimizer.lr=${oc.env:RATE}",
        "optimizer.muon_lr=${optimizer.lr}",
    ]
    read, tree = recipe_reader.read_recipe(words[:1], words[1:])
    assert read.optimizer.muon_lr == 0.25 and read.data.path == "s3cret/run/demonstrations.jsonl"
    text = recipe_reader.as_yaml(read, tree)
    assert "s3cret" not in text and "0.25" not in text
    (tmp_path / "recipe.yaml").write_text(text)
    assert recipe_reader.read_recipe([str(tmp_path / "recipe.yaml")], [])[0] == read
    wrong = CliRunner().invoke(main, ["sft.yaml", "optimizer.name=${oc.env:WHERE}"])
    assert "s3cret" not in wrong.stderr and "got ${oc.env:WHERE}" in wrong.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["sft.yaml"],
        ["grpo.yaml", POLICY],
        ["grpo.yaml", POLICY, f"data.path={__file__}"],
        ["grpo.yaml", POLICY, "rollouts.max_lag=2"],
        ["online_dpo.yaml", POLICY, "rollouts.max_lag=2"],
    ],
)
def test_a_resolved_recipe_is_a_recipe(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(resolve(words)))
    assert recipe(str(tmp_path / "recipe.yaml")) == recipe(*words)


def test_the_sizes_of_a_run_on_a_file_are_reported() -> None:
    lines = recipe_reader.file_run_sizes(
        recipe("sft.yaml", "batch_size=4", "epochs=2", "micro_batch_tokens=10", "schedule.warmup_steps=0"),
        lengths(5, 5, 5, 5, 5, 15),
        4,
        launch(2),
    )
    assert lines == [
        "data         6 samples, 40 tokens: 7 each, at most 15",
        "step         4 samples, 2 on each of 2 ranks",
        "micro-batch  at most 10 tokens on a rank: about 2 in a step, of 7 tokens",
        "             micro_batch_tokens is below the longest sample: one of more, up to 15, is alone",
        "run          4 steps (2 x 2): 12 samples, about 80 tokens",
        "rate         muon 0.02 for matrices, adamw 0.005 for the rest; cosine, down to 0.02 of it",
    ]


def test_a_run_that_is_cut_short_and_a_warm_up_that_is_too_long_are_reported() -> None:
    lines = recipe_reader.file_run_sizes(recipe("sft.yaml", "max_steps=3"), lengths(*[10] * 130), 3, launch(1))
    assert lines[1:2] + lines[3:] == [
        "step         32 samples",
        "run          3 steps (max_steps, of 5): 96 samples, about 960 tokens",
        "rate         muon 0.02 for matrices, adamw 0.005 for the rest, up to it in 20 steps; cosine, down to 0.02 of it",
        "             the run ends in its warm-up: schedule.warmup_steps is 20",
    ]


def test_the_sizes_of_a_live_run_are_reported() -> None:
    words = ("optimizer.lr=1e-3", "schedule={name: constant, warmup_steps: 0}", "rollouts.tasks_per_step=7")
    lines = recipe_reader.live_run_sizes(recipe("grpo.yaml", POLICY, *words), launch(3))
    assert lines == [
        "step         7 tasks x 8 rollouts = 56 rollouts, in 2 optimizer steps of 28, 9 or 10 on each of 3 ranks",
        "micro-batch  at most 4,096 tokens on a rank, as many as the rollouts need",
        "run          20 steps: 40 optimizer steps, 1,120 rollouts",
        "rate         adamw 0.001; constant",
    ]


@pytest.mark.parametrize(
    ("words", "ranks", "key", "reason"),
    [
        (["sft.yaml", "batch_size=3"], 4, "batch_size", "3 samples for 4 ranks"),
        (["grpo.yaml", POLICY, "rollouts.updates_per_step=129"], 1, "rollouts.updates_per_step", "split 128 rollouts"),
        (["grpo.yaml", POLICY, "rollouts.updates_per_step=64"], 3, "rollouts.tasks_per_step", "2 samples for 3 ranks"),
    ],
)
def test_sizes_that_cannot_work_are_refused(words: list[str], ranks: int, key: str, reason: str) -> None:
    ((found, why),) = recipe_reader.impossible_settings(recipe(*words), launch(ranks))
    assert found == key and reason in why


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["letters.yaml"], "model.from_scratch"),
        (["grpo.yaml", POLICY, "rollouts.colocated=true", "engine.zero_stage=2"], "rollouts.colocated"),
        (["grpo.yaml", POLICY, "model.lora.base_4bit=nf4", "rollouts.transport=lora"], "rollouts.transport"),
    ],
)
def test_what_ray_starts_too_early_is_refused(words: list[str], key: str) -> None:
    result = CliRunner().invoke(main, ["--on", "ray", "--dry-run", *words])
    assert result.exit_code == 2 and f"{key}: " in result.stderr and "on Ray" in result.stderr, result.stderr
    assert len(result.stderr.splitlines()) == 1
    recipe_reader.read_recipe([words[0]], words[1:])


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["grpo.yaml", "algorithm.name=rloo"], "algorithm.kl.where"),
        (["grpo.yaml", "algorithm.name=reinforce_pp"], "algorithm.kl.where"),
        (["ppo.yaml", "algorithm.kl={coef: 0.1, where: reward}"], "algorithm.kl.where"),
        (
            ["distillation.yaml", "algorithm.teacher={path: null, beta: null, current_policy: true, hint: x}"],
            "algorithm.teacher.current_policy",
        ),
    ],
)
def test_what_a_file_makes_constant_is_refused(words: list[str], key: str) -> None:
    of_file = [*words, POLICY, f"data.path={__file__}", "evaluation=null"]
    result = CliRunner().invoke(main, [*of_file, "--dry-run"])
    assert result.exit_code == 2 and f"{key}: " in result.stderr and "a file" in result.stderr, result.stderr
    assert result.stderr.count("\n") == 1
    recipe(*of_file, "algorithm.kl.coef=0" if "kl" in key else "algorithm.teacher={path: data, current_policy: false}")
    recipe(
        "ppo.yaml",
        POLICY,
        f"data.path={__file__}",
        "algorithm={loss: {anchor: trainer}, kl: {coef: 0.1, where: reward}}",
    )


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("engine.zero_stage=0", "engine.zero_stage"),
        ("engine.zero_stage=3", "engine.zero_stage"),
        ("rollouts.max_lag=1", "rollouts.max_lag"),
        ("engine.offload.optimizer=cpu", "engine.offload.optimizer"),
        ("algorithm.kl.coef=0.1", "algorithm.kl.coef"),
    ],
)
def test_what_cannot_be_done_on_shared_gpus_is_refused(word: str, key: str) -> None:
    words = ["grpo.yaml", POLICY, "rollouts.colocated=true", "engine.zero_stage=2", word]
    result = CliRunner().invoke(main, [*words, "--dry-run"])
    assert result.exit_code == 2 and f"{key}: " in result.stderr and len(result.stderr.splitlines()) == 1
    assert recipe(*words[:-1]).live.colocated


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_changed_values_are_pushed_only_in_bf16(precision: str) -> None:
    words = ["grpo.yaml", POLICY, "engine.zero_stage=1", "rollouts.transport=delta"]
    result = CliRunner().invoke(main, [*words, f"engine.precision={precision}", "--dry-run"])
    problem = f"rollouts.transport: delta sends the values that a step changed, few in bf16 and most in {precision}"
    assert result.exit_code == 2 and problem in result.stderr and len(result.stderr.splitlines()) == 1
    assert recipe(*words, "engine.precision=bf16").live.transport == "delta"


def test_what_a_live_run_would_not_look_at_is_refused() -> None:
    result = CliRunner().invoke(main, ["grpo.yaml", POLICY, "batch_size=64", "epochs=2"])
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 2
    assert "batch_size: the size of a live step is rollouts.tasks_per_step x group_size" in result.stderr
    assert "epochs: live rollouts have no epochs" in result.stderr
    assert recipe("grpo.yaml", POLICY, "data.path=a.jsonl", "batch_size=64").batch_size == 64


def test_a_reward_model_is_refused_as_policy_and_as_teacher_before_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForSequenceClassification"]}')
    scorer, data = str(tmp_path), "data.path=data/calculator/example.jsonl"
    for key, words in (
        ("model.path", ["dpo.yaml", f"model.path={scorer}"]),
        ("algorithm.teacher.path", ["distillation.yaml", POLICY, f"algorithm.teacher.path={scorer}"]),
    ):
        result = CliRunner().invoke(main, ["--dry-run", *words, data, "evaluation=null"])
        assert result.exit_code == 2
        assert f"{key}: {scorer}: this model is one for sequence classification" in result.stderr
    others = [f"model.tokenizer={POLICY.partition('=')[2]}", data, "evaluation=null"]
    assert recipe("reward_model.yaml", f"model.path={scorer}", *others).model.path == scorer


def test_a_tokenizer_of_another_model_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in a recipe is, when only the model is named again."""
    monkeypatch.chdir(root)
    words = ["sft.yaml", "model.from_scratch=null", "model.path=data/letters/tokenizer"]
    with pytest.raises(ConfigError, match=r"tiny_policy/tokenizer is not the tokenizer of .*letters/tokenizer .*=null"):
        policy.load_tokenizer(recipe(*words).model)
    assert policy.load_tokenizer(recipe(*words, "model.tokenizer=null").model).chat_template


def test_a_model_without_a_tokenizer_takes_the_named_one_and_a_damaged_one_is_reported(
    root: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    words = ["sft.yaml", "model.from_scratch=null", f"model.path={tmp_path}"]
    options = recipe(*words, f"model.tokenizer={root / 'data' / 'tiny_policy' / 'tokenizer'}").model
    assert policy.load_tokenizer(options).chat_template
    for file in (root / "data" / "letters" / "tokenizer").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"no tokenizer can be loaded from"):
        policy.load_tokenizer(options)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(
        ConfigError, match=r"no tokenizer can be loaded from .*/empty: there is no tokenizer_config.json$"
    ):
        policy.load_tokenizer(recipe(*words, f"model.tokenizer={empty}").model)


def test_a_wrong_task_is_reported_before_any_service_starts(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    (tmp_path / "tasks.jsonl").write_text(
        '{"responses_create_params": {"input": "?"}, "agent_ref": {"name": "proofs"}}\n'
    )
    words = [f"rollouts.tasks={tmp_path / 'tasks.jsonl'}", f"output={tmp_path / 'run'}", POLICY, "evaluation=null"]
    result = CliRunner().invoke(main, ["grpo.yaml", *words])
    assert result.exit_code == 2 and "tasks.jsonl:1: agent_ref names 'proofs'" in result.stderr
    assert "loading torch" not in result.output


def test_a_share_of_the_activations_needs_compiled_layers() -> None:
    words = ["sft.yaml", "engine.activation_checkpointing=0.5"]
    result = CliRunner().invoke(main, [*words, "--dry-run"])
    assert result.exit_code == 2 and "needs it; set engine.compile=true" in result.stderr
    assert recipe(*words, "engine.compile=true").engine.activation_checkpointing == 0.5
    assert recipe(*words[:-1], "engine.activation_checkpointing=18").engine.activation_checkpointing == 18


@pytest.mark.parametrize(
    ("words", "parameters", "is_high"),
    [
        (["grpo.yaml", POLICY], 525_184, False),
        (["grpo.yaml", POLICY], 596_049_920, True),
        (["grpo.yaml", POLICY, "optimizer.lr=1e-6"], 596_049_920, False),
        (["grpo.yaml", POLICY, "model.lora.rank=16"], 596_049_920, False),
        (["letters.yaml"], 596_049_920, False),
    ],
)
def test_a_learning_rate_for_tiny_models_is_reported_for_a_large_pretrained_one(
    words: list[str], parameters: int, is_high: bool
) -> None:
    warning = recipe_reader.high_learning_rate(recipe(*words), parameters)
    assert is_high == (warning is not None)
    if warning is not None:
        assert "optimizer.lr is 0.0003, and 596,049,920 pretrained weights are trained" in warning
