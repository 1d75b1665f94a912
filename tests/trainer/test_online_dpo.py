"""Online DPO: pairs of live groups, the reference, a live run, and keys without an effect."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from stub_policy import Stub, serving
from trainer_service import arguments, metrics_of, new_policy, train
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ngym.errors import ConfigError
from ngym.trainer import loop
from ngym.trainer.algorithms import Setup, online_dpo
from ngym.trainer.data import samples
from ngym.trainer.engine import engine
from ngym.trainer.model import policy as model
from ngym.trainer.recipe import recipe, recipe_reader

pytestmark = pytest.mark.usefixtures("only_rank")


@pytest.fixture(scope="module")
def tokenizer(root: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")


@pytest.fixture(scope="module")
def start(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_policy(root, tmp_path_factory.mktemp("policy"))


def rollout(reward: float, group: str, token: int, turns: int = 1) -> Any:
    """token: the first of those that were sampled."""
    segments = tuple(
        samples.SampledSegment([20, 21, 22, token, token + 1, turn], [(3, 6)], sampler=[-1.0] * 3)
        for turn in range(turns)
    )
    fields = {"components": {}, "truncated": False, "turns": 1, "tool_calls": 0, "tool_errors": 0}
    return samples.RolloutSample(segments=segments, group=group, reward=reward, **fields)


def test_the_best_of_each_group_is_preferred_to_its_worst_and_the_first_loss_is_ln_2(
    start: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    policy = model.load_policy(recipe.ModelOptions(path=str(start)), tokenizer, 0).eval()
    optimizing = recipe.OptimizerOptions(lr=1e-2)
    learner = engine.Engine(policy, recipe.Launch(0, 0, 1), recipe.EngineOptions(zero_stage=0), optimizing)
    words = [f"model.path={start}", "evaluation=null", "algorithm.preference.sft_weight=0"]
    read = recipe_reader.read_recipe(["online_dpo.yaml"], words)[0]
    algorithm = online_dpo.create(Setup(read, learner, tokenizer))
    groups = [
        rollout(0.2, "a", 100), rollout(0.9, "a", 200, turns=2), rollout(0.1, "a", 300), rollout(0.9, "a", 400),
        rollout(1.0, "b", 500), rollout(1.0, "b", 600),
        rollout(0.0, "c", 700), rollout(0.5, "c", 800),
        rollout(0.0, "d", 900),
    ]  # fmt: skip
    pairs: Any = algorithm.prepare(groups, learner, 25)
    firsts = [[(segment.token_ids[3], segment.chosen) for segment in pair.segments] for pair in pairs]
    assert firsts == [[(200, True), (200, True), (300, False)], [(800, True), (700, False)]]
    first = loop.take_step(learner, algorithm, pairs, 8192, 1.0).means  # type: ignore[arg-type]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    again: Any = algorithm.prepare(groups, learner, 8192)  # the reference is still the policy at the start
    for one, other in zip(pairs, again, strict=True):
        assert one.reference == pytest.approx(other.reference, abs=1e-4)
    assert loop.take_step(learner, algorithm, again, 8192, 1.0).means["rewards/margins"] > 0  # type: ignore[arg-type]
    assert algorithm.prepare(groups[4:6], learner, 8192) == []


def test_a_live_run_prefers_its_better_rollouts(start: Path, tmp_path: Path) -> None:
    with serving(Stub(start)) as stub:
        words = [*arguments(tmp_path, start, stub, 3), "evaluation=null", "algorithm=null", "algorithm.name=online_dpo"]
        output, _ = (process := train(tmp_path, words)).communicate(timeout=600)
        assert process.returncode == 0, output
    rows = [row for row in metrics_of(tmp_path) if "rewards/accuracies" in row]
    assert len(rows) == 3 and all(0 < row["global_valid_seqs"] <= 8 for row in rows)  # a pair of each group, at most
    assert all(math.isfinite(row["loss"]) and "reward/mean" in row for row in rows)
    assert (tmp_path / "run" / "policy" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm.loss.clip_high=0.3"], "algorithm.loss: online_dpo learns from pairs and does not use it"),
        (["algorithm.preference.loss=ipo", "algorithm.preference.label_smoothing=0.1"], "ipo loss has no label"),
        (["rollouts.group_size=1"], "rollouts.group_size"),
    ],
)
def test_keys_that_have_no_effect_are_refused(start: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe_reader.read_recipe(["online_dpo.yaml"], [f"model.path={start}", "evaluation=null", *words])
