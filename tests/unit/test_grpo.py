"""GRPO from rollouts to a step: trained tokens, refusals, equal rewards, and the same result for any micro-batches."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from small_model import SHAPE
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ngym.cli.train import main
from ngym.errors import UsageError
from ngym.routed_experts import ExpertRows
from ngym.trainer import loop
from ngym.trainer.algorithms import policy_gradient
from ngym.trainer.data import file_batches, samples
from ngym.trainer.data import samples as rollout_samples
from ngym.trainer.engine import engine, sanity_checks
from ngym.trainer.engine.engine import score
from ngym.trainer.model import packing
from ngym.trainer.model import policy as model
from ngym.trainer.recipe import algorithms, recipe_reader
from ngym.trainer.recipe import recipe as config

OPTIONS = config.ModelOptions(from_scratch=SHAPE, tokenizer="data/tiny_policy/tokenizer")
BUDGET = 100_000
Row = dict[str, Any]
Weights = dict[str, torch.Tensor]

pytestmark = pytest.mark.usefixtures("only_rank")


@pytest.fixture(scope="module")
def tokenizer(root: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")


def learner(tokenizer: PreTrainedTokenizerBase, temperature: float = 1.0, stage: int = 0, **options: Any) -> Any:
    policy = model.load_policy(OPTIONS, tokenizer, 0, temperature).eval()
    # the eps of Adam hides no gradient here: a wrong factor on a micro-batch changes the weights by about lr
    optimizing = config.OptimizerOptions(**{"lr": 1e-3, "eps": 1e-3, **options})
    launch = config.Launch(rank=0, local_rank=0, ranks=1)
    return engine.Engine(policy, launch, config.EngineOptions(zero_stage=stage), optimizing)


def weights_of(learner: Any) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in learner.weights().items()}


def largest_difference(one: Weights, other: Weights) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in one)


def options(**switches: Any) -> Any:
    return algorithms.GrpoOptions.model_validate({"name": "grpo", **switches})


def row(task: int, index: int, reward: float | None, draw: random.Random, **fields: Any) -> Row:
    """A rollout of two turns; every third has its second turn in a segment of its own."""

    def ids(count: int) -> list[int]:
        return [draw.randrange(20, 1000) for _ in range(count)]

    def logprobs(count: int) -> list[float]:
        return [-draw.random() for _ in range(count)]

    digits = (draw.randrange(1, 9), draw.randrange(1, 9))
    start = 5 + digits[0] + 3
    full = {
        "token_ids": ids(start + digits[1]),
        "mask": [[5, 5 + digits[0]], [start, start + digits[1]]],
        "logprobs": logprobs(sum(digits)),
        "policy_version": [[5, 5 + digits[0], 3], [start, start + digits[1], 4]],
    }
    first = {"token_ids": ids(9), "mask": [[6, 9]], "logprobs": logprobs(3), "policy_version": [[6, 9, 3]]}
    trace = {"task_id": f"t{task}", "status": "ok", "segments": [full] if index % 3 else [first, full], "turns": 2}
    return {
        "responses_create_params": {"input": "?", "temperature": 1.0},
        "response": {"output": []},
        "reward": reward,
        "_ng_task_index": task,
        "_ng_rollout_index": index,
        "ng": {**trace, **fields},
    }


def rows(tasks: int = 6, size: int = 5, seed: int = 0) -> list[Row]:
    draw = random.Random(seed)
    return [row(task, index, float(draw.random() < 0.5), draw) for task in range(tasks) for index in range(size)]


def write(path: Path, lines: list[Row]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def read(lines: list[Row]) -> list[Any]:
    found = rollout_samples.ReadRollouts()
    for line in lines:
        assert rollout_samples.problem(line, 1.0) is None
        rollout_samples.add_row(line, found)
    return found.rollouts


def test_the_algorithm_of_the_documentation_trains_on_the_rewarded_rollouts_alone(
    root: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    page = (root / "docs" / "algorithms.md").read_text()
    file = tmp_path / "rejection_sampling.py"
    file.write_text(page.partition("```python\n")[2].partition("```")[0])
    name = f"{file}:RejectionSampling"
    chosen = algorithms.options_class(name).model_validate({"name": name, "threshold": 0.5})
    algorithm, trained = chosen.create(None), learner(tokenizer)
    batch = algorithm.prepare(read(rows()), trained, BUDGET)
    assert batch == [rollout for rollout in read(rows()) if rollout.reward == 1] and 0 < len(batch) < len(rows())
    first, second = (loop.take_step(trained, algorithm, batch, BUDGET, 1.0).means["loss"] for _ in range(2))
    assert second < first


def own(batch: list[Any], learner: Any) -> list[Any]:
    """The rollouts as if this policy had sampled them."""
    return [
        replace(rollout, segments=tuple(replace(s, sampler=v) for s, v in zip(rollout.segments, values, strict=True)))
        for rollout, values in zip(batch, score(batch, learner.logprobs, learner, BUDGET), strict=True)
    ]


def one_step(learner: Any, algorithm: Any, batch: list[Any], budget: int = BUDGET) -> Any:
    return loop.take_step(learner, algorithm, batch, budget, 1.0)


VARIANTS: dict[str, Row] = {
    "dapo": {"loss": {"anchor": "sampler", "clip_high": 0.28}},
    "grpo": {"loss": {"aggregation": "sequence"}, "kl": {"coef": 0.1}},
    "dr_grpo": {"advantage": {"estimator": "group_mean"}, "loss": {"aggregation": "fixed", "fixed_length": 20}},
    "gspo": {"loss": {"ratio": "sequence", "aggregation": "sequence", "clip_low": 0.2}},
    "cispo": {"loss": {"surrogate": "cispo", "aggregation": "prompt"}},
    "rloo": {
        "advantage": {"estimator": "leave_one_out"},
        "loss": {"ratio": "product", "aggregation": "sequence"},
        "kl": {"coef": 0.1, "where": "reward", "estimator": "k1"},
    },
    "reinforce++": {
        "advantage": {"estimator": "reward", "whiten": True},
        "kl": {"coef": 0.01, "where": "reward", "estimator": "k2"},
        "shaping": {"skip_equal_groups": False},
    },
    "corrected": {"correction": {"kind": "token", "high": 1.5}, "loss": {"dual_clip": 3}},
    "entropy": {"loss": {"entropy_coef": 0.05, "aggregation": "sequence"}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_no_variant_depends_on_how_the_batch_is_cut(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    chosen = options(**VARIANTS[name])
    reference = model.load_policy(OPTIONS, tokenizer, 1).eval().logprobs if chosen.kl.coef else None
    found: list[tuple[Weights, Any]] = []
    for budget in (BUDGET, 120, 1):
        trained = learner(tokenizer)
        algorithm = policy_gradient.PolicyGradient(chosen, None, reference)
        batch = algorithm.prepare(own(read(rows()), trained), trained, budget)
        for _ in range(2):  # the ratio of the second update is not 1
            step = one_step(trained, algorithm, batch, budget)
        found.append((weights_of(trained), step))
    (full_weights, reference_step), *others = found
    assert reference_step.update.grad_norm > 1e-3
    for weights, step in others:
        assert largest_difference(full_weights, weights) < 1e-6
        assert step.means == pytest.approx(reference_step.means, rel=1e-4, abs=1e-6)
        assert step.update.grad_norm == pytest.approx(reference_step.update.grad_norm, rel=1e-4)


def test_the_loss_is_that_of_the_formula(tokenizer: PreTrainedTokenizerBase) -> None:
    """DAPO's, by hand: the sum over all tokens of -min(r A, clip(r) A), divided by all tokens of the batch."""
    trained = learner(tokenizer)
    algorithm = policy_gradient.PolicyGradient(options(**VARIANTS["dapo"]), None, None)
    batch = algorithm.prepare(read(rows()), trained, BUDGET)
    means = one_step(copy.copy(trained), algorithm, batch).means
    total = count = 0.0
    fresh = model.load_policy(OPTIONS, tokenizer, 0).eval()
    for rollout in batch:
        group = [other.reward for other in read(rows()) if other.group == rollout.group]
        mean = sum(group) / len(group)
        std = (sum((reward - mean) ** 2 for reward in group) / (len(group) - 1)) ** 0.5
        advantage = (rollout.reward - mean) / (std + 1e-6)
        for segment in rollout.segments:
            with torch.no_grad():
                now = fresh.logprobs(packing.pack([samples.Sample((segment,))], torch.device("cpu")))
            ratio = (now - torch.tensor(segment.sampler)).exp()
            total -= torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum().item()
            count += len(now)
    assert means["loss"] == pytest.approx(total / count, rel=1e-4)


def test_the_entropy_bonus_has_the_gradient_of_full_logits(tokenizer: PreTrainedTokenizerBase) -> None:
    """The sum over tokens of - A x log p - coef x entropy, where both count the same."""
    coef, trained = 0.3, learner(tokenizer)
    algorithm = policy_gradient.PolicyGradient(
        options(loss={"surrogate": "reinforce", "entropy_coef": coef}), None, None
    )
    batch = algorithm.prepare(read(rows()), trained, BUDGET)
    packed = packing.pack(batch, torch.device("cpu"))
    loss = algorithm.step_loss(batch).loss(trained.policy(packed, algorithm.asks), packed)
    loss.sum.backward()
    gradients = [parameter.grad.clone() for parameter in trained.policy.parameters()]
    trained.policy.zero_grad()
    hidden = trained.policy.network.get_decoder()(
        input_ids=packed.token_ids_T[None], position_ids=packed.positions_T[None], layout=packed.layout
    ).last_hidden_state[0]
    logprobs = trained.policy.network.get_output_embeddings()(hidden[packed.trained_N - 1]).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    picked = logprobs.gather(1, packed.token_ids_T[packed.trained_N][:, None])[:, 0]
    advantages = torch.tensor([value for segment in packed.segments for value in segment.advantages])
    (-advantages * picked - coef * entropy).sum().backward()
    for actual, parameter in zip(gradients, trained.policy.parameters(), strict=True):
        torch.testing.assert_close(actual, parameter.grad, atol=2e-5, rtol=1e-4)
    mean = loss.metrics["entropy"].total / loss.metrics["entropy"].count
    assert mean == pytest.approx(float(entropy.mean()), rel=1e-5)


def test_a_group_that_is_equal_in_sum_but_not_in_its_parts_has_a_learning_signal_where_parts_are_normalised(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    draw = random.Random(0)
    parts = [{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 1.0}, {"right": 0.0, "short": 1.0}]
    lines = [row(0, index, 1.0, draw, reward_components=each) for index, each in enumerate(parts)]
    lines += [row(1, index, 1.0, draw, reward_components={"right": 0.5, "short": 0.5}) for index in range(3)]
    trained = learner(tokenizer)
    by_part = options(advantage={"components": "normalise_then_sum"})
    prepared = policy_gradient.PolicyGradient(by_part, None, None).prepare(read(lines), trained, BUDGET)
    assert [rollout.group for rollout in prepared] == ["t0 0"] * 3
    assert policy_gradient.PolicyGradient(options(), None, None).prepare(read(lines), trained, BUDGET) == []


def test_rewards_without_the_components_that_a_recipe_needs_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    by_part = options(advantage={"components": "normalise_then_sum"})
    with pytest.raises(UsageError, match=r"needs reward_components, which none of these \d+ rollouts has; return them"):
        policy_gradient.PolicyGradient(by_part, None, None).prepare(read(rows()), learner(tokenizer), BUDGET)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [{"failure": {"service": "policy", "class": "model_error", "message": "gone"}}],
            "1 failed, 0 have the reward",
        ),
        ([{"reward": None, "ng": {"segments": []}}] * 2, "0 failed, 2 have the reward null"),
    ],
)
def test_a_file_without_a_rollout_to_train_on_says_why(tmp_path: Path, lines: list[Any], message: str) -> None:
    file = tmp_path / "rollouts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    with pytest.raises(UsageError, match=message):
        samples.trainable_rollouts(file, 1.0, frozenset())


def test_the_components_of_the_rewards_are_metrics(tokenizer: PreTrainedTokenizerBase) -> None:
    draw = random.Random(0)
    parts = [{"right": 1.0}, {"right": 0.0, "short": 0.25}, None]
    lines = [row(0, index, 1.0, draw, reward_components=each) for index, each in enumerate(parts)]
    found = samples.rollout_metrics(samples.ReadRollouts(read(lines)))
    assert {name: value for name, value in found.items() if name.startswith("reward_component/")} == {
        "reward_component/right": 0.5,
        "reward_component/short": 0.25,
    }


@pytest.mark.parametrize("skip", [True, False])
def test_equal_rewards_leave_every_parameter_as_it_is(tokenizer: PreTrainedTokenizerBase, skip: bool) -> None:
    trained = learner(tokenizer)
    before = weights_of(trained)
    algorithm = policy_gradient.PolicyGradient(options(shaping={"skip_equal_groups": skip}), None, None)
    equal = [replace(rollout, reward=0.1 + 0.2 if index % 2 else 0.3) for index, rollout in enumerate(read(rows()))]
    batch = algorithm.prepare(equal, trained, BUDGET)
    assert bool(batch) is not skip
    if batch:
        assert one_step(trained, algorithm, batch).update.grad_norm == 0
    assert largest_difference(before, weights_of(trained)) == 0


def test_a_batch_without_anything_to_learn_is_a_step_that_is_reported(tokenizer: PreTrainedTokenizerBase) -> None:
    guard = sanity_checks.NanGuard(None, 3)
    reports: list[dict[str, float]] = []
    batches = sanity_checks.check_batches([samples.Batch([], {"reward/mean": 1.0})], None, BUDGET, None, 1.05)
    algorithm = policy_gradient.PolicyGradient(options(), None, None)
    trained = learner(tokenizer)
    loop.train(trained, algorithm, batches, BUDGET, lambda step: 1.0, guard, lambda _, values: reports.append(values))
    assert reports[0]["reward/mean"] == 1 and reports[0]["global_valid_seqs"] == 0 and "loss" not in reports[0]


def test_failures_and_rewards_of_null_are_left_out_of_their_group(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    draw = random.Random(0)
    lines = [row(0, index, reward, draw) for index, reward in enumerate([1.0, 0.0, None, 1.0])]
    failure = {"class": "timeout", "stage": "run", "message": "late", "retryable": True}
    lines.append({name: lines[0][name] for name in lines[0] if name != "response"} | {"failure": failure})
    lines[1]["failure"] = "a field of the task"
    lines += [row(1, 0, 1.0, draw), row(2, 0, 1.0, draw), row(2, 1, 1.0, draw)]  # alone, and equal
    path = write(tmp_path / "out.jsonl", lines)
    found = rollout_samples.read_rollouts(path, 1.0)
    assert (len(found.rollouts), found.unscored, found.failed) == (6, 1, 1)
    algorithm = policy_gradient.PolicyGradient(options(advantage={"estimator": "group_mean"}), None, None)
    batch = algorithm.prepare(algorithm.samples(path, tokenizer), learner(tokenizer), BUDGET)
    assert [rollout.segments[0].advantages[0] for rollout in batch] == pytest.approx([1 / 3, -2 / 3, 1 / 3])
    for rollout in batch:  # every segment, every token
        assert len({value for segment in rollout.segments for value in segment.advantages}) == 1
        assert all(len(segment.advantages) == segment.trained for segment in rollout.segments)


def test_what_was_collected_is_described(tokenizer: PreTrainedTokenizerBase) -> None:
    draw = random.Random(0)
    lines = [row(0, 0, 1.0, draw, status="truncated", tool_errors=2), row(0, 1, 0.0, draw), row(1, 1, None, draw)]
    found = rollout_samples.ReadRollouts()
    for line in lines:
        rollout_samples.add_row(line, found)
    values = rollout_samples.rollout_metrics(found)
    assert values["reward/mean"] == 0.5 and values["num_unscored"] == 1 and values["num_valid_samples"] == 2
    assert values["completions/clipped_ratio"] == 0.5 and values["tool_errors"] == 1


def test_overlong_rollouts_are_shaped_or_dropped(tokenizer: PreTrainedTokenizerBase) -> None:
    draw = random.Random(0)
    lines = [row(0, 1, 1.0, draw), row(0, 2, 0.0, draw), row(0, 4, 1.0, draw, status="truncated")]
    trained = learner(tokenizer)
    dropping = policy_gradient.PolicyGradient(
        options(shaping={"drop_truncated": True}, advantage={"estimator": "group_mean"}), None, None
    )
    prepared = dropping.prepare(read(lines), trained, BUDGET)
    assert [rollout.segments[0].advantages[0] for rollout in prepared] == pytest.approx([1 / 3, -2 / 3])
    lengths = [rollout.trained for rollout in read(lines)]
    limit = max(lengths)
    shaping = {"soft_overlong": {"limit": limit, "buffer": limit, "weight": 0.5}}
    shaped = policy_gradient.PolicyGradient(options(shaping=shaping, advantage={"estimator": "group_mean"}), None, None)
    rewards = [reward - 0.5 * length / limit for reward, length in zip([1, 0, 1], lengths, strict=True)]
    expected = [reward - sum(rewards) / 3 for reward in rewards]
    batch = shaped.prepare(read(lines), trained, BUDGET)
    assert [rollout.segments[0].advantages[0] for rollout in batch] == pytest.approx(expected)


def test_the_temperature_divides_the_logits_that_are_trained(tokenizer: PreTrainedTokenizerBase) -> None:
    warm = learner(tokenizer, temperature=2.0)
    packed = packing.pack(read(rows())[:4], torch.device("cpu"))
    hidden = warm.policy.network.get_decoder()(
        input_ids=packed.token_ids_T[None], position_ids=packed.positions_T[None], layout=packed.layout
    ).last_hidden_state[0]
    logits = warm.policy.network.get_output_embeddings()(hidden[packed.trained_N - 1])
    expected = {
        scale: (logits / scale).log_softmax(-1).gather(1, packed.token_ids_T[packed.trained_N][:, None])[:, 0]
        for scale in (1.0, 2.0)
    }
    assert torch.allclose(warm.logprobs(packed), expected[2.0], atol=1e-5)
    assert torch.allclose(warm.logprobs(packed, temperature=1.0), expected[1.0], atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"responses_create_params": {"top_p": 0.9}}, "top_p is 0.9: the sampler's logprobs would belong to another"),
        ({"responses_create_params": {"metadata": {"extra_body": '{"min_p": 0.1}'}}}, "min_p is 0.1"),
        (  # the request's own field wins, as it does in the model servers
            {"responses_create_params": {"top_p": 0.9, "metadata": {"extra_body": '{"top_p": 1}'}}},
            "top_p is 0.9",
        ),
        ({"responses_create_params": {"metadata": {"extra_body": "{top_p"}}}, "must be a JSON object in a string"),
        (
            {"responses_create_params": {"metadata": {"extra_body": '{"logit_bias": {"7": 8}}'}}},
            "logit_bias is {'7': 8}",
        ),
        ({"responses_create_params": {"structured_outputs": {"choice": ["a"]}}}, "structured_outputs is {'choice'"),
        ({"responses_create_params": {"text": {"format": {"type": "json_schema"}}}}, "text.format is json_schema"),
        ({"responses_create_params": {"tool_choice": "required"}}, "tool_choice is required"),
        ({"responses_create_params": {"tool_choice": {"type": "function", "name": "f"}}}, "tool_choice is function"),
        ({"responses_create_params": {"temperature": 0.7}}, "the recipe trains at 1.0; set algorithm.temperature"),
        ({"ng": {"segments": []}}, "no token ids"),
        ({"ng": {"segments": [{"token_ids": [1, 2], "mask": [[0, 1]], "logprobs": [0.0]}]}}, "span [0, 1)"),
        ({"ng": {"segments": [{"token_ids": [1, 2], "mask": [[1, 2]], "logprobs": []}]}}, "0 logprobs for 1 sampled"),
        ({"ng": {"segments": [{"token_ids": [1, 2], "mask": [[1, 2]]}]}}, "a segment is malformed"),
        (
            {"ng": {"segments": [{"token_ids": [1, -2], "mask": [[1, 2]], "logprobs": [0.0]}]}},
            "token ids must be integers from 0 on",
        ),
        (
            {"ng": {"segments": [{"token_ids": [1, 2.5], "mask": [[1, 2]], "logprobs": [0.0]}]}},
            "token ids must be integers from 0 on",
        ),
        (
            {"ng": {"segments": [{"token_ids": [1, 2], "mask": [[1, 1.5]], "logprobs": [0.0]}]}},
            "token ids must be integers from 0 on",
        ),
        (
            {"ng": {"segments": [{"token_ids": [1, 2], "mask": [[1, 2]], "logprobs": [0.5]}]}},
            "logprobs must be finite and at most 0",
        ),
        (
            {"ng": {"segments": [{"token_ids": [1, 2], "mask": [[1, 2]], "logprobs": [-1e300]}]}},
            "logprobs must be finite and at most 0",
        ),
        ({"ng": None}, "not a scored rollout"),
    ],
)
def test_rows_that_cannot_be_trained_are_named_with_their_reason(tmp_path: Path, change: Row, message: str) -> None:
    good = row(0, 0, 1.0, random.Random(0))
    path = write(tmp_path / "out.jsonl", [good, {**good, **change}])
    with pytest.raises(UsageError) as caught:
        rollout_samples.read_rollouts(path, 1.0)
    assert str(caught.value).startswith(f"{path}:2: ") and message in str(caught.value)


ROUTERS = rollout_samples.Routers(layers=2, chosen=1, experts=4)


def routed(*experts: int, layers: int = 2) -> Row:
    """The row's segment with three tokens, of which the last two are sampled."""
    segment = {"token_ids": [1, 2, 3], "mask": [[1, 3]], "logprobs": [0.0, 0.0], "policy_version": [[1, 3, 0]]}
    record = ExpertRows(layers, 1, "uint8", bytearray(experts)).record()
    return {"ng": {"segments": [{**segment, "routed_experts": record}]}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "a segment has no routed_experts, which algorithm.routing_replay needs"),
        (routed(0, 1), "a segment has routed_experts of 1 tokens, and 2 are needed"),
        (routed(0, 1, 2, 4), "a segment has the expert 4, and the policy has 4"),
        (routed(0, 1, 2, layers=1), "a segment has 1 experts of each of 1 layers, and the policy has 1 of 2"),
        (routed(*[0] * 8), "a segment's routed_experts of the shape [4, 2, 1] for 3 tokens"),
    ],
)
def test_a_rollout_whose_routing_cannot_be_replayed_is_refused(change: Row, message: str) -> None:
    good = row(0, 0, 1.0, random.Random(0))
    assert str(rollout_samples.problem({**good, **change}, 1.0, routers=ROUTERS)).startswith(message)
    assert rollout_samples.problem({**good, **routed(0, 1, 2, 3)}, 1.0, routers=ROUTERS) is None


@pytest.mark.parametrize(
    "params",
    [
        {"tool_choice": "auto", "text": {"format": {"type": "text"}}, "logit_bias": {}, "top_k": -1},
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}, "text": {"verbosity": "low"}},
        {"top_p": 1, "temperature": 1.0, "metadata": {"extra_body": '{"top_p": 0.5, "temperature": 0.5}'}},
    ],
)
def test_what_leaves_the_distribution_as_it_is_can_be_trained(params: Row) -> None:
    assert rollout_samples.distorted_sampling(params, 1.0) is None


def test_rollouts_of_another_policy_are_noticed_before_the_first_step(tokenizer: PreTrainedTokenizerBase) -> None:
    trained = learner(tokenizer)
    before = weights_of(trained)
    algorithm = policy_gradient.PolicyGradient(options(), None, None)

    def run(batch: list[Any]) -> list[Any]:
        prepared = algorithm.prepare(batch, trained, BUDGET)
        watched = sanity_checks.check_batches([samples.Batch([prepared])], trained, BUDGET, algorithm.sampler_N, 1.05)
        return [one_step(trained, algorithm, found.updates[0]) for found in watched]

    with pytest.raises(sanity_checks.CheckFailed, match=r"token_mult_prob_error is .*model\.path"):
        run(read(rows()))
    assert largest_difference(before, weights_of(trained)) == 0
    (step,) = run(own(read(rows()), trained))
    assert step.means["token_mult_prob_error"] == pytest.approx(1, abs=1e-5)
    assert step.means["probs_ratio"] == pytest.approx(1, abs=1e-5) and step.means["clip_ratio/region_mean"] == 0


def test_the_sampler_is_compared_in_the_first_batch_of_the_current_weights(tokenizer: PreTrainedTokenizerBase) -> None:
    trained = learner(tokenizer)
    algorithm = policy_gradient.PolicyGradient(options(), None, None)
    updates = [algorithm.prepare(read(rows()), trained, BUDGET)]  # of another policy's logprobs
    batches = [samples.Batch(updates, {"lag": lag}) for lag in (2, 1, 0)]
    passed = []
    with pytest.raises(sanity_checks.CheckFailed, match="token_mult_prob_error"):
        for found in sanity_checks.check_batches(batches, trained, BUDGET, algorithm.sampler_N, 1.05):
            passed.append(found.values["lag"])
            one_step(trained, algorithm, found.updates[0])
    assert passed == [2, 1]


def test_a_run_that_continues_with_a_file_has_left_the_policy_that_sampled_it(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = write(tmp_path / "out.jsonl", rows())  # of anybody's logprobs
    words = [f"data.path={path}", "rollouts=null", "evaluation=null", "batch_size=7"]
    words += ["model.path=null", "model.tokenizer=data/tiny_policy/tokenizer"]
    recipe, _ = recipe_reader.read_recipe(["grpo.yaml"], [*words, f"model.from_scratch={json.dumps(SHAPE)}"])
    trained = learner(tokenizer)
    algorithm = policy_gradient.PolicyGradient(recipe.algorithm, None, None)
    parts = loop.Parts(recipe, trained, algorithm, tokenizer)
    source = loop.FileSource(parts, lambda text: None)
    with pytest.raises(sanity_checks.CheckFailed, match="token_mult_prob_error"):
        next(source.batches(None, 0, None))
    assert len(next(source.batches(None, 1, source.state())).updates[0]) == 7
    write(path, rows()[1:])
    with pytest.raises(UsageError, match=r"out\.jsonl: changed since the run began with it.*restore the file"):
        loop.FileSource(parts, lambda text: None).batches(None, 1, source.state())


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.process
def test_parameters_that_do_not_learn_are_noticed_after_the_first_step(
    tokenizer: PreTrainedTokenizerBase, stage: int
) -> None:
    trained = learner(tokenizer, stage=stage)
    algorithm = policy_gradient.PolicyGradient(options(), None, None)
    batch = samples.Batch([algorithm.prepare(own(read(rows()), trained), trained, BUDGET)])
    for found in sanity_checks.check_batches([batch], trained, BUDGET, algorithm.sampler_N, 1.05):
        one_step(trained, algorithm, found.updates[0])
    if stage == 3:  # its parameters are shards: none can be added now
        return
    # a weight that the network has and never uses
    trained.policy.network.forgotten = torch.nn.Parameter(torch.zeros(3))
    watched = sanity_checks.check_batches([batch], trained, BUDGET, algorithm.sampler_N, 100)
    with pytest.raises(sanity_checks.CheckFailed, match=r"1 of \d+ trainable parameters got no gradient.*forgotten"):
        for found in watched:
            one_step(trained, algorithm, found.updates[0])


def test_dropout_is_noticed_before_the_first_step(tokenizer: PreTrainedTokenizerBase) -> None:
    trained = learner(tokenizer)
    for module in trained.policy.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    trained.policy.train()
    algorithm = policy_gradient.PolicyGradient(options(), 1, None)
    batch = samples.Batch([algorithm.prepare(read(rows()), trained, BUDGET)])
    with pytest.raises(sanity_checks.CheckFailed, match="does not reproduce its own logprobs"):
        next(sanity_checks.check_batches([batch], trained, BUDGET, algorithm.sampler_N, 100))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.loss.ratio=sequence"], "algorithm.loss.aggregation: with one ratio a rollout"),
        (["algorithm.correction.kind=token"], "algorithm.correction.kind: with loss.anchor sampler"),
        (["algorithm.advantage.estimator=gae"], "algorithm.critic: estimator gae needs values; add `critic: {}`"),
        (["algorithm.critic.lr=1e-3"], "algorithm.critic: group_std does not use it"),
        (["algorithm.advantage.estimator=reward"], "algorithm.shaping.skip_equal_groups: estimator reward also learns"),
        (["algorithm.loss.clip_hihg=0.1"], "unknown key 'algorithm.loss.clip_hihg' (did you mean 'clip_high'?)"),
        (["rollouts.group_size=1"], "rollouts.group_size: group_std compares the attempts at a task: set at least 2"),
        (
            ["rollouts.group_size=1", "rollouts.dynamic_sampling=2", "algorithm.advantage.estimator=reward"],
            "rollouts.dynamic_sampling: a group of one has no other attempts",
        ),
        (["rollouts=null"], "no training data; name a file with data.path, or give rollouts an agent and tasks"),
        (["max_steps=null"], "live rollouts do not end by themselves; set max_steps"),
        (["algorithm.name=sft"], "sft trains on a file; remove rollouts"),
        (["data.path=none.jsonl"], "command line: data.path: there is no none.jsonl"),
        (["algorithm.routing_replay=true", "engine.compile=true"], "engine.compile: algorithm.routing_replay changes"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused_with_the_reason(
    overrides: list[str], message: str, root: Path
) -> None:
    place = [f"model.path={root / 'data' / 'tiny_policy' / 'tokenizer'}", "output=never"]
    result = CliRunner().invoke(main, ["grpo.yaml", *place, *overrides])
    assert result.exit_code == 2 and "Traceback" not in result.stderr
    assert message in result.stderr
    assert not Path("never").exists()


def test_truncated_rollouts_of_a_file_are_not_counted_as_without_a_learning_signal(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    lines = rows(tasks=4, size=4)
    for number, line in enumerate(lines):
        line["reward"] = float(number % 2)
        line["ng"]["status"] = "truncated" if number < 3 else "ok"
    messages: list[str] = []

    def source(lines: list[Row]) -> loop.FileSource:
        path = write(tmp_path / "out.jsonl", lines)
        words = [f"data.path={path}", "rollouts=null", "evaluation=null", "algorithm.shaping.drop_truncated=true"]
        words += ["model.path=null", "model.tokenizer=data/tiny_policy/tokenizer"]
        recipe, _ = recipe_reader.read_recipe(["grpo.yaml"], [*words, f"model.from_scratch={json.dumps(SHAPE)}"])
        algorithm = policy_gradient.PolicyGradient(recipe.algorithm, None, None)
        return loop.FileSource(loop.Parts(recipe, learner(tokenizer), algorithm, tokenizer), messages.append)

    source(lines)
    assert messages[0] == "3 of 16 rollouts are truncated (algorithm.shaping.drop_truncated): left out"
    assert "learning signal" not in " ".join(messages)
    with pytest.raises(UsageError, match="or the rollout is truncated"):
        source(lines[:3])


def test_samples_that_a_teacher_leaves_out_are_named(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, messages = config.DataOptions(path=str(write(tmp_path / "out.jsonl", rows()))), list[str]()
    algorithm = policy_gradient.PolicyGradient(options(), None, None)
    monkeypatch.setattr(algorithm, "prepare", lambda all_samples, *_: all_samples[3:])
    file_batches.prepare_samples(data, algorithm, tokenizer, learner(tokenizer), 200, messages.append, teachers=True)
    assert messages == ["3 of 30 samples are longer than a teacher's context (with its hint): left out"]
    monkeypatch.setattr(algorithm, "prepare", lambda *_: [])
    with pytest.raises(UsageError, match="no sample to train on: 30 are longer than a teacher's context"):
        file_batches.prepare_samples(
            data, algorithm, tokenizer, learner(tokenizer), 200, messages.append, teachers=True
        )


def test_rollouts_with_images_or_with_the_ids_of_another_model_are_refused(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    algorithm, lines = policy_gradient.PolicyGradient(options(), None, None), rows()
    output = {"type": "function_call_output", "output": [{"type": "input_text", "text": "x"}, {"type": "input_image"}]}
    seen = lines[0] | {"response": {"output": [{"type": "reasoning", "content": None}, output]}}
    wrong = r"response.output\[1\] has a part of type 'input_image': the model reads text only"
    with pytest.raises(UsageError, match=wrong):
        algorithm.samples(write(tmp_path / "seen.jsonl", [*lines, seen]), tokenizer)
    lines[0]["ng"]["segments"][0]["token_ids"][-1] = 9999
    data = config.DataOptions(path=str(write(tmp_path / "out.jsonl", lines)))
    with pytest.raises(UsageError, match="token id 9999, but the model has only 1024 tokens"):
        file_batches.prepare_samples(data, algorithm, tokenizer, learner(tokenizer), 200, print)


def test_a_finished_file_is_trained_in_shuffled_batches(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    lines = rows() + [row(9, index, 1.0, random.Random(1)) for index in range(3)]
    data = config.DataOptions(path=str(write(tmp_path / "out.jsonl", lines)))
    messages: list[str] = []
    prepared = file_batches.prepare_samples(
        data, policy_gradient.PolicyGradient(options(), None, None), tokenizer, learner(tokenizer), 200, messages.append
    )
    assert len(messages) == 1 and messages[0].endswith(f"of {len(lines)} samples have no learning signal: left out")
    recipe = config.Recipe.model_validate(
        {
            "algorithm": {"name": "grpo"},
            "output": "out",
            "model": OPTIONS,
            "data": data,
            "optimizer": {"lr": 1},
            "batch_size": 8,
        }
    )
    parts = [part for batch in file_batches.batches(prepared, recipe, 0) for part in batch.updates]
    assert len(parts) == file_batches.steps(prepared, recipe)
    assert sorted(id(sample) for part in parts for sample in part) == sorted(map(id, prepared))
    assert all(len({sample.group for sample in part}) > 1 for part in parts[:-1])
