"""The optimizers (AdamW, or Muon for matrices and AdamW for the rest) and the learning-rate schedule of a run."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..recipe.recipe import OptimizerOptions, ScheduleOptions

if TYPE_CHECKING:
    from ..model.policy import CriticNetwork

# Newton-Schulz coefficients of Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/)
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def build(network: nn.Module, options: OptimizerOptions, critic: CriticNetwork | None = None) -> torch.optim.AdamW:
    """The optimizer over all trainable weights; each group keeps its own full learning rate as `base_lr`.

    critic: its weights always use AdamW.
    """
    embeddings = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    head = getattr(network, "get_output_embeddings", lambda: None)()
    if head is not None:
        embeddings.add(id(head.weight))
    matrices: list[nn.Parameter] = []
    tables: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in network.parameters():
        if not parameter.requires_grad:
            continue
        kind = vectors if parameter.dim() < 2 else tables if id(parameter) in embeddings else matrices
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
        wide, narrow = ([one for one in trained if (one.dim() < 2) is flat] for flat in (False, True))
        groups.append({"params": wide, "lr": lr, "muon": False})
        groups.append({"params": narrow, "lr": lr, "muon": False, "weight_decay": 0.0})
    groups = [{**group, "base_lr": group["lr"]} for group in groups if group["params"]]
    adamw: dict[str, Any] = {
        "lr": options.lr,
        "betas": options.betas,
        "eps": options.eps,
        "weight_decay": options.weight_decay,
        "fused": True,  # twelve times as fast on a CPU, where the offloaded step runs
    }
    return Muon(groups, momentum=options.muon_momentum, **adamw) if muon else torch.optim.AdamW(groups, **adamw)


def schedule(step: int, steps: int, options: ScheduleOptions) -> float:
    """The factor on every learning rate at a step, counted from 0: warm-up times decay."""
    warming = options.warmup(steps)
    warm = min(1.0, (step + 1) / warming) if warming else 1.0
    if options.name == "constant":
        return warm
    done = step / max(1, steps)
    decay = 1.0 - done if options.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return warm * (options.final + (1.0 - options.final) * decay)


class Muon(torch.optim.AdamW):
    """AdamW, except that in groups marked `muon` a matrix moves by its orthogonalized Nesterov momentum."""

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
            wide = parameter.grad.lerp(momentum, self._momentum)
            wide = wide.mT if wide.shape[0] > wide.shape[1] else wide
            by_shape[wide.shape[0], wide.shape[1]].append((parameter, wide))
            parameter.grad = None
        for same_shape in by_shape.values():
            updates = orthogonalise(torch.stack([wide for _, wide in same_shape]))
            for (parameter, _), update in zip(same_shape, updates.unbind(), strict=True):
                rows, columns = parameter.shape
                rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update.mT if rows > columns else update, alpha=-rate)


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
    for left in reversed(range(ITERATIONS)):
        polynomial = torch.baddbmm(a * identity + b * gram, gram, gram, alpha=c)
        product = polynomial if product is None else polynomial @ product
        if left:
            gram = polynomial @ gram @ polynomial
    assert product is not None
    whitened: Tensor = (product @ x).to(matrices.dtype)
    return whitened
