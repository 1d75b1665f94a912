"""From rows to log-probabilities: trained tokens, micro-batches and packing, and messages for invalid rows."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import small_model
import torch
from click.testing import CliRunner
from trainer_service import train
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ngym.cli.train import main
from ngym.errors import UsageError
from ngym.files.atomic import held_folder
from ngym.trainer import run_folder
from ngym.trainer.data import chat_dataset, samples
from ngym.trainer.model import packing
from ngym.trainer.model import policy as model
from ngym.trainer.recipe import recipe

CPU = torch.device("cpu")
SHAPE = {**small_model.SHAPE, "initializer_range": 0.2}
SMALL = [f"model.from_scratch.{name}={size}" for name, size in SHAPE.items()]


@pytest.fixture(scope="module")
def tokenizer(root: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")


@pytest.fixture(scope="module")
def demonstrations(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "demonstrations.jsonl"
    script = root / "data" / "calculator" / "generate.py"
    subprocess.run([sys.executable, script, "demonstrations", "--output", path, "--count", "64"], check=True)
    return path


@pytest.fixture(scope="module")
def policy(tokenizer: PreTrainedTokenizerBase) -> Any:
    options = recipe.ModelOptions(from_scratch=SHAPE, tokenizer="data/tiny_policy/tokenizer")
    return model.load_policy(options, tokenizer, seed=0)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def ragged(count: int, seed: int = 0) -> list[Any]:
    """Samples of random tokens, of very different lengths; some have two trained spans, some two segments."""
    rng = random.Random(seed)

    def segment() -> Any:
        length = rng.choice((3, 9, 10, 11, 40, 90))
        spans = [(1, 3)] if length < 9 else [(2, 4), (6, rng.randint(7, length))]
        return samples.Segment([rng.randrange(1024) for _ in range(length)], spans)

    return [samples.Sample(tuple(segment() for _ in range(rng.choice((1, 1, 2))))) for _ in range(count)]


def test_exactly_what_the_assistant_says_is_trained(demonstrations: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [json.loads(line) for line in demonstrations.read_text("utf-8").splitlines()]
    read = chat_dataset.read_demonstrations(demonstrations, tokenizer)
    assert len(read) == len(rows)
    for row, sample in zip(rows, read, strict=True):
        (segment,) = sample.segments
        conversation = tokenizer.apply_chat_template(
            row["messages"], tools=row["tools"], return_dict=True, return_assistant_tokens_mask=True
        )
        length = len(segment.token_ids)
        assert segment.token_ids == conversation["input_ids"][:length]
        assert tokenizer.decode(conversation["input_ids"][length:]) == "\n"  # after the last turn no one says anything
        mask = [0] * length
        for start, end in segment.spans:
            mask[start:end] = [1] * (end - start)
        assert mask == conversation["assistant_masks"][:length]
        last = tokenizer.decode(segment.token_ids[slice(*segment.spans[-1])])
        assert last == row["messages"][-1]["content"] + "<|im_end|>"


def test_a_template_that_drops_old_reasoning_gives_a_segment_for_each_turn(
    demonstrations: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    forgetful = copy.deepcopy(tokenizer)
    forgetful.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n{% endif %}{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    turns = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
    path = write(tmp_path / "two.jsonl", {"messages": turns})
    (sample,) = chat_dataset.read_demonstrations(path, forgetful)
    texts = [forgetful.decode(segment.token_ids) for segment in sample.segments]
    first = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    second = first + "b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    assert texts == [f"{first}<think>\n\n</think>\nb<|im_end|>", f"{second}<think>\n\n</think>\nd<|im_end|>"]
    assert len(chat_dataset.read_demonstrations(path, tokenizer)[0].segments) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"expression": "37+58", "n": [1, 2.5]}', '{"expression": "37+58", "n": [1, 2.5]}'),
        ({"expression": "é"}, '{"expression": "é"}'),
        ("", "{}"),
        ("37 + 58", '"37 + 58"'),  # no JSON object: a string to the template, to the byte
        ('["37"]', '"[\\"37\\"]"'),
        ('{"id": 12345678901234567890123}', '"{\\"id\\": 12345678901234567890123}"'),
    ],
)
@pytest.mark.parametrize("wrapped", [True, False])
def test_arguments_written_as_a_string_of_json_are_not_quoted_again(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, arguments: Any, text: str, wrapped: bool
) -> None:
    quoting = copy.deepcopy(tokenizer)
    quoting.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ (call.function or call).arguments | tojson }}{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    function = {"name": "calculator", "arguments": arguments}
    calls = [{"type": "function", "function": function} if wrapped else function]
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    (sample,) = chat_dataset.read_demonstrations(write(tmp_path / "call.jsonl", {"messages": turns}), quoting)
    (segment,) = sample.segments
    assert quoting.decode(segment.token_ids[slice(*segment.spans[0])]) == f"{text}<|im_end|>"


def test_bad_rows_are_named_with_file_line_and_reason(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    invalid = {"messages": [{"role": "user", "content": 7}, {"role": "assistant", "content": "b"}]}
    unasked = {"messages": good["messages"][1:]}
    rows = ("{", {"prompt": "a"}, {"messages": good["messages"][:1]}, invalid, unasked)
    path = write(tmp_path / "bad.jsonl", good, *rows)
    with pytest.raises(UsageError) as failure:
        chat_dataset.read_demonstrations(path, tokenizer)
    lines = str(failure.value).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [f"{path}:{number}" for number in (2, 3, 4, 5, 6)]
    assert "not JSON" in lines[0]
    assert 'it needs "messages"' in lines[1]
    assert "no message has the role 'assistant'" in lines[2]
    assert "the chat template refuses it" in lines[3]
    assert "the assistant speaks first" in lines[4]


def test_content_in_text_parts_is_one_text_and_other_parts_and_damaged_calls_are_named(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    def row(content: Any, *calls: Any) -> dict[str, Any]:
        answer = {"role": "assistant", "content": "b", **({"tool_calls": list(calls)} if calls else {})}
        return {"messages": [{"role": "user", "content": content}, answer]}

    def text(said: str) -> dict[str, str]:
        return {"type": "text", "text": said}

    plain, parts = chat_dataset.read_demonstrations(
        write(tmp_path / "parts.jsonl", row("What is 1 + 1?"), row([text("What is "), text("1 + 1?")])), tokenizer
    )
    assert plain == parts
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    path = write(tmp_path / "bad.jsonl", row([text("a"), image]), row("a", {"type": "function", "id": "c"}), row(["a"]))
    with pytest.raises(UsageError) as failure:
        chat_dataset.read_demonstrations(path, tokenizer)
    for line, reason in zip(
        str(failure.value).splitlines(),
        ("messages[0].content: a part of type 'image_url'", "messages[1].tool_calls: a call needs", "of type 'str'"),
        strict=True,
    ):
        assert reason in line


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("budget", [60, 500, 100_000])
def test_a_plan_holds_every_sample_once_within_the_budget_and_equally_often_for_each_rank(
    ranks: int, budget: int
) -> None:
    batch = ragged(40)
    plan = packing.plan(batch, budget, ranks)
    assert sorted(id(sample) for micro_batch in plan for sample in micro_batch) == sorted(map(id, batch))
    assert len(plan) % ranks == 0
    assert all(sum(s.tokens for s in bin_) <= budget or len(bin_) == 1 for bin_ in plan)
    assert len(plan) <= len(batch) + ranks - 1
    if budget == 100_000:
        assert len(plan) == ranks


def test_with_fewer_samples_than_ranks_some_have_nothing_to_do() -> None:
    assert [len(micro_batch) for micro_batch in packing.plan(ragged(1), 500, ranks=3)] == [1, 0, 0]


def beginning_alike(seed: int = 0) -> list[Any]:
    """Groups of answers to one prompt, prompts with the same instructions, and what is hard: a prompt within another one's
    answer, a twin, a first trained token at once, nothing trained.
    """
    rng = random.Random(seed)

    def some(length: int) -> list[int]:
        return [rng.randrange(1024) for _ in range(length)]

    def answered(prompt: list[int]) -> Any:
        answer = some(rng.choice((1, 5, 30)))
        return samples.Segment(prompt + answer, [(len(prompt), len(prompt) + len(answer))])

    instructions = some(20)
    found = []
    for _ in range(4):
        prompt = instructions + some(rng.choice((3, 12)))
        found += [answered(prompt) for _ in range(5)]
    longest = max(found, key=lambda segment: len(segment.token_ids)).token_ids
    found += [answered(longest), samples.Segment(longest, []), samples.Segment(longest, [(1, 3), (9, 12)]), found[0]]
    return [samples.Sample((segment,)) for segment in found]


@pytest.mark.parametrize("batch", [ragged(30), beginning_alike()], ids=["all different", "beginning alike"])
def test_packed_sequences_have_the_logprobs_and_gradients_that_they_have_alone(policy: Any, batch: list[Any]) -> None:
    packed = packing.pack(batch, CPU)
    together = policy.logprobs(packed)
    together.sum().backward()
    gradients = [parameter.grad.clone() for parameter in policy.parameters()]
    policy.zero_grad()

    # Hugging Face's own attention, one sequence at a time
    policy.network.set_attn_implementation("sdpa")
    alone = []
    for segment in packed.segments:
        ids = torch.tensor([segment.token_ids])
        logprobs = policy.network(input_ids=ids).logits[0, :-1].log_softmax(-1)
        of_token = logprobs.gather(1, ids[0, 1:, None]).squeeze(1)
        alone += [of_token[start - 1 : end - 1] for start, end in segment.spans]
    torch.cat(alone).sum().backward()
    policy.network.set_attn_implementation("ngym_packed")

    torch.testing.assert_close(together, torch.cat(alone), atol=2e-5, rtol=1e-5)
    for packed_gradient, parameter in zip(gradients, policy.parameters(), strict=True):
        torch.testing.assert_close(packed_gradient, parameter.grad, atol=2e-4, rtol=1e-4)
    policy.zero_grad()


def test_neither_padding_nor_a_beginning_that_is_there_already_is_computed() -> None:
    batch = ragged(30)
    assert packing.pack(batch, CPU).token_ids_T.numel() == sum(sample.tokens for sample in batch)
    prompt, answers = list(range(100)), ([7, 8, 9], [7, 8], [5])
    group = [samples.Sample((samples.Segment(prompt + ids, [(100, 100 + len(ids))]),)) for ids in answers]
    packed = packing.pack(group, CPU)
    # each has a last prompt token of its own, which predicts the first token of its answer
    assert packed.token_ids_T.numel() == 99 + 3 * 1 + 3 + 2 + 1
    assert packed.trained_N.numel() == 6


def test_rollouts_of_a_task_share_a_micro_batch_as_far_as_they_fit() -> None:
    tasks = [[task] * 30 for task in range(8)]
    group = [samples.Sample((samples.Segment([*task, answer], [(30, 31)]),)) for answer in range(4) for task in tasks]
    for budget, in_one in ((248, 16), (62, 4), (34, 2)):  # attention reads at most twice as many tokens
        micro_batches = packing.plan(group, budget)
        assert [len(micro_batch) for micro_batch in micro_batches] == [in_one] * (32 // in_one)
        for micro_batch in micro_batches:
            assert len({sample.segments[0].token_ids[0] for sample in micro_batch}) == math.ceil(in_one / 4)
            assert len(packing.pack(micro_batch, torch.device("cpu")).token_ids_T) <= budget


def test_the_estimate_of_a_plan_is_never_below_what_is_computed() -> None:
    batch = [samples.Sample((one.segments[0], two.segments[0])) for one, two in pairwise(beginning_alike())]
    for budget in (60, 200, 1000):
        for micro_batch in packing.plan(batch, budget):
            computed = len(packing.pack(micro_batch, torch.device("cpu")).token_ids_T)
            assert computed <= budget or len(micro_batch) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["sfd.yaml"],
            "sfd.yaml: no such recipe (did you mean 'sft.yaml'?); give a YAML file, or one that ships with ngym: distillation.yaml, dpo.yaml",
        ),
        (["sft.yaml", "optimiser.lr=1"], "unknown key 'optimiser' (did you mean 'optimizer'?)"),
        (["sft.yaml", "optimizer.lr=-1"], "command line: optimizer.lr: Input should be greater than 0; got -1"),
        (["sft.yaml", "engine.zero_stage=2"], "muon needs whole matrices"),
        (["sft.yaml", "engine.zero_stage=2", "optimizer.name=SGD"], "ZeRO does not shard sgd"),
        (["sft.yaml", "optimizer.name=adamw_bnb_8bit", "engine.zero_stage=1"], "8-bit states, which ZeRO would cut"),
        (["sft.yaml", "optimizer.momentum=0.9"], "muon does not use it"),
        (["sft.yaml", "engine.precision=bf16"], "set engine.zero_stage to 1, 2 or 3"),
        (["sft.yaml", "engine.precision=fp16"], "master weights of fp16 need ZeRO; set engine.zero_stage to 1, 2 or 3"),
        (["sft.yaml", "model.path=nowhere"], "there is no folder nowhere in "),
        (["sft.yaml", "model.path=data/tiny_policy/tokenizer"], "model.path is given too; keep one of the two"),
        (["sft.yaml", "model.tokenizer=null"], "a model from scratch needs a tokenizer"),
        (["sft.yaml", "model.from_scratch=null"], "name a model: model.path=FOLDER"),
        (["sft.yaml", "data.path=none.jsonl", "data.made_by=[]"], "command line: data.path: there is no none.jsonl"),
        # and not 7,200 demonstrations of word problems in a file of that name
        (["sft.yaml", "data.path=none.jsonl"], "command line: data.path: there is no none.jsonl; name a JSONL file"),
        (["sft.yaml", "data={path: none.jsonl}"], "command line: data.path: there is no none.jsonl; name a JSONL file"),
        (["sft.yaml", "optimizer={lr: -1}"], "command line: optimizer.lr: Input should be greater than 0; got -1"),
        (
            ["sft.yaml", "schedule.warmup_ratio=0.1"],
            "schedule.warmup_ratio: schedule.warmup_steps is 20; set one of the two to null",
        ),
        (["sft.yaml", "schedule.nmae=linear"], "unknown key 'schedule.nmae' (did you mean 'name'?)"),
        (["sft.yaml", "seed=${sead}"], "command line: seed: Interpolation key 'sead' not found"),
        (["sft.yaml", "optimizer.betas=[0.9]"], "command line: 'optimizer.betas.1' is missing"),
        (["sft.yaml", "optimizer.lr"], "optimizer.lr: no such recipe"),
        (["sft.yaml", "output=/dev/null"], "/dev/null is not a folder; choose another output=FOLDER"),
        (["sft.yaml", "output=/dev/null/run", "--dry-run"], "/dev/null is not a folder; choose another output=FOLDER"),
        (["sft.yaml", "schedule.name=${oc.env:HOME}"], "'linear' or 'cosine'; got ${oc.env:HOME}"),
    ],
)
def test_a_mistake_in_a_recipe_is_one_line_that_says_where_and_how_to_fix_it(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert message in result.stderr and "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_folder_of_a_run_is_not_taken_for_its_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    policy = tmp_path / "runs" / "sft" / "policy"
    policy.mkdir(parents=True)
    (policy / "config.json").touch()
    (tmp_path / "pairs.jsonl").touch()
    words = ["dpo.yaml", "data.path=pairs.jsonl", "evaluation=null"]
    result = CliRunner().invoke(main, [*words, "model.path=runs/sft", "--dry-run"])
    assert result.exit_code == 2
    message = "model.path: runs/sft is the folder of a run (did you mean 'runs/sft/policy'?); got 'runs/sft'\n"
    assert result.stderr == f"command line: {message}"


def test_an_earlier_run_is_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "sft" / "policy").mkdir(parents=True)
    result = CliRunner().invoke(main, ["sft.yaml"])
    assert result.exit_code == 2
    assert result.stderr == "runs/sft: holds an earlier run; choose another output=FOLDER, or pass --overwrite\n"
    plan = json.loads(CliRunner().invoke(main, ["sft.yaml", "--dry-run", "--json"]).stdout)
    assert (plan["output"], plan["contains_run"]) == ("runs/sft", True)


def test_an_overwrite_that_does_not_begin_to_train_leaves_the_earlier_run_as_it_was(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = root / "data" / "calculator" / "generate.py"
    subprocess.run([sys.executable, script, "demonstrations", "--output", "few.jsonl", "--count", "8"], check=True)
    run = tmp_path / "run"
    (run / "policy").mkdir(parents=True)
    (run / "policy" / "config.json").write_text("{}")
    (run / "checkpoints" / "step-000001").mkdir(parents=True)
    (run / "recipe.yaml").write_text("seed: 9\n")
    (run / "metrics.jsonl").write_text('{"step": 1}\n')

    def files(folder: Path) -> dict[str, str]:
        return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}

    before = files(run)
    words = ["sft.yaml", "data.path=few.jsonl", "output=run", "max_steps=1", *SMALL, "--overwrite"]
    output, _ = (process := train(tmp_path, [*words, "data.max_tokens=1"])).communicate(timeout=600)
    assert process.returncode == 2 and "no sample to train on" in output, output
    assert files(run) == before | {".held": ""}

    output, _ = (process := train(tmp_path, words)).communicate(timeout=600)
    assert process.returncode == 0, output
    assert files(run / ".old") == before
    assert (run / "policy" / "model.safetensors").exists() and json.loads((run / "metrics.jsonl").read_text())[
        "step"
    ] == 1


def test_what_a_killed_overwrite_has_moved_is_put_back_at_the_next_start(tmp_path: Path) -> None:
    for name in ("initial", "checkpoints"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "of").write_text("the earlier run")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "policy").mkdir()
    run_folder.move_aside(tmp_path, ["initial", "checkpoints", "metrics.jsonl"])
    (tmp_path / "initial").mkdir()
    (tmp_path / "initial" / "of").write_text("the new run")
    run_folder.restore(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "initial", "metrics.jsonl", "policy"]
    assert (tmp_path / "initial" / "of").read_text() == "the earlier run"

    run_folder.replace(tmp_path, in_use=[tmp_path / "policy"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".old", "initial", "policy"]
    (tmp_path / "policy").rmdir()
    (tmp_path / "metrics.jsonl").write_text("")
    run_folder.replace(tmp_path)
    assert (tmp_path / ".old" / "metrics.jsonl").read_text() == '{"step": 1}\n', "a run without results replaces none"


@pytest.mark.parametrize("words", [["--overwrite"], ["--resume"], ["--overwrite", "--sweep", "seed=0,1"]])
def test_a_run_that_another_process_trains_is_left_alone(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "sft"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(CliRunner().invoke(main, ["sft.yaml", "--dry-run"]).stdout)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    with held_folder(run, "wait"):
        there = sorted(run.iterdir())
        result = CliRunner().invoke(main, ["sft.yaml", *words])
        assert sorted(run.iterdir()) == there
    message = f"runs/sft is being written by process {os.getpid()}; wait for it, or choose another output=FOLDER\n"
    assert (result.exit_code, result.stderr) == (1, message)


def test_a_dry_run_prints_the_recipe_with_its_overrides_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["sft.yaml", "output=elsewhere", "seed=7", "--dry-run"])
    assert result.exit_code == 0
    assert "path: elsewhere/demonstrations.jsonl" in result.stdout and "seed: 7" in result.stdout
    assert not list(tmp_path.iterdir())
