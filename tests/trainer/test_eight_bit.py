"""8-bit AdamW with the real bitsandbytes: two bytes a weight, AdamW's steps, the same after a resume."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from steps_on_ranks import TOKENIZER
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ngym.errors import ConfigError
from ngym.trainer import loop
from ngym.trainer.algorithms import sft
from ngym.trainer.data import file_batches
from ngym.trainer.engine import engine, optimizer
from ngym.trainer.model import policy as model
from ngym.trainer.recipe import recipe, recipe_reader

pytest.importorskip("bitsandbytes")
LAUNCH = recipe.Launch(rank=0, local_rank=0, ranks=1)
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
}

pytestmark = pytest.mark.usefixtures("only_rank")


@pytest.fixture(scope="module")
def tokenizer(root: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(root / TOKENIZER)


@pytest.fixture(scope="module")
def samples(root: Path, tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    path = tmp_path_factory.mktemp("data") / "demonstrations.jsonl"
    script = root / "data" / "calculator" / "generate.py"
    subprocess.run([sys.executable, script, "demonstrations", "--output", path, "--count", "512"], check=True)
    read: list[Any] = sft.Sft().samples(path, tokenizer)
    return read


def learner(tokenizer: PreTrainedTokenizerBase, name: str = "adamw_8bit", **options: Any) -> Any:
    shape = recipe.ModelOptions(from_scratch=SHAPE, tokenizer=TOKENIZER)
    optimizing = recipe.OptimizerOptions(name=name, lr=5e-3, **options)
    return engine.Engine(model.load_policy(shape, tokenizer, 0), LAUNCH, recipe.EngineOptions(), optimizing)


def losses(learner: Any, samples: list[Any], count: int) -> list[float]:
    batches = file_batches.epochs(samples, 32, 8, seed=0)
    results = [loop.take_step(learner, sft.Sft(), batch, 100_000, 1.0) for batch, _ in zip(batches, range(count))]  # noqa: B905
    return [step.means["loss"] for step in results]


def states(learner: Any) -> dict[str, dict[str, Any]]:
    by_parameter = learner._deepspeed.optimizer.state
    return {name: by_parameter[one] for name, one in learner.policy.named_parameters()}


def fit(name: str, target: Tensor, steps: int, **options: Any) -> tuple[list[float], Tensor]:
    """Minimise the mean square distance of a bias-free linear layer's outputs from another's."""
    torch.manual_seed(0)
    layer, inputs = nn.Linear(target.shape[1], target.shape[0], bias=False), torch.randn(256, target.shape[1])
    built = optimizer.build(layer, recipe.OptimizerOptions(name=name, lr=2e-2, **options))
    step_losses = []
    for _ in range(steps):
        loss = (layer(inputs) - inputs @ target.T).square().mean()
        built.zero_grad()
        loss.backward()
        built.step()
        step_losses.append(float(loss.detach()))
    return step_losses, layer.weight.detach()


def test_it_follows_adamw() -> None:
    target = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    expected, exact_weights = fit("adamw", target, 200, weight_decay=0.01)
    eight_bit_losses, small = fit("adamw_8bit", target, 200, weight_decay=0.01)
    assert expected[0] == eight_bit_losses[0] and expected[-1] < 1e-3 * expected[0]
    assert eight_bit_losses[-1] < 2e-3 * eight_bit_losses[0]
    assert eight_bit_losses[:20] == pytest.approx(expected[:20], rel=0.01)
    assert float((small - exact_weights).abs().mean()) < 0.02


def test_without_8_bit_states_it_is_adamw() -> None:
    """Fewer than 4,096 values keep float32 states, so that only arithmetic differs."""
    target = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
    expected, exact_weights = fit("adamw", target, 50, weight_decay=0.1, eps=1e-4)
    eight_bit_losses, small = fit("adamw_8bit", target, 50, weight_decay=0.1, eps=1e-4)
    assert eight_bit_losses == pytest.approx(expected, rel=1e-4) and torch.allclose(small, exact_weights, atol=1e-5)


def test_a_matrix_has_two_bytes_a_weight_and_embeddings_keep_float32(
    tokenizer: PreTrainedTokenizerBase, samples: list[Any]
) -> None:
    trained = learner(tokenizer)
    losses(trained, samples, 1)
    held = states(trained)
    for name, state in held.items():
        size = dict(trained.policy.named_parameters())[name].numel()
        used = sum(value.nbytes for kind, value in state.items() if torch.is_tensor(value) and "qmap" not in kind)
        if "embed" in name or size < 4096:
            assert used == 8 * size and state["state1"].dtype == torch.float32
        else:
            assert used == 2 * size + 2 * 4 * -(-size // 256) and state["state1"].dtype == torch.uint8
    assert sum(state["state1"].dtype == torch.uint8 for state in held.values()) == 10


def test_the_embeddings_of_a_critic_keep_float32_too(tokenizer: PreTrainedTokenizerBase) -> None:
    policy = model.load_policy(recipe.ModelOptions(from_scratch=SHAPE, tokenizer=TOKENIZER), tokenizer, 0)
    critic = model.CriticNetwork(policy.network, None)
    built: Any = optimizer.build(policy.network, recipe.OptimizerOptions(name="adamw_8bit", lr=1e-3), critic)
    built.make_room({parameter: 1 for parameter in (*policy.network.parameters(), *critic.parameters())})
    for name, parameter in critic.named_parameters():
        small = "embed" in name or parameter.numel() < 4096
        assert built.state[parameter]["state1"].dtype == (torch.float32 if small else torch.uint8), name


def test_it_learns_the_demonstrations_as_adamw_does(tokenizer: PreTrainedTokenizerBase, samples: list[Any]) -> None:
    expected = losses(learner(tokenizer, "adamw"), samples, 24)
    actual = losses(learner(tokenizer), samples, 24)
    assert expected[0] == pytest.approx(actual[0], rel=1e-6) and actual[0] > 6
    assert actual[-1] == pytest.approx(expected[-1], rel=0.05) and actual[-1] < 0.8 * actual[0]


def test_a_checkpoint_has_the_states_as_they_are(
    tokenizer: PreTrainedTokenizerBase, samples: list[Any], tmp_path: Path
) -> None:
    trained = learner(tokenizer)
    losses(trained, samples, 3)
    meta = json.loads(json.dumps(trained.save_state(tmp_path)))
    with safe_open(tmp_path / "training-00001.safetensors", framework="pt") as file:
        kinds = {key.partition("/")[0]: file.get_tensor(key).dtype for key in file.keys() if "gate_proj" in key}  # noqa: SIM118
        assert not [key for key in file.keys() if "qmap" in key]  # noqa: SIM118
    assert kinds == {
        **dict.fromkeys(("state1", "state2"), torch.uint8),
        **dict.fromkeys(("absmax1", "absmax2", "master"), torch.float32),
    }
    again = learner(tokenizer)
    again.load_state(tmp_path, meta)
    for name, state in states(trained).items():
        other = states(again)[name]
        assert state.keys() == other.keys() and state["step"] == other["step"] == 3
        assert all(torch.equal(value, other[kind]) for kind, value in state.items() if torch.is_tensor(value))


def test_states_of_another_kind_are_refused(
    tokenizer: PreTrainedTokenizerBase, samples: list[Any], tmp_path: Path
) -> None:
    for saved, loads in (("adamw", "adamw_8bit"), ("adamw_8bit", "adamw")):
        folder = tmp_path / saved
        folder.mkdir()
        trained = learner(tokenizer, saved)
        losses(trained, samples, 1)
        meta = trained.save_state(folder)
        again = learner(tokenizer, loads)
        with pytest.raises(
            optimizer.StateMissing, match=r"has other states of the optimizer|has the shape \[16\] in the checkpoint"
        ):
            again.load_state(folder, meta)


@pytest.fixture
def without_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    known: Callable[..., Any] = recipe.find_spec
    monkeypatch.setattr(recipe, "find_spec", lambda name: None if name == "bitsandbytes" else known(name))


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit"])
def test_without_the_package_the_extra_is_named(without_bitsandbytes: None, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe_reader.read_recipe(["sft.yaml"], [f"optimizer.name={name}"])
    assert str(caught.value) == (
        f'command line: optimizer.name: {name} needs ngym[quantized]: pip install "ngym[quantized]", or use adamw; '
        f"got {name!r}"
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_is_refused(stage: int) -> None:
    with pytest.raises(ConfigError, match=r"engine: .*8-bit states, which ZeRO would cut: set zero_stage 0"):
        recipe_reader.read_recipe(["sft.yaml"], ["optimizer.name=adamw_8bit", f"engine.zero_stage={stage}"])
