"""A trainer that is killed, or gets wrong data or non-finite numbers, continues from a complete checkpoint or stops
with a reason."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle  # noqa: TID251  (to be refused)
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from forked import ForkedCommand
from paths import SUPPORT
from safetensors.torch import load_file, save_file
from trainer_service import SHAPE, free_port, on_two_ranks, train
from transformers import AutoTokenizer
from waiting import PATIENCE_S, wait_until

from ngym.errors import ConfigError, UsageError
from ngym.trainer import checkpoints, loop
from ngym.trainer.algorithms import sft
from ngym.trainer.data import samples as rollout_samples
from ngym.trainer.data import samples as trainer_samples
from ngym.trainer.engine import engine, optimizer, sanity_checks
from ngym.trainer.model import policy as model
from ngym.trainer.recipe import recipe

# Killed while it saves

SAVER = """
import os, random, signal, sys
from pathlib import Path
from ngym.trainer import checkpoints

folder, kills = Path(sys.argv[1]), int(sys.argv[2])
kept = checkpoints.Checkpoints(folder, checkpoints.CheckpointOptions(keep=1))
TOUCHES = ("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir", "shutil.rmtree")


def write(aside):
    (aside / "policy").mkdir()
    for number in range(6):
        (aside / "policy" / f"{number}.bin").write_bytes(bytes([number]) * 50_000)


def save(step, killed_at):
    seen = 0
    def kill(event, arguments):
        nonlocal seen
        seen += event in TOUCHES
        if seen == killed_at:
            seen += 1  # the kill is an event, too
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(kill)
    kept.save(step, {"step": step}, write)
    print("committed", step, flush=True)
    kept.tidy([])


def survives(step, killed_at):
    if not (child := os.fork()):
        save(step, killed_at)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    newest = kept.newest()
    files = len(list((newest.folder / "policy").iterdir()))
    hidden = len(list(newest.folder.parent.glob(".*")))
    print("newest", newest.step, files, hidden, status, flush=True)
    return status == 0


survives(1, 0)
draw = random.Random(7)
for step in range(2, 1000):
    if step > kills + 1 if kills else survives(step, step - 1):
        break
    if kills:
        survives(step, draw.randrange(1, 60))
"""


def test_a_trainer_killed_at_each_touch_of_the_disk_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """A save is some sixty operations on files: it is killed right before each of them."""
    kill_repeatedly(tmp_path, 0)


@pytest.mark.soak
def test_a_trainer_killed_a_hundred_times_while_it_saves_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    kill_repeatedly(tmp_path, 100)


def kill_repeatedly(folder: Path, kills: int) -> None:
    command = [sys.executable, "-c", SAVER, folder, str(kills)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout.splitlines()
    committed = died = 0
    for words in map(str.split, lines):
        if words[0] == "committed":
            committed = int(words[1])
            continue
        newest, files, hidden, status = map(int, words[1:])
        assert newest >= committed, "a checkpoint that was committed is gone"
        assert files == 6 and status in (0, signal.SIGKILL)
        assert hidden == 0 or status != 0, "what a killed writer left is swept by the next that ends well"
        died += status != 0
    assert died >= 30


# Checkpoints that are not what was written


def learner(root: Path, stage: int = 0, precision: str = "fp32") -> Any:
    tokenizer = AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")
    shape = recipe.ModelOptions(from_scratch=SHAPE, tokenizer="data/tiny_policy/tokenizer")
    launch = recipe.Launch(rank=0, local_rank=0, ranks=1)
    policy = model.load_policy(shape, tokenizer, 0)
    options = recipe.EngineOptions(zero_stage=stage, precision=precision)
    return engine.Engine(policy, launch, options, recipe.OptimizerOptions(lr=1e-2, name="adamw"))


@pytest.fixture(scope="module")
def saved(root: Path, only_rank: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with the checkpoints of steps 2 and 4, of a real learner."""
    folder = tmp_path_factory.mktemp("saved")
    store, trained = checkpoints.Checkpoints(folder, checkpoints.CheckpointOptions()), learner(root)
    tokenizer = AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")

    def write(aside: Path) -> None:
        trained.save_state(aside)
        trained.save(aside / "policy", tokenizer)

    for step in (2, 4):
        store.save(step, {"step": step}, write)
    return folder


def check_refusal(run: Path) -> str:
    with pytest.raises(checkpoints.CheckpointUnusable) as caught:
        checkpoints.Checkpoints(run, checkpoints.CheckpointOptions()).newest()
    message = str(caught.value)
    assert "step-000004: damaged: " in message and "the one before is of step 2: remove this folder" in message
    assert "\n" not in message
    return message


def test_every_file_of_a_checkpoint_may_be_damaged_in_any_way_and_it_is_noticed(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    newest = run / "checkpoints" / "step-000004"
    files = [path for path in sorted(newest.rglob("*")) if path.is_file()]
    assert {"manifest.json", "state.json", "training-00001.safetensors", "model.safetensors"} <= {f.name for f in files}
    draw = random.Random(3)
    for path in files:
        data = path.read_bytes()
        flips = [draw.randrange(len(data) * 8) for _ in range(5)]
        flipped = [data[: at // 8] + bytes([data[at // 8] ^ 1 << at % 8]) + data[at // 8 + 1 :] for at in flips]
        for damaged in [*flipped, data[: len(data) // 2], data[:-1], b"", data + b"x", None]:
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            check_refusal(run)
            path.write_bytes(data)
    assert checkpoints.Checkpoints(run, checkpoints.CheckpointOptions()).newest().step == 4


def test_no_bit_of_a_manifest_can_flip_unnoticed(tmp_path: Path) -> None:
    store = checkpoints.Checkpoints(tmp_path, checkpoints.CheckpointOptions())
    for step in (2, 4):
        store.save(step, {"step": step}, lambda aside: None)
    manifest = tmp_path / "checkpoints" / "step-000004" / "manifest.json"
    content = bytearray(manifest.read_bytes())
    for bit in range(len(content) * 8):
        content[bit // 8] ^= 1 << bit % 8
        manifest.write_bytes(content)
        check_refusal(tmp_path)
        content[bit // 8] ^= 1 << bit % 8
    for other in (b"{}", b"null", b"[]", b'{"state.json": 3}', b'{"state.json": {"bytes": 17}}', b"\xff"):
        manifest.write_bytes(other)
        check_refusal(tmp_path)


def test_a_folder_that_only_looks_like_a_checkpoint_is_not_a_beginning_at_step_0(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    newest = run / "checkpoints" / "step-000004"
    (newest / "training-00002.safetensors").write_bytes((newest / "training-00001.safetensors").read_bytes())
    assert "training-00002.safetensors was not written with it" in check_refusal(run)
    shutil.rmtree(newest)
    newest.mkdir()
    check_refusal(run)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(checkpoints.CheckpointUnusable, match="no checkpoint to resume from"):
        checkpoints.Checkpoints(run, checkpoints.CheckpointOptions()).newest()


def test_the_files_beside_the_checkpoints_are_looked_at_too(tmp_path: Path) -> None:
    at = checkpoints.Checkpoint(4, tmp_path, {"metrics_bytes": 12})
    metrics = tmp_path / "metrics.jsonl"
    for content, problem in (
        (None, "has 0 bytes, fewer than the 12"),
        (b'{"step":', "8 bytes"),
        (b"x" * 12, "damaged"),
    ):
        if content is not None:
            metrics.write_bytes(content)
        with pytest.raises(checkpoints.CheckpointUnusable, match=problem):
            checkpoints.cut(metrics, at)
    for content in (b"seed: [", b"\xff\xfe", b"", b"- 1"):
        (tmp_path / "recipe.yaml").write_bytes(content)
        with pytest.raises(UsageError, match=r"recipe\.yaml: damaged"):
            checkpoints.resumable(tmp_path, "seed: 0")


# Files that would run code


class Bomb:
    """A pickle of it makes whoever loads it create a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


def pickle_bomb(canary: Path) -> list[bytes]:
    """As pickle writes it, and as torch.save does."""
    buffer = io.BytesIO()
    torch.save({"model.embed_tokens.weight": Bomb(canary)}, buffer)
    return [pickle.dumps(Bomb(canary)), buffer.getvalue()]


def test_a_pickle_in_the_place_of_a_checkpoint_is_refused_and_does_not_run(
    root: Path, saved: Path, tmp_path: Path, only_rank: None
) -> None:
    """Whoever can write a folder can write its manifest, too: the checksums are right."""
    canary, store = tmp_path / "canary", checkpoints.Checkpoints(tmp_path, checkpoints.CheckpointOptions())
    for step, bomb in enumerate(pickle_bomb(canary), 1):

        def write(aside: Path, bomb: bytes = bomb) -> None:
            for name in ("training-00001.safetensors", "training-00001.pt", "optimizer.bin", "policy"):
                (aside / name).write_bytes(bomb)

        store.save(step, {"step": step}, write)
        with pytest.raises(optimizer.StateMissing, match="is not a safetensors file, and no other format is loaded"):
            learner(root).load_state(store.newest().folder, {"optimizer_steps": {}, "steps": 0, "random": []})
        assert not canary.exists()
    with pytest.raises(FileExistsError):  # the bomb is one
        canary.mkdir()
        pickle.loads(pickle_bomb(canary)[0])  # noqa: S301  (the test's own)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "modeling_qwen3.py"])
def test_a_model_that_comes_with_a_pickle_or_with_code_is_refused_and_neither_runs(
    root: Path, saved: Path, tmp_path: Path, name: str
) -> None:
    canary = tmp_path / "canary"
    for number, bomb in enumerate(pickle_bomb(canary)):
        folder = tmp_path / str(number)
        shutil.copytree(saved / "checkpoints" / "step-000004" / "policy", folder)
        config = orjson.loads((folder / "config.json").read_bytes())
        if name.endswith(".py"):
            (folder / name).write_text(f"import os; os.mkdir({str(canary)!r})\nclass Model: pass\nclass Config: pass\n")
            stem = name.removesuffix(".py")
            config |= {"model_type": "unheard_of", "auto_map": {"AutoModelForCausalLM": f"{stem}.Model"}}
            config["auto_map"]["AutoConfig"] = f"{stem}.Config"
            (folder / "config.json").write_bytes(orjson.dumps(config))
        else:
            (folder / "model.safetensors").unlink()
            (folder / name).write_bytes(bomb)
        tokenizer = AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")
        with pytest.raises(ConfigError, match=r"model\.path: no model can be loaded from"):
            model.load_policy(recipe.ModelOptions(path=str(folder)), tokenizer, 0)
        assert not canary.exists()


# Weights that are incomplete or broken

DOWN, EMBEDDING = "model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"


def without_some(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[DOWN], tensors["model.norm.weight"]


def of_another_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[DOWN] = tensors[DOWN][:, 1:].contiguous()


def with_a_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[DOWN][0, 0] = float("nan")


def with_too_few_rows(tensors: dict[str, torch.Tensor]) -> None:
    tensors[EMBEDDING] = tensors[EMBEDDING][:-8].contiguous()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_some, rf"it lacks 2 tensors \({re.escape(DOWN)}, model.norm.weight\)"),
        (of_another_shape, rf"its tensor {re.escape(DOWN)} has the shape .*, but its config.json needs"),
        (with_a_nan, rf"NaN or infinite values are in 1 tensor \({re.escape(DOWN)}\)"),
        (with_too_few_rows, "its tokenizer has 1,024 ids, but its embedding only 1,016 rows: none for '<tool_call>'"),
    ],
)
def test_a_checkpoint_with_incomplete_or_broken_weights_is_refused(
    root: Path,
    saved: Path,
    tmp_path: Path,
    change: Any,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    folder = tmp_path / "broken"
    shutil.copytree(saved / "checkpoints" / "step-000004" / "policy", folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = orjson.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_bytes(orjson.dumps(config | {"vocab_size": len(tensors[EMBEDDING])}))
    tokenizer = AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")
    for load in (model.load_policy, model.load_reward_model):
        with pytest.raises(ConfigError, match=rf"^model\.path: no model can be loaded from {folder}: {reason}"):
            load(recipe.ModelOptions(path=str(folder)), tokenizer, 0)
    assert "LOAD REPORT" not in caplog.text


def test_a_special_token_that_no_text_has_needs_no_row(root: Path, saved: Path) -> None:
    """Gemma 3 without images has no row for its `<image_soft_token>`."""
    tokenizer = AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    options = recipe.ModelOptions(path=str(saved / "checkpoints" / "step-000004" / "policy"))
    model.load_policy(options, tokenizer, 0)
    tokenizer.chat_template += "<image>"
    with pytest.raises(ConfigError, match="none for '<image>'"):
        model.load_policy(options, tokenizer, 0)


# Numbers that are none, on one rank of two


EVERY_WAY = ("0", "1", "2", "3", "1-fp16", "2-fp16", "3-fp16")


@pytest.mark.parametrize("ways", [("0", "2", "2-fp16"), pytest.param(EVERY_WAY, marks=pytest.mark.soak)])
def test_a_number_that_is_not_finite_on_one_rank_changes_no_weight_on_any_and_a_killed_rank_is_named(
    root: Path, tmp_path: Path, ways: tuple[str, ...]
) -> None:
    data = tmp_path / "demonstrations.jsonl"
    script = root / "data" / "calculator" / "generate.py"
    subprocess.run([sys.executable, script, "demonstrations", "--output", data, "--count", "64"], check=True)
    program = SUPPORT / "faults_on_ranks.py"
    ranks = on_two_ranks(tmp_path, [str(program), str(data), str(tmp_path), *ways])
    outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, -signal.SIGKILL], outputs
    assert "RankGone: rank 1 has given no sign of life for 5 s, so rank 0 ends too" in outputs[0]
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    for way in ways:
        for rank in range(2):
            of_way = found[rank][way]
            # none, logprob, none, loss, none, gradient, none; then gradients until the run ends
            changed = [before != after for before, after in pairwise(of_way["hashes"])]
            assert changed == [True, False, True, False, True, False, True, False], (way, rank)
            assert of_way["skipped"] == [0, 1, 1, 2, 2, 3, 3, 4, 5]
            assert "3 optimizer steps in a row; the weights are unchanged" in of_way["ended"]
            # a loss is at fault twice; the gradients, 4 times, at each of 17 scales
            right = {"loss_scale": 2.0**16, "overflow_retries": 4 * 16} if "fp16" in way else {}
            assert of_way["scaling"] == right
        assert found[0][way]["hashes"] == found[1][way]["hashes"] or way[0] == "3"  # of ZeRO-3 each has its own part


# Weights that are garbage


def recipe_words(root: Path, folder: Path, algorithm: str) -> list[str]:
    """The words of a run on a small file of what this algorithm learns from."""
    shape = [f"model.from_scratch.{name}={value}" for name, value in SHAPE.items()]
    words = [f"{algorithm}.yaml", "output=run", "data.path=data.jsonl", "batch_size=4", "evaluation=null", *shape]
    words += ["model.path=null", f"model.tokenizer={root}/data/tiny_policy/tokenizer", "optimizer.name=adamw"]
    words += ["schedule=null", "schedule.name=constant", "optimizer.max_grad_norm=null", "max_skipped=9"]
    draw = random.Random(0)
    rows: list[Any] = []
    for n in range(8):
        prompt = [{"role": "user", "content": f"{n} + 1?"}]
        answers = [[{"role": "assistant", "content": text}] for text in (f"{n + 1}", "No.")]
        ids = [draw.randrange(5, 900) for _ in range(8)]
        segment = {"token_ids": ids, "mask": [[3, 8]], "logprobs": [-7.0] * 5, "policy_version": [[3, 8, 0]]}
        rollout = {"task_id": f"{n // 4}", "status": "ok", "segments": [segment]}
        of_kind: dict[str, Any] = {
            "sft": {"responses_create_params": {"input": prompt + answers[0]}, "messages": prompt + answers[0]},
            "dpo": {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]},
            "grpo": {"reward": float(n % 2), "_ng_task_index": n // 4, "_ng_rollout_index": n % 4, "ng": rollout},
        }
        rows.append(of_kind["grpo" if algorithm == "ppo" else algorithm])
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return words + (["algorithm.max_mismatch=1e9"] if algorithm in ("grpo", "ppo") else [])


@pytest.mark.parametrize(
    ("algorithm", "lr", "steps", "reason"),
    [
        ("sft", "1e30", 1, "embed_tokens.weight: not finite, or too large to compute with, after step 1"),
        ("dpo", "1e5", 1, "the policy's logprobs after step 1 are exactly uniform, whatever the prompt"),
        ("grpo", "1e30", 2, "too large to compute with, after step 1|the last 1 optimizer steps were skipped"),
        ("ppo", "1e30", 2, "too large to compute with, after step 1|the last 1 optimizer steps were skipped"),
    ],
)
def test_weights_that_a_too_large_step_left_behind_are_neither_a_checkpoint_nor_a_policy(
    root: Path, tmp_path: Path, algorithm: str, lr: str, steps: int, reason: str
) -> None:
    words = [*recipe_words(root, tmp_path, algorithm), f"optimizer.lr={lr}", f"max_steps={steps}"]
    process = train(tmp_path, words)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1 and "Traceback" not in output, output
    assert re.search(reason, output) and "so they are not saved, and the last good checkpoint is kept" in output
    assert not (tmp_path / "run" / "policy").exists()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000"]


def test_garbage_in_the_parts_of_two_ranks_is_refused_by_both(root: Path, tmp_path: Path) -> None:
    """Under ZeRO-3 no rank has all weights."""
    words = [*recipe_words(root, tmp_path, "sft"), "optimizer.lr=1e30", "max_steps=2", "engine.zero_stage=3"]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    words.append("checkpoint.every=1")
    ranks = [train(tmp_path, words, **meeting, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
    outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], outputs
    assert "not finite, or too large to compute with" in outputs[0] and not (tmp_path / "run" / "policy").exists()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000"]


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (2, "bf16"), (3, "fp32"), (1, "fp16")])
def test_the_checkpoint_before_a_step_that_was_too_large_is_kept(
    root: Path, tmp_path: Path, only_rank: None, stage: int, precision: str
) -> None:
    trained, watch = learner(root, stage, precision), sanity_checks.NanGuard(None, 3)
    store = checkpoints.Checkpoints(tmp_path, checkpoints.CheckpointOptions(every=1, keep=1))
    tokenizer = AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")
    (tmp_path / "metrics.jsonl").touch()
    saver = checkpoints.CheckpointSaver(
        store, trained, tokenizer, watch, tmp_path / "metrics.jsonl", lambda: None, 9, 10_000
    )
    samples = trainer_samples
    batch = [samples.Sample((samples.Segment(list(range(5, 25)), [(3, 20)]),))]

    def step(number: int, factor: float) -> bool:
        result = loop.take_step(trained, sft.Sft(), batch, 10_000, factor)
        passed: bool = watch.check_step(number, batch, result.means["loss"], result.update)
        return passed

    assert step(1, 1.0)
    saver.after(1)
    assert step(2, 1e25)
    with pytest.raises(sanity_checks.NotFinite, match="too large to compute with, after step 2, so they are not saved"):
        saver.after(2)
    assert not step(3, 1.0)
    saver.after(3)  # a step that was skipped says nothing of the weights: the checkpoint waits
    with pytest.raises(sanity_checks.NotFinite, match="the last 1 optimizer steps were skipped"):
        saver.check()
    assert store.newest().step == 1


# Rows that are not rollouts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"reward": NaN, "ng": {}}', "not JSON"),
        (b'{"reward": 1e999, "ng": {}}', "not JSON"),
        (b'{"reward": "1", "ng": {}}', "'reward' must be null or a number within ±3.4e+38, not '1'"),
        (b'{"reward": true, "ng": {}}', "'reward' must be null or a number within ±3.4e+38, not True"),
        (b'{"reward": null, "ng": {"schema_version": 2}}', "its ng.schema_version is 2, and this ngym reads 1"),
        (b'{"reward": [1], "ng": {}}', "not [1]"),
        (b'{"ng": {}}', "not a scored rollout"),
        (b'{"reward": 1, "ng": {"segments": [null]}}', "a segment is malformed"),
        (
            b'{"reward": 1, "ng": {"segments": [{"token_ids": [1, 2], "mask": [[1, 2]], "logprobs": [null]}]}}',
            "logprobs numbers",
        ),
        (b'{"reward": 1, "ng": {"segments": true}}', "ng.segments a list"),
        (b'{"reward": 1, "ng": {}, "responses_create_params": "x"}', "responses_create_params must be an object"),
        (b'{"reward": 1, "ng": {"segments": [{"token_ids": [1, 2], "mask": [[1, 2]], "logprobs": [-1e999]}]}}', "JSON"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_a_row_that_is_not_a_rollout_is_named_and_nothing_is_made_up_for_it(
    tmp_path: Path, line: bytes, message: str
) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b'{"failure": {}}\n' + line + b"\n")
    with pytest.raises(UsageError) as caught:
        rollout_samples.read_rollouts(path, 1.0)
    assert str(caught.value).startswith(f"{path}:2: ") and message in str(caught.value)


def test_a_rollout_that_appears_twice_in_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    segment = {"token_ids": [1, 2], "mask": [[1, 2]], "logprobs": [-1.0], "policy_version": [[1, 2, 0]]}
    row = orjson.dumps({"reward": 1, "ng": {"rollout_id": "r1", "segments": [segment]}}) + b"\n"
    path.write_bytes(row)
    assert len(rollout_samples.read_rollouts(path, 1.0).rollouts) == 1
    path.write_bytes(row + row)
    with pytest.raises(UsageError, match=r"rollouts\.jsonl:2: the rollout r1 was read before"):
        rollout_samples.read_rollouts(path, 1.0)


# Ranks that are gone


@contextmanager
def two_ranks(root: Path, folder: Path) -> Iterator[list[ForkedCommand]]:
    """A run on two ranks, without a launcher that would notice anything, in its fourth step or later."""
    words = [*sft_words(root), "optimizer.name=adamw", "engine.zero_stage=2", "checkpoint.every=100000"]
    words += ["max_steps=100000", "epochs=100000"]
    ranks = on_two_ranks(folder, ["train", *words])
    try:
        wait_until(lambda: steps_of(folder) >= 3 or any(rank.poll() is not None for rank in ranks), 5 * PATIENCE_S)
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def sft_words(root: Path) -> list[str]:
    shape = [f"model.from_scratch.{name}={value}" for name, value in SHAPE.items()]
    script = f"data.made_by=[{root}/data/calculator/generate.py,demonstrations,--count,400,--seed,0]"
    return ["sft.yaml", "output=run", script, "batch_size=16", *shape]


def steps_of(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def ends_naming(rank: ForkedCommand, other: int, how: str) -> None:
    output, _ = rank.communicate(timeout=PATIENCE_S)
    assert rank.returncode == 1, output[-3000:]
    assert f"rank {other} has {how}" in output and "run the same command with --resume" in output
    assert "Traceback" not in output


@pytest.mark.soak
def test_a_killed_rank_ends_the_run_and_is_named(root: Path, tmp_path: Path) -> None:
    with two_ranks(root, tmp_path) as ranks:
        ranks[1].kill()
        ends_naming(ranks[0], 1, "given no sign of life")


@pytest.mark.soak
def test_a_rank_that_never_comes_is_named_by_those_who_did(root: Path, tmp_path: Path) -> None:
    """As if it had been killed before the ranks have met; one run waits for rank 1, another for rank 0, a third finds a stranger there."""
    ranks: list[tuple[int, ForkedCommand]] = []
    with socket.create_server(("127.0.0.1", 0)) as stranger:  # it says nothing
        ports = [(0, free_port()), (1, free_port()), (1, str(stranger.getsockname()[1]))]
        for number, (rank, port) in enumerate(ports):
            folder = tmp_path / str(number)
            folder.mkdir()
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
            ranks.append((rank, train(folder, sft_words(root), **meeting, RANK=str(rank), LOCAL_RANK=str(rank))))
        for rank, process in ranks:
            output, _ = process.communicate(timeout=5 * PATIENCE_S)
            assert process.returncode == 1, output[-3000:]
            assert f"rank {1 - rank} did not arrive at 127.0.0.1:" in output and "Traceback" not in output
            assert rank or "rank 1 has not arrived at 127.0.0.1:" in output


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_hangs_ends_the_run_but_a_straggler_is_waited_for(root: Path, tmp_path: Path, victim: int) -> None:
    with two_ranks(root, tmp_path) as ranks:
        ranks[victim].send_signal(signal.SIGSTOP)
        time.sleep(30)  # as long as a straggler may take
        before = steps_of(tmp_path)
        ranks[victim].send_signal(signal.SIGCONT)
        wait_until(lambda: steps_of(tmp_path) >= before + 10)
        time.sleep(60)  # by now those who had lost one another for good would have ended
        assert all(rank.poll() is None for rank in ranks)
        ranks[victim].send_signal(signal.SIGSTOP)
        ends_naming(ranks[1 - victim], victim, "given no sign of life for 45 s")
