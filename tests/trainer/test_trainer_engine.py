"""Training steps with the real DeepSpeed: normalization, ZeRO stages, ranks, and a folder that others can load."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from small_model import SHAPE
from trainer_service import on_two_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from ngym.cli.train import main
from ngym.errors import ConfigError
from ngym.runtime.cpu_threads import limit_spinning
from ngym.trainer import loop
from ngym.trainer.algorithms import sft
from ngym.trainer.data import file_batches
from ngym.trainer.data import samples as samples_module
from ngym.trainer.engine import engine, optimizer, sanity_checks
from ngym.trainer.model import layers, packing
from ngym.trainer.model import policy as model
from ngym.trainer.recipe import recipe

Weights = dict[str, torch.Tensor]

pytestmark = pytest.mark.usefixtures("only_rank")


@pytest.fixture(scope="module")
def tokenizer(root: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")


@pytest.fixture(scope="module")
def data(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "demonstrations.jsonl"
    script = root / "data" / "calculator" / "generate.py"
    subprocess.run([sys.executable, script, "demonstrations", "--output", path, "--count", "512"], check=True)
    return path


@pytest.fixture(scope="module")
def samples(data: Path, tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    read: list[Any] = sft.Sft().samples(data, tokenizer)
    return read


def learner(tokenizer: PreTrainedTokenizerBase, stage: int = 0, precision: str = "fp32", **options: Any) -> Any:
    policy = model.load_policy(
        recipe.ModelOptions(from_scratch=SHAPE, tokenizer="data/tiny_policy/tokenizer"), tokenizer, 0
    )
    optimizing = recipe.OptimizerOptions(**{"lr": 1e-2, **options})
    launch = recipe.Launch(rank=0, local_rank=0, ranks=1)
    return engine.Engine(policy, launch, recipe.EngineOptions(zero_stage=stage, precision=precision), optimizing)


def steps(learner: Any, samples: list[Any], count: int, budget: int = 100_000) -> list[Any]:
    batches = file_batches.epochs(samples, 16, 1, seed=0)
    return [loop.take_step(learner, sft.Sft(), batch, budget, 1.0) for batch, _ in zip(batches, range(count))]  # noqa: B905


def weights_of(learner: Any) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in learner.weights().items()}


def largest_difference(one: Weights, other: Weights) -> float:
    assert set(one) - {"lm_head.weight"} == set(other) - {"lm_head.weight"}  # the tied head may or may not be named
    return max((one[name] - other[name]).abs().max().item() for name in one if name in other)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_step_does_not_depend_on_how_the_batch_is_cut(
    tokenizer: PreTrainedTokenizerBase, samples: list[Any], stage: int
) -> None:
    # the eps of Adam hides no gradient here: a wrong factor on a micro-batch changes the weights by about lr
    uncut = learner(tokenizer, stage, eps=1e-3)
    (all_at_once,) = steps(uncut, samples, 1)
    for budget in (400, 1):
        cut = learner(tokenizer, stage, eps=1e-3)
        (in_pieces,) = steps(cut, samples, 1, budget)
        assert largest_difference(weights_of(uncut), weights_of(cut)) < 1e-6
        assert in_pieces.means["loss"] == pytest.approx(all_at_once.means["loss"], rel=1e-6)
        assert in_pieces.update.grad_norm == pytest.approx(all_at_once.update.grad_norm, rel=1e-5)


def test_all_zero_stages_take_the_same_steps_and_save_the_same_weights(
    tokenizer: PreTrainedTokenizerBase, samples: list[Any], tmp_path: Path
) -> None:
    reference = learner(tokenizer, 0)
    expected = steps(reference, samples, 3)
    for stage in (1, 2, 3):
        other = learner(tokenizer, stage)
        actual = steps(other, samples, 3)
        assert [s.means["loss"] for s in actual] == pytest.approx([s.means["loss"] for s in expected], rel=1e-5), stage
        assert [s.update.grad_norm for s in actual] == pytest.approx([s.update.grad_norm for s in expected], rel=1e-4)
        other.save(tmp_path / str(stage), tokenizer)
        saved = load_file(tmp_path / str(stage) / "model.safetensors")
        assert largest_difference(weights_of(reference), saved) < 1e-5, stage


@pytest.mark.parametrize("stage", [2, 3])
def test_the_buffer_of_the_gradient_is_as_large_as_the_gradient(
    tokenizer: PreTrainedTokenizerBase, samples: list[Any], stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, sizes = torch.empty, [0]

    def record_size(*size: Any, **options: Any) -> torch.Tensor:
        buffer = empty(*size, **options)
        sizes.append(buffer.numel())
        return buffer

    monkeypatch.setattr(torch, "empty", record_size)
    engine_of_stage = learner(tokenizer, stage)
    parameters = sum(getattr(one, "ds_numel", one.numel()) for one in engine_of_stage.policy.parameters())
    steps(engine_of_stage, samples, 1)
    assert max(sizes) == parameters


@pytest.mark.parametrize("stage", [0, 1])
def test_weight_decay_applies_to_a_parameter_without_a_gradient(
    tokenizer: PreTrainedTokenizerBase, samples: list[Any], stage: int
) -> None:
    options = recipe.ModelOptions(from_scratch=SHAPE, tokenizer="data/tiny_policy/tokenizer")
    policy = model.load_policy(options, tokenizer, 0)
    policy.network.register_parameter("unused", torch.nn.Parameter(torch.ones(2, 2)))
    optimizing = recipe.OptimizerOptions(lr=1e-2, name="adamw", weight_decay=0.5)
    launch = recipe.Launch(rank=0, local_rank=0, ranks=1)
    steps(engine.Engine(policy, launch, recipe.EngineOptions(zero_stage=stage), optimizing), samples, 2)
    assert policy.network.unused.detach() == pytest.approx((1 - 1e-2 * 0.5) ** 2)


def test_threads_spin_briefly_only_where_nothing_else_of_the_run_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def environment(*, alone: bool, **own: str) -> dict[str, str]:
        monkeypatch.setattr(os, "environ", own)
        limit_spinning(alone=alone)
        return own

    assert environment(alone=True) == {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
    assert environment(alone=False) == {"OMP_WAIT_POLICY": "PASSIVE"}
    assert environment(alone=True, GOMP_SPINCOUNT="0")["GOMP_SPINCOUNT"] == "0"


FREED = """
import resource, torch
from ngym.trainer.engine.engine import keep_freed_memory
keep_freed_memory()
faults = []
for _ in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16 << 20)  # 64 MiB
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(faults)
"""


def test_freed_tensors_cost_no_page_faults_again() -> None:
    def faults(**variables: str) -> list[int]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        command = [sys.executable, "-c", FREED]
        printed = subprocess.run(
            command, env=environment | variables, check=True, capture_output=True, text=True
        ).stdout
        found: list[int] = json.loads(printed)
        return found

    found = faults()  # the heap grows some times, until an aligned tensor fits between what else was allocated
    assert max(found[-5:]) < found[0] / 10, found
    assert min(faults(MALLOC_ARENA_MAX="2")) > found[0] / 2, "the variables of the user apply as they are"


@pytest.mark.parametrize(
    ("stage", "precision", "dtype", "bound"),
    [(2, "bf16", "bfloat16", 0.03), *((stage, "fp16", "float16", 0.003) for stage in (1, 2, 3))],
)
def test_16_bits_with_float32_master_weights_follow_float32(
    tokenizer: PreTrainedTokenizerBase,
    samples: list[Any],
    tmp_path: Path,
    stage: int,
    precision: str,
    dtype: str,
    bound: float,
) -> None:
    expected = steps(learner(tokenizer, 0), samples, 8)
    low = learner(tokenizer, stage, precision)
    actual = steps(low, samples, 8)
    assert actual[-1].means["loss"] == pytest.approx(expected[-1].means["loss"], rel=bound)
    low.save(tmp_path / "policy", tokenizer)
    assert json.loads((tmp_path / "policy" / "config.json").read_text())["dtype"] == dtype == low.dtype


def test_muon_learns_the_demonstrations(tokenizer: PreTrainedTokenizerBase, samples: list[Any]) -> None:
    losses = [step.means["loss"] for step in steps(learner(tokenizer, name="muon", lr=1e-2), samples * 2, 64)]
    assert losses[0] > 6.5 and losses[-1] < 1.2


def test_muon_updates_are_nearly_orthogonal() -> None:
    torch.manual_seed(0)
    for rows, columns in ((32, 32), (16, 48)):
        gradients = torch.randn(3, rows, columns) * torch.logspace(-3, 3, 3).view(3, 1, 1)
        values = torch.linalg.svdvals(optimizer.orthogonalise(gradients))
        assert values.min() > 0.3 and values.max() < 1.3
        signs = torch.einsum("brc,brc->b", optimizer.orthogonalise(gradients), gradients)
        assert (signs > 0).all()


def test_muon_moves_each_matrix_of_stacked_experts_as_if_it_were_alone() -> None:
    torch.manual_seed(0)
    values, gradient = torch.randn(3, 6, 4), torch.randn(3, 6, 4)

    def moved(parameters: list[torch.nn.Parameter], gradients: list[torch.Tensor]) -> None:
        for parameter, each in zip(parameters, gradients, strict=True):
            parameter.grad = each.clone()
        group = {"params": parameters, "lr": 0.1, "muon": True, "weight_decay": 0.1}
        optimizer.Muon([group], momentum=0.9).step()

    stacked, apart = torch.nn.Parameter(values.clone()), [torch.nn.Parameter(each.clone()) for each in values]
    moved([stacked], [gradient])
    moved(apart, list(gradient))
    assert not torch.allclose(stacked, values)
    torch.testing.assert_close(stacked, torch.stack(apart))


def test_weight_decay_spares_norms_and_muon_takes_the_matrices_only(tokenizer: PreTrainedTokenizerBase) -> None:
    policy = model.load_policy(
        recipe.ModelOptions(from_scratch=SHAPE, tokenizer="data/tiny_policy/tokenizer"), tokenizer, 0
    )
    built = optimizer.build(policy.network, recipe.OptimizerOptions(name="muon", lr=1e-3, weight_decay=0.1))
    matrices, tables, vectors = built.param_groups
    assert matrices["muon"] and not tables["muon"] and not vectors["muon"]
    assert len(matrices["params"]) == 14 and len(tables["params"]) == 1 and vectors["weight_decay"] == 0
    assert all(parameter.dim() == 1 for parameter in vectors["params"])
    assert sum(len(group["params"]) for group in built.param_groups) == len(list(policy.parameters()))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("AdamW", "AdamW"), ("adamw_torch", "AdamW"), ("Adam", "Adam"), ("SGD", "SGD"), ("Muon", "Muon")]
    + [(name, "AdamW8bit") for name in ("adamw_8bit", "AdamW8bit", "adamw_bnb_8bit", "paged_adamw_8bit")],
)
def test_an_optimizer_has_the_names_of_torch_and_transformers(
    tokenizer: PreTrainedTokenizerBase, name: str, kind: str
) -> None:
    shape = recipe.ModelOptions(from_scratch=SHAPE, tokenizer="data/tiny_policy/tokenizer")
    network = model.load_policy(shape, tokenizer, 0).network
    options = recipe.OptimizerOptions.model_validate({"name": name, "lr": 1e-3, "weight_decay": 0.1})
    assert type(optimizer.build(network, options)).__name__ == kind


def test_quantized_weights_are_refused(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    shape = recipe.ModelOptions(from_scratch=SHAPE, tokenizer="data/tiny_policy/tokenizer")
    model.load_policy(shape, tokenizer, 0).network.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"are quantized \(bitsandbytes\), and ng_train quantizes whole ones itself"):
        model.load_policy(recipe.ModelOptions(path=str(tmp_path)), tokenizer, 0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"name": "constant", "warmup_steps": 2}, [0.5, 1, 1, 1, 1]),
        ({"name": "constant", "warmup_ratio": 0.5}, [1 / 3, 2 / 3, 1, 1, 1]),
        ({"name": "linear"}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"name": "linear", "warmup_ratio": 0.3}, [0.5, 1, 1, 2 / 3, 1 / 3]),
        ({"name": "linear", "final": 0.5}, [1, 0.9, 0.8, 0.7, 0.6]),
        ({"name": "cosine", "final": 0.1, "warmup_steps": 1}, [1, 1, 0.868, 0.55, 0.232]),
        ({"name": "cosine", "final": 0.1, "warmup_steps": 9}, [1 / 9, 2 / 9, 3 / 9, 4 / 9, 5 / 9]),
    ],
)
def test_the_schedule_is_its_closed_form(options: dict[str, Any], expected: list[float]) -> None:
    schedule = recipe.ScheduleOptions(**options)
    assert [optimizer.schedule(step, 5, schedule) for step in range(5)] == pytest.approx(expected, abs=1e-3)


def test_a_saved_policy_is_a_folder_that_transformers_loads_with_the_same_logits(
    tokenizer: PreTrainedTokenizerBase, samples: list[Any], tmp_path: Path
) -> None:
    trained = learner(tokenizer)
    steps(trained, samples, 2)
    trained.save(tmp_path / "policy", tokenizer)

    folder = tmp_path / "policy"
    described = json.loads((folder / "config.json").read_text())
    assert described["architectures"] == ["Qwen3ForCausalLM"] and described["dtype"] == "float32"
    assert described["vocab_size"] == len(AutoTokenizer.from_pretrained(folder)) == 1024
    assert described["tie_word_embeddings"] is True and "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id
    assert not [key for key in described if "attn" in key], "our attention is not the loader's"
    assert all(file.stat().st_mode & 0o044 for file in folder.iterdir()), "a server may run as another user"

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    layers.fuse_layers(loaded)  # only the weights are compared
    packed = packing.pack(samples[:8], torch.device("cpu"))
    with torch.no_grad():
        ours = trained.logprobs(packed)
        again = model.load_policy(recipe.ModelOptions(path=str(folder)), tokenizer, 0)
        assert torch.equal(ours, again.logprobs(packed))
        ids = torch.tensor([samples[0].segments[0].token_ids])
        logits = loaded(ids).logits
        trained.policy.network.set_attn_implementation("sdpa")
        assert torch.equal(logits, trained.policy.network(ids).logits)


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "fp32"), (1, "fp32"), (2, "bf16"), (3, "fp32"), (1, "fp16"), (3, "fp16")]
)
def test_a_gradient_that_is_not_a_number_changes_nothing_and_its_batch_is_kept(
    tokenizer: PreTrainedTokenizerBase, samples: list[Any], tmp_path: Path, stage: int, precision: str
) -> None:
    class Sometimes(sft.Sft):
        calls = 0

        def loss(self, scores: Any, packed: Any) -> Any:
            self.calls += 1
            loss = super().loss(scores, packed)
            return loss._replace(sum=loss.sum * float("inf")) if self.calls == 2 else loss

    trained, history = learner(tokenizer, stage, precision), []
    batches = [only_batch(samples[start : start + 4]) for start in (0, 4, 8)]
    weights: list[Weights] = []

    def report(step: int, values: dict[str, float]) -> None:
        history.append(values)
        weights.append(weights_of(trained))

    loop.train(trained, Sometimes(), batches, 10_000, lambda step: 1.0, sanity_checks.NanGuard(tmp_path, 2), report)
    assert [values["skipped_steps"] for values in history] == [0, 1, 1]
    assert largest_difference(weights[0], weights[1]) == 0 and largest_difference(weights[1], weights[2]) > 0
    assert "loss" not in history[1] and history[2]["loss"] < 8 and history[2]["grad_norm"] > 0
    scales = [values.get("loss_scale") for values in history]
    assert scales == [2.0**16 if precision == "fp16" else None] * 3, "the loss is at fault, and not its scale"
    (file,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert file.name == "step-000002-1.jsonl"
    assert [row["segments"][0]["token_ids"] for row in rows] == [
        sample.segments[0].token_ids for sample in samples[4:8]
    ]


def test_several_skipped_steps_in_a_row_end_the_run_and_say_where_to_look(
    tokenizer: PreTrainedTokenizerBase, samples: list[Any], tmp_path: Path
) -> None:
    broken, reports = learner(tokenizer), []
    with torch.no_grad():
        next(broken.policy.parameters()).fill_(float("nan"))
    watch = sanity_checks.NanGuard(tmp_path, 3)
    with pytest.raises(
        sanity_checks.NotFinite, match=r"step 3: the loss is nan .*3 optimizer steps in a row.*Lower optimizer\.lr"
    ) as e:
        loop.train(
            broken,
            sft.Sft(),
            [only_batch(samples[:4])] * 4,
            10_000,
            lambda step: 1.0,
            watch,
            lambda step, values: reports.append(step),
        )
    assert reports == [1, 2] and str(tmp_path / "step-000003-3.jsonl") in str(e.value)


def test_a_step_that_runs_out_of_memory_names_its_micro_batch_and_what_to_change(
    tokenizer: PreTrainedTokenizerBase, samples: list[Any], tmp_path: Path
) -> None:
    class Greedy(sft.Sft):
        def loss(self, scores: Any, packed: Any) -> Any:
            if trained.steps:
                torch.empty(10**15)
            return super().loss(scores, packed)

    trained = learner(tokenizer)
    batches = [only_batch(samples[:4]), only_batch(samples[4:8])]
    with (
        pytest.raises(sanity_checks.OutOfMemory) as e,
        sanity_checks.explain_out_of_memory(lambda: trained.activity, sanity_checks.to_fit(10_000)),
    ):
        loop.train(
            trained,
            Greedy(),
            batches,
            10_000,
            lambda step: 1.0,
            sanity_checks.NanGuard(None, 2),
            lambda step, values: None,
        )
    tokens = len(packing.pack(samples[4:8], trained.device).token_ids_T)
    longest = max(one.tokens for one in samples[4:8])
    of = f"a micro-batch of {tokens:,} tokens (samples: 4, the longest of {longest:,})"
    assert str(e.value).startswith(f"optimizer step 2, {of}: out of memory: DefaultCPUAllocator: can't allocate memory")
    assert "micro_batch_tokens (now 10,000;" in str(e.value)
    trained.weights()
    assert trained.activity == "optimizer step 2, gathering the weights"


def test_a_gpu_that_runs_out_of_memory_is_reported_without_torchs_advice() -> None:
    message = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.21 GiB is free. "
        "Including non-PyTorch memory, this process has 138.58 GiB memory in use. If reserved but unallocated memory is large "
        "try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )
    with (
        pytest.raises(sanity_checks.OutOfMemory) as e,
        sanity_checks.explain_out_of_memory(lambda: "step 1", "Add some."),
    ):
        raise torch.OutOfMemoryError(message)
    assert (
        "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.21 GiB is free. Add some."
        in str(e.value)
    )
    with (
        pytest.raises(RuntimeError, match="shapes"),
        sanity_checks.explain_out_of_memory(lambda: "step 1", "Add some."),
    ):
        raise RuntimeError("shapes do not match")


def only_batch(batch: list[Any]) -> Any:
    return samples_module.Batch([batch])


def test_two_ranks_learn_what_one_learns(
    tokenizer: PreTrainedTokenizerBase, samples: list[Any], data: Path, tmp_path: Path
) -> None:
    """The whole program: `ng_train` on two ranks, an odd last batch of one sample, micro-batches of unequal size."""
    overrides = ["data.path=few.jsonl", "optimizer.name=adamw", "engine.zero_stage=1", "batch_size=16", "output=run"]
    overrides += [
        "schedule=null",
        "schedule.name=constant",
        "optimizer.lr=1e-2",
        "optimizer.eps=1e-3",
        "micro_batch_tokens=300",
        "model.from_scratch.rope_theta=10000",
    ]
    overrides += [f"model.from_scratch.{key}={value}" for key, value in SHAPE.items()]
    lines = data.read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(lines[:33]), "utf-8")
    ranks = on_two_ranks(tmp_path, ["train", "sft.yaml", *overrides])
    outputs = [process.communicate(timeout=600)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert "33 samples" in outputs[0] and "step 3/3" in outputs[0] and "policy saved in run/policy" in outputs[0]

    one = learner(tokenizer, stage=1, eps=1e-3)
    expected = steps(one, samples[:33], 3)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[-1]["global_valid_seqs"] == 1
    assert [row["loss"] for row in rows] == pytest.approx([step.means["loss"] for step in expected], rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx([s.update.grad_norm for s in expected], rel=1e-4)
    saved = load_file(tmp_path / "run" / "policy" / "model.safetensors")
    assert largest_difference(saved, weights_of(one)) < 2e-6
    again = CliRunner().invoke(main, ["sft.yaml", f"output={tmp_path / 'run'}", f"data.path={tmp_path / 'few.jsonl'}"])
    assert again.exit_code == 2 and "holds an earlier run" in again.stderr


def test_importing_deepspeed_leaves_out_mlflow_and_does_not_hide_it_afterwards() -> None:
    program = (
        "import importlib.util, sys; from ngym.trainer.engine.engine import import_deepspeed; import_deepspeed(); "
        "sys.exit(('mlflow' in sys.modules) or importlib.util.find_spec('mlflow') is None)"
    )
    assert importlib.util.find_spec("mlflow") is not None  # it is among the packages of the tests
    subprocess.run([sys.executable, "-c", program], check=True)
