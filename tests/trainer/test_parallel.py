"""Ranks that share a sequence or a layer, and states on the CPU: the steps equal those of one rank."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import CliRunner
from forked import ForkedCommand
from paths import SUPPORT
from safetensors.torch import load_file
from steps_on_ranks import SHAPE
from trainer_service import free_port, on_two_ranks
from transformers import AutoTokenizer

from ngym.cli.train import main
from ngym.config.shipped_files import shipped
from ngym.errors import ConfigError, NgymError
from ngym.files.atomic import write_whole
from ngym.trainer.engine import engine
from ngym.trainer.model import policy as model
from ngym.trainer.recipe import recipe as config
from ngym.trainer.recipe import recipe_reader
from ngym.trainer.train import check_recipe

Options = dict[str, Any]
OFFLOADED: Options = {"offload": {"optimizer": "cpu"}}
ALONE: list[Options] = [
    {},
    {"zero_stage": 2, **OFFLOADED},
    {"zero_stage": 3, **OFFLOADED},
    {"zero_stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
]
TOGETHER: list[Options] = [
    {"sequence_parallel": 2},
    {"zero_stage": 3, "sequence_parallel": 2, "activation_checkpointing": True},
    {"zero_stage": 2, **OFFLOADED},
    {"zero_stage": 2, "precision": "fp16"},
    {"zero_stage": 3, "precision": "fp16", "sequence_parallel": 2},
    # last: DeepSpeed takes a process that has cut layers for one that always does
    {"zero_stage": 1, "tensor_parallel": 2, "activation_checkpointing": True},
    {"zero_stage": 2, "tensor_parallel": 2},
    {"zero_stage": 1, "precision": "fp16", "tensor_parallel": 2},
]


class TrainingResult(NamedTuple):
    """steps: loss and gradient norm of each, the second and third twice: again from a stored state. held_out: a loss after them."""

    steps: list[tuple[float, float]]
    held_out: float
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def data(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "demonstrations.jsonl"
    script = root / "data" / "calculator" / "generate.py"
    subprocess.run([sys.executable, script, "demonstrations", "--output", path, "--count", "64"], check=True)
    return path


def words(data: Path, folder: Path, every: list[Options]) -> list[str]:
    return [str(SUPPORT / "steps_on_ranks.py"), str(data), str(folder), *map(json.dumps, every), "--again"]


def read_results(folder: Path, every: list[Options]) -> list[TrainingResult]:
    files = [folder / str(place) for place in range(len(every))]
    return [
        TrainingResult(
            **json.loads(file.with_suffix(".json").read_text()), weights=load_file(file.with_suffix(".safetensors"))
        )
        for file in files
    ]


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[TrainingResult]:
    folder = tmp_path_factory.mktemp("alone")
    process = ForkedCommand(words(data, folder, ALONE), folder, os.environ)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-3000:]
    return read_results(folder, ALONE)


@pytest.fixture(scope="module")
def together(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[TrainingResult]:
    folder = tmp_path_factory.mktemp("together")
    ranks = on_two_ranks(folder, words(data, folder, TOGETHER))
    outputs = [rank.communicate(timeout=600)[0][-3000:] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    return read_results(folder, TOGETHER)


def same(one: TrainingResult, other: TrainingResult, bound: float = 1e-5) -> None:
    for actual, expected in zip(one.steps, other.steps, strict=True):
        assert actual == pytest.approx(expected, rel=bound)
    assert one.held_out == pytest.approx(other.held_out, rel=bound)
    names = set(one.weights) & set(other.weights)  # the tied head may or may not be named
    assert len(names) >= 24 and {"model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"} <= names
    for name in names:
        assert (one.weights[name] - other.weights[name]).abs().max() < bound, name


def test_a_stored_state_continues_with_the_same_steps(
    alone: list[TrainingResult], together: list[TrainingResult]
) -> None:
    for each in [*alone, *together]:
        assert len(each.steps) == 5
        for actual, expected in zip(each.steps[3:], each.steps[1:3], strict=True):
            assert actual == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("place", range(1, len(ALONE)), ids=lambda place: str(ALONE[place]))
def test_what_lives_on_the_cpu_learns_the_same(alone: list[TrainingResult], place: int) -> None:
    same(alone[place], alone[0])


@pytest.mark.parametrize("place", range(len(TOGETHER)), ids=lambda place: str(TOGETHER[place]))
def test_two_ranks_together_learn_and_measure_what_one_does(
    alone: list[TrainingResult], together: list[TrainingResult], place: int
) -> None:
    same(together[place], alone[0], 2e-3 if TOGETHER[place].get("precision") == "fp16" else 1e-5)


MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {f"linear_{of}": 2 for of in ("num_key_heads", "num_value_heads")} | {
    f"linear_{of}": 8 for of in ("key_head_dim", "value_head_dim")
}
OF_FAMILIES: list[tuple[Options, list[Options]]] = [
    (
        {"family": "qwen3_moe", "shape": MOE, "replays": True},
        [{}, {"zero_stage": 2}, {"sequence_parallel": 2}, {"zero_stage": 3, "activation_checkpointing": True}],
    ),
    (
        {
            "family": "qwen3_5_text",
            "shape": {"layer_types": ["linear_attention", "full_attention"], **LINEAR},
            "replays": False,
        },
        [{}, {"zero_stage": 2}],
    ),
]


def test_two_ranks_learn_what_one_does_with_replayed_experts_and_with_linear_attention(tmp_path: Path) -> None:
    on_one = [json.dumps({**case, "engine": {}}) for case, _ in OF_FAMILIES]
    on_two = [json.dumps({**case, "engine": options}) for case, every in OF_FAMILIES for options in every]
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir()
    together.mkdir()
    program = str(SUPPORT / "families_on_ranks.py")
    one = ForkedCommand([program, str(alone), *on_one], alone, os.environ)
    output, _ = one.communicate(timeout=600)
    assert one.returncode == 0, output[-3000:]
    ranks = on_two_ranks(together, [program, str(together), *on_two])
    outputs = [rank.communicate(timeout=600)[0][-3000:] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    expected = [place for place, (_, every) in enumerate(OF_FAMILIES) for _ in every]
    for place, of in enumerate(expected):
        steps = json.loads((together / f"{place}.json").read_text())
        reference = json.loads((alone / f"{of}.json").read_text())
        for actual, wanted in zip(steps, reference, strict=True):
            assert actual == pytest.approx(wanted, rel=1e-5), on_two[place]


TORCHRUN = (
    "torchrun --no-python --nnodes 2 --node-rank {node} --nproc-per-node 1 --master-addr 127.0.0.1 --master-port {port}"
)
DEEPSPEED = (
    "deepspeed --hostfile hosts --no_ssh --node_rank {node} --master_addr 127.0.0.1 --master_port {port} "
    "--no_python --no_local_rank"
)


@pytest.mark.soak
@pytest.mark.parametrize("launcher", [TORCHRUN, DEEPSPEED])
def test_two_nodes_are_launched_without_ssh(launcher: str, data: Path, tmp_path: Path) -> None:
    """One command on each node: here both are this machine, by two names."""
    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    port = free_port()
    sizes = [f"model.from_scratch.{name}={size}" for name, size in SHAPE.items()]
    recipe = ["ng_train", "sft.yaml", "optimizer.name=adamw", "engine.zero_stage=2", f"data.path={data}", "output=run"]
    scripts = Path(sys.executable).parent
    nodes = [
        subprocess.Popen(
            [*launcher.format(node=node, port=port).split(), *recipe, *sizes],
            cwd=tmp_path,
            env={**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    outputs = [node.communicate(timeout=600)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert "32 samples, 16 on each of 2 ranks" in outputs[0] and (tmp_path / "run" / "policy").is_dir()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["engine.offload.optimizer=cpu"], "offloading needs ZeRO; set engine.zero_stage to 1, 2 or 3"),
        (["engine.offload.parameters=cpu"], "set engine.offload.optimizer too"),
        (
            ["engine.zero_stage=2", "engine.offload={optimizer: cpu, parameters: cpu}"],
            "only ZeRO-3 offloads parameters",
        ),
        (["engine.tensor_parallel=2"], "it trains with ZeRO 1 and 2 only"),
        (
            ["engine.zero_stage=2", "engine.tensor_parallel=2", "engine.sequence_parallel=2"],
            "engine.sequence_parallel is given too",
        ),
        (["engine.sequence_parallel=2"], "1 ranks cannot form groups of 2; start a multiple of 2"),
        (["engine.zero_stage=1", "engine.tensor_parallel=3"], "1 ranks cannot form groups of 3; start a multiple of 3"),
    ],
)
def test_what_does_not_go_together_is_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["sft.yaml", "optimizer.name=adamw", *words])
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_ranks_of_a_run_on_ray_are_those_of_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").touch()
    words = ["--on", "ray", "--dry-run", "sft.yaml", "data={path: data.jsonl}", "engine.sequence_parallel=2"]
    two = CliRunner().invoke(main, [*words, "trainer.ranks=2"])
    assert two.exit_code == 0, two.output
    three = CliRunner().invoke(main, [*words, "trainer.ranks=3"])
    assert three.exit_code == 2 and "3 ranks cannot form groups of 2" in three.stderr


@pytest.mark.parametrize(("begins", "option"), [(False, "--overwrite"), (True, "--resume")])
def test_ranks_on_ray_resume_only_what_this_run_has_begun(
    begins: bool, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier run's recipe, even with the same content, is no sign that this run has begun."""
    ray_launcher = pytest.importorskip("ngym.trainer.ray_launcher")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").touch()
    files, overrides = ["sft.yaml"], ["data={path: data.jsonl}", "output=run"]
    recipe, _ = check_recipe(files, overrides, on_ray=True)
    (tmp_path / "run").mkdir()
    write_whole(tmp_path / "run" / "recipe.yaml", b"seed: 0\n")
    groups: list[list[str]] = []

    async def group(_: object, __: object, continues: list[str]) -> int:
        groups.append(continues)
        if begins and len(groups) == 1:
            write_whole(tmp_path / "run" / "recipe.yaml", b"seed: 0\n")
        return [1, -signal.SIGKILL, 0][len(groups) - 1]

    monkeypatch.setattr(ray_launcher._Run, "_group", group)
    run = ray_launcher._Run(recipe, [*files, *overrides], True, False)
    assert asyncio.run(run._run_until_done({})) == 0
    assert groups == [["--overwrite"], [option], [option]]


def run_on_ray(group: Callable[..., Awaitable[int]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run of `ng_train --on ray` in this folder, whose groups of ranks are calls of a function with an exit code."""
    ray_launcher = pytest.importorskip("ngym.trainer.ray_launcher")
    monkeypatch.chdir(folder)
    (folder / "data.jsonl").touch()
    words = ["data={path: data.jsonl}", "output=run"]
    monkeypatch.setattr(ray_launcher._Run, "_group", group)
    monkeypatch.setattr(ray_launcher, "watch_membership", asyncio.Event().wait)  # Ray's functions would start a cluster
    return ray_launcher._Run(check_recipe(["sft.yaml"], words, on_ray=True)[0], ["sft.yaml", *words], False, False)


@pytest.mark.parametrize("code", [2, 75, 130])
def test_ranks_on_ray_do_not_start_again_where_that_changes_nothing(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake in the recipe, a full disk (a job of a chain tries again later), and an interrupt."""
    groups: list[int] = []

    async def group(*_: object) -> int:
        groups.append(code)
        return code

    run = run_on_ray(group, tmp_path, monkeypatch)
    assert asyncio.run(run._run_until_done({})) == code and groups == [code]


@pytest.mark.parametrize(
    ("code", "reached", "starts"),
    [
        (1, [0, 0, 0, 0], 2),  # a check that fails before the first step
        (1, [7, 7, 7, 7], 2),
        (1, [3, 7, 7, 7], 3),
        (1, [1, 2, 3, 4], 4),
        (-signal.SIGKILL, [0, 0, 0, 0], 4),  # not of the ranks' own making
        (256, [0, 0, 0, 0], 4),
    ],
)
@pytest.mark.parametrize("by", ["step", "checkpoint"])
def test_ranks_on_ray_do_not_start_a_third_time_if_they_fail_again_at_the_same_place(
    code: int, reached: list[int], starts: int, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[int] = []

    async def group(*_: object) -> int:
        step = reached[len(groups)]
        groups.append(step)
        if step and by == "checkpoint":
            (tmp_path / "run" / "checkpoints" / f"step-{step:06}").mkdir(parents=True, exist_ok=True)
        elif step:
            (tmp_path / "run").mkdir(exist_ok=True)
            (tmp_path / "run" / "metrics.jsonl").write_text(f'{{"step": {step}}}\n{{"st')
        return code

    run = run_on_ray(group, tmp_path, monkeypatch)
    with pytest.raises(NgymError, match="twice in the same way" if starts < 4 else "failed 4 times"):
        asyncio.run(run._run_until_done({}))
    assert groups == reached[:starts]


def task_error(ray_exceptions: Any) -> Exception:
    cause = FileNotFoundError("no such folder on the node")
    error: Exception = ray_exceptions.RayTaskError("start", "Traceback", cause).as_instanceof_cause()
    return error


def creation_error(ray_exceptions: Any) -> Exception:
    """That of an actor in a Python without ngym."""
    trace = "Traceback\nModuleNotFoundError: No module named 'ngym'"
    error: Exception = ray_exceptions.ActorDiedError(ray_exceptions.RayTaskError("Rank", trace, ImportError()))
    return error


TWICE, LOST = "twice in the same way", "failed 4 times, the last time: its node was lost"
WITHOUT = r"a node of the Ray cluster cannot run a rank: ModuleNotFoundError: No module named 'ngym' \(docs/scale.md\)$"


@pytest.mark.parametrize(
    ("failure", "starts", "reason"),
    [
        (lambda errors: errors.ActorDiedError(), 4, LOST),
        (lambda errors: errors.NodeDiedError("lost"), 4, LOST),
        (task_error, 2, TWICE),
        (creation_error, 1, WITHOUT),
    ],
    ids=["actor", "node", "own code", "no ngym"],
)
def test_a_node_that_is_lost_while_a_rank_starts_counts_as_one_that_is_lost_later(
    failure: Callable[[Any], Exception], starts: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not count as a failure of the rank itself, which would end the run at its second time."""
    ray_launcher = pytest.importorskip("ngym.trainer.ray_launcher")
    groups: list[int] = []

    async def fails() -> None:
        raise failure(ray_launcher.ray.exceptions)

    async def reserve_group(*_: object) -> None:
        groups.append(len(groups))

    run = run_on_ray(ray_launcher._Run._group, tmp_path, monkeypatch)
    actor = SimpleNamespace(address=SimpleNamespace(remote=fails))
    kind = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: actor))
    monkeypatch.setattr(ray_launcher, "reserve_group", reserve_group)
    monkeypatch.setattr(ray_launcher, "in_group", lambda *_: None)
    monkeypatch.setattr(ray_launcher.ray, "remote", lambda _: kind)
    monkeypatch.setattr(ray_launcher.ray, "kill", lambda _: None)
    monkeypatch.setattr(ray_launcher.ray.util, "remove_placement_group", lambda _: None)
    with pytest.raises(NgymError, match=reason):
        asyncio.run(run._run_until_done({}))
    assert len(groups) == starts


async def test_ranks_on_ray_see_the_gpus_that_ray_assigns_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm sets CUDA_VISIBLE_DEVICES of a job's script to all GPUs of its node."""
    ray_launcher = pytest.importorskip("ngym.trainer.ray_launcher")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    words = ["data={path: data.jsonl}", "output=run"]
    recipe, _ = check_recipe(["sft.yaml"], words, on_ray=True)
    async with ray_launcher._Run(recipe, ["sft.yaml", *words], False, False)._services() as (environment, _):
        assert environment["CUDA_LAUNCH_BLOCKING"] == "1" and "CUDA_VISIBLE_DEVICES" not in environment


async def test_ranks_on_ray_get_the_variables_that_the_recipe_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key of a teacher's server, and the parts of a path, but no other home folder than that of their node."""
    ray_launcher = pytest.importorskip("ngym.trainer.ray_launcher")
    monkeypatch.chdir(tmp_path)
    variables = {"TEACHER_KEY": "sk-1", "SHARED": "here", "OTHER": "x", "HOME": str(tmp_path)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "data.jsonl").touch()
    teacher = "{url: 'http://127.0.0.1:9', path: null, api_key_env: TEACHER_KEY}"
    words = ["data={path: data.jsonl}", "rollouts=null", "evaluation=null", f"algorithm.teacher={teacher}"]
    words += ["model.path=${oc.env:SHARED}/policy", "output=${oc.env:HOME}/run", "batch_size=2", "epochs=1"]
    recipe, tree = check_recipe(["distillation.yaml"], words, on_ray=True)
    names = recipe_reader.environment_names(tree)
    async with ray_launcher._Run(recipe, words, False, False, names)._services() as (environment, _):
        assert variables.items() - environment.items() == {("OTHER", "x"), ("HOME", str(tmp_path))}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_a_run_on_ray_whose_ranks_wait_for_room(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank runs yet that could receive it."""
    ray_launcher = pytest.importorskip("ngym.trainer.ray_launcher")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").touch()
    files, overrides = ["sft.yaml"], ["data={path: data.jsonl}", "output=run"]
    recipe, _ = check_recipe(files, overrides, on_ray=True)

    # Ray's functions would start a cluster
    monkeypatch.setattr(ray_launcher, "watch_membership", asyncio.Event().wait)

    async def reserved(*_: object) -> None:
        os.kill(os.getpid(), number)
        await asyncio.Event().wait()

    monkeypatch.setattr(ray_launcher, "reserve_group", reserved)
    with pytest.raises(SystemExit) as ended:
        asyncio.run(ray_launcher._Run(recipe, [*files, *overrides], False, False).run())
    assert ended.value.code == 130


@pytest.mark.usefixtures("only_rank")
@pytest.mark.parametrize("way", ["sequence_parallel", "tensor_parallel"])
def test_heads_that_ranks_cannot_share_are_named(way: str) -> None:
    """Before anything is computed, and before DeepSpeed gets it."""
    tokenizer = AutoTokenizer.from_pretrained(shipped() / "data" / "tiny_policy" / "tokenizer")
    options = config.ModelOptions(from_scratch=SHAPE, tokenizer="data/tiny_policy/tokenizer")
    policy = model.load_policy(options, tokenizer, 0)
    launch = config.Launch(rank=0, local_rank=0, ranks=3)
    three = config.EngineOptions(zero_stage=1, **{way: 3})
    with pytest.raises(ConfigError, match=rf"engine\.{way}: 3 ranks cannot share .*of qwen3"):
        engine.Engine(policy, launch, three, config.OptimizerOptions(lr=1e-2))
