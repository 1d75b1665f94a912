"""The optimizers (AdamW, Adam, SGD, or Muon for matrices and AdamW for the rest) and the learning-rate schedule of a run.

In checkpoints, each trainable weight has its float32 master value and the optimizer's tensors (AdamW: exp_avg, exp_avg_sq), all in the
weight's own shape. The format does not depend on the ZeRO stage, the number of ranks or the precision that wrote it, so
a run may resume with others (DeepSpeed's universal checkpoint, without its pickles).

8-bit states are stored as they are: bytes (state1, state2) and their scales (absmax1, absmax2). They exist without ZeRO
only, where each rank has whole weights.
"""

from __future__ import annotations

import base64
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ngym.errors import NgymError
from ngym.schema import Json

from ..recipe.recipe import EIGHT_BIT, OptimizerOptions, ScheduleOptions
from .tensor_parallel import own_part, whole_shape, whole_tensor

if TYPE_CHECKING:
    from ..model.policy import CriticNetwork


# Newton-Schulz coefficients of Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/)
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
MASTER = "master"
STEP = "step"
TABLES = {"qmap1", "qmap2"}  # of 8-bit states: constants, the same for all weights
FILE_BYTES = 2 << 30
GROUP_ELEMENTS = 1 << 29  # ZeRO 1 and 2 convert the gradient of a group at once to float32


def build(network: nn.Module, options: OptimizerOptions, critic: CriticNetwork | None = None) -> torch.optim.Optimizer:
    """The optimizer over all trainable weights; each group keeps its own full learning rate as `base_lr`.

    critic: its weights never use Muon.
    """
    embeddings = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    head = getattr(network, "get_output_embeddings", lambda: None)()
    head = getattr(network, "score", None) if head is None else head  # of a reward model
    if head is not None:
        embeddings.add(id(head.weight))
    matrices: list[nn.Parameter] = []
    tables: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            continue
        is_convolution = parameter.dim() > 3 or (parameter.dim() == 3 and parameter.shape[1] == 1)
        is_table = id(parameter) in embeddings or is_convolution
        is_vector = parameter.dim() < 2 or name.endswith("bias")  # those of experts are stacked
        kind = vectors if is_vector else tables if is_table else matrices
        kind.append(parameter)
    muon = options.name == "muon"
    groups: list[dict[str, Any]] = [
        {"params": matrices, "lr": options.muon_lr if muon else options.lr, "muon": muon},
        {"params": tables, "lr": options.lr, "muon": False},
        {"params": vectors, "lr": options.lr, "muon": False, "weight_decay": 0.0},
    ]
    if critic is not None:
        lr = options.lr if critic.lr is None else critic.lr
        trained = [parameter for parameter in critic.parameters() if parameter.requires_grad]
        wide, narrow = ([weight for weight in trained if (weight.dim() < 2) is flat] for flat in (False, True))
        groups.append({"params": wide, "lr": lr, "muon": False})
        groups.append({"params": narrow, "lr": lr, "muon": False, "weight_decay": 0.0})
    groups = [
        {**group, "params": part, "base_lr": group["lr"]} for group in groups for part in _buckets(group["params"])
    ]
    if options.name == "sgd":
        momentum, decay = options.momentum, options.weight_decay
        return torch.optim.SGD(groups, lr=options.lr, momentum=momentum, weight_decay=decay)
    adam: dict[str, Any] = {
        "lr": options.lr,
        "betas": options.betas,
        "eps": options.eps,
        "weight_decay": options.weight_decay,
        "fused": True,  # twelve times as fast on a CPU, where the offloaded step runs
    }
    if muon:
        return Muon(groups, momentum=options.muon_momentum, **adam)
    if options.name in EIGHT_BIT:
        return _eight_bit(groups, embeddings, options, critic)
    return torch.optim.Adam(groups, **adam) if options.name == "adam" else torch.optim.AdamW(groups, **adam)


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters in groups of at most GROUP_ELEMENTS, or of one."""
    part: list[nn.Parameter] = []
    elements = 0
    for parameter in parameters:
        size = getattr(parameter, "ds_numel", parameter.numel())
        if part and elements + size > GROUP_ELEMENTS:
            yield part
            part, elements = [], 0
        part.append(parameter)
        elements += size
    if part:
        yield part


def _eight_bit(
    groups: list[dict[str, Any]], embeddings: set[int], options: OptimizerOptions, critic: CriticNetwork | None
) -> torch.optim.Optimizer:
    """embeddings: the ids of the network's, and of its head."""
    from ..model.quantized import working_device
    from .eight_bit import AdamW8bit

    working_device("optimizer.name", "adamw")
    of_critic = () if critic is None else critic.modules()
    embedding_ids = embeddings | {id(module.weight) for module in of_critic if isinstance(module, nn.Embedding)}
    adam = {"lr": options.lr, "betas": options.betas, "eps": options.eps, "weight_decay": options.weight_decay}
    return AdamW8bit(groups, whole=embedding_ids, paged=options.name.startswith("paged"), **adam)


def schedule(step: int, steps: int, options: ScheduleOptions) -> float:
    """The factor on every learning rate at a step, counted from 0: up to 1 in the warm-up, then the decay."""
    warming = options.warmup(steps)
    if step < warming:
        return (step + 1) / warming
    if options.name == "constant":
        return 1.0
    done = (step - warming) / max(1, steps - warming)
    decay = 1.0 - done if options.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return options.final + (1.0 - options.final) * decay


class Muon(torch.optim.AdamW):
    """AdamW, except that in groups marked `muon` a matrix moves by its orthogonalized Nesterov momentum. A weight of three
    dimensions is a stack of matrices, one for each expert.
    """

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float, **adamw: Any) -> None:
        super().__init__(groups, **adamw)
        self._momentum = momentum

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if group["muon"]:
                self._step_matrices(group)
        return super().step(closure)  # skips parameters whose gradient was cleared

    def _step_matrices(self, group: dict[str, Any]) -> None:
        by_shape: defaultdict[tuple[int, int], list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
            momentum.lerp_(parameter.grad, 1 - self._momentum)
            wide = parameter.grad.lerp(momentum, self._momentum).reshape(-1, *parameter.shape[-2:])
            wide = wide.mT if wide.shape[1] > wide.shape[2] else wide
            by_shape[wide.shape[1], wide.shape[2]].append((parameter, wide))
            parameter.grad = None
        for same_shape in by_shape.values():
            updates = orthogonalise(torch.cat([wide for _, wide in same_shape]))
            counts = [len(wide) for _, wide in same_shape]
            for (parameter, _), update in zip(same_shape, updates.split(counts), strict=True):
                rows, columns = parameter.shape[-2:]
                rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_((update.mT if rows > columns else update).reshape(parameter.shape), alpha=-rate)


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, approximately: singular values end between 0.7 and 1.2. [B, rows <=
    columns].

    Five steps of X <- (a + b R + c R^2) X with R = X X^T. R and the product of the polynomials commute, so both are
    iterated as small square matrices and X is touched at the end (https://tridao.me/blog/2026/gram-newton-schulz/).
    Float32 throughout: half precision would need a restart, and is slower on most CPUs.
    """
    a, b, c = QUINTIC
    x = matrices.float()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    gram = x @ x.mT
    identity = torch.eye(x.shape[-2], device=x.device)
    product: Tensor | None = None
    for remaining in reversed(range(ITERATIONS)):
        polynomial = torch.baddbmm(a * identity + b * gram, gram, gram, alpha=c)
        product = polynomial if product is None else polynomial @ product
        if remaining:
            gram = polynomial @ gram @ polynomial
    assert product is not None
    whitened: Tensor = (product @ x).to(matrices.dtype)
    return whitened


def generator_states(device: torch.device) -> dict[str, str | None]:
    """The state of each generator, in base64; None if this rank has no such device."""
    return {
        name: None if generator is None else base64.b64encode(bytes(generator.get_state().numpy())).decode()
        for name, generator in _generators(device).items()
    }


def restore_generators(device: torch.device, states: Json, rank: int) -> None:
    """states: `generator_states` of every rank, by name. A rank or device without a stored state keeps its fresh seed."""
    for name, generator in _generators(device).items():
        of_ranks = states.get(name, [])
        if generator is not None and rank < len(of_ranks) and of_ranks[rank] is not None:
            state = bytearray(base64.b64decode(of_ranks[rank]))
            generator.set_state(torch.frombuffer(state, dtype=torch.uint8))


def _generators(device: torch.device) -> dict[str, torch.Generator | None]:
    gpu = torch.cuda.default_generators[torch.cuda.current_device()] if device.type == "cuda" else None
    return {"random": torch.default_generator, "random_gpu": gpu}


class StateMissing(NgymError):
    """A stored state does not belong to these weights."""


def gather_state(engine: Any, network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(key, tensor on the CPU: float32, or bytes of 8-bit states) of every trainable weight, one after another; every
    rank must iterate to the end.

    A key is `kind/name`; the kind is `master`, or the optimizer's own name for the tensor.

    engine: what deepspeed.initialize returned. Before the first step there are only masters.
    """
    kinds = _kinds(engine)
    if kinds and _is_sharded(engine):
        _link_states(engine)
    for name, parameter in _trainable(network):
        for kind in (MASTER, *kinds):
            value = _read_tensor(engine, parameter, kind)
            if value is not None:
                tensor = whole_tensor(parameter, value.detach())
                dtype = torch.uint8 if tensor.dtype == torch.uint8 else torch.float32
                yield f"{kind}/{name}", tensor.to("cpu", dtype, copy=True)


def steps_of(engine: Any, network: nn.Module) -> dict[str, float]:
    """The number of steps that the optimizer has counted for each weight; ZeRO has one count for all."""
    if not _is_sharded(engine):
        state = engine.optimizer.state
        return {
            name: float(state[parameter][STEP])
            for name, parameter in _trainable(network)
            if STEP in state.get(parameter, {})
        }
    counts = [float(state[STEP]) for state in _base(engine).state.values() if STEP in state]
    return dict.fromkeys((name for name, _ in _trainable(network)), max(counts)) if counts else {}


@torch.no_grad()
def scatter(
    engine: Any, network: nn.Module, keys: Iterable[str], read: Callable[[str], Tensor], steps: Mapping[str, float]
) -> None:
    """Take over a gathered state. Every rank calls it.

    Args:
        keys: the keys in the checkpoint. read: loads the tensor of a key.

    Raises:
        StateMissing: weights are missing, unknown, or of another shape; nothing is promised of the engine then.
    """
    kinds_by_name: dict[str, list[str]] = {}
    for key in keys:
        kind, name = key.split("/", 1)
        kinds_by_name.setdefault(name, []).append(kind)
    trainable = dict(_trainable(network))
    if wrong := sorted(kinds_by_name.keys() ^ trainable.keys()):
        place = "the checkpoint" if wrong[0] in trainable else "this model's trainable weights"
        raise StateMissing(f"{wrong[0]} is not in {place}; resume with the recipe of the run")
    kinds = sorted({kind for kinds in kinds_by_name.values() for kind in kinds} - {MASTER})
    _make_room(engine, trainable, kinds_by_name, kinds, steps)
    for name, parameter in trainable.items():
        for kind in kinds_by_name[name]:
            value = read(f"{kind}/{name}")
            _check_fits(name, kind, value, engine, parameter)
            _write_tensor(engine, parameter, kind, own_part(parameter, value))


def _check_fits(name: str, kind: str, value: Tensor, engine: Any, parameter: nn.Parameter) -> None:
    """Raise StateMissing unless the stored value has the shape that it has here; 8-bit states also their dtype."""
    shape = whole_shape(parameter)
    if kind != MASTER and not _is_sharded(engine):
        place = engine.optimizer.state[parameter].get(kind)
        if place is None or (torch.uint8 in (place.dtype, value.dtype) and place.dtype != value.dtype):
            raise StateMissing(
                f"{name} has other states of the optimizer in the checkpoint; resume with its bitsandbytes"
            )
        shape = tuple(place.shape)
    if tuple(value.shape) != shape:
        raise StateMissing(f"{name} has the shape {list(value.shape)} in the checkpoint and {list(shape)} here")


def write_state(folder: Path | None, tensors: Iterable[tuple[str, Tensor]]) -> None:
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


def load_state(engine: Any, network: nn.Module, folder: Path, steps: Mapping[str, float]) -> None:
    """`scatter` what `write_state` wrote; every rank reads it, a tensor at a time.

    Raises:
        StateMissing: as scatter does, or a file has another format.
    """
    files_by_key: dict[str, safe_open] = {}
    for path in sorted(folder.glob(_name("*"))):
        try:
            file = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise StateMissing(f"{path} is not a safetensors file, and no other format is loaded: {error}") from None
        files_by_key |= dict.fromkeys(file.keys(), file)
    scatter(engine, network, files_by_key, lambda key: files_by_key[key].get_tensor(key), steps)


def _name(number: int | str) -> str:
    return f"training-{number:05}.safetensors" if isinstance(number, int) else f"training-{number}.safetensors"


def _trainable(network: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in network.named_parameters() if parameter.requires_grad)


def _is_sharded(engine: Any) -> bool:
    return bool(engine.zero_optimization_stage() > 0)


def _base(engine: Any) -> torch.optim.Optimizer:
    """The optimizer that DeepSpeed's own wraps: it steps on flat shards."""
    base: torch.optim.Optimizer = engine.optimizer.optimizer
    return base


def _kinds(engine: Any) -> list[str]:
    """The names of the optimizer's tensors."""
    state = (_base(engine) if _is_sharded(engine) else engine.optimizer).state
    kinds = {kind for values in state.values() for kind, value in values.items() if torch.is_tensor(value)}
    return sorted(kinds - {STEP} - TABLES)


def _read_tensor(engine: Any, parameter: nn.Parameter, kind: str) -> Tensor | None:
    """The whole tensor, on every rank; None if this weight has none of this kind."""
    if not _is_sharded(engine):
        if kind == MASTER:
            return parameter
        value: Tensor | None = engine.optimizer.state.get(parameter, {}).get(kind)
        return value
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    tensor: Tensor = (
        safe_get_full_fp32_param(parameter) if kind == MASTER else safe_get_full_optimizer_state(parameter, kind)
    )
    return tensor.view(getattr(parameter, "ds_shape", parameter.shape))


def _write_tensor(engine: Any, parameter: nn.Parameter, kind: str, value: Tensor) -> None:
    if not _is_sharded(engine):
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
    kinds_by_name: Mapping[str, list[str]],
    kinds: list[str],
    steps: Mapping[str, float],
) -> None:
    """Empty tensors of the optimizer to write into: it makes its own only in its first step."""
    if not _is_sharded(engine):
        if hasattr(engine.optimizer, "make_room"):  # AdamW8bit; its module cannot be imported without bitsandbytes
            engine.optimizer.make_room({trainable[name]: int(steps[name]) for name in kinds_by_name if name in steps})
            return
        for name, parameter in trainable.items():
            state: dict[str, Any] = {
                kind: torch.zeros_like(parameter) for kind in kinds_by_name[name] if kind != MASTER
            }
            if name in steps:
                state[STEP] = torch.tensor(steps[name], dtype=torch.float32, device=parameter.device)
            if state:
                engine.optimizer.state[parameter] = state
        return
    if not kinds:
        return
    count = max(steps.values(), default=0.0)
    base = _base(engine)
    names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
    for shard in next(getattr(engine.optimizer, name) for name in names if hasattr(engine.optimizer, name)):
        tensors = {kind: torch.zeros_like(shard) for kind in kinds}
        # DeepSpeed's own Adam for the CPU counts with a plain number
        is_adam = isinstance(base, torch.optim.Adam)  # AdamW, too
        base.state[shard] = {STEP: torch.tensor(count, device=shard.device) if is_adam else int(count), **tensors}
    _link_states(engine)


def _link_states(engine: Any) -> None:
    """Have each weight find its part of the shards' tensors; ZeRO 1 and 2 look once, which may have been too early."""
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
