"""Four verbs over DeepSpeed: logprobs, backward, step, save. The only file that imports deepspeed.

    engine.logprobs(packed)                          # with a graph behind it
    engine.backward(loss_sum, weight, last=False)    # once for each micro-batch, `last` on the last one
    engine.step(factor)                              # the learning rates, scaled by the schedule
    engine.save(folder, tokenizer)

All but logprobs are collective: every rank calls them, in the same order.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, distributed

from . import optimizer
from .checkpoint import committed
from .config import EngineOptions, Launch, OptimizerOptions
from .model import Policy
from .packing import Packed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Shared = TypeVar("Shared")


class Update(NamedTuple):
    """What a step did. grad_norm: before clipping."""

    grad_norm: float
    lr: float


class Engine:
    """A policy under training, on one rank of several."""

    def __init__(self, policy: Policy, launch: Launch, options: EngineOptions, optimizing: OptimizerOptions) -> None:
        deepspeed = _import_deepspeed()
        deepspeed.init_distributed(verbose=False)
        self.policy = policy
        self.rank = launch.rank
        self.ranks = launch.ranks
        self.steps = 0  # that changed the weights
        self._options = options
        self._optimizing = optimizing
        self._deepspeed, *_ = deepspeed.initialize(
            model=policy,
            optimizer=optimizer.build(policy.network, optimizing),
            config=_deepspeed_config(options, optimizing),
            dist_init_required=False,
        )
        self.device = torch.device(self._deepspeed.device)

    def logprobs(self, packed: Packed, temperature: float | None = None) -> Tensor:
        """Log p of the trained tokens, [N]; under torch.no_grad() nothing is kept for a backward.

        temperature: None is the one that is trained at.
        """
        logprobs: Tensor = self._deepspeed(packed, temperature)
        return logprobs

    def backward(self, loss_sum: Tensor, weight: float, *, last: bool) -> None:
        """Add the gradient of loss_sum / weight, where `weight` is that of the whole batch over all ranks.

        DeepSpeed averages over ranks, hence the factor; it is not to divide by micro-batches again.
        """
        self._deepspeed.set_gradient_accumulation_boundary(last)
        self._deepspeed.backward(loss_sum * (self.ranks / weight), scale_wrt_gas=False)

    def step(self, factor: float) -> Update:
        """Clip, update, forget the gradients; learning rates are scaled by `factor`.

        A gradient that is no number changes nothing, on any rank; grad_norm tells.
        """
        for group in self._deepspeed.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        lr = self._optimizing.lr * factor
        if self._options.zero_stage > 0:  # then DeepSpeed skips such a step itself
            self._deepspeed.step()
            norm = float(self._deepspeed.get_global_grad_norm())
            self.steps += math.isfinite(norm)
            return Update(norm, lr)
        # without ZeRO, DeepSpeed keeps the norm to itself, and steps in any case
        bound = self._optimizing.max_grad_norm or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), bound))
        if math.isfinite(norm):
            self._deepspeed.step()
            self.steps += 1
        else:
            self._deepspeed.zero_grad()
        return Update(norm, lr)

    @contextmanager
    def gradients_seen(self) -> Iterator[set[str]]:
        """The names of the network's parameters that get a gradient in this block; this rank's micro-batches decide."""
        seen: set[str] = set()
        hooks = [
            parameter.register_hook(partial(_note, seen, name))
            for name, parameter in self.policy.network.named_parameters()
            if parameter.requires_grad
        ]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    def share(self, value: Shared) -> Shared:
        """Rank 0's value, on every rank."""
        if self.ranks == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, device=self.device)
        return box[0]

    def add_up(self, values: list[float]) -> list[float]:
        """Each value summed over all ranks."""
        if self.ranks == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(total)
        return [float(value) for value in total]

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Commit a Hugging Face folder: config, safetensors, tokenizer. Every rank calls it, rank 0 writes."""
        weights = self.weights()
        if self.rank == 0:
            with committed(folder) as aside:
                self.policy.network.save_pretrained(aside, state_dict=weights)
                tokenizer.save_pretrained(aside)
                for file in aside.iterdir():
                    file.chmod(0o644)  # safetensors makes its file private, and a server may be another user
        wait_for_all()

    def weights(self) -> dict[str, Tensor]:
        """All weights on rank 0, none elsewhere; under ZeRO-3 every rank holds a shard and helps to gather each."""
        network = self.policy.network
        if self._options.zero_stage < 3:
            return dict(network.state_dict()) if self.rank == 0 else {}
        import deepspeed

        weights: dict[str, Tensor] = {}
        for name, parameter in network.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                if self.rank == 0:
                    weights[name] = parameter.detach().cpu().clone()
        return weights


@contextmanager
def joined(launch: Launch) -> Iterator[None]:
    """In the company of the other ranks (the launcher's environment says where they meet), or alone without one."""
    os.environ.setdefault("LOCAL_RANK", str(launch.local_rank))
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(launch.local_rank)
    if launch.launched:
        distributed.init_process_group(backend)
    else:
        distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        _leave()


def _leave() -> None:
    """Through DeepSpeed, where it was used: it remembers groups, and would use dead ones in the next company."""
    comm: Any = sys.modules.get("deepspeed.comm")
    if comm is not None and comm.is_initialized():
        comm.destroy_process_group()
    else:
        distributed.destroy_process_group()


def _note(seen: set[str], name: str, gradient: Tensor) -> None:
    seen.add(name)


def wait_for_all() -> None:
    """Return when every rank has come here."""
    distributed.barrier()


def _import_deepspeed() -> Any:
    """deepspeed, quiet, and on a machine without a GPU told so: it would look for a compiler otherwise."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's to mend
    # On a CPU it would compile an operator now, and a build that was once killed leaves a lock at which this hangs for
    # ever. Through sys.modules, because the attribute `deepspeed.comm.torch` is torch itself.
    backend: Any = sys.modules["deepspeed.comm.torch"]
    backend.build_shm_op = lambda: None
    return deepspeed


def _deepspeed_config(options: EngineOptions, optimizing: OptimizerOptions) -> dict[str, Any]:
    clips_itself = options.zero_stage > 0
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": options.zero_stage},
        # without the check a bf16 step would be taken on a gradient that is no number
        "bf16": {"enabled": options.precision == "bf16", "check_grad_overflow": options.precision == "bf16"},
        "gradient_clipping": (optimizing.max_grad_norm or 0.0) if clips_itself else 0.0,
        "steps_per_print": 1 << 30,
    }
