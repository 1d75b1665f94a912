"""The smallest reinforcement learning run, from random weights, with every part of a run."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

import pytest
import torch
from trainer_service import metrics_of, train
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM


@pytest.fixture
def tokenizer_folder(root: Path) -> Path:
    return root / "data" / "letters" / "tokenizer"


def test_the_shipped_tokenizer_is_what_its_script_writes(
    root: Path, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["generate.py", str(tmp_path)])
    runpy.run_path(str(root / "data" / "letters" / "generate.py"), run_name="__main__")
    for file in tokenizer_folder.iterdir():
        assert (tmp_path / "tokenizer" / file.name).read_bytes() == file.read_bytes(), file.name


def write_experts(folder: Path, tokenizer_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=128,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=32,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_a_token_is_a_letter(tokenizer_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    messages = [{"role": "user", "content": "abca"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    conversation = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": "zz"}], return_dict=False)
    assert tokenizer.convert_ids_to_tokens(conversation) == [
        "<|start|>",
        *"abca",
        "<|end|>",
        "<|start|>",
        *"zz",
        "<|end|>",
    ]
    assert conversation[: len(prompt)] == prompt
    assert tokenizer.decode(conversation, skip_special_tokens=True) == "abcazz"
    assert len(tokenizer) == max(tokenizer.get_vocab().values()) + 1


@pytest.mark.parametrize("app", ["models/transformers", "models/vllm"])
def test_live_training_begins_with_random_weights(tmp_path: Path, app: str) -> None:
    words = ["letters.yaml", "output=run", "max_steps=6", "rollouts.max_output_tokens=16", f"rollouts.policy_app={app}"]
    output, _ = train(tmp_path, words, vllm=app == "models/vllm").communicate(timeout=600)
    steps = metrics_of(tmp_path)
    assert [row["step"] for row in steps] == list(range(1, 7)), output
    assert steps[0]["reward/mean"] < 0.1 < steps[5]["reward/mean"]  # one letter of 26, and more of it
    assert all(row["lag"] == 0 and row["token_mult_prob_error"] < 1.001 for row in steps)
    first, last = (AutoModelForCausalLM.from_pretrained(tmp_path / "run" / name) for name in ("initial", "policy"))
    assert first.config.vocab_size == 30
    assert not first.get_input_embeddings().weight.equal(last.get_input_embeddings().weight)


def test_in_bf16_every_transport_is_proved_and_apart_or_on_shared_gpus_it_learns_the_same(tmp_path: Path) -> None:
    """The trainer in bf16, the server in float32: over HTTP, in turns on one machine, and as an adapter, also
    of a 4-bit base.
    """
    words = ["letters.yaml", "output=run", "max_steps=3", "rollouts.max_output_tokens=16", "engine.zero_stage=1"]
    words += ["engine.precision=bf16", "rollouts.policy_app=null"]
    beginning = tmp_path / "http" / "run" / "initial"
    adapter = ["model.from_scratch=null", "model.tokenizer=null", f"model.path={beginning}", "model.lora.rank=8"]
    ways = {"http": [], "colocated": ["rollouts.colocated=true"], "lora": [*adapter, "rollouts.transport=lora"]}
    ways["transformers"] = ["rollouts.colocated=true", "rollouts.policy_app=models/transformers"]
    if importlib.util.find_spec("bitsandbytes"):  # the server has the dequantized base
        ways["qlora"] = [*ways["lora"], "model.lora.base_4bit=nf4"]
    steps, weights = {}, {}
    for name, more in ways.items():
        (tmp_path / name).mkdir()
        output, _ = (process := train(tmp_path / name, [*words, *more], vllm=True)).communicate(timeout=600)
        assert process.returncode == 0, output
        rows = metrics_of(tmp_path / name)
        assert [row["step"] for row in rows] == [1, 2, 3], name
        assert all(row["token_mult_prob_error"] < 1.05 for row in rows), name
        timed = ("time/", "memory/", "tokens_per_s")
        steps[name] = [{key: value for key, value in row.items() if not key.startswith(timed)} for row in rows]
        weights[name] = (tmp_path / name / "run" / "policy" / "model.safetensors").read_bytes()
    assert steps["http"] == steps["colocated"], "the same seed, the same services: every figure is the same"
    assert weights["http"] == weights["colocated"]


def test_pushes_of_what_changed_give_the_run_of_whole_checkpoints(tmp_path: Path) -> None:
    words = ["letters.yaml", "output=run", "max_steps=3", "rollouts.max_output_tokens=16", "engine.zero_stage=1"]
    words += ["engine.precision=bf16", "optimizer.lr=3e-6", "rollouts.policy_app=null"]
    steps, sizes, weights = {}, {}, {}
    for transport in ("http", "delta"):
        (tmp_path / transport).mkdir()
        process = train(tmp_path / transport, [*words, f"rollouts.transport={transport}"], vllm=True)
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
        rows = metrics_of(tmp_path / transport)
        measured = ("time/", "memory/", "tokens_per_s", "weight_sync/")
        steps[transport] = [{key: row[key] for key in row if not key.startswith(measured)} for row in rows]
        sizes[transport] = [row["weight_sync/bytes"] for row in rows]
        weights[transport] = (tmp_path / transport / "run" / "policy" / "model.safetensors").read_bytes()
    assert steps["http"] == steps["delta"] and weights["http"] == weights["delta"]
    whole = sizes["http"][0]
    assert sizes["http"] == [whole] * 3
    assert sizes["delta"][0] >= whole and all(0 < size < whole / 2 for size in sizes["delta"][1:])


def test_the_routing_of_a_mixture_of_experts_is_replayed(tmp_path: Path, tokenizer_folder: Path) -> None:
    """The server is in bf16, so that its routers choose other experts for some tokens than those of the trainer."""
    experts = tmp_path / "experts"
    write_experts(experts, tokenizer_folder)
    differences = {}
    for replay in ("true", "false"):
        folder = tmp_path / replay
        folder.mkdir()
        (folder / "services.yaml").write_text(
            "policy: {kind: model, app: models/transformers, model: unused, dtype: bfloat16}\n"
            "letters: {kind: gym_server, app: gym_servers/letters}\n"
            "letters_agent: {kind: agent, app: agents/simple, gym: letters, model: policy}\n"
        )
        words = ["letters.yaml", "output=run", "max_steps=2", "rollouts.max_output_tokens=16", "model.tokenizer=null"]
        words += ["model.from_scratch=null", f"model.path={experts}", f"algorithm.routing_replay={replay}"]
        words += ["rollouts.services=services.yaml", "rollouts.policy_app=null"]
        output, _ = (process := train(folder, words)).communicate(timeout=600)
        assert process.returncode == 0, output
        differences[replay] = [row["mismatch_kl"] for row in metrics_of(folder)]
    # step 1 has the same rollouts in both
    assert differences["true"][0] < differences["false"][0] / 2, differences


def test_trainer_and_server_in_fp16_agree(tmp_path: Path) -> None:
    (tmp_path / "services.yaml").write_text(
        "policy: {kind: model, app: models/vllm, model: unused, engine: {dtype: float16}}\n"
        "letters: {kind: gym_server, app: gym_servers/letters}\n"
        "letters_agent: {kind: agent, app: agents/simple, gym: letters, model: policy}\n"
    )
    words = ["letters.yaml", "output=run", "max_steps=3", "rollouts.max_output_tokens=16", "engine.zero_stage=1"]
    words += ["engine.precision=fp16", "rollouts.services=services.yaml", "rollouts.policy_app=null"]
    output, _ = (process := train(tmp_path, words, vllm=True)).communicate(timeout=600)
    assert process.returncode == 0, output
    rows = metrics_of(tmp_path)
    assert [row["policy_version"] for row in rows] == [1, 2, 3]
    assert all(row["token_mult_prob_error"] < 1.005 and row["lag"] == 0 for row in rows)
    assert all(row["loss_scale"] == 2.0**16 and row["overflow_retries"] == 0 for row in rows)
    learned = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy", dtype="auto")
    assert learned.dtype == torch.float16
