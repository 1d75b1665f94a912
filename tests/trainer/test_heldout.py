"""Held-out loss of a run that learns from a file: before the first step, every few steps, at the end, on any ranks."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from small_model import SHAPE
from trainer_service import on_two_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from ngym.cli.train import main
from ngym.errors import UsageError
from ngym.trainer import loop
from ngym.trainer.algorithms import dpo, sft
from ngym.trainer.data import samples as samples_module
from ngym.trainer.engine import engine
from ngym.trainer.evaluation import heldout_loss
from ngym.trainer.model import policy as model
from ngym.trainer.recipe import algorithms, recipe_reader
from ngym.trainer.recipe import recipe as config

Values = dict[str, Any]

pytestmark = pytest.mark.usefixtures("only_rank")


@pytest.fixture(scope="module")
def tokenizer(root: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")


@pytest.fixture(scope="module")
def data(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "demonstrations.jsonl"
    script = root / "data" / "calculator" / "generate.py"
    subprocess.run([sys.executable, script, "demonstrations", "--output", path, "--count", "64"], check=True)
    return path


@pytest.fixture(scope="module")
def learner(tokenizer: PreTrainedTokenizerBase) -> Any:
    options = config.ModelOptions(from_scratch=SHAPE, tokenizer="data/tiny_policy/tokenizer")
    launch = config.Launch(rank=0, local_rank=0, ranks=1)
    policy = model.load_policy(options, tokenizer, 0)
    return engine.Engine(policy, launch, config.EngineOptions(), config.OptimizerOptions(lr=1e-3))


def measuring(learner: Any, samples: list[Any], algorithm: Any, budget: int = 100_000, every: int = 2) -> Any:
    records: list[tuple[int, Values, str]] = []
    held_out = heldout_loss.HeldOutData(
        samples, algorithm, learner, budget, every, lambda step, values, line: records.append((step, values, line))
    )
    return held_out, records


def nll_by_transformers(learner: Any, samples: list[Any], folder: Path) -> float:
    """Of each trained token alone: one sequence at a time, no packing."""
    learner.policy.network.save_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder)
    values: list[float] = []
    for sample in samples:
        for segment in sample.segments:
            with torch.no_grad():
                logits = network(torch.tensor([segment.token_ids])).logits[0]
            log_p = logits.log_softmax(-1)
            values += [
                -float(log_p[place - 1, segment.token_ids[place]])
                for start, end in segment.spans
                for place in range(start, end)
            ]
    return math.fsum(values) / len(values)


def test_the_perplexity_is_that_of_transformers_however_the_file_is_cut(
    learner: Any, tokenizer: PreTrainedTokenizerBase, data: Path, tmp_path: Path
) -> None:
    samples = sft.Sft().samples(data, tokenizer)
    expected = nll_by_transformers(learner, samples, tmp_path)
    learner.policy.train()
    for budget in (100_000, 300):
        held_out, records = measuring(learner, samples, sft.Sft(), budget)
        assert list(held_out.evaluate_between([], 0)) == []
        ((step, values, line),) = records
        assert step == 0 and values["val/loss"] == pytest.approx(expected, rel=1e-5)
        assert values["val/perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)
        assert f"held-out after 0 steps: loss {values['val/loss']:.4f}," in line and "(64 samples)" in line
    assert learner.policy.training, "the evaluation turns dropout off, and on again"


@pytest.mark.parametrize(
    ("count", "done", "measured"),
    [(5, 0, [0, 2, 4, 5]), (4, 0, [0, 2, 4]), (3, 2, [2, 4, 5]), (3, 1, [2, 4]), (0, 4, [4]), (0, 5, [5])],
)
def test_it_is_measured_before_the_first_step_every_so_many_and_at_the_end(
    learner: Any, tokenizer: PreTrainedTokenizerBase, data: Path, count: int, done: int, measured: list[int]
) -> None:
    held_out, records = measuring(learner, sft.Sft().samples(data, tokenizer)[:2], sft.Sft())
    batches = [samples_module.Batch([]) for _ in range(count)]
    for number, batch in enumerate(held_out.evaluate_between(batches, done), done + 1):
        assert batch is batches[number - done - 1]
        assert all(step < number for step, *_ in records), "a batch is trained before it is measured"
    assert [step for step, *_ in records] == measured


def test_a_loss_that_is_not_a_number_is_logged_and_ends_the_run(
    learner: Any, tokenizer: PreTrainedTokenizerBase, data: Path
) -> None:
    class Broken(sft.Sft):  # type: ignore[name-defined,misc]
        def loss(self, scores: Any, packed: Any) -> Any:
            return super().loss(scores._replace(logprobs_N=scores.logprobs_N * math.nan), packed)

    held_out, records = measuring(learner, sft.Sft().samples(data, tokenizer)[:2], Broken())
    with pytest.raises(
        heldout_loss.HeldOutNotFinite, match=r"the held-out loss after step 4 is nan: .* not saved"
    ) as caught:
        list(held_out.evaluate_between([], 4))
    assert caught.value.step == 4 and math.isnan(records[0][1]["val/loss"])


def test_preferences_are_measured_against_the_policy_that_the_run_began_with(
    learner: Any, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    def answer(text: str) -> list[Values]:
        return [{"role": "assistant", "content": text}]

    rows = [
        {"prompt": [{"role": "user", "content": f"{n} + 1?"}], "chosen": answer(f"{n + 1}"), "rejected": answer("No.")}
        for n in range(9)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    algorithm = dpo.Dpo(algorithms.DpoOptions(name="dpo"))
    pairs = algorithm.prepare(algorithm.samples(path, tokenizer), learner, 1000)
    held_out, records = measuring(learner, pairs, algorithm, budget=100)
    list(held_out.evaluate_between([], 0))
    ((_, values, line),) = records
    assert values["val/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert values["val/rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert "val/perplexity" not in values and "rewards/accuracies" in line


def test_a_long_file_is_one_step_whatever_its_order(
    learner: Any, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heldout_loss, "PLANNED_AT_ONCE", 2)

    def answer(words: int) -> list[Values]:
        return [{"role": "assistant", "content": " ".join(["No."] * words)}]

    rows = [
        {"prompt": [{"role": "user", "content": f"{n}?"}], "chosen": answer(2 + n * n), "rejected": answer(1)}
        for n in range(6)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    algorithm = dpo.Dpo(algorithms.CpoOptions(name="cpo"))
    pairs = algorithm.prepare(algorithm.samples(path, tokenizer), learner, 1000)
    in_order, shuffled = ([pairs[index] for index in places] for places in (range(6), (5, 0, 4, 1, 3, 2)))
    one, other = (measuring(learner, some, algorithm)[0].means()["sft_loss"] for some in (in_order, shuffled))
    tokens = [pair.chosen_tokens for pair in pairs]
    alone = [measuring(learner, [pair], algorithm)[0].means()["sft_loss"] for pair in pairs]
    by_token = sum(map(float.__mul__, alone, map(float, tokens))) / sum(tokens)
    assert one == pytest.approx(by_token, rel=1e-6) and other == pytest.approx(by_token, rel=1e-6)


def test_ng_train_measures_the_same_on_two_ranks_as_on_one(
    learner: Any, tokenizer: PreTrainedTokenizerBase, data: Path, tmp_path: Path
) -> None:
    lines = data.read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(lines[:24]), "utf-8")
    (tmp_path / "held_out.jsonl").write_text("".join(lines[24:]), "utf-8")
    overrides = ["data.path=train.jsonl", "evaluation.data=held_out.jsonl", "evaluation.every=2", "evaluation.limit=33"]
    overrides += ["batch_size=8", "micro_batch_tokens=600", "output=run", "engine.zero_stage=1"]
    overrides += ["optimizer.name=adamw", "optimizer.lr=1e-2", "model.from_scratch.rope_theta=10000"]
    overrides += [f"model.from_scratch.{key}={value}" for key, value in SHAPE.items()]
    ranks = on_two_ranks(tmp_path, ["train", "sft.yaml", *overrides])
    outputs = [process.communicate(timeout=600)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    measured = {row["step"]: row["val/loss"] for row in rows if "val/loss" in row}
    assert sorted(measured) == [0, 2, 3] and measured[3] < measured[0]
    samples = sft.Sft().samples(tmp_path / "held_out.jsonl", tokenizer)[:33]
    one, _ = measuring(learner, samples, sft.Sft())
    assert measured[0] == pytest.approx(one.means()["loss"], rel=1e-5)
    assert outputs[0].count("held-out after") == 3 and "held-out after" not in outputs[1]


def test_a_run_that_continues_has_the_held_out_file_that_it_began_with(
    learner: Any, tokenizer: PreTrainedTokenizerBase, data: Path, tmp_path: Path
) -> None:
    rows = data.read_text().splitlines(keepends=True)
    held_out, other = tmp_path / "held_out.jsonl", tmp_path / "other.jsonl"
    held_out.write_text("".join(rows[:4]))
    other.write_text("".join(rows[:3]))

    def source(evaluated: Path) -> loop.FileSource:
        words = [f"data.path={data}", f"evaluation={{data: {evaluated}}}", f"model.from_scratch={json.dumps(SHAPE)}"]
        recipe, _ = recipe_reader.read_recipe(["sft.yaml"], words)
        return loop.FileSource(loop.Parts(recipe, learner, sft.Sft(), tokenizer), lambda text: None)

    state = source(held_out).state()
    assert state is not None
    source(held_out).check(state)
    source(other).check(state)  # a resumed run may be measured on another file
    held_out.write_text("".join(rows[:3]))
    with pytest.raises(UsageError, match=r"held_out\.jsonl: changed since the run began with it.*restore the file"):
        source(held_out).check(state)
    source(held_out).check({"digest": state["digest"]})  # of an older version


def test_a_run_that_learns_from_a_file_is_not_evaluated_on_tasks(tmp_path: Path, data: Path) -> None:
    recipe = [f"output={tmp_path / 'run'}", f"data.path={data}", f"evaluation.tasks={data}"]
    result = CliRunner().invoke(main, ["sft.yaml", *recipe])
    assert result.exit_code == 2
    assert "evaluation: sft trains on a file and is evaluated on one; name evaluation.data" in result.stderr
