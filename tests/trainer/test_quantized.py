"""QLoRA with the real bitsandbytes, PEFT and DeepSpeed: training on 4-bit weights, and the saved adapter."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_steps import compute_logprobs, difference, pack_sequences, step
from safetensors.torch import load_file
from steps_on_ranks import TOKENIZER
from torch import nn
from trainer_service import metrics_of, on_two_ranks, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from ngym.errors import ConfigError, UsageError
from ngym.trainer.engine import engine
from ngym.trainer.model import layers, lora
from ngym.trainer.model import policy as model
from ngym.trainer.online import services
from ngym.trainer.recipe import recipe as config
from ngym.trainer.recipe import recipe_reader

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
LAUNCH = config.Launch(rank=0, local_rank=0, ranks=1)
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.05,
}
LAYERS = 2 * 7
QLORA = {"rank": 4, "alpha": 8, "base_4bit": "nf4"}

pytestmark = pytest.mark.usefixtures("only_rank")


@pytest.fixture(scope="module")
def base(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tokenizer = AutoTokenizer.from_pretrained(root / TOKENIZER)
    options = config.ModelOptions(from_scratch=SHAPE, tokenizer=TOKENIZER)
    model.load_policy(options, tokenizer, 0).network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load_policy(folder: Path, lora: dict[str, Any] | None = QLORA) -> Any:
    return model.load_policy(
        config.ModelOptions(path=str(folder), lora=lora), AutoTokenizer.from_pretrained(folder), 0
    ).eval()


def learner(
    folder: Path, stage: int = 0, precision: str = "fp32", lora: dict[str, Any] | None = QLORA, **options: Any
) -> Any:
    engineering = config.EngineOptions(zero_stage=stage, precision=precision, **options)
    return engine.Engine(load_policy(folder, lora), LAUNCH, engineering, config.OptimizerOptions(lr=1e-2))


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_the_base_has_four_bits_a_weight_and_the_rest_is_as_it_was(base: Path, kind: str) -> None:
    from ngym.trainer.model.quantized import Linear4bit

    unquantized = load_policy(base, None).network
    network = load_policy(base, {**QLORA, "base_4bit": kind}).network
    layers = [module for module in network.modules() if isinstance(module, Linear4bit)]
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    scales = sum(layer.scales.absmax.nbytes + layer.scales.state2.absmax.nbytes for layer in layers)
    assert len(layers) == LAYERS and all(layer.weight.dtype == torch.uint8 for layer in layers)
    assert sum(layer.weight.nbytes for layer in layers) == weights / 2
    assert 8 * (weights / 2 + scales) / weights == pytest.approx(4.13, abs=0.01)
    parameters = dict(network.named_parameters())
    for name, parameter in unquantized.named_parameters():
        if "proj" not in name:
            assert torch.equal(parameters[name], parameter) and parameters[name].dtype == torch.float32


def test_the_bytes_are_those_of_transformers(base: Path) -> None:
    """So an adapter belongs to the model that transformers loads in 4 bits."""
    from transformers import BitsAndBytesConfig

    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
    quantization = BitsAndBytesConfig(load_in_4bit=True, **options)
    reference = AutoModelForCausalLM.from_pretrained(base, quantization_config=quantization, dtype=torch.float32)
    ours = load_policy(base).network
    ours.set_attn_implementation("sdpa")
    packed = {name.replace(".base_layer", ""): one for name, one in ours.named_parameters() if one.dtype is torch.uint8}
    assert len(packed) == LAYERS
    assert all(torch.equal(one, reference.get_parameter(name)) for name, one in packed.items())
    layers.fuse_layers(reference)  # only the linear layers are compared
    ids = torch.arange(20, 50)[None]
    assert difference(reference.train()(ids).logits.detach(), ours(ids).logits.detach()) < 1e-6


def test_a_product_and_its_gradient_are_those_of_the_dequantized_weights() -> None:
    from ngym.trainer.model.quantized import Linear4bit

    torch.manual_seed(0)
    plain = nn.Linear(96, 80)
    layer = Linear4bit(plain, "nf4", torch.device("cpu"))
    assert 0 < difference(layer.dequantized(torch.float32), plain.weight.detach()) < 0.03
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = layer.dequantized(torch.float32).to(dtype)
        assert torch.equal(layer.dequantized(dtype), weight), "rounded once"
        one, other = (torch.randn(5, 96, generator=torch.Generator().manual_seed(1)).to(dtype) for _ in range(2))
        actual, right = (
            layer(one.requires_grad_()),
            nn.functional.linear(other.requires_grad_(), weight, plain.bias.to(dtype)),
        )
        (actual.float().square().sum() + right.float().square().sum()).backward()
        assert actual.dtype == dtype and torch.equal(actual, right) and torch.equal(one.grad, other.grad)


def test_only_the_adapter_learns(base: Path) -> None:
    trained, data = learner(base), pack_sequences()
    names = {name for name, parameter in trained.policy.named_parameters() if parameter.requires_grad}
    assert len(names) == LAYERS * 2 and all(".lora_A." in name or ".lora_B." in name for name in names)
    first = compute_logprobs(trained.logprobs, data)
    with trained.track_gradients() as parameters:
        step(trained, data, 3)
    assert parameters == names and difference(compute_logprobs(trained.logprobs, data), first) > 0.1
    assert torch.equal(compute_logprobs(trained.base_logprobs, data), first), (
        "the reference of KL is the quantized base"
    )


@pytest.mark.parametrize(
    ("stage", "options"),
    [(1, {}), (2, {}), (2, {"offload": {"optimizer": "cpu"}}), (0, {"activation_checkpointing": True})],
)
def test_each_way_learns_the_same(base: Path, stage: int, options: dict[str, Any]) -> None:
    data, plain, trained = pack_sequences(), learner(base), learner(base, stage, **options)
    assert step(trained, data, 3) == pytest.approx(step(plain, data, 3), rel=1e-4)
    assert difference(compute_logprobs(trained.logprobs, data), compute_logprobs(plain.logprobs, data)) < 1e-4


@pytest.mark.parametrize(("stage", "precision", "bound"), [(0, "fp32", 1e-5), (2, "bf16", 0.05), (1, "fp16", 0.005)])
def test_the_saved_policy_is_whole_and_says_what_was_trained(
    base: Path, tmp_path: Path, stage: int, precision: str, bound: float
) -> None:
    data, trained = pack_sequences(), learner(base, stage, precision)
    step(trained, data, 3)
    learned = compute_logprobs(trained.logprobs, data)
    trained.save(tmp_path / "policy", AutoTokenizer.from_pretrained(base))
    merged = learner(tmp_path / "policy", stage, precision, None)
    assert difference(compute_logprobs(merged.logprobs, data), learned) < bound
    assert set(load_file(tmp_path / "policy" / "model.safetensors")) == set(load_file(base / "model.safetensors"))
    assert "quantization_config" not in json.loads((tmp_path / "policy" / "config.json").read_text())


def test_the_written_base_with_the_adapter_is_what_was_trained_and_the_unquantized_one_is_not(
    base: Path, tmp_path: Path
) -> None:
    import peft

    data, policy = pack_sequences(), load_policy(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    lora.write_base(tmp_path / "base", policy.network, tokenizer, "float32")
    trained = engine.Engine(policy, LAUNCH, config.EngineOptions(), config.OptimizerOptions(lr=1e-2))
    step(trained, data, 3)
    trained.save_adapter(tmp_path / "adapter", config.LoraOptions(**QLORA), str(base))
    policy.network.set_attn_implementation("sdpa")
    ids = torch.tensor([data.segments[0].token_ids])
    found = []
    for folder in (tmp_path / "base", base):
        served = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            found.append(
                difference(
                    peft.PeftModel.from_pretrained(served, tmp_path / "adapter")(ids).logits, policy.network(ids).logits
                )
            )
    assert found[0] < 1e-4 and found[1] > 0.01, found
    again = load_policy(tmp_path / "base", {**QLORA, "base_4bit": None})
    assert difference(compute_logprobs(again.logprobs, data), compute_logprobs(trained.base_logprobs, data)) < 0.2


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_written_base_has_the_dtype_of_the_trainers_arithmetic(base: Path, tmp_path: Path, precision: Any) -> None:
    policy, options = load_policy(base), config.EngineOptions(zero_stage=1, precision=precision)
    lora.write_base(tmp_path / "base", policy.network, AutoTokenizer.from_pretrained(base), options.dtype)
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto")
    assert served.dtype == getattr(torch, options.dtype) == served.config.dtype
    trained = engine.Engine(policy, LAUNCH, options, config.OptimizerOptions(lr=1e-2))
    computed = trained.weights()
    assert all(torch.equal(one, computed[name]) for name, one in served.named_parameters())


@pytest.mark.parametrize(("stage", "precision", "resumed_stage"), [(0, "fp32", 2), (2, "bf16", 2), (1, "fp16", 1)])
def test_it_resumes_exactly(base: Path, tmp_path: Path, stage: int, precision: str, resumed_stage: int) -> None:
    data, first = pack_sequences(), learner(base, stage, precision)
    step(first, data, 2)
    meta = json.loads(json.dumps(first.save_state(tmp_path)))
    assert all("lora" in key for key in load_file(tmp_path / "training-00001.safetensors"))
    expected = step(first, data, 2)
    for other in {stage, resumed_stage}:
        second = learner(base, other, precision)
        second.load_state(tmp_path, meta)
        assert step(second, data, 2) == pytest.approx(expected, rel=1e-5 if other != stage else 0)


def test_a_critic_has_a_base_of_its_own(base: Path) -> None:
    policy, data = load_policy(base), pack_sequences()
    policy.critic = model.CriticNetwork(policy.network, 1e-3)
    nn.init.normal_(policy.critic.head.weight, std=0.1)
    trained = engine.Engine(policy, LAUNCH, config.EngineOptions(), config.OptimizerOptions(lr=1e-2))
    before = compute_logprobs(trained.logprobs, data)
    errors = []
    for _ in range(4):
        values_N = trained.values(data)
        loss = (values_N - 1).square().sum()
        trained.backward(loss, len(values_N), last=True)
        trained.step(1.0)
        errors.append(float(loss.detach()))
    assert errors[-1] < 0.8 * errors[0]
    assert torch.equal(compute_logprobs(trained.logprobs, data), before)


def test_a_reward_model_keeps_its_head(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    options = config.ModelOptions(path=str(base), lora=QLORA)
    network = model.load_reward_model(options, tokenizer, 0).network
    assert type(network.score) is nn.Linear and network.score.weight.requires_grad


def test_other_linear_layers_are_quantized_too(base: Path) -> None:
    trained, data = learner(base, lora={**QLORA, "targets": ["q_proj"]}), pack_sequences()
    step(trained, data)
    weights, first = trained.weights(), load_file(base / "model.safetensors")
    assert set(weights) - {"lm_head.weight"} == set(first) - {"lm_head.weight"}
    changed = {name.rsplit(".", 2)[1] for name in first if difference(weights[name], first[name]) > 0}
    assert {"gate_proj", "o_proj", "q_proj"} <= changed and "embed_tokens" not in changed
    assert all(weight.dtype == torch.float32 for weight in weights.values())


def test_a_run_on_two_ranks_is_that_on_one_and_resumes(root: Path, base: Path, tmp_path: Path) -> None:
    words = ["sft.yaml", "model.from_scratch=null", f"model.path={base}", "model.tokenizer=null", "output=run"]
    words += ["model.lora.rank=4", "model.lora.base_4bit=nf4", "optimizer.name=adamw", "optimizer.lr=1e-2"]
    words += ["max_steps=4", "checkpoint.every=2", "data.path=data.jsonl"]
    script = root / "data" / "calculator" / "generate.py"
    rows = {}
    for name, start in (
        ("one", lambda folder: [train(folder, words)]),
        ("two", lambda folder: on_two_ranks(folder, ["train", *words])),
    ):
        (folder := tmp_path / name).mkdir()
        data = ["demonstrations", "--output", str(folder / "data.jsonl"), "--count", "256"]
        subprocess.run([sys.executable, script, *data], check=True)
        ranks = start(folder)
        output = [process.communicate(timeout=600)[0] for process in ranks]
        assert [process.returncode for process in ranks] == [0] * len(ranks), output
        rows[name] = [(row["loss"], row["grad_norm"]) for row in metrics_of(folder)]
    assert len(rows["one"]) == 4
    for one, two in zip(rows["one"], rows["two"], strict=True):
        assert two == pytest.approx(one, rel=1e-4)
    folder = tmp_path / "one"
    shutil.rmtree(folder / "run" / "checkpoints" / "step-000004")
    stdout, _ = (process := train(folder, [*words, "--resume"])).communicate(timeout=600)
    assert process.returncode == 0 and "resuming after step 2" in stdout
    assert [(row["loss"], row["grad_norm"]) for row in metrics_of(folder)] == rows["one"]


@pytest.fixture
def without_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    known: Callable[..., Any] = config.find_spec
    monkeypatch.setattr(config, "find_spec", lambda name: None if name == "bitsandbytes" else known(name))


def problem(base: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        recipe_reader.read_recipe(["grpo.yaml"], [f"model.path={base}", "model.lora.base_4bit=nf4", *overrides])
    return str(caught.value)


def test_without_the_package_the_extra_is_named(base: Path, without_bitsandbytes: None) -> None:
    assert problem(base) == (
        'command line: model.lora.base_4bit: a 4-bit base needs ngym[quantized]: pip install "ngym[quantized]", or use '
        "null; got 'nf4'"
    )


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["engine.zero_stage=3"], "engine.zero_stage: ZeRO 3 would cut the packed weights"),
        (
            ["engine.zero_stage=3", "engine.offload.optimizer=cpu", "engine.offload.parameters=cpu"],
            "engine.offload.parameters: a 4-bit base (model.lora.base_4bit) stays on the GPU",
        ),
        (
            ["engine.zero_stage=1", "engine.tensor_parallel=2"],
            "engine.tensor_parallel: a layer with an adapter is not cut",
        ),
        (["engine.zero_stage=1", "rollouts.colocated=true"], "rollouts.colocated: a 4-bit base"),
        (["rollouts.services=.", "rollouts.transport=lora"], "rollouts.transport: the running services do not serve"),
    ],
)
def test_what_cannot_work_is_refused(base: Path, overrides: list[str], says: str) -> None:
    assert says in problem(base, *overrides)


def test_the_import_of_bitsandbytes_loads_no_kernel_from_the_hub(tmp_path: Path) -> None:
    """It would, where the CPU has bfloat16 instructions and `kernels` is installed."""
    (tmp_path / "kernels.py").write_text(
        "def get_kernel(*_, **__):\n    print('downloaded')\n    raise OSError('no network')\n"
    )
    code = (
        "import kernels; from ngym.trainer.model import quantized; import sys; print(sys.modules['kernels'] is kernels)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["True"] and "kernels" not in done.stderr, done.stderr


def test_on_ray_servers_cannot_wait_for_the_base(base: Path) -> None:
    pytest.importorskip("ray")
    from ngym.trainer import ray_launcher

    words = [f"model.path={base}", "model.lora.base_4bit=nf4", "rollouts.transport=lora"]
    with pytest.raises(UsageError, match=r"rollouts\.transport: on Ray the services start before .*; set http"):
        ray_launcher.main(["grpo.yaml"], words, "auto", overwrite=False, resume=False)


@pytest.mark.parametrize("key", ["load_in_4bit", "model.bnb_4bit_quant_type", "model.quantization"])
def test_the_names_of_other_trainers_lead_to_ours(base: Path, key: str) -> None:
    assert "did you mean 'model.lora.base_4bit'?" in problem(base, f"{key}=true")


def test_a_device_that_bitsandbytes_cannot_use_is_one_line(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ngym.trainer.model import quantized

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("\nlibbitsandbytes_cuda999.so: cannot open shared object file\nand a page of advice")

    monkeypatch.setattr(quantized, "quantize_4bit", fails)
    with pytest.raises(ConfigError) as caught:
        load_policy(base)
    message = str(caught.value)
    assert message.startswith("model.lora.base_4bit: bitsandbytes 0.") and "\n" not in message
    assert "does not work on cpu: libbitsandbytes_cuda999.so: cannot open" in message


def test_servers_that_get_the_adapter_load_the_dequantized_base(base: Path) -> None:
    words = [f"model.path={base}", "model.lora.base_4bit=nf4", "output=runs/q"]
    recipe, _ = recipe_reader.read_recipe(["grpo.yaml"], [*words, "rollouts.transport=lora"])
    folder = Path("runs/q/base").resolve()
    assert services.serving_options(recipe)[:2] == [f"model={folder}", "model_within_s=600"]
    recipe, _ = recipe_reader.read_recipe(["grpo.yaml"], words)
    assert services.serving_options(recipe) == [f"model={base}"]
