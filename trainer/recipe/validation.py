"""Which combinations of a recipe make no sense? Each is refused when the recipe is read, with its key and the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .algorithms import PolicyGradientOptions
from .objective import UNCOMPARED, Refusal

if TYPE_CHECKING:
    from .recipe import Recipe


def refusals(recipe: Recipe) -> list[Refusal]:
    """All of them."""
    found = [Refusal(f"algorithm.{key}", reason) for key, reason in recipe.algorithm.refusals()]
    return [*found, *_of_single_attempts(recipe), *_of_adapters(recipe), *_of_shared_gpus(recipe)]


def _of_single_attempts(recipe: Recipe) -> list[Refusal]:
    if recipe.live is None or recipe.live.group_size > 1 or not isinstance(recipe.algorithm, PolicyGradientOptions):
        return []
    estimator = recipe.algorithm.advantage.estimator
    if estimator not in UNCOMPARED:
        reason = (
            f"{estimator} compares the attempts at a task: 2 at least, or advantage.estimator {' or '.join(UNCOMPARED)}"
        )
        return [Refusal("rollouts.group_size", reason)]
    if recipe.live.dynamic_sampling > 1:
        reason = "one attempt never differs from the others at its task, so every group would be left out; set it to 1"
        return [Refusal("rollouts.dynamic_sampling", reason)]
    return []


def _of_adapters(recipe: Recipe) -> list[Refusal]:
    found: list[Refusal] = []
    if recipe.rollouts is not None and recipe.rollouts.transport == "lora" and recipe.model.lora is None:
        found.append(
            Refusal("rollouts.transport", "lora sends an adapter, and none is trained; set model.lora, or http")
        )
    of_rollouts = isinstance(recipe.algorithm, PolicyGradientOptions)
    if recipe.model.lora is not None and recipe.model.lora.dropout > 0 and of_rollouts:
        reason = "the ratio to the policy that sampled must come from the weights alone; set it to 0"
        found.append(Refusal("model.lora.dropout", reason))
    if recipe.model.lora is not None and recipe.engine.tensor_parallel > 1:
        found.append(Refusal("engine.tensor_parallel", "a layer with an adapter is not cut; set it to 1"))
    return found


def _of_shared_gpus(recipe: Recipe) -> list[Refusal]:
    if recipe.live is None or not recipe.live.colocated:
        return []
    found: list[Refusal] = []
    if recipe.live.max_lag > 0:
        found.append(Refusal("rollouts.max_lag", "colocated servers sleep while the trainer works; set it to 0"))
    if recipe.engine.zero_stage not in (1, 2):
        reason = "DeepSpeed moves the states of ZeRO 1 and 2 out of the GPU for colocated servers; set it to 1 or 2"
        found.append(Refusal("engine.zero_stage", reason))
    if recipe.engine.offload.optimizer is not None:
        reason = "rollouts.colocated moves the states for the time of sampling; keep one of the two"
        found.append(Refusal("engine.offload.optimizer", reason))
    if (
        isinstance(recipe.algorithm, PolicyGradientOptions)
        and recipe.algorithm.kl.coef > 0
        and recipe.model.lora is None
    ):
        reason = "a reference policy would stay on the GPU while colocated servers sample; train an adapter, or set 0"
        found.append(Refusal("algorithm.kl.coef", reason))
    return found
