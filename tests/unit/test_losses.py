"""Losses: values and gradients of the formulas and of other libraries, for any micro-batches, and refusals."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import DATA
from torch import Tensor

from ngym.trainer.losses import policy_loss, preference_loss, reward_loss, value_loss
from ngym.trainer.model import teacher_divergence
from ngym.trainer.recipe import algorithms, objective

PEERS = json.loads((DATA / "peer_losses.json").read_text("utf-8"))
PAIRS = json.loads((DATA / "peer_preferences.json").read_text("utf-8"))
DIVERGENCES = json.loads((DATA / "peer_divergences.json").read_text("utf-8"))
REWARDS = json.loads((DATA / "peer_rewards.json").read_text("utf-8"))


@dataclass(frozen=True)
class Batch:
    """The rollouts of an optimiser step; flat lists over their tokens."""

    lengths: list[int]
    tasks: list[int]
    advantages: list[float]
    logprobs: list[float]
    old: list[float]
    sampler: list[float]
    reference: list[float]
    entropy: list[float]


PEER_BATCH = Batch(**{name: PEERS[name] for name in Batch.__dataclass_fields__})


@dataclass(frozen=True)
class StepResult:
    """A step's loss, its gradients by token in the order of the batch, and its metrics."""

    loss: float
    grad: list[float]
    entropy_grad: list[float]
    metrics: dict[str, float]


def make(options: dict[str, Any]) -> Any:
    """An objective; the advantages are given here, so what it says of them is not looked at."""
    spec = objective.Objective.model_validate(options)
    assert objective.invalid_settings(spec) == []
    return spec


def step(
    options: dict[str, Any],
    batch: Batch,
    micro_batches: Sequence[Sequence[int]] | None = None,
    *,
    first: bool = False,
    shuffle: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> StepResult:
    """As the loop does it: weigh the whole step, add up micro-batches of whole rollouts, divide once.

    first: it is the first update on the batch, so there are no old logprobs. shuffle: a seed to mix the tokens with.
    """
    spec = make(options)
    weights = policy_loss.loss_weights(
        spec.loss.aggregation, batch.lengths, fixed_length=spec.loss.fixed_length, tasks_B=batch.tasks
    )
    rollout_of = [index for index, length in enumerate(batch.lengths) for _ in range(length)]
    logprobs = torch.tensor(batch.logprobs, dtype=dtype, requires_grad=True)
    entropy = torch.tensor(batch.entropy, dtype=dtype, requires_grad=True)
    sums: dict[str, list[float]] = {}
    value = 0.0
    for members in micro_batches or [range(len(batch.lengths))]:
        places = [place for place, rollout in enumerate(rollout_of) if rollout in members]
        if shuffle is not None:
            random.Random(shuffle).shuffle(places)
        at = torch.tensor(places, dtype=torch.int64)

        def flat(values: list[float], at: Tensor = at) -> Tensor:
            return torch.tensor(values, dtype=dtype)[at]

        row_of = {rollout: row for row, rollout in enumerate(members)}
        rows = policy_loss.TokenRows(
            torch.tensor([row_of[rollout_of[place]] for place in places], dtype=torch.int64), len(members)
        )
        tokens = policy_loss.Tokens(
            logprobs_N=logprobs[at],
            advantages_N=rows.spread(torch.tensor([batch.advantages[member] for member in members], dtype=dtype)),
            rows=rows,
            weight_R=torch.tensor([weights.token_B[member] for member in members], dtype=dtype),
            share=sum(weights.share_B[member] for member in members),
            old_N=None if first else flat(batch.old),
            sampler_N=flat(batch.sampler),
            reference_N=flat(batch.reference),
            entropy_N=entropy[at],
        )
        loss = policy_loss.policy_loss(spec, tokens)
        (loss.sum / weights.total).backward()
        value += float(loss.sum.detach()) / weights.total
        for name, mean in loss.metrics.items():
            total, count = sums.get(name, (0.0, 0.0))
            sums[name] = [total + mean.total, count + mean.count]
    assert logprobs.grad is not None
    return StepResult(
        loss=value,
        grad=logprobs.grad.tolist(),
        entropy_grad=[] if entropy.grad is None else entropy.grad.tolist(),
        metrics={name: total / count for name, (total, count) in sums.items() if count},
    )


# --- other libraries -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PEERS["cases"], ids=lambda case: case["name"])
def test_losses_and_gradients_are_those_of_other_libraries(case: dict[str, Any]) -> None:
    ours = step(case["objective"], PEER_BATCH, first="no old" in case["uses"])
    assert ours.grad == pytest.approx(case["grad"], abs=2e-6)
    if "gradient only" not in case["uses"]:  # OpenRLHF reports the estimate, we the estimate times the ratio
        assert ours.loss == pytest.approx(case["loss"], abs=2e-6)
    if case["entropy_grad"]:
        assert ours.entropy_grad == pytest.approx(case["entropy_grad"], abs=2e-6)
    names = {"kl": "kl_penalty"}
    for name, value in case["metrics"].items():
        if case["objective"].get("loss", {}).get("ratio", "token") == "token":  # GSPO: they count rollouts, we tokens
            assert ours.metrics[names.get(name, name)] == pytest.approx(value, abs=2e-6), name


@pytest.mark.parametrize(
    ("batch", "case"),
    [(batch, case) for batch in PEERS["batches"] for case in batch["cases"]],
    ids=lambda value: value.get("name") or f"{len(value['lengths'])} rollouts",
)
def test_sapo_and_trls_sequence_mask_are_trls_to_1e_6(batch: Any, case: dict[str, Any]) -> None:
    rollouts = Batch(**{name: batch[name] for name in Batch.__dataclass_fields__})
    ours = step(case["objective"], rollouts, dtype=torch.float64)
    assert ours.loss == pytest.approx(case["loss"], abs=1e-6)
    assert ours.grad == pytest.approx(case["grad"], abs=1e-6)


@pytest.mark.parametrize("case", PEERS["value_cases"], ids=lambda case: f"{case['aggregation']} {case['value_clip']}")
def test_the_value_loss_is_openrlhfs(case: dict[str, Any]) -> None:
    lengths = PEERS["lengths"]
    weights = policy_loss.loss_weights(case["aggregation"], lengths)
    values = torch.tensor(PEERS["values"]["values"], requires_grad=True)
    loss = value_loss.value_loss(
        objective.Critic(value_clip=case["value_clip"]),
        value_loss.Values(
            values_N=values,
            old_N=torch.tensor(PEERS["values"]["old"]),
            returns_N=torch.tensor(PEERS["values"]["returns"]),
            rows=policy_loss.TokenRows(
                torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)), len(lengths)
            ),
            weight_R=torch.tensor(weights.token_B),
            share=weights.total,
        ),
    )
    (loss.sum / weights.total).backward()
    assert loss.sum.item() / weights.total == pytest.approx(case["loss"], abs=1e-6)
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx(case["grad"], abs=1e-6)


def of_pairs(options: dict[str, Any], logprobs: list[Any], reference: list[Any]) -> tuple[Any, list[list[list[float]]]]:
    """The loss of pairs given as [P][chosen, rejected][tokens], and its gradients in the same shape."""
    flat, rows = answers_of(logprobs)
    reference_R = rows.sum(answers_of(reference)[0].detach())
    loss = preference_loss.preference_loss(objective.Preference.model_validate(options), flat, rows, reference_R)
    (loss.sum / len(logprobs)).backward()
    return loss, by_side(flat, logprobs)


def answers_of(pairs: list[Any]) -> tuple[Tensor, Any]:
    """[P][chosen, rejected][tokens] as a flat tensor, and its rows."""
    answers = [answer for pair in pairs for answer in pair]
    row = torch.tensor([index for index, answer in enumerate(answers) for _ in answer])
    flat = torch.tensor([value for answer in answers for value in answer], dtype=torch.float64, requires_grad=True)
    return flat, policy_loss.TokenRows(row, len(answers))


def by_side(flat: Tensor, pairs: list[Any]) -> list[list[list[float]]]:
    """The gradients in the shape of the pairs."""
    assert flat.grad is not None
    split = iter(flat.grad.split([len(answer) for pair in pairs for answer in pair]))
    return [[next(split).tolist(), next(split).tolist()] for _ in pairs]


@pytest.mark.parametrize("case", PAIRS["cases"], ids=lambda case: f"{case['source'].split()[-1]} {case['options']}")
def test_preference_losses_and_gradients_are_those_of_other_libraries(case: dict[str, Any]) -> None:
    loss, grads = of_pairs(case["options"], PAIRS["logprobs"], PAIRS["reference"])
    assert loss.sum.item() / len(grads) == pytest.approx(case["loss"], abs=2e-6)
    for ours, expected in zip(grads, case["grad"], strict=True):
        assert ours[0] == pytest.approx(expected[0], abs=2e-6)
        assert ours[1] == pytest.approx(expected[1], abs=2e-6)
    for name, value in case["metrics"].items():
        mean = loss.metrics[name]
        assert mean.total / mean.count == pytest.approx(value, abs=2e-6), name


@pytest.mark.parametrize(
    ("batch", "case"),
    [(batch, case) for batch in REWARDS["batches"] for case in batch["cases"]],
    ids=lambda value: str(value["options"]) if "options" in value else f"{len(value['scores'])} pairs",
)
def test_the_loss_of_reward_models_and_its_gradient_are_trls_to_1e_6(batch: Any, case: dict[str, Any]) -> None:
    scores_R = torch.tensor(batch["scores"], dtype=torch.float64).flatten().requires_grad_()
    pairs, options = len(batch["margins"]), algorithms.RewardModelOptions(**case["options"])
    loss = reward_loss.pair_loss(options, scores_R, torch.tensor(batch["margins"], dtype=torch.float64))
    (loss.sum / pairs).backward()
    assert loss.sum.item() / pairs == pytest.approx(case["loss"], abs=1e-6)
    assert scores_R.grad is not None
    for ours, expected in zip(scores_R.grad.reshape(pairs, 2).tolist(), case["grad"], strict=True):
        assert ours == pytest.approx(expected, abs=1e-6)
    for name, value in case["metrics"].items():
        assert loss.metrics[name].total / loss.metrics[name].count == pytest.approx(value, abs=1e-6), name


@pytest.mark.parametrize(
    ("batch", "case"),
    [(batch, case) for batch in DIVERGENCES["batches"] for case in batch["cases"]],
    ids=lambda value: f"beta {value['beta']}" if "beta" in value else f"{len(value['student'])} tokens",
)
def test_divergences_from_a_teacher_and_their_gradients_are_trls_to_1e_6(batch: Any, case: dict[str, Any]) -> None:
    student_NV = torch.tensor(batch["student"], dtype=torch.float64, requires_grad=True)
    teacher_NV = torch.tensor(batch["teacher"], dtype=torch.float64).log_softmax(-1)
    loss = teacher_divergence.divergence(student_NV.log_softmax(-1), teacher_NV, None, case["beta"]).sum()
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-6)
    assert student_NV.grad is not None
    torch.testing.assert_close(student_NV.grad, torch.tensor(case["grad"], dtype=torch.float64), atol=1e-6, rtol=0)


def test_the_loss_of_labels_is_binary_cross_entropy() -> None:
    scores_N = torch.tensor([0.3, -2.0, 40.0, -40.0], dtype=torch.float64, requires_grad=True)
    labels_N = torch.tensor([True, True, False, False])
    loss = reward_loss.label_loss(scores_N, labels_N)
    bce = torch.nn.functional.binary_cross_entropy_with_logits(scores_N, labels_N.double(), reduction="sum")
    assert loss.sum.item() == pytest.approx(bce.item(), abs=1e-9)
    assert loss.metrics["rewards/accuracies"].total == 2


@pytest.mark.parametrize(
    ("batch", "case"),
    [(batch, case) for batch in PAIRS["batches"] for case in batch["cases"]],
    ids=lambda value: str(value["options"]) if "options" in value else f"{len(value['logprobs'])} pairs",
)
def test_named_preference_losses_and_their_gradients_are_trls_to_1e_6(batch: Any, case: dict[str, Any]) -> None:
    flat, rows = answers_of(batch["logprobs"])
    reference_R = rows.sum(answers_of(batch["reference"])[0].detach())
    options: Any = algorithms.ALGORITHMS[case["options"]["name"]].model_validate(case["options"])
    if isinstance(options, algorithms.KtoOptions):
        labels_R = torch.tensor([True, False]).repeat(len(batch["logprobs"]))
        weights_R = torch.where(labels_R, options.desirable_weight, options.undesirable_weight)
        pairs_of = zip(batch["kl_now"], batch["kl_reference"], strict=True)
        gains = [now - reference for now, reference in pairs_of]
        kl = max(0.0, math.fsum(gains) / len(gains))
        loss = preference_loss.kto_loss(options.beta, rows.sum(flat) - reference_R, labels_R, weights_R, kl)
        divisor = 2 * len(batch["logprobs"])
    else:
        assert options.invalid_settings() == []
        divisor, reference_R = len(batch["logprobs"]), reference_R * (not options.reference_free)
        tokens = sum(len(chosen) for chosen, _ in batch["logprobs"])
        weight_P = torch.full((divisor,), divisor / tokens) if options.sft_aggregation == "token" else None
        collision_N = answers_of(batch["collision"])[0].detach()
        loss = preference_loss.preference_loss(options, flat, rows, reference_R, weight_P, collision_N)
    (loss.sum / divisor).backward()
    assert loss.sum.item() / divisor == pytest.approx(case["loss"], abs=1e-6)
    for ours, expected in zip(by_side(flat, batch["logprobs"]), case["grad"], strict=True):
        assert ours[0] == pytest.approx(expected[0], abs=1e-6)
        assert ours[1] == pytest.approx(expected[1], abs=1e-6)
    for name, value in case["metrics"].items():
        mean = loss.metrics[name]
        assert mean.total / mean.count == pytest.approx(value, abs=1e-6), name


# --- values by hand --------------------------------------------------------------------------------------------------

RATIOS = [0.5, 1.0, 1.5]
THREE = Batch(
    lengths=[1, 1, 1],
    tasks=[0, 0, 0],
    advantages=[1.0, -1.0, 2.0],
    logprobs=[math.log(ratio) - 1 for ratio in RATIOS],
    old=[-1.0, -1.0, -1.0],
    sampler=[-0.5, -1.5, -0.8],
    reference=[-1.0, -1.0, -1.0],
    entropy=[1.0, 1.0, 1.0],
)


@pytest.mark.parametrize(
    ("options", "batch", "value"),
    [
        ({}, THREE, -0.63333),
        ({"correction": {"kind": "token", "high": 0.8}}, THREE, -0.47442),
        (
            {"loss": {"ratio": "sequence", "aggregation": "sequence"}},
            replace(THREE, lengths=[3], tasks=[0], advantages=[1.0]),
            -0.90856,
        ),
        ({"loss": {"surrogate": "cispo"}}, THREE, 0.59380),
        ({"loss": {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.2}}, THREE, 0.42448),
        ({"loss": {"dual_clip": 1.3}}, replace(THREE, advantages=[0.0, 0.0, -1.0]), 1.3 / 3),
    ],
    ids=["clipped", "TIS", "GSPO", "CISPO two-sided", "CISPO from above", "dual clip"],
)
def test_losses_by_hand(options: dict[str, Any], batch: Batch, value: float) -> None:
    assert step(options, batch).loss == pytest.approx(value, abs=1e-5)


def test_kl_estimates_by_hand() -> None:
    log_ratio = torch.tensor([1.0, -14.0, -29.0])  # log p_ref - log p
    zero = torch.zeros(3)

    def estimate(name: str, cap: float) -> list[float]:
        values: list[float] = policy_loss.kl_estimate(zero, log_ratio, name, cap).tolist()
        return values

    assert estimate("k1", math.inf) == pytest.approx([-1, 14, 29])
    assert estimate("k2", math.inf) == pytest.approx([0.5, 98, 420.5])
    assert estimate("k3", math.inf) == pytest.approx([0.7183, 13, 28], abs=1e-4)
    assert estimate("k1", policy_loss.CAP) == pytest.approx([-1, 10, 10])
    assert estimate("k3", policy_loss.CAP) == pytest.approx([0.7183, 10, 10], abs=1e-4)


def test_preference_losses_begin_where_they_must() -> None:
    answers = [[[-1.0, -2.0], [-0.5]], [[-0.3], [-1.0, -1.0, -1.0]]]
    starts = {
        "sigmoid": ({}, math.log(2)),
        "smoothed": ({"label_smoothing": 0.2}, math.log(2)),
        "hinge": ({"loss": "hinge"}, 1.0),
        "ipo": ({"loss": "ipo", "beta": 0.5}, 1.0),
    }
    for name, (options, value) in starts.items():
        loss, _ = of_pairs(options, answers, answers)
        assert loss.sum.item() / 2 == pytest.approx(value, abs=1e-6), name
        assert loss.metrics["rewards/accuracies"].total == 0


def test_the_mismatch_is_one_when_sampler_and_trainer_agree_and_grows_with_their_difference() -> None:
    trainer_N = torch.tensor([-1.0, -2.0, -3.0])
    same = policy_loss.measure(policy_loss.mismatch(trainer_N, trainer_N))
    assert same["token_mult_prob_error"].total / same["token_mult_prob_error"].count == 1.0
    assert same["mismatch_kl"].total == 0.0
    apart = policy_loss.measure(policy_loss.mismatch(trainer_N, trainer_N + torch.tensor([0.1, -0.1, 0.0])))
    assert apart["token_mult_prob_error"].total == pytest.approx(2 * math.exp(0.1) + 1, rel=1e-5)
    assert apart["mismatch_kl"].total == pytest.approx(math.exp(0.1) + math.exp(-0.1) - 2, rel=1e-3)


# --- the formulas, written out ---------------------------------------------------------------------------------------


def reference_objective(spec: Any, batch: Batch, first: bool) -> tuple[float, list[float]]:
    """The objective token by token, in Python: its value and autograd's gradient, float64."""
    x = torch.tensor(batch.logprobs, dtype=torch.float64, requires_grad=True)
    loss, by_task = spec.loss, {task: 0 for task in batch.tasks}
    for task, length in zip(batch.tasks, batch.lengths, strict=True):
        by_task[task] += length
    present = sum(length > 0 for length in batch.lengths)
    total = 0 * x.sum()  # where all is clipped there is a gradient too: zero
    start = 0
    for rollout, length in enumerate(batch.lengths):
        places = range(start, start + length)
        start += length
        old = [x[i].detach() if first else torch.tensor(batch.old[i], dtype=torch.float64) for i in places]
        logs = [x[i] - old_logprob for i, old_logprob in zip(places, old, strict=True)]
        if loss.ratio == "sequence" and length:
            logs = [sum(logs) / length] * length  # type: ignore[list-item]
        if loss.ratio == "product":
            logs = [sum(logs)] * length  # type: ignore[list-item]
        log_w = [float(old_logprob) - batch.sampler[i] for i, old_logprob in zip(places, old, strict=True)]
        for t, i in enumerate(places):
            advantage, ratio = batch.advantages[rollout], logs[t].exp()
            clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
            if loss.surrogate == "clipped":
                term = max(-advantage * ratio, -advantage * clipped)
                if loss.dual_clip and advantage < 0 and term.detach() > -advantage * loss.dual_clip:
                    term = torch.tensor(-advantage * loss.dual_clip, dtype=torch.float64)
            elif loss.surrogate == "cispo":
                term = -clipped.detach() * advantage * x[i]
            elif loss.surrogate == "sapo":
                tau = loss.tau_positive if advantage > 0 else loss.tau_negative
                term = -advantage * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
            else:
                term = -advantage * x[i]
            term = term * importance(spec.correction, log_w, t)
            if spec.kl.coef:
                d = x[i] - batch.reference[i]
                term = term + spec.kl.coef * {"k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[spec.kl.estimator]
            term = term - loss.entropy_coef * batch.entropy[i]
            divisor = {
                "token": sum(batch.lengths),
                "sequence": present * length,
                "fixed": present * (loss.fixed_length or 0),
                "prompt": by_task[batch.tasks[rollout]] * sum(count > 0 for count in by_task.values()),
            }
            total = total + term / divisor[loss.aggregation]
    total.backward()
    assert x.grad is not None
    return total.item(), x.grad.tolist()


def importance(options: Any, log_w: list[float], t: int) -> float:
    low, high = options.bounds
    w = math.exp(log_w[t])
    if options.kind == "token":
        return min(max(w, low), high)
    if options.kind == "sequence":
        return min(max(math.exp(sum(log_w)), low), high)
    if options.kind == "icepop":
        return w if low <= w <= high else 0.0
    if options.kind == "product_mask":
        return product if low <= (product := math.exp(sum(log_w))) <= high else 0.0
    if options.kind == "sequence_mask":
        return w if low <= math.exp(sum(log_w) / len(log_w)) <= high else 0.0
    return 1.0


@st.composite
def objectives(draw: st.DrawFn) -> dict[str, Any]:
    ratio = draw(st.sampled_from(["token", "token", "token", "sequence", "product"]))
    surrogate = draw(st.sampled_from(["clipped", "cispo", "sapo", "reinforce"])) if ratio == "token" else "clipped"
    aggregation = draw(st.sampled_from(["token", "sequence", "fixed", "prompt"])) if ratio == "token" else "sequence"
    kind = draw(st.sampled_from(["none", "token", "sequence", "icepop", "sequence_mask", "product_mask"]))
    bounds = {"low": draw(st.sampled_from([0.5, 0.9])), "high": draw(st.sampled_from([1.05, 1.6]))}
    return {
        "loss": {
            "surrogate": surrogate,
            "ratio": ratio,
            "aggregation": aggregation,
            "fixed_length": 9 if aggregation == "fixed" else None,
            "clip_low": draw(st.sampled_from([0.05, 0.2, 1.0])),
            "clip_high": draw(st.sampled_from([0.05, 0.28])),
            "dual_clip": draw(st.sampled_from([None, 1.4])) if surrogate == "clipped" else None,
            "entropy_coef": draw(st.sampled_from([0.0, 0.01])),
        },
        "kl": {
            "coef": draw(st.sampled_from([0.0, 0.1])),
            "estimator": draw(st.sampled_from(["k2", "k3"])),
            "gradient": "pathwise",
        },
        "correction": {"kind": kind, **(bounds if kind != "none" else {})},
    }


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any))
    rng = random.Random(draw(st.integers(0, 10**9)))

    def near(values: list[float], width: float) -> list[float]:
        return [value + rng.gauss(0, width) for value in values]

    logprobs = [-rng.expovariate(0.7) for _ in range(sum(lengths))]
    old = near(logprobs, 0.3)
    return Batch(
        lengths=lengths,
        tasks=[rng.randrange(3) for _ in lengths],
        advantages=[rng.choice([0.0, 1.0, -1.0, rng.gauss(0, 1)]) for _ in lengths],
        logprobs=logprobs,
        old=old,
        sampler=near(old, 0.2),
        reference=near(logprobs, 0.5),
        entropy=[rng.random() for _ in logprobs],
    )


@settings(max_examples=150)
@given(options=objectives(), batch=batches(), first=st.booleans())
def test_losses_and_gradients_are_those_of_the_formula_written_out(
    options: dict[str, Any], batch: Batch, first: bool
) -> None:
    value, grad = reference_objective(make(options), batch, first)
    ours = step(options, batch, first=first, dtype=torch.float64)
    assert ours.loss == pytest.approx(value, abs=1e-9)
    assert ours.grad == pytest.approx(grad, abs=1e-9)


@settings(max_examples=60)
@given(options=objectives(), batch=batches(), seed=st.integers(0, 10**9))
def test_a_step_does_not_depend_on_how_it_is_cut_ordered_or_padded_with_masked_rollouts(
    options: dict[str, Any], batch: Batch, seed: int
) -> None:
    rng = random.Random(seed)
    full = step(options, batch)
    members = list(range(len(batch.lengths)))
    rng.shuffle(members)
    cuts = sorted(rng.sample(range(1, len(members)), rng.randint(0, len(members) - 1)))
    pieces = [members[a:b] for a, b in zip([0, *cuts], [*cuts, len(members)], strict=True)]
    masked = replace(
        batch,
        lengths=[*batch.lengths, 0],
        tasks=[*batch.tasks, 7],
        advantages=[*batch.advantages, 3.0],
    )
    for other in (
        step(options, batch, pieces, shuffle=seed),
        step(options, masked, [[len(members)], *pieces], shuffle=seed),
    ):
        assert other.loss == pytest.approx(full.loss, abs=1e-6)
        assert other.grad == pytest.approx(full.grad, abs=1e-6)
        for name, value in full.metrics.items():
            if name != "is_dropped_sequences":  # is a share of the rollouts that are there
                assert other.metrics[name] == pytest.approx(value, abs=1e-5), name


def test_the_loss_that_is_reported_is_the_loss_that_is_descended_on() -> None:
    for aggregation in ("token", "sequence", "prompt"):
        ours = step({"loss": {"aggregation": aggregation, "entropy_coef": 0.1}}, PEER_BATCH, [[0, 5], [1, 2], [3, 4]])
        assert ours.metrics["loss"] == pytest.approx(ours.loss, abs=1e-6)
        policy_alone = step({"loss": {"aggregation": aggregation}}, PEER_BATCH)
        assert ours.metrics["actor_loss"] == pytest.approx(policy_alone.loss, abs=1e-6)


def test_on_the_first_update_the_ratio_is_one_and_nothing_is_clipped() -> None:
    clipped = step({}, PEER_BATCH, first=True)
    assert clipped.metrics["probs_ratio"] == 1.0
    assert clipped.metrics["clip_ratio/region_mean"] == 0.0
    assert clipped.grad == pytest.approx(step({"loss": {"surrogate": "reinforce"}}, PEER_BATCH).grad, abs=1e-7)


def test_what_is_clipped_is_counted_where_clipping_takes_the_gradient_away() -> None:
    both = replace(
        THREE,
        lengths=[1] * 4,
        tasks=[0] * 4,
        advantages=[-1.0, 1.0, 1.0, 1.0],
        logprobs=[math.log(ratio) - 1 for ratio in (0.5, 0.5, 1.5, 1.5)],
        **{name: [-1.0] * 4 for name in ("old", "sampler", "reference", "entropy")},
    )
    metrics = step({}, both).metrics
    assert (metrics["clip_ratio/low_mean"], metrics["clip_ratio/high_mean"]) == (0.25, 0.5)
    assert metrics["clip_ratio/region_mean"] == 0.75
    assert metrics["probs_ratio"] == pytest.approx(1.0)
    assert metrics["probs_ratio_clamped"] == pytest.approx(1.0)


def test_the_anchor_can_be_the_sampler() -> None:
    anchored = step({"loss": {"anchor": "sampler"}}, PEER_BATCH)
    assert anchored.grad == pytest.approx(step({}, replace(PEER_BATCH, old=PEER_BATCH.sampler)).grad, abs=1e-7)


def test_extreme_logprobs_give_numbers() -> None:
    far = replace(
        THREE,
        logprobs=[-0.001, -90.0, -1.0],
        old=[-90.0, -0.001, -1.0],
        sampler=[-0.5, -95.0, -90.0],
        reference=[-80.0] * 3,
    )
    for options in (
        {"kl": {"coef": 0.1}},
        {"kl": {"coef": 0.1, "estimator": "k2"}, "loss": {"surrogate": "cispo"}},
        {"correction": {"kind": "sequence"}, "loss": {"ratio": "product", "aggregation": "sequence"}},
    ):
        ours = step(options, far)
        assert math.isfinite(ours.loss)
        assert all(map(math.isfinite, ours.grad))
        assert all(map(math.isfinite, ours.metrics.values()))


def test_a_nan_is_not_hidden() -> None:
    broken = replace(THREE, logprobs=[math.nan, -1.0, -1.0])
    assert math.isnan(step({"correction": {"kind": "icepop"}}, broken).loss)


def test_what_a_correction_drops_is_counted() -> None:
    # ratios of the three one-token rollouts: e^-0.5, e^0.5, e^-0.2
    metrics = step({"correction": {"kind": "icepop", "low": 0.7, "high": 1.2}}, THREE).metrics
    assert metrics["is_dropped_ratio"] == metrics["is_oob_ratio"] == pytest.approx(2 / 3)
    assert metrics["is_dropped_sequences"] == pytest.approx(2 / 3)
    assert metrics["sampling_importance_ratio"] == pytest.approx(math.exp(-0.2) / 3, rel=1e-5)
    masked = replace(THREE, lengths=[1, 1, 1, 0], tasks=[0] * 4, advantages=[*THREE.advantages, 1.0])
    assert step({"correction": {"kind": "icepop", "low": 0.7, "high": 1.2}}, masked).metrics[
        "is_dropped_sequences"
    ] == pytest.approx(2 / 4)
    cut = step({"correction": {"kind": "token", "high": 1.2}}, THREE).metrics
    assert (cut["is_oob_ratio"], cut["is_dropped_ratio"]) == (pytest.approx(1 / 3), 0.0)
    agreeing = step({"correction": {"kind": "sequence_mask"}}, replace(THREE, sampler=THREE.old))
    assert agreeing.metrics["sampling_importance_ratio"] == 1.0
    assert agreeing.grad == step({}, THREE).grad


# --- the gradient of KL ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_exact_gradient_is_on_average_that_of_the_kl_divergence(estimator: str) -> None:
    """Over a vocabulary of five, every token drawn as often as the sampling policy draws it."""
    torch.manual_seed(0)
    theta = torch.randn(5, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(5, dtype=torch.float64).log_softmax(0)
    log_p = theta.log_softmax(0)
    (true,) = torch.autograd.grad((log_p.exp() * (log_p - reference)).sum(), theta, retain_graph=True)
    options = objective.Kl(coef=1.0, estimator=estimator)
    for old in (log_p.detach(), (theta.detach() + 0.5 * torch.randn(5, dtype=torch.float64)).log_softmax(0)):
        terms = policy_loss.kl_term(options, log_p, reference, old)
        (found,) = torch.autograd.grad((old.exp() * terms).sum(), theta, retain_graph=True)
        assert found.tolist() == pytest.approx(true.tolist(), abs=1e-12)


def test_the_pathwise_gradient_of_k1_is_zero_on_average_and_that_of_k3_another_divergences() -> None:
    torch.manual_seed(0)
    theta = torch.randn(5, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(5, dtype=torch.float64).log_softmax(0)
    log_p = theta.log_softmax(0)
    p = log_p.exp().detach()
    (k1,) = torch.autograd.grad((p * policy_loss.kl_estimate(log_p, reference, "k1")).sum(), theta, retain_graph=True)
    assert k1.abs().max() < 1e-12
    (k3,) = torch.autograd.grad(
        (p * policy_loss.kl_estimate(log_p, reference, "k3", math.inf)).sum(), theta, retain_graph=True
    )
    (reverse,) = torch.autograd.grad((reference.exp() * (reference - log_p)).sum(), theta, retain_graph=True)
    assert k3.tolist() == pytest.approx(reverse.tolist(), abs=1e-12)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "key", "reason"),
    [
        ({"loss": {"ratio": "sequence"}}, "loss.aggregation", "use aggregation sequence"),
        ({"loss": {"ratio": "sequence", "aggregation": "sequence", "surrogate": "cispo"}}, "loss.ratio", "ratio token"),
        (
            {"loss": {"ratio": "sequence", "aggregation": "sequence"}, "advantage": {"estimator": "gae"}, "critic": {}},
            "loss.ratio",
            "estimator gae makes advantages differ",
        ),
        (
            {
                "loss": {"ratio": "product", "aggregation": "sequence"},
                "advantage": {"estimator": "reward", "whiten": True},
                "kl": {"coef": 0.1, "where": "reward"},
            },
            "loss.ratio",
            "the KL in the reward of each token",
        ),
        (
            {
                "loss": {"ratio": "product", "aggregation": "sequence"},
                "advantage": {"estimator": "reward", "gamma": 0.9},
            },
            "loss.ratio",
            "gamma 0.9",
        ),
        ({"loss": {"surrogate": "reinforce", "anchor": "sampler"}}, "loss.anchor", "has no ratio"),
        ({"loss": {"surrogate": "cispo", "dual_clip": 3.0}}, "loss.dual_clip", "remove dual_clip"),
        ({"loss": {"tau_positive": 2.0}}, "loss.tau_positive", "use surrogate sapo"),
        ({"loss": {"surrogate": "sapo", "dual_clip": 3.0}}, "loss.dual_clip", "remove dual_clip"),
        ({"loss": {"dual_clip": 1.1}}, "loss.dual_clip", "1 + clip_high = 1.2"),
        ({"loss": {"aggregation": "fixed"}}, "loss.fixed_length", "set the maximum number of tokens"),
        ({"loss": {"fixed_length": 100}}, "loss.fixed_length", "remove it"),
        ({"advantage": {"whiten": True}}, "advantage.whiten", "use estimator group_mean"),
        (
            {"advantage": {"components": "normalise_then_sum", "estimator": "leave_one_out"}},
            "advantage.components",
            "group_std",
        ),
        ({"advantage": {"gamma": 0.9}}, "advantage.gamma", "set 1"),
        ({"advantage": {"lam": 0.95}}, "advantage.lam", "estimator gae"),
        ({"advantage": {"estimator": "gae"}}, "critic", "add `critic: {}`"),
        ({"critic": {}}, "critic", "does not use it"),
        ({"correction": {"high": 3.0}}, "correction.kind", "name one"),
        ({"correction": {"kind": "token"}, "loss": {"anchor": "sampler"}}, "correction.kind", "already"),
        ({"correction": {"kind": "token", "low": 3.0}}, "correction.low", "above high 2"),
        ({"correction": {"kind": "icepop", "high": 0.9}}, "correction.high", "must hold 1"),
        ({"kl": {"coef": 0.1, "estimator": "k1", "gradient": "pathwise"}}, "kl.gradient", "gradient exact"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value and " " not in value else "",
)
def test_a_combination_that_makes_no_sense_is_refused_with_the_reason(
    options: dict[str, Any], key: str, reason: str
) -> None:
    found = objective.invalid_settings(objective.Objective.model_validate(options))
    assert [refusal.key for refusal in found] == [key]
    assert reason in found[0].reason


def test_label_smoothing_is_for_the_sigmoid_loss_alone() -> None:
    (refusal,) = objective.invalid_preferences(objective.Preference(loss="ipo", label_smoothing=0.1))
    assert refusal.key == "label_smoothing"
    assert objective.invalid_preferences(objective.Preference(label_smoothing=0.1)) == []


def test_a_tensor_that_the_objective_asks_for_must_be_there() -> None:
    rows = policy_loss.TokenRows(torch.tensor([0]), 1)
    one = torch.ones(1)
    tokens = policy_loss.Tokens(logprobs_N=-one, advantages_N=one, rows=rows, weight_R=one, share=1.0)
    for options, name in (
        ({"kl": {"coef": 0.1}}, "reference_N"),
        ({"correction": {"kind": "token"}}, "sampler_N"),
        ({"loss": {"entropy_coef": 0.1}}, "entropy_N"),
    ):
        with pytest.raises(ValueError, match=name):
            policy_loss.policy_loss(make(options), tokens)


# --- the rest --------------------------------------------------------------------------------------------------------


def test_sft_is_the_sum_of_minus_log_p() -> None:
    logits = torch.randn(6, 11, requires_grad=True)
    target = torch.randint(0, 11, (6,))
    loss = policy_loss.nll_loss(logits.log_softmax(-1).gather(1, target[:, None])[:, 0])
    assert loss.sum.item() / 6 == pytest.approx(torch.nn.functional.cross_entropy(logits, target).item(), rel=1e-6)
    assert (loss.metrics["loss"].total, loss.metrics["loss"].count) == (pytest.approx(loss.sum.item()), 6)


def test_a_step_in_which_nothing_is_trained_weighs_nothing() -> None:
    for aggregation in ("token", "sequence", "fixed", "prompt"):
        weights = policy_loss.loss_weights(aggregation, [0, 0], fixed_length=5, tasks_B=["a", "b"])
        assert weights.total == 0
        assert weights.token_B == [0, 0]


@pytest.mark.process
def test_the_mathematics_imports_no_engine_and_what_a_config_needs_no_torch() -> None:
    script = """
import sys
from ngym.trainer import sweep, train
from ngym.trainer.losses import advantages
from ngym.trainer.recipe import algorithms, objective
assert "torch" not in sys.modules
from ngym.trainer.losses import gae, policy_loss, preference_loss
print(sorted({"deepspeed", "vllm", "transformers"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
