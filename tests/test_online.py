"""`ng_train grpo.yaml` as a user runs it, against services: it learns, counts what went wrong, and is the same on two ranks."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stub_policy import Stub, serving
from transformers import AutoModelForCausalLM, AutoTokenizer

from ngym.cli.train import trainer
from ngym.config import load_config
from ngym.errors import ConfigError, UsageError

config, model, curves, live, services = map(trainer, ("config", "model", "curves", "live", "services"))
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
STEPS = 8
TASKS, SIZE = 8, 4
Values = dict[str, Any]


@pytest.fixture(scope="module")
def policy(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a new policy."""
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")
    options = config.ModelOptions(from_scratch=SHAPE, tokenizer="data/tiny_policy/tokenizer")
    model.load_policy(options, tokenizer, 0).network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_tasks(path: Path, count: int) -> Path:
    draw = random.Random(0)
    tasks = [
        {"responses_create_params": {"input": f"task {n}"}, "prompt": [draw.randrange(20, 1000) for _ in range(4)]}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks), "utf-8")
    return path


def arguments(folder: Path, policy: Path, stub: Stub, steps: int) -> list[str]:
    """The command line of a run in this folder."""
    stanzas = {
        "policy": {"kind": "model", "url": stub.url},
        "agent": {"kind": "agent", "url": stub.url, "model": "policy"},
    }
    (folder / "services.yaml").write_text(json.dumps(stanzas), "utf-8")
    tasks = write_tasks(folder / "tasks.jsonl", 20)
    overrides = {
        "output": "run",
        "model.path": policy,
        "rollouts.agent": "agent",
        "rollouts.tasks": tasks,
        "rollouts.services": folder / "services.yaml",
        "rollouts.tasks_per_step": TASKS,
        "rollouts.group_size": SIZE,
        "max_steps": steps,
        "micro_batch_tokens": 120,
        "optimizer.lr": 3e-2,
        "optimizer.max_grad_norm": "null",
        "optimizer.eps": 1e-5,
        "schedule.name": "constant",
        "schedule.warmup_steps": 0,
        "evaluation.tasks": tasks,
        "evaluation.limit": 10,
        "evaluation.every": 4,
    }
    return ["grpo.yaml", *(f"{key}={value}" for key, value in overrides.items())]


def train(folder: Path, words: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ngym", "train", *words],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def rows(folder: Path) -> list[Values]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]


def of_steps(folder: Path) -> list[Values]:
    return [row for row in rows(folder) if "reward/mean" in row]


@pytest.fixture(scope="module")
def finished(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, Stub]]:
    """A run to its end, with a policy server that restarts in its sixth step."""
    folder = tmp_path_factory.mktemp("online")
    evaluated = 2 * 2 * 10
    with serving(Stub(policy, restarts_after=evaluated + 5 * TASKS * SIZE + 10)) as stub:
        process = train(folder, arguments(folder, policy, stub, STEPS))
        said, _ = process.communicate(timeout=200)
        assert process.returncode == 0, said
        yield folder, said, stub


def test_the_reward_rises_on_tasks_and_held_out(finished: tuple[Path, str, Stub]) -> None:
    folder, said, _ = finished
    steps = of_steps(folder)
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert steps[0]["reward/mean"] < 0.6 and steps[-1]["reward/mean"] > steps[0]["reward/mean"] + 0.15
    held_out = [(row["step"], row["eval/agent/sampled"]) for row in rows(folder) if "eval/agent/sampled" in row]
    assert [step for step, _ in held_out] == [0, 4, 8] and held_out[-1][1] > held_out[0][1] + 0.15
    assert "held-out after 8 steps: sampled 0." in said and "step 8/8  reward 0." in said
    assert "reward/mean: " in said and (folder / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_tells_what_it_saw(finished: tuple[Path, str, Stub]) -> None:
    steps = of_steps(finished[0])
    for row in steps:
        assert row["lag"] == 0 and row["completions/mean_length"] == 6 and row["num_turns"] == 1
        assert row["token_mult_prob_error"] == pytest.approx(1, abs=1e-3)
        assert {"loss", "grad_norm", "lr", "tokens_per_s", "approx_entropy", "clip_ratio/region_mean"} <= set(row)
        assert {"time/generation", "time/weight_sync", "time/train", "policy_version"} <= set(row)
    assert any(row["num_unscored"] for row in steps) and any(row["num_failed"] for row in steps)


def test_what_a_restarted_server_sampled_is_left_out_and_it_gets_the_weights_again(
    finished: tuple[Path, str, Stub],
) -> None:
    folder, _, stub = finished
    dropped = [row["step"] for row in of_steps(folder) if row["stale_dropped"]]
    assert dropped == [6]
    for row in of_steps(folder):
        total = row["num_valid_samples"] + row["num_unscored"] + row["num_failed"] + row["stale_dropped"]
        assert total == TASKS * SIZE
    assert stub.pushes == list(range(1, STEPS + 2))


def test_the_saved_policy_is_the_one_that_is_served(finished: tuple[Path, str, Stub]) -> None:
    folder, _, stub = finished
    saved = AutoModelForCausalLM.from_pretrained(folder / "run" / "policy").state_dict()
    served = stub._network.state_dict()
    assert all((saved[name] - served[name]).abs().max() == 0 for name in saved)


def test_two_ranks_learn_what_one_learns(policy: Path, tmp_path: Path, finished: tuple[Path, str, Stub]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with serving(Stub(policy)) as stub:
        words = [*arguments(tmp_path, policy, stub, 2), "engine.zero_stage=2", "evaluation=null"]
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        ranks = [train(tmp_path, words, **meeting, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
        said = [process.communicate(timeout=200)[0] for process in ranks]
        assert [process.returncode for process in ranks] == [0, 0], said
    for two, one in zip(of_steps(tmp_path), of_steps(finished[0]), strict=False):
        for name in ("loss", "grad_norm", "reward/mean", "global_valid_toks"):
            assert two[name] == pytest.approx(one[name], rel=1e-3), name


def test_a_model_server_that_takes_no_weights_ends_the_run_with_a_line(policy: Path, tmp_path: Path) -> None:
    """The services are real processes, started and stopped by the command."""
    write_tasks(tmp_path / "tasks.jsonl", 3)
    (tmp_path / "services.yaml").write_text(
        "policy: {kind: model, app: models/scripted, tokens: true}\n"
        "calculator: {kind: gym_server, app: gym_servers/calculator}\n"
        "calculator_agent: {kind: agent, app: agents/simple, gym: calculator, model: policy}\n"
        "weather: {kind: gym_server, app: gym_servers/weather}\n",
        "utf-8",
    )
    words = [f"model.path={policy}", "rollouts.tasks=tasks.jsonl", "rollouts.services=services.yaml", "output=run"]
    process = train(tmp_path, ["grpo.yaml", "evaluation=null", *words])
    said, _ = process.communicate(timeout=100)
    assert process.returncode != 0 and "Traceback" not in said, said
    assert "starting policy, calculator, calculator_agent" in said
    assert "no transport 'http' there; it offers no push at all" in said


def test_only_what_the_agent_needs_is_started(root: Path) -> None:
    whole = load_config([root / "global_config.yaml"])
    assert set(services.needed(whole, "math_agent", "policy").services) == {"math_agent", "math", "policy"}
    with pytest.raises(ConfigError, match="'math' is a gym_server, not an agent"):
        services.needed(whole, "math", "policy")
    with pytest.raises(ConfigError, match=r"does not lead to the model 'weather'; set rollouts\.policy"):
        services.needed(whole, "math_agent", "weather")


def test_tasks_come_in_a_new_order_each_epoch_and_bent_sampling_is_refused(tmp_path: Path) -> None:
    path = write_tasks(tmp_path / "tasks.jsonl", 5)
    stream = iter(live.Tasks(path, 0))
    epochs = [[next(stream)["responses_create_params"]["input"] for _ in range(5)] for _ in range(3)]
    assert all(sorted(epoch) == [f"task {n}" for n in range(5)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = iter(live.Tasks(path, 0))
    assert [next(again)["responses_create_params"]["input"] for _ in range(5)] == epochs[0]
    path.write_text('{"responses_create_params": {"input": "?", "top_k": 20}}\n', "utf-8")
    with pytest.raises(UsageError, match=r"tasks\.jsonl:1: top_k is 20: the sampler's"):
        live.Tasks(path, 0)


def test_curves_are_drawn_from_what_was_logged(tmp_path: Path) -> None:
    history = [{"step": n, "reward/mean": n / 10, "loss": 1.0} for n in range(1, 9)]
    shown = curves.curves([{"step": 0, "eval/agent/greedy": 0.25, "eval/agent/greedy/count": 4}, *history])
    assert [curve.name for curve in shown] == ["reward/mean", "eval/agent/greedy"]
    text = curves.as_text(shown)
    assert "reward/mean: 0.100 -> 0.800" in text and len(text.splitlines()) == 16
    curves.as_png(shown, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000
    assert [curve.name for curve in curves.curves([{"step": 1, "loss": 2.0}])] == ["loss"]
