"""DPO from rows to a step: trained tokens, the cost of a pair, and the same result for any micro-batches."""

from __future__ import annotations

import copy
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_model
import torch
import torch.nn.functional as F
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file
from trainer_service import on_two_ranks, train
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ngym.cli.train import main
from ngym.errors import UsageError
from ngym.trainer import loop
from ngym.trainer.algorithms import dpo
from ngym.trainer.data import chat_dataset
from ngym.trainer.engine import engine
from ngym.trainer.model import chunked_logprobs, packing
from ngym.trainer.model import policy as model
from ngym.trainer.recipe import algorithms, recipe

CPU = torch.device("cpu")
SHAPE = {**small_model.SHAPE, "max_position_embeddings": 512}
TOOL = {"name": "calculator", "description": "Sums.", "parameters": {"type": "object", "properties": {}}}
EVERY_TERM = {"length_normalised": True, "label_smoothing": 0.1, "sft_weight": 0.5, "beta": 2.0}
PRESETS = ("robust_dpo", "wpo", "cpo", "simpo", "orpo")
Row = dict[str, Any]

pytestmark = pytest.mark.usefixtures("only_rank")


@pytest.fixture(scope="module")
def tokenizer(root: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")


def assistant_message(text: str) -> Row:
    return {"role": "assistant", "content": text}


def user_message(text: str) -> Row:
    return {"role": "user", "content": text}


def tool_call(expression: str, result: str) -> list[Row]:
    function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    return [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": result},
    ]


def pair(number: int = 7) -> Row:
    """A rollout that used the tool, and one that guessed."""
    rng = random.Random(number)
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    return {
        "prompt": [user_message(f"Tom has {a} coins and buys {b} more. How many coins does Tom have?")],
        "chosen": [*tool_call(f"{a}+{b}", str(a + b)), assistant_message(f"The answer is {a + b}.")],
        "rejected": [assistant_message(f"The answer is {rng.randint(1, 999)}.") for _ in range(rng.choice((1, 1, 2)))],
        "tools": [{"type": "function", "function": TOOL}],
        "margin": 1.0,
    }


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def algorithm(name: str = "dpo", **options: Any) -> Any:
    return dpo.Dpo(algorithms.ALGORITHMS[name](name=name, **options))


@pytest.fixture(scope="module")
def pairs(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    path = write(tmp_path_factory.mktemp("data") / "pairs.jsonl", *map(pair, range(33)))
    samples: list[Any] = algorithm().samples(path, tokenizer)
    return samples


def new_policy(tokenizer: PreTrainedTokenizerBase) -> Any:
    options = recipe.ModelOptions(from_scratch=SHAPE, tokenizer="data/tiny_policy/tokenizer")
    return model.load_policy(options, tokenizer, seed=0)


def learner(tokenizer: PreTrainedTokenizerBase, stage: int = 0) -> Any:
    # the eps of Adam hides no gradient here: a wrong factor on a micro-batch changes the weights by about lr
    optimizing = recipe.OptimizerOptions(lr=1e-2, eps=1e-3)
    launch = recipe.Launch(rank=0, local_rank=0, ranks=1)
    return engine.Engine(new_policy(tokenizer), launch, recipe.EngineOptions(zero_stage=stage), optimizing)


def weights_of(learner: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in learner.weights().items()}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in one if name in other)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.598139, 0.744397, 0.693147]),
        ({"label_smoothing": 0.1}, [0.618139, 0.734397, 0.693147]),
        ({"loss": "ipo"}, [9.0, 36.0, 25.0]),
        ({"loss": "hinge"}, [0.8, 1.1, 1.0]),
        ({"loss": "hinge", "beta": 1.0}, [0.0, 2.0, 1.0]),
        ({"loss": "hinge", "beta": 1.0, "length_normalised": True}, [0.3, 1.8, 1.3]),
        ({"sft_weight": 0.5}, [1.598139, 1.494397, 1.193147]),
    ],
)
def test_each_loss_is_its_closed_form(options: dict[str, Any], expected: list[float]) -> None:
    """Rejected: -5 in 5 tokens against -4 before. Chosen, in 2 tokens: -4 against -5, -3 and -2 against -1."""
    for logprob, reference, value in zip((-4.0, -3.0, -2.0), (-5.0, -1.0, -1.0), expected, strict=True):
        sides = dpo.Side([1, 2, 3], [(1, 3)], chosen=True), dpo.Side([1, 2, 3, 4, 5, 6], [(1, 6)], chosen=False)
        batch = [dpo.PairSample(sides, reference=(reference, -4.0))]
        logprobs = torch.tensor([logprob / 2] * 2 + [-1.0] * 5)  # sorted by their tokens
        loss = algorithm(**options).step_loss(batch).loss(chunked_logprobs.Scores(logprobs), packing.pack(batch, CPU))
        assert loss.sum.item() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("options", [{"beta": 0.5}, {"loss": "ipo", "beta": 0.5}, {"loss": "hinge"}, EVERY_TERM])
def test_loss_and_gradients_are_those_of_the_formula_on_one_conversation_after_the_other(
    tokenizer: PreTrainedTokenizerBase, pairs: list[Any], options: dict[str, Any]
) -> None:
    policy = new_policy(tokenizer)
    rng = random.Random(0)
    batch = [replace(sample, reference=(-rng.uniform(100, 130), -rng.uniform(50, 70))) for sample in pairs[:9]]
    packed = packing.pack(batch, CPU)
    dpo_ = algorithm(**options)
    loss = dpo_.step_loss(batch).loss(policy(packed), packed)
    loss.sum.backward()
    assert dpo_.step_loss(batch).divisor == 9  # the loop divides by the pairs of the whole batch
    gradients = [parameter.grad.clone() for parameter in policy.parameters()]
    policy.zero_grad()

    policy.network.set_attn_implementation("sdpa")  # Hugging Face's own, one conversation at a time
    expected = torch.zeros(())
    for sample in batch:
        h, nll = torch.zeros(()), torch.zeros(())
        for chosen, reference in zip((True, False), sample.reference, strict=True):
            logprobs = torch.cat([_logprobs(policy.network, s) for s in sample.segments if s.chosen is chosen])
            gain = logprobs.sum() - reference
            h = h + (1 if chosen else -1) * (gain / len(logprobs) if options.get("length_normalised") else gain)
            nll = -logprobs.mean() if chosen else nll
        beta, smoothing = options.get("beta", 0.1), options.get("label_smoothing", 0.0)
        by_name = {
            "sigmoid": -(1 - smoothing) * torch.log(torch.sigmoid(beta * h))
            - smoothing * torch.log(torch.sigmoid(-beta * h)),
            "ipo": (h - 1 / (2 * beta)).square(),
            "hinge": F.relu(1 - beta * h),
        }
        expected = expected + by_name[options.get("loss", "sigmoid")] + options.get("sft_weight", 0.0) * nll
    expected.backward()
    assert loss.sum.item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss.metrics["loss"].total == pytest.approx(expected.item(), rel=1e-5) and loss.metrics["loss"].count == 9
    largest = max(gradient.abs().max().item() for gradient in gradients)
    for gradient, parameter in zip(gradients, policy.parameters(), strict=True):
        assert (gradient - parameter.grad).abs().max().item() < 1e-5 * largest


def _logprobs(network: Any, segment: Any) -> torch.Tensor:
    ids = torch.tensor([segment.token_ids])
    logprobs = network(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    return torch.cat([logprobs[start - 1 : end - 1] for start, end in segment.spans])


@pytest.mark.parametrize("stage", [0, 3])
def test_the_first_loss_is_ln_2_and_training_prefers_what_was_chosen(
    tokenizer: PreTrainedTokenizerBase, pairs: list[Any], stage: int
) -> None:
    trained = learner(tokenizer, stage)
    dpo_ = algorithm()
    samples = dpo_.prepare(pairs, trained, 1000)  # the reference is computed in other micro-batches
    steps = [loop.take_step(trained, dpo_, samples, 100_000, 1.0) for _ in range(8)]
    assert steps[0].means["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[0].means["rewards/margins"] == pytest.approx(0, abs=2e-6)
    assert steps[0].means["preference_loss"] == steps[0].means["loss"]
    assert steps[0].means["logps/chosen"] < -100 and steps[0].means["sft_loss"] == pytest.approx(6.9, abs=0.2)
    last = steps[-1].means
    assert last["rewards/accuracies"] == 1.0 and last["loss"] < 0.3
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"], rel=1e-5)
    assert [sample.reference for sample in samples] != [sample.reference for sample in pairs]


@pytest.mark.parametrize("name", PRESETS)
def test_every_named_loss_learns_to_prefer_what_was_chosen(
    tokenizer: PreTrainedTokenizerBase, pairs: list[Any], name: str
) -> None:
    trained, algorithm_ = learner(tokenizer), algorithm(name)
    samples = algorithm_.prepare(pairs, trained, 1000)
    means = [loop.take_step(trained, algorithm_, samples, 100_000, 1.0).means for _ in range(8)]
    assert means[-1]["rewards/margins"] > means[0]["rewards/margins"]
    assert name == "cpo" or means[-1]["rewards/accuracies"] == 1.0  # cpo: sums over the longer, chosen sides are lower
    assert means[-1]["preference_loss"] < means[0]["preference_loss"]
    if algorithms.ALGORITHMS[name]().sft_weight:  # the likelihood of what was chosen grows, too
        assert means[-1]["logps/chosen"] > means[0]["logps/chosen"]


EACH_CUT = [{}, EVERY_TERM, *({"name": name} for name in PRESETS)]


@pytest.mark.parametrize("options", EACH_CUT, ids=lambda options: options.get("name", f"dpo {len(options)}"))
def test_a_step_does_not_depend_on_how_the_batch_is_cut(
    tokenizer: PreTrainedTokenizerBase, pairs: list[Any], options: dict[str, Any]
) -> None:
    dpo_ = algorithm(**options)
    results = []
    for budget in (100_000, 600, 1):
        cut = learner(tokenizer)
        samples = dpo_.prepare(pairs, cut, budget)
        steps = [loop.take_step(cut, dpo_, samples, budget, 1.0) for _ in range(2)]
        results.append((weights_of(cut), steps[-1]))
    (expected, full_step), *others = results
    for weights, step in others:
        assert largest_difference(expected, weights) < 1e-6
        assert step.means == pytest.approx(full_step.means, rel=1e-5, abs=1e-6)
        assert step.update.grad_norm == pytest.approx(full_step.update.grad_norm, rel=1e-5)


def test_both_sides_of_a_pair_are_in_the_same_micro_batch(pairs: list[Any]) -> None:
    for micro_batch in packing.plan(pairs, 1, ranks=2):
        packed = packing.pack(micro_batch or pairs[:1], CPU)
        assert {segment.chosen for segment in packed.segments} == {True, False}
        assert dpo.rows_of(packed).lengths.tolist() == [
            sum(segment.trained for segment in packed.segments if segment.chosen is chosen) for chosen in (True, False)
        ]


def test_of_a_pair_only_what_the_assistant_says_after_the_prompt_is_trained(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    prompt = [
        user_message("What is 2+2?"),
        *tool_call("2+2", "4"),
        assistant_message("It is 4."),
        user_message("And 3+3?"),
    ]
    rejected = [assistant_message("7"), user_message("Really?"), assistant_message("Yes.")]
    row = {
        "prompt": prompt,
        "chosen": [*tool_call("3+3", "6"), assistant_message("It is 6.")],
        "rejected": rejected,
        "tools": [],
    }
    (sides,) = chat_dataset.read_pairs(write(tmp_path / "pairs.jsonl", row), tokenizer)
    trained = [
        [tokenizer.decode(segment.token_ids[start:end]) for segment in side.segments for start, end in segment.spans]
        for side in sides
    ]
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3+3"}}\n</tool_call><|im_end|>'
    assert trained == [[call, "It is 6.<|im_end|>"], ["7<|im_end|>", "Yes.<|im_end|>"]]
    context = tokenizer.decode(sides.chosen.segments[0].token_ids)
    assert "It is 4.<|im_end|>" in context and "<tool_response>\n6\n</tool_response>" in context


def test_sides_whose_turns_do_not_continue_one_another_are_several_segments_of_one_sample(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    forgetful = copy.deepcopy(tokenizer)
    forgetful.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n{% endif %}{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    row = {
        "prompt": [user_message("a")],
        "chosen": [assistant_message("b"), user_message("c"), assistant_message("d")],
        "rejected": [assistant_message("e")],
    }
    (sample,) = algorithm().samples(write(tmp_path / "pairs.jsonl", row), forgetful)
    assert [segment.chosen for segment in sample.segments] == [True, True, False]
    packed = packing.pack([sample], CPU)
    assert dpo.rows_of(packed).lengths.tolist() == [
        sum(s.trained for s in sample.segments[:2]),
        packed.segments[-1].trained,
    ]


def test_bad_pairs_are_named_with_file_line_and_reason(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    good = pair()
    path = write(
        tmp_path / "bad.jsonl",
        good,
        "{",
        {"messages": good["prompt"]},
        {**good, "rejected": "The answer is 4."},
        {**good, "chosen": [user_message("a")]},
        {**good, "rejected": []},
        {**good, "prompt": []},
        {**good, "rejected": good["chosen"]},
        {**good, "prompt": [{"role": "user", "content": 7}]},
    )
    with pytest.raises(UsageError) as failure:
        chat_dataset.read_pairs(path, tokenizer)
    lines = str(failure.value).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [f"{path}:{number}" for number in range(2, 10)]
    expected = [
        "not JSON",
        'not a preference pair: it needs "prompt", a list of {"role", "content"}',
        'it needs "rejected", a list',
        "no message of 'chosen' has the role 'assistant'",
        "no message of 'rejected' has the role 'assistant'",
        "the prompt is empty",
        "chosen and rejected are equal",
        "the chat template refuses it",
    ]
    for line, reason in zip(lines, expected, strict=True):
        assert reason in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["algorithm.loss=ipo", "algorithm.label_smoothing=0.1"], "ipo loss has no label smoothing"),
        (
            ["algorithm.loss=ipq"],
            "algorithm.loss: Input should be 'sigmoid', 'ipo', 'hinge', 'robust' or 'odds_ratio'; ",
        ),
        (["algorithm.loss=odds_ratio"], "algorithm.reference_free: odds are those of an answer's mean probability"),
        (["algorithm.name=simpo", "algorithm.loss=hinge"], "hinge loss has no target margin"),
        (
            ["algorithm.advantage={}"],
            "unknown key 'algorithm.advantage': it is a key of other kinds of algorithm, not of dpo",
        ),
        (["algorithm.betta=1"], "unknown key 'algorithm.betta' (did you mean 'beta'?)"),
        ([], "data.path: there is no runs/dpo/pairs.jsonl"),
    ],
)
def test_a_mistake_in_the_recipe_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fresh = ["model.path=null", "model.tokenizer=data/tiny_policy/tokenizer"]
    fresh += [f"model.from_scratch.{key}={value}" for key, value in SHAPE.items()]
    result = CliRunner().invoke(main, ["dpo.yaml", *fresh, *arguments])
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_two_ranks_learn_what_one_learns(tokenizer: PreTrainedTokenizerBase, pairs: list[Any], tmp_path: Path) -> None:
    """The whole program: `ng_train dpo.yaml` on two ranks; an odd last batch of one pair."""
    start = learner(tokenizer)
    start.save(tmp_path / "start", tokenizer)
    write(tmp_path / "pairs.jsonl", *map(pair, range(33)))
    overrides = ["model.path=start", "data.path=pairs.jsonl", "batch_size=16", "output=run", "epochs=1"]
    overrides += [
        "micro_batch_tokens=600",
        "schedule=null",
        "schedule.name=constant",
        "optimizer.lr=1e-2",
        "optimizer.eps=1e-3",
    ]
    ranks = on_two_ranks(tmp_path, ["train", "dpo.yaml", *overrides])
    output = [process.communicate(timeout=600)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], output
    assert "33 samples" in output[0] and "step 3/3" in output[0]

    dpo_ = algorithm(sft_weight=1.0)
    samples = dpo_.prepare(pairs, start, 100_000)
    order = list(range(33))
    random.Random("0 epoch 0").shuffle(order)
    batches = [[samples[index] for index in order[first : first + 16]] for first in (0, 16, 32)]
    expected = [loop.take_step(start, dpo_, batch, 100_000, 1.0) for batch in batches]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row, step in zip(rows, expected, strict=True):
        assert {name: row[name] for name in step.means} == pytest.approx(step.means, rel=1e-4, abs=2e-6)
        assert row["grad_norm"] == pytest.approx(step.update.grad_norm, rel=1e-4)
    saved = load_file(tmp_path / "run" / "policy" / "model.safetensors")
    assert largest_difference(saved, weights_of(start)) < 2e-6


@pytest.mark.parametrize("name", PRESETS)
def test_ng_train_saves_a_policy_under_each_name(name: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    learner(tokenizer).save(tmp_path / "start", tokenizer)
    write(tmp_path / "pairs.jsonl", *map(pair, range(8)))
    words = ["dpo.yaml", f"algorithm.name={name}", f"model.path={tmp_path}/start", f"data.path={tmp_path}/pairs.jsonl"]
    words += [f"output={tmp_path}/run", "batch_size=4", "epochs=1"]
    result = CliRunner().invoke(main, [*words, "--dry-run"])
    assert result.exit_code == 0, result.output
    resolved = yaml.safe_load(result.stdout)["algorithm"]
    assert resolved == algorithms.ALGORITHMS[name]().model_dump(mode="json")
    run = train(tmp_path, words)
    output = run.communicate(timeout=600)[0]
    assert run.returncode == 0, output
    assert (tmp_path / "run" / "policy" / "model.safetensors").exists()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and math.isfinite(rows[-1]["loss"])


def test_an_unknown_algorithm_lists_all_with_a_line_each() -> None:
    result = CliRunner().invoke(main, ["dpo.yaml", "model.path=data/letters/tokenizer", "algorithm.name=dqo"])
    first, *listed = result.stderr.splitlines()
    assert result.exit_code == 2 and first.endswith("there is no algorithm 'dqo' (did you mean 'dpo'?); known:")
    assert [line.split()[0] for line in listed] == list(algorithms.ALGORITHMS)
    assert result.stderr.endswith("pairs of the best and the worst rollout of each group, live\n")
    assert "  orpo                   ORPO (arXiv 2403.07691): the likelihood of the chosen answer" in result.stderr
