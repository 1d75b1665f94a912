"""The transport `delta`: changed values are found bit by bit, and applied to kept files they give the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from ngym.errors import BadRequest
from ngym.trainer.recipe.extensions import File
from ngym.trainer.weights import push_files
from ngym.weight_push import stage
from ngym.weight_push.delta import INDICES, VALUES, Delta, DeltaStage, KeptCheckpoint, changed_values

Weights = dict[str, Tensor]


@pytest.fixture(autouse=True)
def staging_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "SHARED_MEMORY", tmp_path)


def new_weights(dtype: torch.dtype) -> Weights:
    generator = torch.Generator().manual_seed(7)
    shapes = {"embed": (50, 8), "up": (3, 5, 7), "scale": (), "empty": (0, 4), "bias": (9,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def change(weights: Weights, every: int) -> Weights:
    """Other values in each `every`th element of all tensors but the bias."""
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    for name in changed.keys() - {"bias"}:
        changed[name].view(-1)[::every] += 1
    return changed


def announced(weights: Weights) -> list[stage.AnnouncedTensor]:
    return [
        stage.AnnouncedTensor(name=name, shape=tuple(tensor.shape), dtype=push_files.DTYPES[tensor.dtype])
        for name, tensor in weights.items()
    ]


def accept(received: stage.Stage, files: Iterable[File]) -> stage.Stage:
    for file in files:
        part = received.next_file()
        part.write_bytes(file.content)
        received.accept(part, file.sha256)
    return received


def keep(weights: Weights, limit: int = push_files.FILE_BYTES) -> KeptCheckpoint:
    whole = stage.Stage(announced(weights), torch.float32)
    return KeptCheckpoint("first", accept(whole, push_files.safetensors_files(weights, limit)), announced(weights))


def new_delta_stage(weights: Weights, files: list[File], changes: Mapping[str, Any] = {}) -> DeltaStage:
    size = sum(len(file.content) for file in files)
    delta = {"base": "first", "files": len(files), "bytes": size} | changes
    return DeltaStage(announced(weights), torch.float32, Delta.model_validate(delta))


def loaded(folder: Path) -> Weights:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_bit_equal(ours: Weights, expected: Weights) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in ours.items():
        assert tensor.shape == expected[name].shape and tensor.dtype == expected[name].dtype
        assert not len(changed_values(tensor, expected[name])[0]), name


def file_of(**tensors: Tensor) -> File:
    return push_files._file({name.replace("__", "#"): tensor for name, tensor in tensors.items()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("limit", [push_files.FILE_BYTES, 200])
def test_deltas_applied_to_kept_files_are_the_checkpoint(dtype: torch.dtype, limit: int) -> None:
    weights = new_weights(dtype)
    kept, deltas = keep(weights, limit), push_files.WeightDeltas()
    assert deltas.files(weights) is None, "there is no copy yet"
    deltas.keep(1, weights)
    for version, every in ((2, 20), (3, 7), (4, 1000)):
        weights = change(weights, every)
        files = deltas.files(weights)
        assert files
        received = accept(new_delta_stage(weights, files), files)
        received.check_complete()
        kept.apply(received.folder, f"push {version}")
        deltas.keep(version, weights)
        assert_bit_equal(loaded(kept.folder), weights)
        assert (kept.push, deltas.version) == (f"push {version}", version)
    assert deltas.files(weights) == [], "nothing has changed since"


def test_zeros_of_another_sign_are_changes() -> None:
    indices, values = changed_values(torch.tensor([0.0, -0.0, 1.0]), torch.tensor([-0.0, -0.0, 2.0]))
    assert indices.tolist() == [0, 2] and values.tolist() == [0.0, 1.0] and indices.dtype == torch.int32


def test_a_delta_of_more_than_half_the_checkpoint_is_not_sent_and_the_next_one_is() -> None:
    weights = new_weights(torch.bfloat16)
    deltas = push_files.WeightDeltas()
    deltas.files(weights)
    deltas.keep(1, weights)
    other = change(weights, 2)
    assert deltas.files(other) is None
    deltas.keep(2, other)
    assert deltas.files(other) == []
    assert deltas.files({**other, "bias": other["bias"].float()}) is None, "another dtype"


def test_a_push_that_failed_is_a_delta_to_the_same_copy_again() -> None:
    weights = new_weights(torch.bfloat16)
    deltas = push_files.WeightDeltas()
    deltas.files(weights)
    deltas.keep(1, weights)
    first = deltas.files(change(weights, 20))
    assert first and deltas.files(change(weights, 20)) == first


def test_the_copy_does_not_follow_a_trainer_that_changes_its_weights_in_place() -> None:
    weights = new_weights(torch.bfloat16)
    deltas = push_files.WeightDeltas()
    deltas.files(weights)
    deltas.keep(1, weights)
    weights["embed"][3, 2] += 1
    files = deltas.files(weights)
    assert files and files[0].content == save({f"embed{INDICES}": torch.tensor([26], dtype=torch.int32), f"embed{VALUES}": weights["embed"][3, 2:3]})  # fmt: skip


def test_who_has_mapped_a_kept_file_into_memory_keeps_its_values() -> None:
    weights = new_weights(torch.bfloat16)
    kept = keep(weights)
    mapped = loaded(kept.folder)
    deltas = push_files.WeightDeltas()
    deltas.files(weights)
    deltas.keep(1, weights)
    files = deltas.files(change(weights, 9))
    assert files
    kept.apply(accept(new_delta_stage(weights, files), files).folder, "second")
    assert_bit_equal(mapped, weights)


def test_a_kept_push_is_the_base_only_of_a_delta_that_names_it_with_the_same_tensors() -> None:
    weights = new_weights(torch.bfloat16)
    kept = keep(weights)
    delta = Delta(base="first", files=0, bytes=0)
    assert kept.is_base_of(delta, announced(weights))
    assert not kept.is_base_of(Delta(base="another", files=0, bytes=0), announced(weights))
    assert not kept.is_base_of(delta, announced({**weights, "bias": weights["bias"].float()}))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (file_of(bias__indices=torch.tensor([9]).int(), bias__values=torch.ones(1)), "an index of 9 to 9 is not in its 9 values"),
        (file_of(bias__indices=torch.tensor([-1]).int(), bias__values=torch.ones(1)), "an index of -1 to -1"),
        (file_of(empty__indices=torch.tensor([0]).int(), empty__values=torch.ones(1)), "an index of 0 to 0 is not in its 0 values"),
        (file_of(bias__indices=torch.tensor([1]), bias__values=torch.ones(1)), "tensor bias: needs indices in I32 and values in F32"),
        (file_of(bias__indices=torch.tensor([1]).int(), bias__values=torch.ones(1).half()), "tensor bias: needs indices in I32"),
        (file_of(bias__indices=torch.tensor([1]).int(), bias__values=torch.ones(1, 1)), "both \\[K\\]"),
        (file_of(bias__indices=torch.tensor([1, 2]).int(), bias__values=torch.ones(1)), "\\[2\\] indices for \\[1\\] values"),
        (file_of(bias__indices=torch.tensor([1]).int(), bias__values=torch.tensor([float("nan")])), "tensor bias: not every value is finite"),
        (file_of(bias__indices=torch.tensor([1]).int()), "tensor bias#indices: a delta has the tensors NAME#indices and NAME#values"),
        (file_of(bias__values=torch.ones(1)), "tensor bias#values: a delta has"),
        (file_of(bias=torch.ones(9)), "tensor bias: a delta has"),
        (file_of(other__indices=torch.tensor([1]).int(), other__values=torch.ones(1)), "tensor other: was not announced"),
    ],
)  # fmt: skip
def test_a_delta_that_does_not_fit_the_announced_tensors_is_refused(file: File, message: str) -> None:
    weights = new_weights(torch.float32)
    with pytest.raises(BadRequest, match=message):
        accept(new_delta_stage(weights, [file]), [file])


def test_a_delta_is_complete_with_all_of_its_files_and_has_each_tensor_once() -> None:
    weights = new_weights(torch.float32)
    file = file_of(bias__indices=torch.tensor([1]).int(), bias__values=torch.ones(1))
    received = new_delta_stage(weights, [file], {"files": 2})
    accept(received, [file])
    with pytest.raises(BadRequest, match="1 of the 2 announced files have arrived"):
        received.check_complete()
    with pytest.raises(BadRequest, match="tensor bias: was not announced, or was already sent"):
        accept(received, [file])
