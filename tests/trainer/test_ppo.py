"""PPO: a critic beside the policy, advantages by GAE, and one engine that steps both."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_model import SHAPE
from torch import Tensor, nn
from trainer_service import on_two_ranks
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ngym.trainer import loop
from ngym.trainer.algorithms import policy_gradient
from ngym.trainer.data import file_batches, samples
from ngym.trainer.data import samples as rollout_samples
from ngym.trainer.engine import engine, sanity_checks
from ngym.trainer.losses import gae
from ngym.trainer.model import chunked_logprobs, packing
from ngym.trainer.model import policy as critic
from ngym.trainer.recipe import algorithms, recipe

OPTIONS = recipe.ModelOptions(from_scratch=SHAPE, tokenizer="data/tiny_policy/tokenizer")
PPO: dict[str, Any] = {
    "name": "grpo",
    "advantage": {"estimator": "gae", "gamma": 0.99, "lam": 0.95},
    "critic": {},
    "shaping": {"skip_equal_groups": False},
}
BUDGET = 100_000

pytestmark = pytest.mark.usefixtures("only_rank")


@pytest.fixture(scope="module")
def tokenizer(root: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")


def options(**switches: Any) -> Any:
    return algorithms.GrpoOptions.model_validate({**PPO, **switches})


def learner(
    tokenizer: PreTrainedTokenizerBase, stage: int = 0, network: nn.Module | None = None, **changes: Any
) -> Any:
    """A policy with a critic that says something; `network` is one that says something else."""
    policy = critic.load_policy(OPTIONS, tokenizer, 0).eval()
    policy.critic = network or critic.CriticNetwork(policy.network, changes.pop("critic_lr", None))
    if network is None:
        nn.init.normal_(policy.critic.head.weight, std=0.1, generator=torch.Generator().manual_seed(1))
    optimizing = recipe.OptimizerOptions(**{"lr": 1e-3, "eps": 1e-3, **changes})
    launch = recipe.Launch(rank=0, local_rank=0, ranks=1)
    return engine.Engine(policy, launch, recipe.EngineOptions(zero_stage=stage), optimizing)


def rollout(group: int, reward: float, *spans: list[tuple[int, int]], draw: random.Random) -> Any:
    """One with a segment for each list of sampled spans."""
    segments = tuple(
        rollout_samples.SampledSegment(
            [draw.randrange(20, 1000) for _ in range(of_segment[-1][1] + 2)],
            of_segment,
            sampler=[-draw.random() for start, end in of_segment for _ in range(start, end)],
        )
        for of_segment in spans
    )
    fields = {"components": {}, "truncated": False, "turns": 1, "tool_calls": 0, "tool_errors": 0}
    return rollout_samples.RolloutSample(segments=segments, group=str(group), reward=reward, **fields)


def batch(seed: int = 0, count: int = 12) -> list[Any]:
    """Rollouts of two turns with a tool's answer between them; every third with its second turn in a segment of its own."""
    draw = random.Random(seed)
    rollouts = []
    for index in range(count):
        first, second = draw.randrange(6, 12), draw.randrange(15, 25)
        spans = [[(4, first)], [(9, second)]] if index % 3 == 0 else [[(4, first), (first + 2, second)]]
        rollouts.append(rollout(index // 3, draw.random(), *spans, draw=draw))
    return rollouts


def everything(learner: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in learner.policy.named_parameters()}


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert set(one) == set(other)
    return max((one[name] - other[name]).abs().max().item() for name in one)


class FixedCritic(nn.Module):
    """A critic that says these values at the trained tokens, plus a learned constant."""

    lr = None

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.constant = nn.Parameter(torch.zeros(1))
        self.values = torch.tensor(values)

    def forward(self, packed: Any, group: object) -> Tensor:
        return self.values + self.constant


def test_advantages_returns_and_value_loss_by_hand_across_a_tools_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Two tokens sampled, two of a tool, two sampled; reward 1; gamma 0.99, lambda 0.95."""
    predictions = [0.1, 0.2, 0.3, 0.4]
    trained = learner(tokenizer, network=FixedCritic(predictions), lr=1e-2)
    algorithm = policy_gradient.PolicyGradient(options(critic={"value_clip": 0.15, "lr": 0.1}), None, None)
    one = rollout(0, 1.0, [(3, 5), (7, 9)], draw=random.Random(0))
    (prepared,) = algorithm.prepare([one], trained, BUDGET)
    (segment,) = prepared.segments
    returns = [0.8733, 0.9180, 0.9603, 1.0]
    assert segment.values == pytest.approx(predictions)
    assert segment.advantages == pytest.approx([0.7733, 0.7180, 0.6603, 0.6], abs=1e-4)
    assert segment.returns == pytest.approx(returns, abs=1e-4)

    def loss(values: list[float], bound: float | None) -> float:
        errors = []
        for value, old, target in zip(values, predictions, returns, strict=True):
            near = value if bound is None else old + max(-bound, min(bound, value - old))
            errors.append(max((value - target) ** 2, (near - target) ** 2) / 2)
        return sum(errors) / 4

    before = loop.take_step(trained, algorithm, [prepared], BUDGET, 0.0).means
    assert before["value_loss"] == pytest.approx(loss(predictions, 0.15), abs=1e-4)
    assert before["values"] == pytest.approx(0.25) and before["value_clip_ratio"] == 0
    assert before["loss"] == pytest.approx(before["actor_loss"] + before["value_loss"])
    with torch.no_grad():
        trained.policy.critic.constant.add_(0.3)  # further than it may move: the error counts as if it had stopped
    after = loop.take_step(trained, algorithm, [prepared], BUDGET, 0.0).means
    assert after["value_loss"] == pytest.approx(loss([value + 0.3 for value in predictions], 0.15), abs=1e-4)
    assert after["value_clip_ratio"] == 1


def test_values_and_advantages_follow_time_through_all_segments(tokenizer: PreTrainedTokenizerBase) -> None:
    trained = learner(tokenizer)
    prepared = policy_gradient.PolicyGradient(options(), None, None).prepare(batch(), trained, 120)
    for one in prepared:
        values = [value for segment in one.segments for value in segment.values]
        found = [value for segment in one.segments for value in segment.advantages]
        expected, advantage, next_value = [], 0.0, 0.0
        for t in reversed(range(len(values))):
            reward = one.reward if t == len(values) - 1 else 0.0
            advantage = reward + 0.99 * next_value - values[t] + 0.99 * 0.95 * advantage
            next_value = values[t]
            expected.append(advantage)
        assert found == pytest.approx(expected[::-1], abs=1e-5)
        for segment in one.segments:  # each value is that of the token's own place
            packed = packing.pack([samples.Sample((segment,))], torch.device("cpu"))
            assert segment.values == pytest.approx(trained.policy.critic(packed).tolist(), abs=1e-5)


def test_whitened_advantages_have_mean_0_and_deviation_1_and_leave_the_returns_alone(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    trained = learner(tokenizer)
    plain, white = (
        policy_gradient.PolicyGradient(options(advantage={**PPO["advantage"], "whiten": whiten}), None, None).prepare(
            batch(), trained, BUDGET
        )
        for whiten in (False, True)
    )

    def field(prepared: list[Any], name: str) -> Tensor:
        return torch.tensor([x for one in prepared for segment in one.segments for x in getattr(segment, name)])

    whitened = field(white, "advantages")
    assert float(whitened.mean()) == pytest.approx(0, abs=1e-5)
    assert float(whitened.std(correction=0)) == pytest.approx(1, abs=1e-4)
    assert torch.equal(field(white, "returns"), field(plain, "returns"))


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_a_step_does_not_depend_on_how_the_batch_is_cut(tokenizer: PreTrainedTokenizerBase, aggregation: str) -> None:
    chosen = options(loss={"aggregation": aggregation, "entropy_coef": 0.01}, critic={"value_clip": 0.01})
    found = []
    for budget in (BUDGET, 120, 1):
        trained = learner(tokenizer, critic_lr=3e-3)
        algorithm = policy_gradient.PolicyGradient(chosen, None, None)
        prepared = algorithm.prepare(batch(), trained, budget)
        for _ in range(2):  # at the second update ratio and values have moved
            step = loop.take_step(trained, algorithm, prepared, budget, 1.0)
        found.append((everything(trained), step))
    (full_weights, whole_step), *others = found
    assert whole_step.update.grad_norm > 1e-3 and whole_step.update.critic_grad_norm > 1e-3
    assert {"value_loss", "explained_variance", "value_clip_ratio", "entropy"} <= set(whole_step.means)
    for weights, step in others:
        assert largest_difference(full_weights, weights) < 1e-6
        assert step.means == pytest.approx(whole_step.means, rel=1e-4, abs=1e-6)
        assert step.update.critic_grad_norm == pytest.approx(whole_step.update.critic_grad_norm, rel=1e-4)


def test_policy_and_critic_step_each_at_its_own_rate_and_are_clipped_each_on_its_own(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """An optimiser whose step is the learning rate, wherever the gradient is not tiny: Adam's first."""
    trained = learner(tokenizer, critic_lr=1e-2, lr=1e-4, eps=1e-12, max_grad_norm=1e-3)
    before = everything(trained)
    algorithm = policy_gradient.PolicyGradient(options(), None, None)
    prepared = algorithm.prepare(batch(), trained, BUDGET)
    update = loop.take_step(trained, algorithm, prepared, BUDGET, 0.5).update
    moved = {name: (now - before[name]).abs().max().item() for name, now in everything(trained).items()}
    assert moved["critic.head.weight"] == pytest.approx(5e-3, rel=1e-2)
    assert moved["critic.backbone.layers.0.mlp.up_proj.weight"] == pytest.approx(5e-3, rel=1e-2)
    assert moved["network.model.layers.0.mlp.up_proj.weight"] == pytest.approx(5e-5, rel=1e-2)
    assert update.grad_norm > 1e-3 < update.critic_grad_norm and update.grad_norm != update.critic_grad_norm

    def gradients(**switches: Any) -> tuple[list[Tensor], list[Tensor]]:
        fresh = learner(tokenizer)
        algorithm = policy_gradient.PolicyGradient(options(**switches), None, None)
        prepared = algorithm.prepare(batch(), fresh, BUDGET)
        packed = packing.pack(prepared, fresh.device)
        algorithm.step_loss(prepared).loss(fresh.policy(packed, algorithm.asks), packed).sum.backward()
        of = fresh.policy.network.parameters(), fresh.policy.critic.parameters()
        return [p.grad for p in of[0]], [p.grad for p in of[1]]

    (policy, of_critic), (same_policy, larger) = gradients(), gradients(critic={"loss_coef": 10})
    for one, other in zip(policy, same_policy, strict=True):
        torch.testing.assert_close(one, other)  # the critic's loss does not reach the policy
    for one, other in zip(of_critic, larger, strict=True):
        torch.testing.assert_close(10 * one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_takes_the_same_steps_where_nothing_is_clipped(
    tokenizer: PreTrainedTokenizerBase, stage: int
) -> None:
    found = []
    for zero_stage in (0, stage):
        trained = learner(tokenizer, zero_stage, max_grad_norm=None, critic_lr=3e-3)
        algorithm = policy_gradient.PolicyGradient(options(), None, None)
        prepared = algorithm.prepare(batch(), trained, 120)
        steps = [loop.take_step(trained, algorithm, prepared, 120, 1.0) for _ in range(2)]
        values = algorithm.prepare(batch(), trained, BUDGET)
        flat = [x for one in values for segment in one.segments for x in segment.values]
        found.append((trained.weights(), [step.means["loss"] for step in steps], flat))
    (weights, losses, values), (same_weights, same_losses, same_values) = found
    assert same_losses == pytest.approx(losses, rel=1e-5) and same_values == pytest.approx(values, abs=1e-5)
    assert max((weights[name] - same_weights[name]).abs().max().item() for name in weights) < 1e-5


def test_a_critic_learns_the_returns_of_a_batch(tokenizer: PreTrainedTokenizerBase) -> None:
    trained = learner(tokenizer, lr=1e-4, critic_lr=3e-3, eps=1e-8)
    algorithm = policy_gradient.PolicyGradient(
        options(advantage={"estimator": "gae"}, critic={"value_clip": None}), None, None
    )
    losses, explained = [], []
    for _ in range(30):  # returns are the rewards: lambda is 1
        step = loop.take_step(trained, algorithm, algorithm.prepare(batch(), trained, BUDGET), BUDGET, 1.0)
        losses.append(step.means["value_loss"])
        explained.append(step.means["explained_variance"])
    assert losses[-1] < 0.1 * losses[0]
    assert explained[0] < 0.2 and explained[-1] > 0.8


def test_explained_variance_by_hand() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert gae.explained_variance(returns, returns) == 1
    assert gae.explained_variance(torch.full((4,), 9.0), returns) == 0
    assert gae.explained_variance(returns / 2, returns) == pytest.approx(0.75)
    assert gae.explained_variance(-returns, returns) == pytest.approx(-3)
    assert gae.explained_variance(returns, torch.ones(4)) == 0


def test_a_new_critic_says_0_and_is_not_a_part_of_the_policy_that_is_saved(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    policy = critic.load_policy(OPTIONS, tokenizer, 0).eval()
    bare = set(policy.network.state_dict())
    policy.critic = critic.CriticNetwork(policy.network, None)
    own = {id(parameter) for parameter in policy.network.parameters()}
    assert not own & {id(parameter) for parameter in policy.critic.parameters()}
    launch = recipe.Launch(rank=0, local_rank=0, ranks=1)
    trained = engine.Engine(policy, launch, recipe.EngineOptions(), recipe.OptimizerOptions(lr=1e-3))
    packed = packing.pack(batch(), torch.device("cpu"))
    assert trained.values(packed).abs().max() == 0
    assert trained.scores(packed, chunked_logprobs.RequestedScores(logprobs=False, values=True)).logprobs_N.numel() == 0
    assert set(trained.weights()) <= bare
    trained.save(tmp_path / "policy", tokenizer)
    assert set(load_file(tmp_path / "policy" / "model.safetensors")) <= bare


def test_a_part_of_the_critic_without_a_gradient_is_noticed(tokenizer: PreTrainedTokenizerBase) -> None:
    class Idle(critic.CriticNetwork):
        def __init__(self, network: Any) -> None:
            super().__init__(network, None)
            self.spare = nn.Linear(2, 2)

    for network, unused in ((critic.CriticNetwork, []), (Idle, ["critic.spare.weight", "critic.spare.bias"])):
        policy = critic.load_policy(OPTIONS, tokenizer, 0).eval()
        policy.critic = Idle(policy.network) if network is Idle else network(policy.network, None)
        launch = recipe.Launch(rank=0, local_rank=0, ranks=1)
        trained = engine.Engine(policy, launch, recipe.EngineOptions(), recipe.OptimizerOptions(lr=1e-3))
        algorithm = policy_gradient.PolicyGradient(options(), None, None)
        prepared = algorithm.prepare(batch(), trained, BUDGET)
        watched = sanity_checks.check_batches([samples.Batch([prepared])], trained, BUDGET, algorithm.sampler_N, 1e9)
        if not unused:
            assert [loop.take_step(trained, algorithm, b.updates[0], BUDGET, 1.0) for b in watched]
            continue
        with pytest.raises(sanity_checks.CheckFailed, match=r"2 of \d+ trainable parameters .* critic\.spare\.weight"):
            for found in watched:
                loop.take_step(trained, algorithm, found.updates[0], BUDGET, 1.0)


def row(one: Any, index: int) -> dict[str, Any]:
    """As ng_collect_rollouts writes it."""
    segments = [
        {
            "token_ids": segment.token_ids,
            "mask": [list(span) for span in segment.spans],
            "logprobs": segment.sampler,
            "policy_version": [[*span, 1] for span in segment.spans],
        }
        for segment in one.segments
    ]
    return {
        "responses_create_params": {"input": "?", "temperature": 1.0},
        "response": {"output": []},
        "reward": one.reward,
        "_ng_task_index": int(one.group),
        "_ng_rollout_index": index,
        "ng": {"task_id": one.group, "status": "ok", "segments": segments, "turns": 1},
    }


def test_two_ranks_learn_from_a_file_what_one_learns(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """The whole program; at each step the values are of the critic as it is then."""
    read = batch(count=15)
    lines = [json.dumps(row(one, index)) + "\n" for index, one in enumerate(read)]
    (tmp_path / "out.jsonl").write_text("".join(lines), "utf-8")
    overrides = ["data.path=out.jsonl", "output=run", "batch_size=6", "micro_batch_tokens=80", "optimizer.eps=1e-3"]
    overrides += ["schedule=null", "schedule.name=constant", "algorithm.max_mismatch=1e9", "evaluation=null"]
    overrides += ["model.path=null", "model.tokenizer=data/tiny_policy/tokenizer", "algorithm.loss.entropy_coef=0.01"]
    overrides += [f"model.from_scratch.{key}={value}" for key, value in SHAPE.items()]
    overrides += ["max_steps=3", "optimizer.lr=1e-3", "engine.activation_checkpointing=true"]
    ranks = on_two_ranks(tmp_path, ["train", "ppo.yaml", *overrides])
    outputs = [process.communicate(timeout=600)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs

    policy = critic.load_policy(OPTIONS, tokenizer, 0).eval()
    policy.critic = critic.CriticNetwork(policy.network, 1e-3)
    launch = recipe.Launch(rank=0, local_rank=0, ranks=1)
    one = engine.Engine(policy, launch, recipe.EngineOptions(), recipe.OptimizerOptions(lr=1e-3, eps=1e-3))
    advantage = {"estimator": "gae", "lam": 0.95, "whiten": True}
    algorithm = policy_gradient.PolicyGradient(
        options(advantage=advantage, loss={"anchor": "sampler", "entropy_coef": 0.01}), None, None
    )
    steps = []
    for samples_ in file_batches.epochs(read, 6, 1, 0):
        steps.append(loop.take_step(one, algorithm, algorithm.prepare(samples_, one, BUDGET), BUDGET, 1.0))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "value_loss", "explained_variance", "entropy"):
        assert [each[name] for each in rows] == pytest.approx([step.means[name] for step in steps], rel=1e-4), name
    norms = [step.update.critic_grad_norm for step in steps]
    assert [each["critic_grad_norm"] for each in rows] == pytest.approx(norms, rel=1e-4)
    saved = load_file(tmp_path / "run" / "policy" / "model.safetensors")
    weights = one.weights()
    assert max((saved[name] - weights[name]).abs().max().item() for name in saved) < 2e-6
