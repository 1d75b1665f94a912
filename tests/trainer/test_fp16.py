"""fp16: float16 weights with float32 master weights and a dynamic loss scale, compared with a loop in plain PyTorch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import QUICKLY_COMPILED, needs_compiler, needs_rounding
from small_model import SHAPE
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ngym.trainer import loop
from ngym.trainer.algorithms import sft
from ngym.trainer.data import samples as samples_module
from ngym.trainer.engine import engine, loss_scale, optimizer, sanity_checks
from ngym.trainer.model import packing
from ngym.trainer.model import policy as model
from ngym.trainer.recipe import recipe
from ngym.trainer.weights.weight_sync import WeightSync

OPTIMIZER = recipe.OptimizerOptions(lr=1e-2, eps=1e-3, max_grad_norm=0.5)
BUDGET = 200
Weights = dict[str, torch.Tensor]

pytestmark = pytest.mark.usefixtures("only_rank")


@pytest.fixture(scope="module")
def tokenizer(root: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")


def new_policy(tokenizer: PreTrainedTokenizerBase) -> model.Policy:
    shape = recipe.ModelOptions(from_scratch=SHAPE, tokenizer="data/tiny_policy/tokenizer")
    return model.load_policy(shape, tokenizer, 0)


def learner(tokenizer: PreTrainedTokenizerBase, stage: int = 1, **options: Any) -> Any:
    launch = recipe.Launch(rank=0, local_rank=0, ranks=1)
    chosen = recipe.EngineOptions(zero_stage=stage, precision="fp16", **options)
    return engine.Engine(new_policy(tokenizer), launch, chosen, OPTIMIZER)


def set_scale(learner: Any, value: float) -> Any:
    """The engine with another loss scale."""
    learner._loss_scale.load({"value": value, "stable": 0, "overflows": 0})
    learner._deepspeed.optimizer.loss_scale = value
    return learner


def batch(seed: int) -> list[Any]:
    """Eight samples of 20 to 55 random tokens, of which the last 10 are trained."""
    drawn = torch.Generator().manual_seed(seed)
    lengths = range(20, 60, 5)
    rows = [torch.randint(3, 1000, (length,), generator=drawn).tolist() for length in lengths]
    return [samples_module.Sample((samples_module.Segment(row, [(len(row) - 10, len(row))]),)) for row in rows]


def steps(learner: Any, seeds: Sequence[int]) -> list[tuple[float, float]]:
    results = [loop.take_step(learner, sft.Sft(), batch(seed), BUDGET, 1.0) for seed in seeds]
    return [(step.means["loss"], step.update.grad_norm) for step in results]


def weights_of(learner: Any) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in learner.weights().items()}


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def plain_steps(tokenizer: PreTrainedTokenizerBase, seeds: Sequence[int], scale: float) -> tuple[Any, Weights]:
    """The same steps in a few lines of PyTorch, all gradients at once."""
    low = new_policy(tokenizer).half()
    masters = new_policy(tokenizer).half().float()
    stepping = optimizer.build(masters.network, OPTIMIZER)
    found = []
    for seed in seeds:
        packed = packing.pack(batch(seed), torch.device("cpu"))
        loss = -low.logprobs(packed).sum() / 80
        (loss * scale).backward()
        for master, parameter in zip(masters.parameters(), low.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float() / scale
        norm = nn.utils.clip_grad_norm_(masters.parameters(), OPTIMIZER.max_grad_norm or math.inf)
        stepping.step()
        with torch.no_grad():
            for master, parameter in zip(masters.parameters(), low.parameters(), strict=True):
                parameter.copy_(master)
                parameter.grad = None
        found.append((float(loss.detach()), float(norm)))
    return found, {name: tensor.detach() for name, tensor in low.network.named_parameters()}


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (1, {}),
        (2, {}),
        (3, {}),
        (2, {"offload": {"optimizer": "cpu"}}),
        (3, {"activation_checkpointing": True}),
        pytest.param(1, {"compile": True}, marks=[needs_compiler, needs_rounding]),
    ],
)
@torch._inductor.config.patch(QUICKLY_COMPILED)
def test_the_steps_are_those_of_a_plain_loop_with_master_weights_and_a_loss_scale(
    tokenizer: PreTrainedTokenizerBase, stage: int, options: dict[str, Any]
) -> None:
    expected, weights = plain_steps(tokenizer, range(3), 2.0**16)
    trained = learner(tokenizer, stage, **options)
    found = steps(trained, range(3))
    assert trained.scaling() == {"loss_scale": 2.0**16, "overflow_retries": 0}
    for (loss, norm), (right_loss, right_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(right_loss, rel=1e-4) and norm == pytest.approx(right_norm, rel=1e-3)
    learned = weights_of(trained)
    assert all(tensor.dtype == torch.float16 for tensor in learned.values())
    assert max(float((learned[name] - right).abs().max()) for name, right in weights.items()) < 1e-3


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_overflow_costs_no_batch_the_same_one_is_computed_again_with_a_lower_scale(
    tokenizer: PreTrainedTokenizerBase, stage: int
) -> None:
    high = set_scale(learner(tokenizer, stage), 2.0**40)
    first = steps(high, [0])
    lowered = high.scaling()
    assert 2 < lowered["loss_scale"] < 2.0**40 and 2.0**40 / 2 ** lowered["overflow_retries"] == lowered["loss_scale"]
    assert high.steps == 1
    right = set_scale(learner(tokenizer, stage), lowered["loss_scale"])
    assert first == steps(right, [0]) and same(weights_of(high), weights_of(right))
    assert steps(high, [1, 2]) == steps(right, [1, 2])


def test_the_scale_grows_after_steps_without_an_overflow_and_each_step_divides_by_its_own(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed, growing = set_scale(learner(tokenizer), 2.0**10), set_scale(learner(tokenizer), 2.0**10)
    expected = steps(fixed, range(5))
    monkeypatch.setattr(loss_scale, "WINDOW", 2)
    for seed, (loss, norm) in enumerate(expected):
        ((found_loss, found_norm),) = steps(growing, [seed])
        assert growing.scaling()["loss_scale"] == 2.0 ** (10 + (seed + 1) // 2)
        assert found_loss == pytest.approx(loss, rel=1e-3) and found_norm == pytest.approx(norm, rel=1e-2)


def test_a_model_whose_activations_overflow_is_named_before_its_first_step_and_push(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    policy = new_policy(tokenizer)
    with torch.no_grad():
        policy.network.model.layers[0].mlp.down_proj.weight.mul_(1e7).clamp_(-6e4, 6e4)
    launch = recipe.Launch(rank=0, local_rank=0, ranks=1)
    trained = engine.Engine(policy, launch, recipe.EngineOptions(zero_stage=1, precision="fp16"), OPTIMIZER)
    message = "logprobs after step 0 are not finite in float16: .* set engine.precision to bf16 or fp32"
    with pytest.raises(sanity_checks.NotFinite, match=message):
        next(sanity_checks.check_batches([samples_module.Batch([batch(0)])], trained, BUDGET, None, 1.05))
    pushes = WeightSync(trained, None, [5, 6, 7], trained.weights)
    with pytest.raises(sanity_checks.NotFinite, match=message):
        pushes.publish(lambda version: None)


class Broken(sft.Sft):
    """Its loss is finite, and its gradient not, at any scale: the slope of a root at 0."""

    def loss(self, scores: Any, packed: Any) -> Any:
        loss = super().loss(scores, packed)
        return loss._replace(sum=loss.sum + (scores.logprobs_N - scores.logprobs_N.detach()).abs().sqrt().sum())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_gradient_that_is_finite_at_no_scale_is_skipped_as_elsewhere_and_leaves_the_scale_as_it_was(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, stage: int
) -> None:
    trained, history = learner(tokenizer, stage), []
    before = weights_of(trained)
    with pytest.raises(sanity_checks.NotFinite, match=r"norm inf \(loss scale 1\), 2 optimizer .* bf16 or fp32"):
        loop.train(
            trained,
            Broken(),
            [samples_module.Batch([batch(seed)]) for seed in range(3)],
            BUDGET,
            lambda step: 1.0,
            sanity_checks.NanGuard(tmp_path, 2),
            lambda step, values: history.append(values),
        )
    assert [(row["skipped_steps"], row["loss_scale"], row["overflow_retries"]) for row in history] == [(1, 2.0**16, 16)]
    assert same(weights_of(trained), before) and len(list(tmp_path.iterdir())) == 2
    assert steps(trained, [0]) == steps(learner(tokenizer, stage), [0])


@pytest.mark.parametrize(("stage", "resumed_stage"), [(1, 1), (2, 2), (3, 3), (1, 3), (3, 2)])
def test_a_resumed_run_continues_with_its_loss_scale(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, stage: int, resumed_stage: int
) -> None:
    first = set_scale(learner(tokenizer, stage), 2.0**30)
    steps(first, range(2))
    meta = json.loads(json.dumps(first.save_state(tmp_path)))
    expected = steps(first, range(2, 5))
    second = learner(tokenizer, resumed_stage)
    second.load_state(tmp_path, meta)
    for found, right in zip(steps(second, range(2, 5)), expected, strict=True):
        assert found == pytest.approx(right, rel=0 if resumed_stage == stage else 1e-3, abs=0)
    assert second.scaling() == first.scaling() and second.scaling()["overflow_retries"] > 5
    if resumed_stage == stage:
        assert same(weights_of(first), weights_of(second))


def test_a_run_may_resume_in_another_precision(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    first = learner(tokenizer)
    steps(first, range(2))
    meta = json.loads(json.dumps(first.save_state(tmp_path)))
    expected = steps(first, [2])
    launch = recipe.Launch(rank=0, local_rank=0, ranks=1)
    full_precision = engine.Engine(new_policy(tokenizer), launch, recipe.EngineOptions(), OPTIMIZER)
    full_precision.load_state(tmp_path, meta)
    again = json.loads(json.dumps(full_precision.save_state(tmp_path)))
    assert steps(full_precision, [2]) == [pytest.approx(step, rel=0.01) for step in expected]
    assert full_precision.scaling() == {}
    back = learner(tokenizer)
    back.load_state(tmp_path, again)
    assert steps(back, [2]) == [pytest.approx(step, rel=0.01) for step in expected]
    assert back.scaling() == {"loss_scale": 2.0**16, "overflow_retries": 0}
