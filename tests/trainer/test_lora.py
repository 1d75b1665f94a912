"""LoRA with the real PEFT and DeepSpeed: only the adapter is trained, and merged it is an ordinary checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_steps import compute_logprobs, difference, pack_sequences, step
from safetensors.torch import load_file
from trainer_service import SHAPE, new_policy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ngym.errors import ConfigError
from ngym.trainer.engine import engine
from ngym.trainer.model import policy as model
from ngym.trainer.online import services
from ngym.trainer.recipe import recipe as config
from ngym.trainer.recipe import recipe_reader

pytest.importorskip("peft")
NAMES = ("recipe.recipe", "engine.engine", "model.policy", "recipe.recipe", "model.packing", "data.samples")
RANK = 4
Weights = dict[str, torch.Tensor]

pytestmark = pytest.mark.usefixtures("only_rank")


@pytest.fixture(scope="module")
def base(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_policy(root, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def experts(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts: transformers fuses them when it loads, and a checkpoint names each."""
    folder = tmp_path_factory.mktemp("experts")
    tokenizer = AutoTokenizer.from_pretrained(base)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 32}
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=len(tokenizer), head_dim=16, **shape, **experts)).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    return folder


def learner(folder: Path, stage: int = 0, precision: str = "fp32", lora: dict[str, Any] | None = None) -> Any:
    options = config.ModelOptions(path=str(folder), lora=lora)
    policy = model.load_policy(options, AutoTokenizer.from_pretrained(folder), 0)
    launch, optimizing = config.Launch(rank=0, local_rank=0, ranks=1), config.OptimizerOptions(lr=1e-2)
    return engine.Engine(policy, launch, config.EngineOptions(zero_stage=stage, precision=precision), optimizing)


def adapter(folder: Path, stage: int = 0, precision: str = "fp32", **lora: Any) -> Any:
    return learner(folder, stage, precision, {"rank": RANK, "alpha": 8, **lora})


def test_before_the_first_step_an_adapter_changes_nothing(base: Path) -> None:
    data = pack_sequences()
    assert torch.equal(compute_logprobs(adapter(base).logprobs, data), compute_logprobs(learner(base).logprobs, data))


def test_only_the_adapter_has_gradients_and_every_part_of_it_has_one(base: Path) -> None:
    trained, data = adapter(base), pack_sequences()
    names = {name for name, parameter in trained.policy.named_parameters() if parameter.requires_grad}
    layers = trained.policy.network.config.num_hidden_layers
    assert len(names) == layers * 7 * 2 and all(".lora_A." in name or ".lora_B." in name for name in names)
    with trained.track_gradients() as parameters:
        step(trained, data)
    assert parameters == names


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_zero_stages_learn_the_same_and_merged_it_says_the_same(base: Path, tmp_path: Path, stage: int) -> None:
    data, plain, trained = pack_sequences(), adapter(base), adapter(base, stage)
    assert step(trained, data, 3) == pytest.approx(step(plain, data, 3), rel=1e-4)
    learned = compute_logprobs(trained.logprobs, data)
    assert difference(learned, compute_logprobs(plain.logprobs, data)) < 1e-4
    parts = {name: tensor.clone() for name, tensor in trained.adapter().items()}
    base_said = compute_logprobs(trained.base_logprobs, data)

    trained.save(tmp_path / "policy", AutoTokenizer.from_pretrained(base))
    merged = learner(tmp_path / "policy")
    assert difference(compute_logprobs(merged.logprobs, data), learned) < 1e-5
    assert set(load_file(tmp_path / "policy" / "model.safetensors")) == set(load_file(base / "model.safetensors"))
    assert all(torch.equal(tensor, parts[name]) for name, tensor in trained.adapter().items())
    assert torch.equal(compute_logprobs(trained.base_logprobs, data), base_said), "nothing was merged in place"


@pytest.mark.parametrize("stage", [0, 3])
def test_with_the_adapter_off_it_is_the_policy_of_the_beginning_and_continues_learning(base: Path, stage: int) -> None:
    data, trained = pack_sequences(), adapter(base, stage)
    first = compute_logprobs(trained.logprobs, data)
    for _ in range(2):
        step(trained, data)
        assert torch.equal(compute_logprobs(trained.base_logprobs, data), first)
    assert difference(compute_logprobs(trained.logprobs, data), first) > 0.1
    uninterrupted = adapter(base, stage)
    step(uninterrupted, data, 2)
    assert torch.equal(compute_logprobs(uninterrupted.logprobs, data), compute_logprobs(trained.logprobs, data))


def test_a_saved_adapter_is_one_that_peft_loads(base: Path, tmp_path: Path) -> None:
    import peft

    data, trained = pack_sequences(), adapter(base, targets=["q_proj", "down_proj"])
    step(trained, data, 3)
    options = config.LoraOptions(rank=RANK, alpha=8, targets=["q_proj", "down_proj"])
    trained.save_adapter(tmp_path / "adapter", options, str(base))
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert described["target_modules"] == ["down_proj", "q_proj"] and described["base_model_name_or_path"] == str(base)
    loaded = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path / "adapter"
    )
    trained.policy.network.set_attn_implementation("sdpa")
    ids = torch.tensor([data.segments[0].token_ids])
    with torch.no_grad():
        assert difference(loaded(ids).logits, trained.policy.network(ids).logits) < 1e-5
        with loaded.disable_adapter():
            assert difference(loaded(ids).logits, trained.policy.network(ids).logits) > 0.1


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.05), ("fp16", 0.005)])
def test_in_16_bits_the_merged_policy_is_the_adapter_but_for_one_rounding(
    base: Path, tmp_path: Path, precision: str, bound: float
) -> None:
    data, trained = pack_sequences(), adapter(base, 2, precision)
    step(trained, data, 3)
    trained.save(tmp_path / "policy", AutoTokenizer.from_pretrained(base))
    merged = compute_logprobs(learner(tmp_path / "policy").logprobs, data)
    assert float((merged - compute_logprobs(trained.logprobs, data)).abs().mean()) < bound


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("lora", [None, {"rank": RANK}])
def test_a_mixture_of_experts_is_saved_and_pushed_under_the_names_of_its_checkpoint(
    experts: Path, tmp_path: Path, stage: int, lora: dict[str, Any] | None
) -> None:
    data, trained = pack_sequences(), learner(experts, stage, lora=lora)
    loaded = load_file(experts / "model.safetensors")
    weights: Weights = trained.weights()
    assert set(weights) == set(loaded) and all(torch.equal(weights[name], loaded[name]) for name in loaded)
    step(trained, data)
    trained.save(tmp_path / "policy", AutoTokenizer.from_pretrained(experts))
    assert set(load_file(tmp_path / "policy" / "model.safetensors")) == set(loaded)
    assert (
        difference(
            compute_logprobs(learner(tmp_path / "policy").logprobs, data), compute_logprobs(trained.logprobs, data)
        )
        < 1e-5
    )


def test_a_target_that_is_not_a_linear_layer_is_refused_with_those_that_are(base: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model\.lora\.targets: .*'q_porj'.*did you mean 'q_proj'.*it has q_proj, k_proj"
    ):
        adapter(base, targets=["q_porj"])


def test_the_adapters_dropout_drops_in_training_only_and_the_models_own_never(base: Path, tmp_path: Path) -> None:
    folder, data = tmp_path / "dropping", pack_sequences()
    shutil.copytree(base, folder)
    changed = json.loads((folder / "config.json").read_text()) | {"attention_dropout": 0.5}
    (folder / "config.json").write_text(json.dumps(changed))
    full_model = learner(folder)
    assert model.unused_dropout(full_model.policy.network) == {"attention_dropout": 0.5}
    assert model.unused_dropout(learner(base).policy.network) == {}
    assert torch.equal(compute_logprobs(full_model.logprobs, data), compute_logprobs(full_model.logprobs, data))
    trained = adapter(folder, dropout=0.5)
    step(trained, data)
    assert not torch.equal(compute_logprobs(trained.logprobs, data), compute_logprobs(trained.logprobs, data))
    once, again = (engine.score(data.samples, trained.logprobs, trained, 10_000) for _ in range(2))
    assert once == again
    assert not torch.equal(compute_logprobs(trained.logprobs, data), compute_logprobs(trained.logprobs, data)), (
        "on again after scoring"
    )


def test_recipes_that_make_no_sense_are_refused(base: Path) -> None:
    def problem(*overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            recipe_reader.read_recipe(["grpo.yaml"], [f"model.path={base}", *overrides])
        return str(caught.value)

    assert "rollouts.transport: lora sends an adapter, but the recipe trains no adapter" in problem(
        "rollouts.transport=lora"
    )
    assert "model.lora.dropout: the ratio" in problem("model.lora.dropout=0.1")
    shape = [f"model.from_scratch.{key}={value}" for key, value in SHAPE.items()]
    assert "name them with model.path" in problem("model.path=null", "model.lora.rank=4", *shape)
    assert "the transport filesystem needs the folder" in problem("rollouts.transport=filesystem")
    assert "push_folder is only for the transport filesystem" in problem("rollouts.push_folder=x")
    assert "rollouts.transport: Input should be 'http', 'delta', 'filesystem'" in problem("rollouts.transport=pigeon")
    recipe, _ = recipe_reader.read_recipe(
        ["grpo.yaml"],
        [f"model.path={base}", "model.lora.rank=4", "rollouts.transport=lora", "rollouts.push_mode=abort"],
    )
    assert recipe.model.lora.rank == 4 and recipe.model.lora.alpha == 32 and recipe.rollouts.push_mode == "abort"


@pytest.mark.parametrize(
    ("transport", "needs"),
    [
        ("http", []),
        ("lora", ["lora_rank=16"]),
        ("nccl", ["engine.weight_transfer_config.backend=nccl"]),
        ("ipc", ["engine.weight_transfer_config.backend=ipc"]),
    ],
)
def test_a_policy_that_ng_train_starts_takes_weights_as_the_recipe_says(
    base: Path, transport: str, needs: list[str]
) -> None:
    overrides = [f"model.path={base}", "model.lora.rank=16", f"rollouts.transport={transport}"]
    recipe, _ = recipe_reader.read_recipe(["grpo.yaml"], overrides)
    assert services.serving_options(recipe) == [f"model={base}", *needs]
