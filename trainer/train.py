"""Trains a policy from a recipe: read the recipe, find its samples in a file or live, load the model, train, save."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import yaml

from ngym.config.service_config import load_config, tracing_from_environment
from ngym.config.yaml_tree import ConfigTree
from ngym.errors import ConfigError, UsageError
from ngym.files.atomic import held_folder, write_whole
from ngym.files.hub_download import hub_model_problem
from ngym.runtime.cpu_threads import limit_spinning
from ngym.runtime.lean_imports import defer_compiler, lean_imports, quick_metadata
from ngym.telemetry import tracing

from .checkpoints import resumable
from .data import file_batches
from .recipe.algorithms import PolicyGradientOptions
from .recipe.recipe import BASE, Launch, Recipe, TrainerOptions, read_launch
from .recipe.recipe_reader import as_yaml, impossible_on_ray, impossible_settings, live_run_sizes, read_recipe
from .recipe.rollout_options import RolloutOptions
from .run_folder import (
    INITIAL,
    METRICS,
    POLICY,
    RESOLVED,
    contains_run,
    is_interrupted,
    move_aside,
    replace,
    restore,
)

if TYPE_CHECKING:
    from .online.services import Services

OTHERWISE = "choose another output=FOLDER"


def main(files: Sequence[str], overrides: Sequence[str], *, overwrite: bool, resume: bool) -> Path:
    """Run a recipe; see `ng_train --help`. Returns the run's folder.

    Raises:
        UsageError: the recipe, its data or the output folder is invalid.
        FileLocked: another process trains there.
    """
    warnings: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: warnings.append(number))
    recipe, tree = check_recipe(files, overrides)
    launch, resolved = read_launch(), as_yaml(recipe, tree)
    if launch.rank:
        _run(recipe, launch, resolved, resume, lambda: None, warnings)
    else:
        with _locked_folder(recipe, resolved, overwrite, resume) as begin:
            _run(recipe, launch, resolved, resume, begin, warnings)
    return recipe.output


def dry_run(
    files: Sequence[str],
    overrides: Sequence[str],
    *,
    resume: bool,
    overwrite: bool,
    as_json: bool,
    on_ray: bool = False,
) -> None:
    """Check a recipe, its tasks and its services, without loading or writing anything.

    Prints the resolved recipe on standard output, its sizes and output paths on standard error; or all of it as JSON.

    Raises:
        UsageError: the recipe cannot run, as far as this is known without loading anything.
    """
    recipe, tree = check_recipe(files, overrides, on_ray=on_ray)
    if recipe.live:
        check_live(recipe, recipe.live)
    text = as_yaml(recipe, tree)
    holds_run = contains_run(recipe.output)
    if resume:
        resumable(recipe.output, text)
    sizes = live_run_sizes(recipe, _launch(recipe, on_ray)) if recipe.live else []
    if as_json:
        plan = {"output": str(recipe.output), "contains_run": holds_run, "sizes": sizes, "recipe": yaml.safe_load(text)}
        print(orjson.dumps(plan, option=orjson.OPT_INDENT_2).decode())
        return
    print(text, end="")
    for line in sizes:
        print(line, file=sys.stderr)
    needs = " (it holds a run: pass --overwrite or --resume)" if holds_run and not (resume or overwrite) else ""
    print(f"would write {recipe.output / POLICY}{needs}; nothing was loaded or written", file=sys.stderr)


def check_recipe(files: Sequence[str], overrides: Sequence[str], *, on_ray: bool = False) -> tuple[Recipe, ConfigTree]:
    """The recipe, checked as far as possible without loading anything. on_ray: for the ranks that Ray starts.

    Raises:
        ConfigError: it cannot run; one line for each mistake. UsageError: its output path is a file.
    """
    recipe, tree = read_recipe(files, overrides)
    parent = next((place for place in (recipe.output, *recipe.output.parents) if place.exists()), Path())
    if not parent.is_dir():
        raise UsageError(f"{parent} is not a folder; {OTHERWISE}")
    if recipe.data is not None:
        file_batches.check(recipe.data, tree)
    refused = impossible_settings(recipe, _launch(recipe, on_ray))
    if on_ray:
        refused += impossible_on_ray(recipe)
    if refused:
        raise ConfigError("\n".join(f"{tree.where(key)}: {key}: {reason}" for key, reason in refused))
    return recipe, tree


def _launch(recipe: Recipe, on_ray: bool) -> Launch:
    if not on_ray:
        return read_launch()
    return Launch(rank=0, local_rank=0, ranks=(recipe.trainer or TrainerOptions()).ranks)


def _run(
    recipe: Recipe, launch: Launch, resolved: str, resume: bool, begin: Callable[[], None], warnings: Sequence[int]
) -> None:
    """Train on this rank. The arguments are those of TrainingJob.

    torch, transformers and deepspeed are imported from here on, so that a wrong recipe fails without their seconds.
    """
    limit_spinning(alone=not launch.launched and not (recipe.live and recipe.live.max_lag))
    new_policy = recipe.model if recipe.live and recipe.model.from_scratch is not None else None
    if new_policy is not None:
        recipe = _with_initial_policy(recipe, launch, resume)
    if recipe.served_base is not None and launch.rank == 0 and not resume:
        move_aside(recipe.output, [BASE])  # an earlier run's must not be served
    with ExitStack() as stack:
        if launch.rank == 0:  # so that services are stopped and the terminal is restored
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        stack.callback(tracing.end)
        if not recipe.live:  # in a live run, the services' config has the destination of spans
            tracing.begin(tracing_from_environment(), "ng_train", launch.rank)
        _check_hub_models(recipe)
        if recipe.live and launch.rank == 0:
            check_live(recipe, recipe.live)
        services = stack.enter_context(_services(recipe)) if recipe.live and launch.rank == 0 else None
        _say("loading torch, transformers and deepspeed")
        imports = stack.enter_context(ExitStack())
        imports.enter_context(_fast_imports(recipe.engine.compile))
        from .engine.sanity_checks import NothingTrained
        from .training_run import TrainingJob, train_policy

        job = TrainingJob(recipe, launch, resolved, services, new_policy, resume, begin, warnings, _say)
        steps = train_policy(job, imports)
    _say(f"policy saved in {recipe.output / POLICY}, metrics in {recipe.output / METRICS}")
    if launch.rank == 0 and not steps:
        raise NothingTrained(
            "no step changed the weights: the saved policy is the one that the run began with. The lines above, and "
            f"{recipe.output / METRICS}, show why"
        )


@contextmanager
def _fast_imports(compile_layers: bool) -> Iterator[None]:
    """Imports without torch's compiler, unless the engine compiles. The collection of garbage is off until
    `train_policy` has imported deepspeed: it would take a fifth of the time, among objects that stay.
    """
    gc.disable()
    if not compile_layers:
        defer_compiler()
    with quick_metadata() if compile_layers else lean_imports():
        yield


def _with_initial_policy(recipe: Recipe, launch: Launch, resume: bool) -> Recipe:
    """The recipe with the folder of its new policy in place of from_scratch: servers load a policy from a folder."""
    folder = recipe.output.resolve() / INITIAL
    if launch.rank == 0 and not resume:
        move_aside(recipe.output, [INITIAL])  # an earlier run's must not be served
    saved = recipe.model.model_copy(update={"path": str(folder), "from_scratch": None, "tokenizer": None})
    return recipe.model_copy(update={"model": saved})


def _check_hub_models(recipe: Recipe) -> None:
    """Check the models that are named as on the Hub, if it cannot be reached.

    Raises:
        ConfigError: the cache of the Hub does not have one of them.
    """
    names = {"model.path": recipe.model.path, "model.tokenizer": recipe.model.tokenizer}
    if isinstance(recipe.algorithm, PolicyGradientOptions) and recipe.algorithm.teacher:
        names |= {f"algorithm.teacher.path ({share.path})": share.path for share in recipe.algorithm.teacher.sources}
    for key, name in names.items():
        if name is None or os.path.isabs(name):
            continue
        if problem := hub_model_problem(name):
            raise ConfigError(f"{key}: {problem}; name a folder")


def check_live(recipe: Recipe, rollouts: RolloutOptions) -> None:
    """Check the services, the tasks and the held-out tasks of live rollouts before anything starts.

    Raises:
        ConfigError: the config of the services is wrong, or its agents do not lead to the policy.
        UsageError: a row is not a task of its agent.
    """
    from .evaluation.live_eval import read_held_out
    from .online.services import config_for_agents
    from .online.task_sampler import TaskSource

    if rollouts.config is not None:
        config_for_agents(load_config([rollouts.config]), agents_of(recipe, rollouts), rollouts.policy)
    TaskSource(rollouts, recipe.seed, recipe.algorithm.task_fields)
    if recipe.evaluation is not None:
        read_held_out(recipe.evaluation, rollouts)


def agents_of(recipe: Recipe, rollouts: RolloutOptions) -> list[str]:
    """The names of the agents of the tasks and held-out tasks."""
    held_out = recipe.evaluation.held_out(rollouts) if recipe.evaluation else ()
    return list(dict.fromkeys(environment.agent for environment in (*rollouts.sources, *held_out)))


def _services(recipe: Recipe) -> Services:
    """The services of the recipe's config, or of a running ng_run; they start in the background while torch is
    imported.
    """
    from .online.services import HEAD, Services, running, serving_options, start_services

    options = recipe.live
    assert options is not None
    agents = agents_of(recipe, options)
    if options.config is None or HEAD in os.environ:
        return Services(partial(running, Path(options.services or Path.cwd()), agents, options.policy))
    serving, ranks = serving_options(recipe), read_launch().local_ranks
    return Services(
        partial(start_services, options.config, agents, options.policy, serving, _say, options.policy_app, ranks)
    )


@contextmanager
def _locked_folder(recipe: Recipe, resolved: str, overwrite: bool, resume: bool) -> Iterator[Callable[[], None]]:
    """Lock the run's folder. The yielded function must be called when training begins: it writes the recipe, and moves an
    earlier run that is not resumed into `.old/`.

    If the run ends before that, the earlier run is unchanged.
    """
    output = recipe.output
    if is_interrupted(output):
        with held_folder(output, OTHERWISE):
            restore(output)
    if resume:
        resumable(output, resolved)
    elif contains_run(output) and not overwrite:
        raise UsageError(f"{output}: holds an earlier run; choose another output=FOLDER, or pass --overwrite")
    output.mkdir(parents=True, exist_ok=True)
    paths = [recipe.model.path, recipe.model.tokenizer, recipe.data.path if recipe.data else None]

    def begin() -> None:
        if not resume:
            replace(output, [Path(path) for path in paths if path is not None])
        write_whole(output / RESOLVED, resolved.encode())

    with held_folder(output, OTHERWISE):
        try:
            yield begin
        finally:
            restore(output)


def _say(text: str) -> None:
    if read_launch().rank == 0:
        print(text, flush=True)
