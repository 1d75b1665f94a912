"""Reward models from rows to a step and a saved folder: scored tokens, the cost of a pair, and loading elsewhere."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from trainer_service import new_policy, on_two_ranks
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from ngym.cli.train import main
from ngym.errors import ConfigError, UsageError
from ngym.trainer import loop
from ngym.trainer.algorithms import reward_model
from ngym.trainer.data import chat_dataset
from ngym.trainer.engine import engine
from ngym.trainer.evaluation.heldout_loss import HeldOutData
from ngym.trainer.losses import reward_loss
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


def assistant_message(text: str) -> Row:
    return {"role": "assistant", "content": text}


def pair(number: int) -> Row:
    """The answer that names a number is the better one."""
    rng = random.Random(number)
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    perhaps = " ".join(rng.choice(("Perhaps", "Maybe")) for _ in range(rng.randint(2, 9)))
    return {
        "prompt": [{"role": "user", "content": f"Tom has {a} coins and buys {b} more. How many coins does Tom have?"}],
        "chosen": [assistant_message(f"The answer is {a + b}.")],
        "rejected": [assistant_message(f"{perhaps}.")],
        "margin": rng.random(),
    }


def outcome(number: int) -> Row:
    row, label = pair(number), number % 2 == 0
    return {"prompt": row["prompt"], "completion": row["chosen" if label else "rejected"], "label": label}


def steps(number: int) -> Row:
    row = pair(number)
    return {"prompt": row["prompt"], "completion": [*row["chosen"], *row["rejected"]], "labels": [True, False]}


ROWS = {"pairs": pair, "outcomes": outcome, "steps": steps}


def write(path: Path, *rows: Row) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def learner(start: Path, tokenizer: PreTrainedTokenizerBase, stage: int = 0, **options: Any) -> engine.Engine:
    scorer = model.load_reward_model(recipe.ModelOptions(path=str(start), **options), tokenizer, seed=0)
    optimizing = recipe.OptimizerOptions(lr=1e-2, eps=1e-3)
    return engine.Engine(scorer, recipe.Launch(0, 0, 1), recipe.EngineOptions(zero_stage=stage), optimizing)


def algorithm(**options: Any) -> reward_model.RewardModelTraining:
    return reward_model.RewardModelTraining(algorithms.RewardModelOptions(**options))


def of_transformers(folder: Path, tokenizer: Any, conversations: list[list[Row]]) -> list[float]:
    """The scores of transformers' own class, in one padded batch."""
    network = AutoModelForSequenceClassification.from_pretrained(folder)
    texts = [tokenizer.apply_chat_template(each, tokenize=False) for each in conversations]
    batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = network(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return [float(score) for score in logits[:, 0]]


def test_the_saved_folder_scores_in_transformers_what_training_scored(
    start: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    trained, training = learner(start, tokenizer), algorithm(supervision="steps")
    rows = [steps(number) for number in range(5)]
    samples = training.samples(write(tmp_path / "steps.jsonl", *rows), tokenizer)
    loop.take_step(trained, training, samples, 100_000, 1.0)
    scores = engine.score(samples, trained.values, trained, 150)  # in several micro-batches
    trained.save(tmp_path / "saved", tokenizer)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"] and len(config["id2label"]) == 1
    for row, (first, second) in zip(rows, scores, strict=True):
        prefixes = [row["prompt"] + row["completion"][:end] for end in (1, 2)]
        assert [*first, *second] == pytest.approx(of_transformers(tmp_path / "saved", tokenizer, prefixes), abs=1e-5)
    again = learner(tmp_path / "saved", tokenizer)  # its head is kept, and not drawn again
    assert engine.score(samples, again.values, again, 100_000)[0] == [
        pytest.approx(each, abs=1e-5) for each in scores[0]
    ]


def test_the_new_head_of_a_policy_is_not_reported_as_missing(
    start: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    learner(start, tokenizer)
    assert "LOAD REPORT" not in caplog.text


@pytest.mark.parametrize("supervision", ROWS)
@pytest.mark.parametrize("stage", [0, 3])
def test_training_separates_good_from_bad_and_held_out_rows_are_measured(
    start: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, supervision: str, stage: int
) -> None:
    trained, training = learner(start, tokenizer, stage), algorithm(supervision=supervision)
    samples = training.samples(write(tmp_path / "rows.jsonl", *map(ROWS[supervision], range(24))), tokenizer)
    means = [loop.take_step(trained, training, samples, 400, 1.0).means for _ in range(8)]
    assert means[-1]["rewards/accuracies"] == 1.0 and means[-1]["loss"] < 0.5 * means[0]["loss"]
    assert means[-1]["rewards/chosen"] > means[-1]["rewards/rejected"]
    assert not any(name.startswith(("calibration/", "moments/")) for name in means[-1])
    held_out = training.samples(write(tmp_path / "rows.jsonl", *map(ROWS[supervision], range(24, 36))), tokenizer)
    found = HeldOutData(held_out, training, trained, 300, 10, lambda *_: None).means()
    assert found["rewards/accuracies"] > 0.9
    shares = {name: found[f"calibration/{name}/share"] for name in reward_loss.BINS}
    assert sum(shares.values()) == pytest.approx(1)
    filled = {name: share for name, share in shares.items() if share}
    assert {name for name in shares if f"calibration/{name}/accuracy" in found} == set(filled) < set(shares)
    errors = [abs(found[f"calibration/{n}/accuracy"] - found[f"calibration/{n}/confidence"]) for n in filled]
    assert found["calibration_error"] == pytest.approx(sum(map(float.__mul__, filled.values(), errors)))
    scores = [value for each in engine.score(held_out, trained.values, trained, 1000) for (value,) in each]
    lengths = [segment.length for sample in held_out for segment in sample.segments]  # type: ignore[attr-defined]
    expected = torch.corrcoef(torch.tensor([scores, lengths], dtype=torch.float64))[0, 1].item()
    assert found["length_correlation"] == pytest.approx(expected, abs=1e-4)


def test_an_adapter_is_trained_with_its_head_and_saved_merged(
    start: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    trained, training = learner(start, tokenizer, lora=recipe.LoraOptions(rank=2)), algorithm()
    rows = [pair(number) for number in range(8)]
    samples = training.samples(write(tmp_path / "pairs.jsonl", *rows), tokenizer)
    head = trained.policy.network.score.weight.detach().clone()
    for _ in range(3):
        loop.take_step(trained, training, samples, 100_000, 1.0)
    assert not torch.equal(head, trained.policy.network.score.weight)
    trained.save(tmp_path / "saved", tokenizer)
    (first, _), *_ = engine.score(samples, trained.values, trained, 100_000)
    chosen = rows[0]["prompt"] + rows[0]["chosen"]
    assert first == pytest.approx(of_transformers(tmp_path / "saved", tokenizer, [chosen]), abs=1e-5)


def test_keys_of_another_supervision_change_nothing(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    every = {**steps(0), **outcome(0), **pair(0), "completion": steps(0)["completion"]}
    for supervision in ROWS:
        only = {"pairs": pair(0), "steps": steps(0), "outcomes": {**outcome(0), "completion": every["completion"]}}
        path, bare = write(tmp_path / "every.jsonl", every), write(tmp_path / "bare.jsonl", only[supervision])
        read = [chat_dataset.read_judged(each, tokenizer, supervision) for each in (path, bare)]
        assert [row.answers for row in read[0]] == [row.answers for row in read[1]]


def test_rows_that_cannot_be_used_are_named(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    same = {**pair(0), "rejected": pair(0)["chosen"]}
    cases: list[tuple[Any, Row, str]] = [
        ("pairs", same, "chosen and rejected are equal"),
        ("pairs", outcome(0), 'not a preference pair: it needs "chosen"'),
        ("outcomes", pair(0), 'not a labeled answer: it needs "completion"'),
        ("steps", {**steps(0), "labels": [True]}, "it needs true or false for each of the 2 assistant messages"),
        ("steps", outcome(0), "the labels are None"),
    ]
    for supervision, row, message in cases:
        with pytest.raises(UsageError) as failure:
            chat_dataset.read_judged(write(path, row), tokenizer, supervision)
        assert message in str(failure.value) and ":1:" in str(failure.value)
    without = {**pair(0), "margin": None}
    with pytest.raises(UsageError, match="without a number as its margin"):
        algorithm(margin_coef=1.0).samples(write(path, without), tokenizer)


def test_a_network_without_a_score_is_refused(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(**shape, vocab_size=len(tokenizer))).save_pretrained(tmp_path / "bert")
    with pytest.raises(ConfigError, match="choose a decoder model"):
        model.load_reward_model(recipe.ModelOptions(path=str(tmp_path / "bert")), tokenizer, seed=0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm.supervision=steps", "algorithm.margin_coef=1"], "algorithm.margin_coef: labels have no pairs"),
        (["engine.tensor_parallel=2", "engine.zero_stage=1"], "the head of a reward model is not cut"),
        (["algorithm.supervision=pair"], "Input should be 'pairs', 'outcomes' or 'steps'"),
    ],
)
def test_a_mistake_in_the_recipe_is_one_line(words: list[str], message: str, start: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "pairs.jsonl", pair(0))
    arguments = [f"model.path={start}", f"data.path={data}", f"evaluation.data={data}", f"output={tmp_path}/run"]
    result = CliRunner().invoke(main, ["reward_model.yaml", *arguments, "algorithm.center_coef=0", *words])
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_two_ranks_learn_what_one_learns(start: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """The whole program, `ng_train reward_model.yaml`, on two ranks."""
    path = write(tmp_path / "pairs.jsonl", *map(pair, range(21)))
    overrides = [f"model.path={start}", "data.path=pairs.jsonl", "batch_size=8", "output=run", "epochs=1"]
    overrides += ["micro_batch_tokens=150", "schedule=null", "schedule.name=constant", "algorithm.margin_coef=0.5"]
    overrides += ["optimizer.lr=1e-2", "optimizer.eps=1e-3", "evaluation.data=pairs.jsonl", "evaluation.every=3"]
    ranks = on_two_ranks(tmp_path, ["train", "reward_model.yaml", *overrides])
    output = [process.communicate(timeout=600)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], output

    alone, training = learner(start, tokenizer), algorithm(margin_coef=0.5, center_coef=0.01)
    samples = training.samples(path, tokenizer)
    order = list(range(21))
    random.Random("0 epoch 0").shuffle(order)
    batches = [[samples[index] for index in order[first : first + 8]] for first in (0, 8, 16)]
    expected = [loop.take_step(alone, training, batch, 100_000, 1.0) for batch in batches]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained, measured = ([row for row in rows if (key in row)] for key in ("loss", "val/loss"))
    for found, step in zip(trained, expected, strict=True):
        assert {name: found[name] for name in step.means} == pytest.approx(step.means, rel=1e-4, abs=1e-5)
    held_out = HeldOutData(samples, training, alone, 100_000, 10, lambda *_: None).means()
    assert {name: measured[-1][f"val/{name}"] for name in held_out} == pytest.approx(held_out, rel=1e-4, abs=1e-5)
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "policy")
    for name, tensor in alone.weights().items():
        assert (saved.state_dict()[name] - tensor).abs().max().item() < 2e-6
