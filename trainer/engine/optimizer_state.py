"""The state of the optimizer and of random number generators in checkpoints.

Each trainable weight has its float32 master value and the optimizer's tensors (AdamW: exp_avg, exp_avg_sq), all in the
weight's own shape. The format does not depend on the ZeRO stage, the number of ranks or the precision that wrote it, so
a run may resume with others (DeepSpeed's universal checkpoint, without its pickles).
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ngym.errors import NgymError
from ngym.schema import Json

from . import tensor_parallel

MASTER = "master"
STEP = "step"
FILE_BYTES = 2 << 30


def states(device: torch.device) -> dict[str, str | None]:
    """The state of each generator, in base64; None if this rank has no such device."""
    return {
        name: None if generator is None else base64.b64encode(bytes(generator.get_state().numpy())).decode()
        for name, generator in _generators(device).items()
    }


def restore(device: torch.device, told: Json, rank: int) -> None:
    """told: `states` of every rank, by name. A rank or device without a stored state keeps its fresh seed."""
    for name, generator in _generators(device).items():
        of_ranks = told.get(name, [])
        if generator is not None and rank < len(of_ranks) and of_ranks[rank] is not None:
            state = bytearray(base64.b64decode(of_ranks[rank]))
            generator.set_state(torch.frombuffer(state, dtype=torch.uint8))


def _generators(device: torch.device) -> dict[str, torch.Generator | None]:
    gpu = torch.cuda.default_generators[torch.cuda.current_device()] if device.type == "cuda" else None
    return {"random": torch.default_generator, "random_gpu": gpu}


class StateMissing(NgymError):
    """A stored state does not belong to these weights."""


class Entry(NamedTuple):
    """One tensor of one weight. kind: `master`, or the optimizer's own name for it."""

    name: str
    kind: str

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}"


def gather(engine: Any, network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(key, float32 tensor on the CPU) of every trainable weight, one after another; every rank must iterate to the
    end.

    engine: what deepspeed.initialize returned. Before the first step there are only masters.
    """
    kinds = _kinds(engine)
    if kinds and _sharded(engine):
        _link(engine)
    for name, parameter in _trainable(network):
        for kind in (MASTER, *kinds):
            value = _read(engine, parameter, kind)
            if value is not None:
                whole = tensor_parallel.whole(parameter, value.detach())
                yield Entry(name, kind).key, whole.to("cpu", torch.float32, copy=True)


def steps_of(engine: Any, network: nn.Module) -> dict[str, float]:
    """How many steps the optimizer has counted for each weight; ZeRO has one count for all."""
    if not _sharded(engine):
        state = engine.optimizer.state
        return {name: float(state[one][STEP]) for name, one in _trainable(network) if STEP in state.get(one, {})}
    counts = [float(state[STEP]) for state in _base(engine).state.values() if STEP in state]
    return dict.fromkeys((name for name, _ in _trainable(network)), max(counts)) if counts else {}


@torch.no_grad()
def scatter(
    engine: Any, network: nn.Module, keys: Iterable[str], read: Callable[[str], Tensor], steps: Mapping[str, float]
) -> None:
    """Take over a gathered state. Every rank calls it.

    Args:
        keys: what is stored. read: the tensor of a key.

    Raises:
        StateMissing: weights are missing, unknown, or of another shape; nothing is promised of the engine then.
    """
    stored: dict[str, list[str]] = {}
    for key in keys:
        kind, name = key.split("/", 1)
        stored.setdefault(name, []).append(kind)
    trainable = dict(_trainable(network))
    if wrong := sorted(stored.keys() ^ trainable.keys()):
        where = "the checkpoint" if wrong[0] in trainable else "this model's trainable weights"
        raise StateMissing(f"{wrong[0]} is not in {where}; resume with the recipe of the run")
    kinds = sorted({kind for kinds in stored.values() for kind in kinds} - {MASTER})
    _make_room(engine, trainable, stored, kinds, steps)
    for name, parameter in trainable.items():
        for kind in stored[name]:
            value = read(Entry(name, kind).key)
            shape = tensor_parallel.whole_shape(parameter)
            if tuple(value.shape) != shape:
                raise StateMissing(f"{name} has the shape {list(value.shape)} in the checkpoint and {list(shape)} here")
            _write(engine, parameter, kind, tensor_parallel.part(parameter, value))


def write(folder: Path | None, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write gathered tensors as safetensors files of about 2 GiB; without a folder only help to gather."""
    part: dict[str, Tensor] = {}
    files, size = 0, 0
    for key, tensor in tensors:
        if folder is None:
            continue
        if part and size + tensor.nbytes > FILE_BYTES:
            files, size = files + 1, 0
            save_file(part, folder / _name(files))
            part = {}
        part[key] = tensor.contiguous()
        size += tensor.nbytes
    if folder is not None and part:
        save_file(part, folder / _name(files + 1))


def load(engine: Any, network: nn.Module, folder: Path, steps: Mapping[str, float]) -> None:
    """`scatter` what `write` wrote; every rank reads it, a tensor at a time.

    Raises:
        StateMissing: as scatter does, or a file has another format.
    """
    where: dict[str, safe_open] = {}
    for path in sorted(folder.glob(_name("*"))):
        try:
            file = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise StateMissing(f"{path} is not a safetensors file, and no other format is loaded: {error}") from None
        where |= dict.fromkeys(file.keys(), file)
    scatter(engine, network, where, lambda key: where[key].get_tensor(key), steps)


def _name(number: int | str) -> str:
    return f"training-{number:05}.safetensors" if isinstance(number, int) else f"training-{number}.safetensors"


def _trainable(network: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, one) for name, one in network.named_parameters() if one.requires_grad)


def _sharded(engine: Any) -> bool:
    return bool(engine.zero_optimization_stage() > 0)


def _base(engine: Any) -> torch.optim.Optimizer:
    """The optimizer that DeepSpeed's own wraps: it steps on flat shards."""
    base: torch.optim.Optimizer = engine.optimizer.optimizer
    return base


def _shards(engine: Any) -> list[Tensor]:
    """The flat float32 shards of this rank."""
    names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
    return next(list(getattr(engine.optimizer, name)) for name in names if hasattr(engine.optimizer, name))


def _kinds(engine: Any) -> list[str]:
    """The names of the optimizer's tensors."""
    state = (_base(engine) if _sharded(engine) else engine.optimizer).state
    found = {kind for each in state.values() for kind, value in each.items() if torch.is_tensor(value)}
    return sorted(found - {STEP})


def _read(engine: Any, parameter: nn.Parameter, kind: str) -> Tensor | None:
    """The whole tensor, on every rank; None if this weight has none of this kind."""
    if not _sharded(engine):
        if kind == MASTER:
            return parameter
        value: Tensor | None = engine.optimizer.state.get(parameter, {}).get(kind)
        return value
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    whole: Tensor = (
        safe_get_full_fp32_param(parameter) if kind == MASTER else safe_get_full_optimizer_state(parameter, kind)
    )
    return whole.view(getattr(parameter, "ds_shape", parameter.shape))


def _write(engine: Any, parameter: nn.Parameter, kind: str, value: Tensor) -> None:
    if not _sharded(engine):
        place = parameter if kind == MASTER else engine.optimizer.state[parameter][kind]
        place.copy_(value)
        return
    if hasattr(parameter, "ds_id"):
        _write_shard(parameter, kind, value)
    else:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if kind == MASTER:
            safe_set_full_fp32_param(parameter, value)
            parameter.copy_(value)  # the weights that the network computes with
        else:
            safe_set_full_optimizer_state(parameter, value, kind)


def _write_shard(parameter: Any, kind: str, value: Tensor) -> None:
    """ZeRO-3: this rank's part. The last rank's ends in padding."""
    from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param, safe_set_local_optimizer_state

    size = safe_get_local_fp32_param(parameter).numel()
    rank = torch.distributed.get_rank(parameter.ds_process_group)
    flat = value.flatten().to(parameter.ds_tensor.device)[rank * size : (rank + 1) * size]
    part = torch.nn.functional.pad(flat, (0, size - flat.numel()))
    if kind == MASTER:
        safe_set_local_fp32_param(parameter, part)
        parameter.ds_tensor.copy_(part)
    else:
        safe_set_local_optimizer_state(parameter, part, kind)


def _make_room(
    engine: Any,
    trainable: Mapping[str, nn.Parameter],
    stored: Mapping[str, list[str]],
    kinds: list[str],
    steps: Mapping[str, float],
) -> None:
    """Empty tensors of the optimizer to write into: it makes its own only in its first step."""
    if not _sharded(engine):
        for name, parameter in trainable.items():
            made: dict[str, Any] = {kind: torch.zeros_like(parameter) for kind in stored[name] if kind != MASTER}
            if name in steps:
                made[STEP] = torch.tensor(steps[name], dtype=torch.float32, device=parameter.device)
            if made:
                engine.optimizer.state[parameter] = made
        return
    if not kinds:
        return
    count = max(steps.values(), default=0.0)
    base = _base(engine)
    for shard in _shards(engine):
        tensors = {kind: torch.zeros_like(shard) for kind in kinds}
        # DeepSpeed's own Adam for the CPU counts with a plain number
        whole = isinstance(base, torch.optim.AdamW)
        base.state[shard] = {STEP: torch.tensor(count, device=shard.device) if whole else int(count), **tensors}
    _link(engine)


def _link(engine: Any) -> None:
    """Have each weight find its part of the shards' tensors; ZeRO 1 and 2 look once, which may have been too early."""
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
