"""KTO from labeled rows to a step: mismatched answers, z, both labels, and the same result for any micro-batches."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_service import new_policy, on_two_ranks
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ngym.errors import UsageError
from ngym.trainer import loop
from ngym.trainer.algorithms import kto
from ngym.trainer.data import chat_dataset
from ngym.trainer.data.samples import Batch
from ngym.trainer.engine import engine
from ngym.trainer.engine.sanity_checks import NanGuard
from ngym.trainer.evaluation import heldout_loss
from ngym.trainer.evaluation.heldout_loss import HeldOutData
from ngym.trainer.model import attention
from ngym.trainer.model import policy as model
from ngym.trainer.recipe import algorithms, recipe

Row = dict[str, Any]

pytestmark = pytest.mark.usefixtures("only_rank")


@pytest.fixture(scope="module")
def tokenizer(root: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")


@pytest.fixture(scope="module")
def start(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_policy(root, tmp_path_factory.mktemp("policy") / "start")


def row(number: int, task: int | None = None, label: bool | None = None) -> Row:
    """Good answers are short, bad ones long."""
    rng, good = random.Random(number), number % 2 == 0 if label is None else label
    a = 10 + (number if task is None else task)
    text = f"The answer is {a + 7}." if good else " ".join("Perhaps" for _ in range(rng.randint(3, 6)))
    return {
        "prompt": [{"role": "user", "content": f"Tom has {a} coins and buys 7 more. How many coins does Tom have?"}],
        "completion": [{"role": "assistant", "content": text}],
        "label": good,
    }


def write(path: Path, *rows: Row) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), "utf-8")
    return path


def learner(start: Path, tokenizer: PreTrainedTokenizerBase) -> engine.Engine:
    policy = model.load_policy(recipe.ModelOptions(path=str(start)), tokenizer, seed=0)
    optimizing = recipe.OptimizerOptions(lr=1e-2, eps=1e-3)
    return engine.Engine(policy, recipe.Launch(0, 0, 1), recipe.EngineOptions(zero_stage=0), optimizing)


def algorithm(trained: engine.Engine, budget: int = 100_000, **options: Any) -> kto.Kto:
    return kto.Kto(algorithms.KtoOptions(**options), trained, budget)


def test_the_mismatched_answer_is_the_nearest_one_before_to_another_prompt(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows = [row(0, task=1), row(1, task=1), row(2, task=5), row(3, task=5), row(4, task=8)]
    read = chat_dataset.read_labeled(write(tmp_path / "kto.jsonl", *rows), tokenizer)
    assert [each.label for each in read] == [True, False, True, False, True]
    for each, partner in zip(read, (4, 4, 1, 1, 3), strict=True):
        (answer,), (other,), (own,) = each.answer.segments, each.mismatched.segments, read[partner].answer.segments
        ((begin, end),), ((from_, to),) = other.spans, own.spans
        assert other.token_ids[begin:end] == own.token_ids[from_:to]
        assert other.token_ids[:begin] == answer.token_ids[: answer.spans[0][0]]


def test_rows_that_cannot_be_used_are_named(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", row(0), {**row(1), "label": 1}, {"messages": []}, {**row(2), "completion": []})
    with pytest.raises(UsageError) as failure:
        chat_dataset.read_labeled(path, tokenizer)
    assert [line.removeprefix(f"{path}:") for line in str(failure.value).splitlines()] == [
        "2: the label is 1; it must be true or false",
        '3: not a labeled answer: it needs "prompt", a list of {"role", "content"}',
        "4: nothing to train on: no message of 'completion' has the role 'assistant'",
    ]
    with pytest.raises(UsageError, match="all prompts are equal"):
        chat_dataset.read_labeled(write(path, row(0, task=1), row(1, task=1)), tokenizer)


def test_the_first_loss_is_a_half_and_training_separates_the_labels(
    start: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    trained = learner(start, tokenizer)
    kto_ = algorithm(trained)
    read = kto_.samples(write(tmp_path / "kto.jsonl", *map(row, range(24))), tokenizer)
    samples = kto_.prepare(read, trained, 300)
    means = [loop.take_step(trained, kto_, samples, 100_000, 1.0).means for _ in range(10)]
    assert means[0]["loss"] == pytest.approx(0.5, abs=1e-6) and means[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert means[-1]["rewards/chosen"] > means[-1]["rewards/rejected"] + 1
    assert means[-1]["loss"] < 0.35 and all(each["kl"] >= 0 for each in means)


def test_a_step_without_desirable_answers_has_no_reward_of_them(
    start: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    trained = learner(start, tokenizer)
    kto_ = algorithm(trained)
    path = write(tmp_path / "kto.jsonl", *(row(number, label=number > 3) for number in range(6)))
    samples = kto_.prepare(kto_.samples(path, tokenizer), trained, 100_000)
    batch = Batch([samples[:2], samples[2:4], samples[3:]])
    reported: list[dict[str, float]] = []
    guard = NanGuard(None, 1)
    loop.train(
        trained, kto_, [Batch([samples[:4]]), batch], 100_000, lambda _: 1.0, guard, lambda _, r: reported.append(r)
    )
    assert "rewards/chosen" not in reported[0] and reported[0]["rewards/rejected"] == pytest.approx(0, abs=1e-6)
    assert {"rewards/chosen", "rewards/rejected", "loss"} <= set(reported[1])
    held_out = HeldOutData(samples[:4], kto_, trained, 100_000, 10, lambda *_: None).means()
    assert "rewards/chosen" not in held_out and "rewards/rejected" in held_out


def test_z_is_the_mean_gain_of_the_mismatched_answers_of_the_whole_step(
    start: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heldout_loss, "PLANNED_AT_ONCE", 2)
    trained = learner(start, tokenizer)
    kto_ = algorithm(trained, beta=1.0)
    path = write(tmp_path / "kto.jsonl", *(row(number, label=True) for number in range(6)))
    samples: Any = kto_.prepare(kto_.samples(path, tokenizer), trained, 100_000)
    for _ in range(3):  # answers of the same form: their likelihood grows after other prompts, too
        loop.take_step(trained, kto_, samples, 100_000, 1.0)
    gains = []
    for sample in samples:
        (segment,) = sample.mismatched.segments
        ids, ((begin, end),) = torch.tensor([segment.token_ids]), segment.spans
        with torch.no_grad():
            trained.policy.network.set_attn_implementation("sdpa")
            logprobs = trained.policy.network(input_ids=ids).logits[0, begin - 1 : end - 1].log_softmax(-1)
        gains.append(logprobs.gather(1, ids[0, begin:end, None]).sum().item() - sample.mismatched_reference)
    trained.policy.network.set_attn_implementation(attention.NAME)
    assert (expected := sum(gains) / 6) > 1
    held_out = HeldOutData(samples, kto_, trained, 70, 10, lambda *_: None).means()
    means = loop.take_step(trained, kto_, samples, 70, 1.0).means
    assert means["kl"] == pytest.approx(expected, rel=1e-4)
    assert (held_out["kl"], held_out["loss"]) == pytest.approx((means["kl"], means["loss"]), rel=1e-4)


def test_two_ranks_and_small_micro_batches_learn_what_one_learns(
    start: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """The whole program, `ng_train kto.yaml`, on two ranks."""
    path = write(tmp_path / "kto.jsonl", *map(row, range(21)))
    overrides = [f"model.path={start}", "data.path=kto.jsonl", "batch_size=8", "output=run", "epochs=1"]
    overrides += ["micro_batch_tokens=150", "schedule=null", "schedule.name=constant", "algorithm.desirable_weight=1.3"]
    ranks = on_two_ranks(tmp_path, ["train", "kto.yaml", *overrides, "optimizer.lr=1e-2", "optimizer.eps=1e-3"])
    output = [process.communicate(timeout=600)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], output

    alone = learner(start, tokenizer)
    kto_ = algorithm(alone, desirable_weight=1.3)
    samples = kto_.prepare(kto_.samples(path, tokenizer), alone, 100_000)
    order = list(range(21))
    random.Random("0 epoch 0").shuffle(order)
    batches = [[samples[index] for index in order[first : first + 8]] for first in (0, 8, 16)]
    expected = [loop.take_step(alone, kto_, batch, 100_000, 1.0) for batch in batches]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for found, step in zip(rows, expected, strict=True):
        assert {name: found[name] for name in step.means} == pytest.approx(step.means, rel=1e-4, abs=2e-6)
        assert math.isfinite(found["grad_norm"])
    saved = load_file(tmp_path / "run" / "policy" / "model.safetensors")
    for name, tensor in alone.weights().items():
        if name in saved:
            assert (saved[name] - tensor).abs().max().item() < 2e-6
