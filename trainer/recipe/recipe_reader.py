"""Reads a whole recipe: files and overrides, combinations of options that are refused, and the sizes of its batches."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ngym.config.shipped_files import RECIPES
from ngym.config.yaml_tree import ConfigTree, load_tree, parse
from ngym.did_you_mean import did_you_mean, near_file, nearest
from ngym.errors import ConfigError
from ngym.files.model_checkpoint import CLASSIFIER_PROBLEM, holds_classifier
from ngym.telemetry.log_format import redact

from .algorithms import OnlineDpoOptions, PolicyGradientOptions, RewardModelOptions, add_correction
from .objective import UNCOMPARED, InvalidSetting, find_path
from .other_names import OTHER_NAMES
from .recipe import Launch, Recipe

if TYPE_CHECKING:
    from ..data.samples import Sample

VARIABLE = re.compile(r"\$\{oc\.env:\s*([^,{}\s]+)")
LARGE = 100_000_000  # pretrained weights
HIGH_RATE = 1e-4  # for so many


def read_recipe(files: Sequence[str], overrides: Sequence[str]) -> tuple[Recipe, ConfigTree]:
    """The recipe from these files; a bare `sft.yaml` is also found among the shipped recipes.

    Raises:
        ConfigError: one line per mistake.
    """
    tree = load_tree([_recipe_file(name) for name in files], overrides, named=("algorithm",))
    recipe = parse(Recipe, tree, other_names=OTHER_NAMES)
    refused = [f"{tree.where(key)}: {key}: {reason}" for key, reason in invalid_settings(recipe)]
    if refused:
        raise ConfigError("\n".join(refused))
    if isinstance(recipe.algorithm, PolicyGradientOptions) and recipe.live and recipe.live.max_lag:
        recipe = recipe.model_copy(update={"algorithm": add_correction(recipe.algorithm)})
    return recipe, tree


def invalid_settings(recipe: Recipe) -> list[InvalidSetting]:
    """All invalid combinations of a recipe."""
    settings = [InvalidSetting(f"algorithm.{key}", reason) for key, reason in recipe.algorithm.invalid_settings()]
    parts = (
        _check_files,
        _check_reward_models,
        _check_teacher,
        _check_single_attempts,
        _check_adapters,
        _check_delta,
        _check_routing_replay,
        _check_heads,
        _check_shared_gpus,
    )
    return [*settings, *(refusal for part in parts for refusal in part(recipe))]


def _check_files(recipe: Recipe) -> Iterator[InvalidSetting]:
    """Refuse what a finished file makes a constant: its rollouts are of the policy with which the run begins."""
    if recipe.data is None or not isinstance(recipe.algorithm, PolicyGradientOptions):
        return
    algorithm = recipe.algorithm
    kl, recomputed = algorithm.kl, algorithm.critic is not None and algorithm.loss.anchor == "trainer"
    if kl.coef > 0 and kl.where == "reward" and not recomputed:
        reason = (
            "in a file, the rollouts are of the reference itself, so a KL in the reward is 0; use loss, or kl.coef 0"
        )
        yield InvalidSetting("algorithm.kl.where", reason)
    teachers = algorithm.teacher.sources if algorithm.teacher else ()
    if any(share.current_policy for share in teachers):
        reason = "from a file, the teacher would stay the policy at the start; name that policy with path"
        yield InvalidSetting("algorithm.teacher.current_policy", reason)


def _check_reward_models(recipe: Recipe) -> Iterator[InvalidSetting]:
    """Refuse a folder with a reward model as policy or teacher. Models of the Hub are checked when they are loaded."""
    if isinstance(recipe.algorithm, RewardModelOptions):
        return
    teacher = recipe.algorithm.teacher if isinstance(recipe.algorithm, PolicyGradientOptions) else None
    paths = [("model.path", recipe.model.path)]
    paths += [("algorithm.teacher.path", share.path) for share in (teacher.sources if teacher else ())]
    for key, path in paths:
        if path is not None and holds_classifier(path):
            yield InvalidSetting(key, f"{path}: {CLASSIFIER_PROBLEM}")


def _check_single_attempts(recipe: Recipe) -> Iterator[InvalidSetting]:
    if recipe.live is None or recipe.live.group_size > 1 or not isinstance(recipe.algorithm, PolicyGradientOptions):
        return
    advantage, teacher = recipe.algorithm.advantage, recipe.algorithm.teacher
    if teacher is not None and teacher.reward_coef == 0:
        return
    if advantage.is_custom and recipe.algorithm.shaping.skip_equal_groups:
        reason = "every group of one is a group of equal rewards, and would be left out; set it to false"
        yield InvalidSetting("algorithm.shaping.skip_equal_groups", reason)
    elif advantage.estimator not in UNCOMPARED and not advantage.is_custom:
        remedy = f"set at least 2, or advantage.estimator {' or '.join(UNCOMPARED)}"
        yield InvalidSetting("rollouts.group_size", f"{advantage.estimator} compares the attempts at a task: {remedy}")
    elif recipe.live.dynamic_sampling > 1:
        reason = "a group of one has no other attempts to compare, so every group would be left out; set it to 1"
        yield InvalidSetting("rollouts.dynamic_sampling", reason)


def _check_teacher(recipe: Recipe) -> Iterator[InvalidSetting]:
    if not isinstance(recipe.algorithm, PolicyGradientOptions) or not recipe.algorithm.teacher:
        return
    if recipe.algorithm.teacher.beta is not None and recipe.engine.together > 1:
        key = "engine.sequence_parallel" if recipe.engine.sequence_parallel > 1 else "engine.tensor_parallel"
        yield InvalidSetting(
            key, "whole distributions are not shared between ranks; set it to 1, or teacher.beta to null"
        )
    if recipe.live is None:
        return
    agents = {source.agent for source in recipe.live.sources}
    covered = {name for share in recipe.algorithm.teacher.sources for name in share.agents or agents}
    for name in sorted(covered - agents):
        yield InvalidSetting(
            "algorithm.teacher.several", f"no tasks are for an agent {name!r}{did_you_mean(name, agents)}"
        )
    for name in sorted(agents - covered):
        yield InvalidSetting(
            "algorithm.teacher.several", f"no teacher scores the rollouts of {name!r}; add it to agents"
        )
    if recipe.live.dynamic_sampling > 1:
        reason = "it replaces groups of equal rewards, in which a teacher has a learning signal; set it to 1"
        yield InvalidSetting("rollouts.dynamic_sampling", reason)
    if recipe.live.colocated and any(source.path for source in recipe.algorithm.teacher.sources):
        reason = "a teacher would stay on the GPU while colocated servers sample; use teacher.url"
        yield InvalidSetting("algorithm.teacher.path", reason)


def _check_adapters(recipe: Recipe) -> Iterator[InvalidSetting]:
    lora = recipe.model.lora
    if lora is None:
        if recipe.rollouts is not None and recipe.rollouts.transport == "lora":
            reason = "lora sends an adapter, but the recipe trains no adapter; set model.lora, or http"
            yield InvalidSetting("rollouts.transport", reason)
        return
    if lora.dropout > 0 and isinstance(recipe.algorithm, PolicyGradientOptions):
        reason = "the ratio to the policy that sampled must come from the weights alone; set it to 0"
        yield InvalidSetting("model.lora.dropout", reason)
    if recipe.engine.tensor_parallel > 1:
        yield InvalidSetting("engine.tensor_parallel", "a layer with an adapter is not cut; set it to 1")
    if lora.base_4bit is None:
        return
    if recipe.engine.offload.parameters is not None:
        yield InvalidSetting(
            "engine.offload.parameters", "a 4-bit base (model.lora.base_4bit) stays on the GPU; set it to null"
        )
    if recipe.engine.zero_stage == 3:
        reason = "ZeRO 3 would cut the packed weights of model.lora.base_4bit; set it to 0, 1 or 2"
        yield InvalidSetting("engine.zero_stage", reason)
    if recipe.served_base is not None and recipe.live is not None and recipe.live.config is None:
        reason = "the running services do not serve the dequantized model.lora.base_4bit, to which the adapter belongs; set http"
        yield InvalidSetting("rollouts.transport", reason)
    if recipe.live is not None and recipe.live.colocated:
        reason = "a 4-bit base (model.lora.base_4bit) is made on the GPU before servers sleep; set it to false"
        yield InvalidSetting("rollouts.colocated", reason)


def _check_routing_replay(recipe: Recipe) -> Iterator[InvalidSetting]:
    if not isinstance(recipe.algorithm, PolicyGradientOptions) or not recipe.algorithm.routing_replay:
        return
    if recipe.engine.compile:
        yield InvalidSetting("engine.compile", "algorithm.routing_replay changes routers as they run; set it to false")
    if recipe.engine.tensor_parallel > 1:
        yield InvalidSetting("engine.tensor_parallel", "algorithm.routing_replay is not supported with it; set it to 1")


def _check_delta(recipe: Recipe) -> Iterator[InvalidSetting]:
    if recipe.live is not None and recipe.live.transport == "delta" and recipe.engine.precision != "bf16":
        reason = (
            f"delta sends the values that a step changed, few in bf16 and most in {recipe.engine.precision}; set "
            "engine.precision=bf16, or http"
        )
        yield InvalidSetting("rollouts.transport", reason)


def _check_heads(recipe: Recipe) -> Iterator[InvalidSetting]:
    if isinstance(recipe.algorithm, RewardModelOptions) and recipe.engine.tensor_parallel > 1:
        yield InvalidSetting("engine.tensor_parallel", "the head of a reward model is not cut; set it to 1")


def _check_shared_gpus(recipe: Recipe) -> Iterator[InvalidSetting]:
    if recipe.live is None or not recipe.live.colocated:
        return
    algorithm = recipe.algorithm
    if recipe.live.max_lag > 0:
        yield InvalidSetting("rollouts.max_lag", "colocated servers sleep while the trainer works; set it to 0")
    if recipe.engine.zero_stage not in (1, 2):
        reason = "DeepSpeed moves the states of ZeRO 1 and 2 out of the GPU for colocated servers; set it to 1 or 2"
        yield InvalidSetting("engine.zero_stage", reason)
    if recipe.engine.offload.optimizer is not None:
        reason = "rollouts.colocated moves the states for the time of sampling; keep one of the two"
        yield InvalidSetting("engine.offload.optimizer", reason)
    if isinstance(algorithm, PolicyGradientOptions) and algorithm.kl.coef > 0 and recipe.model.lora is None:
        reason = "a reference policy would stay on the GPU while colocated servers sample; train an adapter, or set 0"
        yield InvalidSetting("algorithm.kl.coef", reason)
    if (
        isinstance(algorithm, OnlineDpoOptions)
        and not algorithm.preference.reference_free
        and recipe.model.lora is None
    ):
        reason = (
            "a reference policy would stay on the GPU while colocated servers sample; train an adapter, or set true"
        )
        yield InvalidSetting("algorithm.preference.reference_free", reason)


def as_yaml(recipe: Recipe, tree: ConfigTree) -> str:
    """The resolved recipe as YAML, in the form that users write.

    A value from an environment variable is written as its `${oc.env:...}`, so that no secret reaches the disk.
    """
    values = redact(recipe.model_dump(mode="json"))
    for key, text in tree.environment.items():
        _set_value(values, key.split("."), text)
    return yaml.safe_dump(values, sort_keys=False)


def environment_names(tree: ConfigTree) -> set[str]:
    """The environment variables that a recipe names: `${oc.env:NAME}`, and values of keys such as `api_key_env`."""
    return {name for text in tree.environment.values() for name in VARIABLE.findall(text)} | _env_values(tree.values)


def _env_values(values: Any) -> set[str]:
    if isinstance(values, list):
        return set().union(*(_env_values(value) for value in values))
    if not isinstance(values, dict):
        return set()
    own = {value for key, value in values.items() if str(key).endswith("_env") and isinstance(value, str)}
    return own.union(*(_env_values(value) for value in values.values()))


def _set_value(values: Any, path: Sequence[str], text: str) -> None:
    """Replace the value at a path of keys and list indices."""
    for part in path[:-1]:
        values = values[int(part) if isinstance(values, list) else part]
    values[int(path[-1]) if isinstance(values, list) else path[-1]] = text


def _recipe_file(name: str) -> Path:
    file = find_path(name) or find_path(f"{RECIPES}/{name}")
    if file is None:
        names = sorted(path.name for path in RECIPES.glob("*.yaml"))
        near = near_file(Path(name)) or (
            f" (did you mean {suggestion!r}?)" if (suggestion := nearest(name, names)) else ""
        )
        remedy = f"give a YAML file, or one that ships with ngym: {', '.join(names)}"
        raise ConfigError(f"{name}: no such recipe{near}; {remedy}")
    return file


def impossible_settings(recipe: Recipe, launch: Launch) -> list[InvalidSetting]:
    """Settings that cannot work, each with its key in the recipe."""
    group_size = recipe.engine.together
    if launch.ranks % group_size:
        key = "engine.sequence_parallel" if recipe.engine.sequence_parallel > 1 else "engine.tensor_parallel"
        return [
            InvalidSetting(
                key, f"{launch.ranks} ranks cannot form groups of {group_size}; start a multiple of {group_size}"
            )
        ]
    live = recipe.live
    if live is None:
        assert recipe.batch_size is not None
        key, samples = "batch_size", recipe.batch_size
    else:
        rollouts, updates = live.tasks_per_step * live.group_size, live.updates_per_step
        if updates > rollouts:
            reason = f"{updates} optimizer steps cannot split {rollouts} rollouts; set it to {rollouts} or less"
            return [InvalidSetting("rollouts.updates_per_step", reason)]
        key, samples = "rollouts.tasks_per_step", rollouts // updates
    ranks = launch.ranks // group_size
    if samples >= ranks:
        return []
    reason = f"an optimizer step has {samples} samples for {ranks} ranks, and some ranks would be idle; raise it"
    return [InvalidSetting(key, f"{reason}, or start fewer ranks")]


def impossible_on_ray(recipe: Recipe) -> Iterator[InvalidSetting]:
    """Settings that cannot work with `--on ray`: its services start before the ranks, on GPUs of their own."""
    if recipe.live is None:
        return
    if recipe.live.colocated:
        yield InvalidSetting("rollouts.colocated", "trainer and policy have GPUs of their own on Ray; remove this key")
    if recipe.served_base is not None:
        reason = "on Ray the services start before the run can write the dequantized base of model.lora.base_4bit"
        yield InvalidSetting("rollouts.transport", f"{reason}; set http")
    if recipe.model.from_scratch is not None and recipe.live.config is not None:
        reason = "on Ray the services start before the run can write a new policy"
        yield InvalidSetting("model.from_scratch", f"{reason}; set model.path to one that exists")


def file_run_sizes(recipe: Recipe, samples: Sequence[Sample], steps: int, launch: Launch) -> list[str]:
    """The sizes of a run on these samples, one per line. steps: optimizer steps."""
    assert recipe.batch_size is not None and recipe.epochs is not None
    tokens = [sample.tokens for sample in samples]
    mean, count = sum(tokens) / len(tokens), min(recipe.batch_size, len(tokens))
    each_epoch = math.ceil(len(tokens) / recipe.batch_size)
    sample_count = steps // each_epoch * len(tokens) + min(steps % each_epoch * recipe.batch_size, len(tokens))
    total = each_epoch * recipe.epochs
    run = f"{recipe.epochs:,} x {each_epoch:,}" if steps == total else f"max_steps, of {total:,}"
    return [
        f"data         {len(tokens):,} samples, {sum(tokens):,} tokens: {mean:,.0f} each, at most {max(tokens):,}",
        f"step         {count:,} samples{_describe_share(count, recipe, launch)}",
        *_micro_batches(recipe, count * mean, max(tokens), launch),
        f"run          {steps:,} steps ({run}): {sample_count:,} samples, about {sample_count * mean:,.0f} tokens",
        *_learning_rates(recipe, steps),
    ]


def live_run_sizes(recipe: Recipe, launch: Launch) -> list[str]:
    """The sizes of a live run, one per line."""
    live, steps = recipe.live, recipe.max_steps
    assert live is not None and steps is not None
    rollouts, updates = live.tasks_per_step * live.group_size, live.updates_per_step
    part = math.ceil(rollouts / updates)
    text = f"{live.tasks_per_step:,} tasks x {live.group_size:,} rollouts = {rollouts:,} rollouts"
    trained = (
        f"{updates:,} optimizer step{'s' if updates > 1 else ''} of {part:,}{_describe_share(part, recipe, launch)}"
    )
    return [
        f"step         {text}, in {trained}",
        f"micro-batch  at most {recipe.micro_batch_tokens:,} tokens on a rank, as many as the rollouts need",
        f"run          {steps:,} steps: {steps * updates:,} optimizer steps, {steps * rollouts:,} rollouts",
        *_learning_rates(recipe, steps),
    ]


def _describe_share(samples: int, recipe: Recipe, launch: Launch) -> str:
    if launch.ranks == 1:
        return ""
    group_size = recipe.engine.together
    groups = launch.ranks // group_size
    share = (
        f"{samples / groups:,.0f}" if samples % groups == 0 else f"{samples // groups:,} or {samples // groups + 1:,}"
    )
    return f", {share} on each of {groups} " + ("ranks" if group_size == 1 else f"groups of {group_size} ranks")


def _micro_batches(recipe: Recipe, tokens: float, longest: int, launch: Launch) -> Iterator[str]:
    """tokens: of an optimizer step, on average."""
    budget, tokens_of_rank = recipe.micro_batch_tokens, tokens * recipe.engine.tensor_parallel / launch.ranks
    count = math.ceil(tokens_of_rank / budget)
    mean = tokens_of_rank / count
    yield f"micro-batch  at most {budget:,} tokens on a rank: about {count:,} in a step, of {mean:,.0f} tokens"
    if longest > budget * recipe.engine.sequence_parallel:
        yield f"             micro_batch_tokens is below the longest sample: one of more, up to {longest:,}, is alone"


def _learning_rates(recipe: Recipe, steps: int) -> Iterator[str]:
    schedule, optimizer = recipe.schedule, recipe.optimizer
    rates = f"{optimizer.name} {optimizer.lr:.3g}"
    if optimizer.name == "muon":
        rates = f"muon {optimizer.muon_lr:.3g} for matrices, adamw {optimizer.lr:.3g} for the rest"
    warm = schedule.warmup(steps)
    up = f", up to it in {warm:,} steps" if warm else ""
    after = "constant" if schedule.name == "constant" else f"{schedule.name}, down to {schedule.final:.3g} of it"
    yield f"rate         {rates}{up}; {after}"
    if warm > steps:
        yield f"             the run ends in its warm-up: schedule.warmup_steps is {warm:,}"


def high_learning_rate(recipe: Recipe, parameters: int) -> str | None:
    """A warning if the recipe's learning rate is one for a tiny or new model. parameters: those that are trained."""
    model, optimizer = recipe.model, recipe.optimizer
    if model.from_scratch is not None or model.lora is not None or parameters < LARGE or optimizer.lr <= HIGH_RATE:
        return None
    return (
        f"optimizer.lr is {optimizer.lr:.3g}, and {parameters:,} pretrained weights are trained: such models usually need "
        "1e-5 or less, and may forget what they know above it"
    )
