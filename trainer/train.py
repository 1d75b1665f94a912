"""Trains a policy from a recipe: read the recipe, find its samples in a file or live, load the model, train, save."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import orjson
import yaml

from ngym.config.service_config import load_config, tracing_from_environment
from ngym.config.yaml_tree import ConfigTree
from ngym.errors import ConfigError, UsageError
from ngym.files.atomic import WriteFailed, held_folder, whole_folder, write_whole
from ngym.files.hub_download import hub_model_problem
from ngym.runtime.cpu_threads import limit_spinning
from ngym.runtime.lean_imports import defer_compiler, lean_imports, quick_metadata
from ngym.telemetry import tracing

from .checkpoints import Checkpoints, model_digest, resumable
from .data import file_batches
from .recipe.algorithms import PolicyGradientOptions, RewardModelOptions
from .recipe.recipe import BASE, Launch, ModelOptions, Recipe, TrainerOptions, read_launch
from .recipe.recipe_reader import as_yaml, impossible_settings, live_run_sizes, read_recipe
from .recipe.rollout_options import RolloutOptions
from .reporting import sinks
from .run_folder import (
    ADAPTER,
    CURVE,
    INITIAL,
    METRICS,
    POLICY,
    RESOLVED,
    SKIPPED,
    contains_run,
    is_interrupted,
    move_aside,
    replace,
    restore,
)

if TYPE_CHECKING:
    from .data.samples import Batch
    from .online.services import Services
    from .reporting.metrics import Metrics

OTHERWISE = "choose another output=FOLDER"


def main(files: Sequence[str], overrides: Sequence[str], *, overwrite: bool, resume: bool) -> Path:
    """Run a recipe; see `ng_train --help`. Returns the run's folder.

    Raises:
        UsageError: the recipe, its data or the output folder is invalid.
        FileLocked: another process trains there.
    """
    warnings: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: warnings.append(number))
    recipe, tree = checked(files, overrides)
    launch = read_launch()
    if launch.rank:
        _run(recipe, launch, resume, lambda: None, warnings)
    else:
        with _locked_folder(recipe, as_yaml(recipe, tree), overwrite, resume) as begin:
            _run(recipe, launch, resume, begin, warnings)
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
    recipe, tree = checked(files, overrides, on_ray=on_ray)
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


def checked(files: Sequence[str], overrides: Sequence[str], *, on_ray: bool = False) -> tuple[Recipe, ConfigTree]:
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
    if refused:
        raise ConfigError("\n".join(f"{tree.where(key)}: {key}: {reason}" for key, reason in refused))
    return recipe, tree


def _launch(recipe: Recipe, on_ray: bool) -> Launch:
    if not on_ray:
        return read_launch()
    return Launch(rank=0, local_rank=0, ranks=(recipe.trainer or TrainerOptions()).ranks)


def _run(recipe: Recipe, launch: Launch, resume: bool, begin: Callable[[], None], warnings: Sequence[int]) -> None:
    """Train on this rank. begin: called when everything is ready and training begins. warnings: a scheduler's (SIGUSR1)
    that have come while the run loads; it then ends before its first step, and --resume continues it.

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
        gc.disable()  # a fifth of the imports' time would go into looking for garbage among objects that stay
        loading = stack.enter_context(ExitStack())
        if not recipe.engine.compile:
            defer_compiler()
        loading.enter_context(quick_metadata() if recipe.engine.compile else lean_imports())
        from .algorithms import Algorithm, Setup
        from .checkpoints import CheckpointSaver
        from .engine import engine, optimizer
        from .engine.distributed import barrier, joined
        from .engine.sanity_checks import (
            TO_LOAD,
            NanGuard,
            NoSignalMonitor,
            NothingTrained,
            memory_explained,
            to_fit,
        )
        from .evaluation.heldout_loss import HeldOutNotFinite
        from .loop import FileSource, LiveSource, Parts, make_room, temperature, train
        from .model.policy import (
            CriticNetwork,
            TrainedNetwork,
            load_policy,
            load_reward_model,
            load_tokenizer,
            unused_dropout,
            write_base,
        )
        from .reporting.metrics import Metrics

        engine.imported()
        gc.freeze()
        gc.enable()
        stack.enter_context(joined(launch))
        if recipe.data is not None and launch.rank == 0:
            file_batches.make(recipe.data, _say)
        if new_policy is not None and launch.rank == 0:
            _begin(new_policy, Path(str(recipe.model.path)), recipe.seed)
        barrier()

        loading.enter_context(memory_explained(lambda: "loading the model", TO_LOAD))
        tokenizer = load_tokenizer(recipe.model)
        policy: TrainedNetwork
        if isinstance(recipe.algorithm, RewardModelOptions):
            policy = load_reward_model(recipe.model, tokenizer, recipe.seed)
        else:
            policy = load_policy(recipe.model, tokenizer, recipe.seed, temperature(recipe))
        if isinstance(recipe.algorithm, PolicyGradientOptions) and recipe.algorithm.critic is not None:
            policy.critic = CriticNetwork(policy.network, recipe.algorithm.critic.lr)
        if dropout := unused_dropout(policy.network):
            text = ", ".join(f"{key} {value:g}" for key, value in dropout.items())
            _say(f"the model's own dropout is off ({text}); only model.lora.dropout drops anything")
        if launch.rank == 0 and (base := recipe.served_base) is not None and not base.exists():
            write_base(base, policy.network, tokenizer, recipe.engine.dtype)
            _say(f"the policy's servers load the dequantized base from {base}")
        if recipe.live and recipe.live.colocated:
            make_room(recipe, services)
            barrier()
        learner = engine.Engine(policy, launch, recipe.engine, recipe.optimizer)
        loading.close()
        stack.enter_context(memory_explained(lambda: learner.doing, to_fit(recipe.micro_batch_tokens)))
        algorithm: Algorithm = recipe.algorithm.create(Setup(recipe, learner, tokenizer))
        parts = Parts(recipe, learner, algorithm, tokenizer)
        source = LiveSource(parts, services, _say) if recipe.live else FileSource(parts, _say)
        is_main = launch.rank == 0
        guard = NanGuard(recipe.output / SKIPPED if is_main else None, recipe.max_skipped)
        checkpoints = Checkpoints(recipe.output, recipe.checkpoint)
        saver = CheckpointSaver(
            checkpoints,
            learner,
            tokenizer,
            guard,
            recipe.output / METRICS,
            source.state,
            source.steps,
            recipe.micro_batch_tokens,
            {name: digest for name in _models(recipe) if (digest := model_digest(name)) is not None},
        )
        signal.signal(signal.SIGUSR1, lambda *_: saver.end())
        if warnings:
            saver.end()
        earlier = learner.broadcast(checkpoints.newest() if resume and is_main else None)
        history: list[dict[str, float]] = []
        if earlier is None:
            begin()
            saver.begin()
        else:
            source.check(earlier.state.get("source"))
            history = saver.restore(earlier, _say)
            begin()
        done = earlier.step if earlier else 0
        untrained = NoSignalMonitor()
        run_sinks = sinks.open_sinks(recipe.logging, recipe.output, recipe.output / RESOLVED, done) if is_main else None
        with Metrics(recipe.output / METRICS, source.steps, is_main, history, run_sinks) as metrics:
            batches = source.batches(metrics, done, earlier.state.get("source") if earlier else None)

            def missing_best() -> str:
                return checkpoints.missing_best(metrics.history)

            def report(step: int, values: dict[str, float]) -> None:
                metrics.log(step, values)
                if idle := untrained.noted(values):
                    metrics.say(f"step {step}: {idle}")
                saver.after(step)
                first = step == recipe.checkpoint.every < source.steps
                if is_main and first and not recipe.checkpoint.best_is_held_out and (message := missing_best()):
                    metrics.say(message)

            try:
                saver.before(done)
                with closing(cast("Generator[Batch]", batches)):
                    train(
                        learner,
                        algorithm,
                        batches,
                        recipe.micro_batch_tokens,
                        lambda step: optimizer.schedule(step, source.steps, recipe.schedule),
                        guard,
                        report,
                        done,
                    )
            except HeldOutNotFinite as error:
                saver.discard(error.step)
                raise
            except (KeyboardInterrupt, SystemExit):
                metrics.say(f"interrupted; --resume continues after step {checkpoints.last_step}")
                raise
            except WriteFailed as error:
                raise WriteFailed(f"{error}; --resume continues after step {checkpoints.last_step}") from error
            saver.tidy()
        saver.check()
        learner.save(recipe.output / POLICY, tokenizer)
        if recipe.model.lora is not None and not isinstance(recipe.algorithm, RewardModelOptions):
            learner.save_adapter(recipe.output / ADAPTER, recipe.model.lora, recipe.model.path)
        if is_main:
            _draw(metrics, recipe.output / CURVE)
            if idle := untrained.summary(metrics.history):
                _say(idle)
            if message := missing_best():
                _say(message)
    _say(f"policy saved in {recipe.output / POLICY}, metrics in {recipe.output / METRICS}")
    if is_main and not learner.steps:
        raise NothingTrained(
            "no step changed the weights: the saved policy is the one that the run began with. The lines above, and "
            f"{recipe.output / METRICS}, show why"
        )


def _models(recipe: Recipe) -> list[str]:
    """The paths of the models that a resumed run reads again: the reference's, the adapter's base, teachers."""
    teacher = recipe.algorithm.teacher if isinstance(recipe.algorithm, PolicyGradientOptions) else None
    paths = [recipe.model.path, *(share.path for share in (teacher.sources if teacher else ()))]
    return [path for path in paths if path is not None]


def _with_initial_policy(recipe: Recipe, launch: Launch, resume: bool) -> Recipe:
    """The recipe with the folder of its new policy in place of from_scratch: servers load a policy from a folder."""
    folder = recipe.output.resolve() / INITIAL
    if launch.rank == 0 and not resume:
        move_aside(recipe.output, [INITIAL])  # an earlier run's must not be served
    saved = recipe.model.model_copy(update={"path": str(folder), "from_scratch": None, "tokenizer": None})
    return recipe.model_copy(update={"model": saved})


def _begin(options: ModelOptions, folder: Path, seed: int) -> None:
    """Save a new policy in this folder, unless the run resumes; its server has started and waits for it."""
    if folder.exists():
        return
    _say(f"initialized a new policy in {folder}")
    from .model.policy import load_policy, load_tokenizer

    tokenizer = load_tokenizer(options)
    with whole_folder(folder) as temporary:
        load_policy(options, tokenizer, seed).network.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


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
    from .online.services import HEAD, Services, running, serving_options, started

    options = recipe.live
    assert options is not None
    agents = agents_of(recipe, options)
    if options.config is None or HEAD in os.environ:
        return Services(partial(running, Path(options.services or Path.cwd()), agents, options.policy))
    serving, ranks = serving_options(recipe), read_launch().local_ranks
    return Services(partial(started, options.config, agents, options.policy, serving, _say, options.policy_app, ranks))


def _draw(metrics: Metrics, image: Path) -> None:
    from ngym.plot.figure import Line, Panel, as_text, default_series, write_picture

    series_list = default_series(metrics.history)
    if series_list:
        _say(as_text(series_list))
        write_picture([Panel("", [Line(series) for series in series_list])], image)


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
