"""A killed run continues with the same losses: from complete checkpoints, on other ranks, without collecting again."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from forked import ForkedCommand
from stub_agents import scored_row
from stub_agents import serving as agents_serving
from stub_policy import Stub, serving
from trainer_service import SHAPE, arguments, free_port, metrics_of, new_policy, train
from transformers import AutoTokenizer
from waiting import wait_until

from ngym.errors import UsageError
from ngym.peers import Peers
from ngym.trainer import checkpoints, loop
from ngym.trainer.algorithms import sft
from ngym.trainer.data import samples
from ngym.trainer.engine import engine
from ngym.trainer.model import policy as model
from ngym.trainer.online import rollout_stream, task_sampler
from ngym.trainer.online import rollout_stream as rollout_spool
from ngym.trainer.recipe import recipe, rollout_options

Values = dict[str, Any]


# The state of the engine


def learner(root: Path, stage: int, precision: str = "fp32", name: str = "adamw") -> Any:
    tokenizer = AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")
    shape = recipe.ModelOptions(from_scratch=SHAPE, tokenizer="data/tiny_policy/tokenizer")
    options = recipe.EngineOptions(zero_stage=stage, precision=precision)
    momentum = {"momentum": 0.9} if name == "sgd" else {}
    optimizing = recipe.OptimizerOptions(lr=1e-2, name=name, weight_decay=0.1, **momentum)
    launch = recipe.Launch(rank=0, local_rank=0, ranks=1)
    return engine.Engine(model.load_policy(shape, tokenizer, 0), launch, options, optimizing)


def losses(learner: Any, first: int, last: int) -> list[float]:
    draw = random.Random(0)
    batches = [
        [samples.Sample((samples.Segment([draw.randrange(5, 500) for _ in range(30)], [(5, 30)]),)) for _ in range(8)]
        for _ in range(last)
    ]
    steps = [loop.take_step(learner, sft.Sft(), batch, 10_000, 1.0) for batch in batches[first:]]
    return [step.means["loss"] for step in steps]


@pytest.mark.parametrize(
    ("stage", "precision", "name"),
    [
        (0, "fp32", "adamw"),
        (0, "fp32", "muon"),
        (0, "fp32", "adamw_8bit"),
        (0, "fp32", "sgd"),
        (1, "fp32", "adam"),
        (1, "fp32", "adamw"),
        (3, "fp32", "adamw"),
        (2, "bf16", "adamw"),
        (2, "fp16", "adamw"),
    ],
)
def test_what_was_saved_continues_exactly_also_under_another_zero_stage(
    root: Path, tmp_path: Path, only_rank: None, stage: int, precision: str, name: str
) -> None:
    first = learner(root, stage, precision, name)
    losses(first, 0, 3)
    meta = json.loads(json.dumps(first.save_state(tmp_path)))
    expected = losses(first, 3, 6)
    others = (0, 2, 3) if (precision, name) == ("fp32", "adamw") else (stage,)
    for other in others:
        second = learner(root, other, precision, name)
        second.load_state(tmp_path, meta)
        assert second.steps == 3
        assert losses(second, 3, 6) == pytest.approx(expected, abs=2e-6 if other != stage else 0)


def test_what_is_not_this_models_state_is_refused(root: Path, tmp_path: Path, only_rank: None) -> None:
    first = learner(root, 0)
    meta = first.save_state(tmp_path)
    second = learner(root, 0)
    next(second.policy.network.parameters()).requires_grad_(False)
    with pytest.raises(Exception, match="is not in this model's trainable weights; resume with the recipe"):
        second.load_state(tmp_path, meta)


# The checkpoints of a folder


def save(folder: Path, step: int, options: Any) -> None:
    checkpoints.Checkpoints(folder, options).save(step, {"step": step}, lambda aside: _write(aside, step))


def _write(aside: Path, step: int) -> None:
    (aside / "policy").mkdir()
    (aside / "policy" / "weights").write_bytes(bytes([step]) * 1000)


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    options = checkpoints.CheckpointOptions(keep=2, best="eval/greedy")
    history = [{"step": 0, "eval/greedy": 0.1}, {"step": 2, "eval/greedy": 0.9}, {"step": 4, "eval/greedy": 0.5}]
    for step in range(7):
        save(tmp_path, step, options)
        checkpoints.Checkpoints(tmp_path, options).tidy(history)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-000002", "step-000005", "step-000006"]
    least = options.model_copy(update={"mode": "min"})
    assert checkpoints.Checkpoints(tmp_path, least).best(history) == 2  # of those that are left


def test_a_loss_is_better_if_it_is_lower_and_an_unknown_metric_is_named(tmp_path: Path) -> None:
    options = checkpoints.CheckpointOptions(best="val/loss")
    losses = [0.5, 3.0, 1.0, 2.0]  # there are no weights of step 0
    history = [{"step": step, "val/loss": loss} for step, loss in enumerate(losses)]
    for step in range(4):
        save(tmp_path, step, options)
    assert checkpoints.Checkpoints(tmp_path, options).best(history) == 2
    assert checkpoints.Checkpoints(tmp_path, options.model_copy(update={"mode": "max"})).best(history) == 1
    assert checkpoints.Checkpoints(tmp_path, options).missing_best(history) == ""
    misspelled = checkpoints.Checkpoints(tmp_path, options.model_copy(update={"best": "val/los"}))
    assert misspelled.best(history) is None
    assert misspelled.missing_best(history) == (
        "warning: checkpoint.best: no step has a metric 'val/los', did you mean 'val/loss'; only the newest checkpoints "
        "are kept. The metrics are step, val/loss"
    )


def test_a_damaged_checkpoint_is_named_and_nothing_starts_from_the_beginning(tmp_path: Path) -> None:
    options = checkpoints.CheckpointOptions()
    with pytest.raises(checkpoints.CheckpointUnusable, match="no checkpoint to resume from"):
        checkpoints.Checkpoints(tmp_path, options).newest()
    for step in (3, 6):
        save(tmp_path, step, options)
    store = checkpoints.Checkpoints(tmp_path, options)
    assert store.newest().step == 6
    newest = tmp_path / "checkpoints" / "step-000006"
    weights = newest / "policy" / "weights"
    content = weights.read_bytes()
    for damaged in (content[:-1], content[:500] + b"\xff" + content[501:], None):
        weights.unlink()
        if damaged is not None:
            weights.write_bytes(damaged)
        with pytest.raises(checkpoints.CheckpointUnusable, match=r"step-000006: damaged.*step 3: remove this folder"):
            store.newest()
        weights.write_bytes(content)
    (newest / "manifest.json").unlink()
    with pytest.raises(checkpoints.CheckpointUnusable, match="damaged"):
        store.newest()


def test_metrics_that_are_damaged_are_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    content = b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    checkpoint = checkpoints.Checkpoint(2, tmp_path, {"metrics_bytes": 24})
    for damaged in (b"own line\n" + content, b"[1]\n" + content):
        path.write_bytes(damaged)
        with pytest.raises(checkpoints.CheckpointUnusable, match="damaged"):
            checkpoints.cut(path, checkpoint)
        assert path.read_bytes() == damaged
    path.write_bytes(content)
    assert [row["step"] for row in checkpoints.cut(path, checkpoint)] == [1, 2] and path.stat().st_size == 24


def test_the_metrics_that_a_checkpoint_counts_are_on_the_disk_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power failure could leave a checkpoint with more metrics than the file, which cannot be resumed."""
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n')
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    seen: list[list[int]] = []
    learner: Any = SimpleNamespace(rank=0, broadcast=lambda value: value, save=lambda *_: None)
    learner.save_state = lambda folder: seen.append([*synced]) or {}
    guard: Any = SimpleNamespace(is_skipping=False, skipped=0, check=lambda *_: None)
    store = checkpoints.Checkpoints(tmp_path, checkpoints.CheckpointOptions())
    checkpoints.CheckpointSaver(store, learner, cast(Any, None), guard, file, lambda: None, 1, 1).after(1)
    assert seen == [[file.stat().st_ino, tmp_path.stat().st_ino]]
    assert store.newest().state["metrics_bytes"] == 12


def test_an_interrupted_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """Killed at any moment of a save: what is there is whole."""
    script = (
        "import sys; from pathlib import Path; from ngym.trainer import checkpoints as c\n"
        "kept = c.Checkpoints(Path(sys.argv[1]), c.CheckpointOptions(keep=2))\n"
        "def write(aside):\n"
        "    for n in range(20): (aside / f'{n}.bin').write_bytes(bytes(100_000))\n"
        "for step in range(1, 10_000):\n"
        "    kept.save(step, {'step': step}, write); kept.tidy([]); print(step, flush=True)\n"
    )
    draw = random.Random(1)
    for _ in range(5):
        process = subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        step = int(process.stdout.readline())
        time.sleep(draw.random() * 0.2)
        process.kill()
        step = max([step, *(int(line) for line in process.stdout.read().split())])
        process.wait()
        newest = checkpoints.Checkpoints(tmp_path, checkpoints.CheckpointOptions()).newest()
        assert step <= newest.step <= step + 1 or newest.step > step  # from an earlier life there may be later ones
        assert (newest.folder / "19.bin").stat().st_size == 100_000


# Whole runs


@pytest.fixture(scope="module")
def policy(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_policy(root, tmp_path_factory.mktemp("policy"))


def kill_when(process: ForkedCommand, due: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not due():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.communicate()


def wait_for_end(process: ForkedCommand) -> str:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


def read_metrics(folder: Path) -> list[Values]:
    """The metrics of the steps, without what depends on the clock, the process or on how often weights were pushed."""
    measured = ("time/", "memory/", "tokens_per_s", "policy_version")
    return [{name: value for name, value in row.items() if not name.startswith(measured)} for row in metrics_of(folder)]


def sft_words(root: Path) -> list[str]:
    shape = [f"model.from_scratch.{name}={value}" for name, value in SHAPE.items()]
    script = f"data.made_by=[{root}/data/calculator/generate.py,demonstrations,--count,400,--seed,0]"
    return ["sft.yaml", "output=run", script, "batch_size=16", "checkpoint.every=4", *shape]


def test_a_killed_run_on_a_file_continues_with_the_same_losses(root: Path, tmp_path: Path) -> None:
    words = sft_words(root)
    (tmp_path / "whole").mkdir()
    wait_for_end(train(tmp_path / "whole", words))
    killed = tmp_path / "killed"
    killed.mkdir()
    checkpoint_folder = killed / "run" / "checkpoints"
    kill_when(train(killed, words), has_checkpoint(checkpoint_folder, 4))
    kill_when(train(killed, [*words, "--resume"]), has_checkpoint(checkpoint_folder, 12))
    output = wait_for_end(train(killed, [*words, "--resume"]))
    assert "resuming after step" in output
    assert read_metrics(killed) == read_metrics(tmp_path / "whole")
    rows = metrics_of(killed)
    assert rows[-1]["epoch"] == 1 and [row["epoch"] for row in rows] == sorted({row["epoch"] for row in rows})
    assert all(0.05 < row["memory/peak_rss"] < 50 for row in rows), "GiB"
    one, other = (folder / "run" / "policy" / "model.safetensors" for folder in (killed, tmp_path / "whole"))
    assert one.read_bytes() == other.read_bytes()


def has_checkpoint(checkpoint_folder: Path, step: int) -> Callable[[], bool]:
    """Whether there is a checkpoint of this step, or of a later one: each is tidied away in its turn."""
    return lambda: any(path.name >= f"step-{step:06}" for path in checkpoint_folder.glob("step-*"))


def test_a_run_that_a_scheduler_warns_saves_at_once_and_continues(root: Path, tmp_path: Path) -> None:
    words = [*sft_words(root), "checkpoint.every=1000"]
    process = train(tmp_path, words)
    steps = count_of_steps(tmp_path)
    wait_until(lambda: steps() >= 2 or process.poll() is not None, patience_s=600)
    os.kill(process.pid, signal.SIGUSR1)
    output, _ = process.communicate(timeout=600)
    last = len(metrics_of(tmp_path))
    assert process.returncode == 130 and f"interrupted; --resume continues after step {last}" in output, output
    assert max(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")) == f"step-{last:06}"
    output = wait_for_end(train(tmp_path, [*words, "--resume"]))
    assert f"resuming after step {last}" in output
    assert [row["step"] for row in metrics_of(tmp_path)] == list(range(1, 26))


def test_a_rank_that_a_scheduler_ends_waits_until_rank_0_has_committed_the_checkpoint(tmp_path: Path) -> None:
    """Once one rank has ended, its launcher kills the others."""
    calls: list[str] = []

    class Rank1:
        rank = 1

        def broadcast(self, value: object) -> bool:
            calls.append("broadcast")
            return True

        def save_state(self, folder: Path) -> dict[str, int]:
            calls.append("save_state")
            return {}

        def save(self, folder: Path, tokenizer: object) -> None:
            calls.append("save")

    guard: Any = SimpleNamespace(is_skipping=False, skipped=0, check=lambda *_: None)
    rank, store = cast(Any, Rank1()), checkpoints.Checkpoints(tmp_path, checkpoints.CheckpointOptions())
    saver = checkpoints.CheckpointSaver(store, rank, cast(Any, None), guard, tmp_path / "m", lambda: None, 9, 1)
    with pytest.raises(KeyboardInterrupt):
        saver.after(1)
    assert calls == ["broadcast", "save_state", "save", "broadcast"]


def test_a_run_that_a_scheduler_warns_while_it_loads_ends_before_its_first_step(root: Path, tmp_path: Path) -> None:
    warns = tmp_path / "warns.py"  # it runs after the imports, before the model is loaded
    warns.write_text(
        "import os, runpy, signal, sys\n"
        "os.kill(os.getppid(), signal.SIGUSR1)\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"  # a scheduler may signal every process of the job
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    words = [word.replace("data.made_by=[", f"data.made_by=[{warns},") for word in sft_words(root)]
    process = train(tmp_path, [*words, "max_steps=2"])
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130 and "interrupted; --resume continues after step 0" in output, output
    assert metrics_of(tmp_path) == []
    output = wait_for_end(train(tmp_path, [*words, "max_steps=2", "--resume"]))
    assert "resuming after step 0" in output and [row["step"] for row in metrics_of(tmp_path)] == [1, 2]


def test_a_run_that_cannot_continue_says_why(root: Path, tmp_path: Path) -> None:
    words = [*sft_words(root), "max_steps=2"]
    process = train(tmp_path, [*words, "--resume"])
    output, _ = process.communicate(timeout=600)
    assert process.returncode != 0 and "run: no run to resume" in output and "Traceback" not in output
    wait_for_end(train(tmp_path, words))
    before = (tmp_path / "run" / "recipe.yaml").read_bytes()
    manifest = tmp_path / "run" / "checkpoints" / "step-000002" / "manifest.json"
    content = manifest.read_bytes()
    manifest.write_bytes(content[:50])
    process = train(tmp_path, [*words, "max_steps=3", "--resume"])
    output, _ = process.communicate(timeout=600)
    assert process.returncode != 0 and "damaged: manifest.json is not what was written" in output, output
    assert (tmp_path / "run" / "recipe.yaml").read_bytes() == before  # of the run as it is
    manifest.write_bytes(content)
    process = train(tmp_path, [*words, "optimizer.lr=0.5", "--resume"])
    output, _ = process.communicate(timeout=600)
    assert process.returncode != 0 and "--resume: optimizer.lr: 0.005 in the run, 0.5 now; set it back" in output
    recipe = tmp_path / "run" / "recipe.yaml"
    older = "".join(line for line in recipe.read_text().splitlines(keepends=True) if "  train_vision:" not in line)
    assert older != recipe.read_text()
    recipe.write_text(older)  # of a version that did not have this option
    output = wait_for_end(train(tmp_path, [*words, "max_steps=3", "--resume"]))  # a run may be made longer
    assert "resuming after step 2" in output and [row["step"] for row in metrics_of(tmp_path)] == [1, 2, 3]


def test_a_run_whose_model_has_changed_is_not_resumed(policy: Path, tmp_path: Path) -> None:
    rng = random.Random(0)
    answers = [f"The answer is {rng.randint(10, 99)}." for _ in range(80)]
    prompt = [{"role": "user", "content": "How many?"}]
    pairs = [
        {"prompt": prompt, "chosen": [message], "rejected": [{"role": "assistant", "content": "Perhaps."}]}
        for message in ({"role": "assistant", "content": answer} for answer in answers)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs), "utf-8")
    shutil.copytree(policy, tmp_path / "start")
    words = ["dpo.yaml", "output=run", "data.path=pairs.jsonl", "model.path=start", "evaluation=null", "batch_size=16"]
    wait_for_end(train(tmp_path, [*words, "max_steps=1"]))
    weights = bytearray((tmp_path / "start" / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "start" / "model.safetensors").write_bytes(weights)
    process = train(tmp_path, [*words, "max_steps=2", "--resume"])
    message, _ = process.communicate(timeout=600)
    assert process.returncode != 0 and "start: the model has changed since the run began with it" in message, message
    weights[-1] ^= 1
    (tmp_path / "start" / "model.safetensors").write_bytes(weights)
    wait_for_end(train(tmp_path, [*words, "max_steps=2", "--resume"]))


def test_a_killed_live_run_continues_and_collects_nothing_twice(policy: Path, tmp_path: Path) -> None:
    settings = ["evaluation=null", "checkpoint.every=3"]
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (uninterrupted, killed):
        folder.mkdir()
    with serving(Stub(policy)) as stub:
        wait_for_end(train(uninterrupted, [*arguments(uninterrupted, policy, stub, 8), *settings]))
        runs = stub.runs
    with serving(Stub(policy)) as stub:
        words = [*arguments(killed, policy, stub, 8), *settings]
        steps = count_of_steps(killed)
        kill_when(train(killed, words), lambda: steps() >= 2)  # before the first checkpoint
        kill_when(train(killed, [*words, "--resume"]), lambda: steps() >= 5)  # between two
        output = wait_for_end(train(killed, [*words, "--resume"]))
        # what was in flight when it was killed, or not yet on the disk, is collected again, and nothing else
        assert runs <= stub.runs <= runs + 2 * 3 * 32
    assert "rollouts were collected before and are used again" in output
    assert read_metrics(killed) == read_metrics(uninterrupted)
    rows = [json.loads(line) for line in (killed / "run" / "rollouts.jsonl").read_text("utf-8").splitlines()]
    trained = {(row["_ng_task_index"], row["_ng_rollout_index"]) for row in rows}
    assert len(trained) == len(rows)
    assert {task for task, _ in trained} == set(range(8 * 8))


def test_a_killed_run_with_a_lag_continues_with_rollouts_of_earlier_weights(policy: Path, tmp_path: Path) -> None:
    settings = ["evaluation=null", "checkpoint.every=2", "rollouts.max_lag=3", "rollouts.curriculum.decay=0.5"]
    with serving(Stub(policy)) as stub:
        words = [*arguments(tmp_path, policy, stub, 6), *settings]
        steps = count_of_steps(tmp_path)
        kill_when(train(tmp_path, words), lambda: steps() >= 3)
        tasks, logged = (tmp_path / "tasks.jsonl").read_bytes(), (tmp_path / "run" / "metrics.jsonl").read_bytes()
        (tmp_path / "tasks.jsonl").write_bytes(tasks[: tasks.index(b"\n") + 1])
        output, _ = (process := train(tmp_path, [*words, "--resume"])).communicate(timeout=600)
        assert process.returncode != 0 and "tasks.jsonl: changed since its tasks were drawn before" in output, output
        assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == logged
        (tmp_path / "tasks.jsonl").write_bytes(tasks)
        output = wait_for_end(train(tmp_path, [*words, "--resume"]))
    assert "rollouts were collected before and are used again" in output
    assert any(row["lag"] > 0 for row in metrics_of(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text("utf-8").splitlines()]
    assert len({(row["_ng_task_index"], row["_ng_rollout_index"]) for row in rows}) == len(rows)
    tasks = {(row["_ng_task_index"], json.dumps(row["responses_create_params"]["input"])) for row in rows}
    assert len(tasks) == len({number for number, _ in tasks}), "a number is there for two tasks"


def count_of_steps(folder: Path) -> Callable[[], int]:
    path = folder / "run" / "metrics.jsonl"
    return lambda: path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_run_of_two_ranks_continues_with_one(root: Path, tmp_path: Path) -> None:
    constant = "schedule={name: constant, warmup_steps: 0}"  # two runs of other lengths have the same rates
    words = [*sft_words(root), "engine.zero_stage=2", "optimizer.name=adamw", constant]
    (tmp_path / "whole").mkdir()
    wait_for_end(train(tmp_path / "whole", [*words, "max_steps=8"]))
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    two = tmp_path / "two"
    two.mkdir()
    ranks = [train(two, [*words, "max_steps=4"], **meeting, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
    for rank in ranks:
        wait_for_end(rank)
    wait_for_end(train(two, [*words, "max_steps=8", "--resume"]))
    for row, expected in zip(metrics_of(two), metrics_of(tmp_path / "whole"), strict=True):
        for name in ("step", "loss", "grad_norm", "lr"):
            assert row[name] == pytest.approx(expected[name], rel=1e-4), name


# Ahead of the trainer


@pytest.mark.parametrize("lag", [1, 3])
def test_collection_continues_while_the_trainer_trains_but_never_too_far(
    policy: Path, tmp_path: Path, lag: int
) -> None:
    with serving(Stub(policy, slow_commit_s=0.3)) as stub:
        words = [*arguments(tmp_path, policy, stub, 8), "evaluation=null", f"rollouts.max_lag={lag}"]
        wait_for_end(train(tmp_path, words))
        assert stub.runs <= 8 * 32 + 3 * 8  # nothing is collected to be thrown away; failed attempts are tried again
    steps = metrics_of(tmp_path)
    assert [row["step"] for row in steps] == list(range(1, 9))
    assert all(row["lag"] <= lag for row in steps) and any(row["lag"] > 0 for row in steps)
    assert all(row["stale_dropped"] == 0 for row in steps)
    assert sum(row["num_valid_samples"] + row["num_unscored"] + row["num_failed"] for row in steps) == 8 * 32
    assert "is_weight/mean" in steps[-1] or "token_mult_prob_error" in steps[-1]


def test_groups_that_have_no_learning_signal_are_replaced_up_to_a_bound(policy: Path, tmp_path: Path) -> None:
    with serving(Stub(policy, equal_share=5)) as stub:  # of eight
        words = [*arguments(tmp_path, policy, stub, 3), "evaluation=null", "rollouts.dynamic_sampling=4"]
        wait_for_end(train(tmp_path, words))
    steps = metrics_of(tmp_path)
    assert all(row["num_equal_groups"] > 0 for row in steps)
    assert all(row["frac_reward_zero_std"] == 0 for row in steps)


def test_replaced_groups_do_not_count_in_the_reward_of_their_environment(policy: Path, tmp_path: Path) -> None:
    """Those of the stub have a mean of 0.5."""
    with serving(Stub(policy, equal_share=5)) as stub:
        words = [*arguments(tmp_path, policy, stub, 3), "evaluation=null", "rollouts.dynamic_sampling=4"]
        services = json.loads((tmp_path / "services.yaml").read_text("utf-8"))
        services["other"] = services["agent"]
        (tmp_path / "services.yaml").write_text(json.dumps(services), "utf-8")
        both = "rollouts.environments=[{agent: agent, tasks: tasks.jsonl}, {agent: other, tasks: tasks.jsonl}]"
        wait_for_end(train(tmp_path, [*words, "rollouts.agent=null", "rollouts.tasks=null", both]))
    for row in metrics_of(tmp_path):
        means = [row[name] for name in ("reward/agent/mean", "reward/other/mean") if name in row]
        assert row["num_equal_groups"] > 0 and min(means) <= row["reward/mean"] + 1e-9 <= max(means) + 2e-9


def test_a_run_is_not_resumed_to_fewer_steps(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("max_steps: 5\n")
    save(tmp_path, 4, checkpoints.CheckpointOptions())
    with pytest.raises(
        UsageError, match=r"--resume: max_steps: 3, but .* has a checkpoint of step 4; set it to 4 or more"
    ):
        checkpoints.resumable(tmp_path, "max_steps: 3\n")
    checkpoints.resumable(tmp_path, "max_steps: 4\n")


@pytest.mark.parametrize("output", ["run/", "./run", "{cwd}/run", "{cwd}/link"])
def test_a_run_is_resumed_from_the_same_paths_however_they_are_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    (tmp_path / "run" / "recipe.yaml").write_text("data: {path: run/rollouts.jsonl}\n")
    for created in (False, True):  # data.made_by creates it
        if created:
            (tmp_path / "run" / "rollouts.jsonl").touch()
        spelled = output.format(cwd=tmp_path)
        checkpoints.resumable(Path("run"), f"data: {{path: {spelled}/rollouts.jsonl}}\n")
        with pytest.raises(UsageError, match=r"data\.path: 'run/rollouts\.jsonl' in the run, '.*other\.jsonl'"):
            checkpoints.resumable(Path("run"), f"data: {{path: {spelled}/other.jsonl}}\n")
    (tmp_path / "run" / "recipe.yaml").write_text("rollouts: {push_folder: run/weights}\n")
    checkpoints.resumable(Path("run"), f"rollouts: {{push_folder: {spelled}/weights}}\n")
    with pytest.raises(UsageError, match=r"rollouts\.push_folder: 'run/weights' in the run, '.*other'"):
        checkpoints.resumable(Path("run"), f"rollouts: {{push_folder: {spelled}/other}}\n")


def test_the_spool_belongs_to_one_trainer(policy: Path, tmp_path: Path) -> None:
    spool = rollout_spool
    path = tmp_path / "rollouts.jsonl"
    row = {
        "_ng_task_index": 3,
        "_ng_rollout_index": 1,
        "ng": {"rollout_id": "a"},
        "_ng_train": {"task": "t", "oldest": 0},
    }
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "ng": {"rollout_id": "b"}})[:-5], "utf-8")
    opened = spool.RolloutFiles(path, lambda number: True)
    assert len(opened) == 1 and list(opened.rows(3, "other")) == []
    with pytest.raises(Exception, match="is being written by"):
        spool.RolloutFiles(path, lambda number: True)
    with pytest.raises(UsageError, match="start again with --overwrite"):
        (tmp_path / "other.jsonl").write_text("{}\n", "utf-8")
        spool.RolloutFiles(tmp_path / "other.jsonl", lambda number: True)


def test_rows_behind_a_line_that_was_there_twice_are_found(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    lines = [
        json.dumps({
            "_ng_task_index": number,
            "_ng_rollout_index": 0,
            "ng": {"rollout_id": f"r{number}"},
            "_ng_train": {"task": "t", "oldest": number},
        })
        for number in (0, 1, 0, 2, 1, 3)
    ]  # fmt: skip
    path.write_text("\n".join(lines) + "\n", "utf-8")
    opened = rollout_spool.RolloutFiles(path, lambda number: True)
    for number in (3, 2, 1, 0):
        assert [row["ng"]["rollout_id"] for row in opened.rows(number, "t")] == [f"r{number}"]


# The order of tasks


async def test_a_resumed_run_gives_every_number_the_task_that_it_had_before(tmp_path: Path) -> None:
    """With a lag, what a curriculum knows at a draw depends on which groups were complete first: here 3 and 4, then 2 and 3."""
    text = "".join(json.dumps({"responses_create_params": {"input": str(n)}}) + "\n" for n in range(12))
    (tmp_path / "tasks.jsonl").write_text(text, "utf-8")
    options = rollout_options.RolloutOptions(
        agent="agent",
        tasks=str(tmp_path / "tasks.jsonl"),
        tasks_per_step=2,
        group_size=1,
        max_lag=2,
        curriculum={"decay": 0.0, "floor": 0.01},
    )
    spooled = tmp_path / "rollouts.jsonl"
    requests: list[tuple[int, str]] = []
    slow: set[int] = set()
    never = asyncio.Event()

    async def answer(row: Values) -> Any:
        number, task = row["_ng_task_index"], row["responses_create_params"]["input"]
        requests.append((number, task))
        if number in slow:
            await never.wait()
        segment = {"token_ids": [1, 2], "mask": [[1, 2]], "logprobs": [-1.0], "policy_version": [[1, 2, 0]]}
        ng = {"segments": [segment], "turns": 1, "tool_calls": 0, "tool_errors": 0, "stop_reason": "answer"}
        return scored_row(row, float(int(task) % 2), ng=ng)

    def rows() -> dict[int, str]:
        lines = [json.loads(line) for line in spooled.read_text("utf-8").splitlines()]
        numbers = [row["_ng_task_index"] for row in lines]
        assert len(set(numbers)) == len(numbers), "a number is there for two rollouts"
        return dict(zip(numbers, (row["responses_create_params"]["input"] for row in lines), strict=True))

    async def life(state: Values | None, takes: int) -> Values:
        """Trains after `state` and returns the state of the checkpoint after the first batch."""
        async with agents_serving(answer) as url:
            peers = Peers({"agent": [url]}, owner="the test")
            source = task_sampler.TaskSource(options, seed=0)
            stream = rollout_stream.RolloutStream(peers, source, options, 1.0, 0, 99, spooled, lambda group: True)
            await stream.open(state)
            first = state["step"] + 1 if state else 0
            for step in range(first, first + takes):
                stream.announce_version(0, 0)
                stream.record_version(0, step)
                for number in {2} - slow if step else ():
                    while not stream._groups[number].complete:
                        await asyncio.sleep(0.01)
                assert await stream.take() is not None
                if step == 0:
                    state = json.loads(json.dumps(stream.state()))
            stream.record_version(0, first + takes)
            while not {8, 9} <= rows().keys():
                await asyncio.sleep(0.01)
            await stream.close()
            await peers.close()
        assert state is not None
        return state

    slow.add(2)
    state = await life(None, 2)
    before = rows()
    slow.clear()
    requests.clear()
    await life(state, 1)
    assert before.items() <= rows().items() and not {number for number, _ in requests} & before.keys()
    order = [json.loads(line) for line in (tmp_path / "rollouts_tasks.jsonl").read_text("utf-8").splitlines()]
    assert [drawn["number"] for drawn in order] == list(range(10))
    assert rows().items() <= {drawn["number"]: str(drawn["index"]) for drawn in order}.items()
