"""A training run on this rank: loads the policy, restores a checkpoint, trains each batch, saves the result.

`train` imports this module, and with it torch, transformers and deepspeed, when the recipe has been checked.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import yaml

from ngym import __version__
from ngym.errors import ConfigError
from ngym.files.atomic import WriteFailed, whole_folder
from ngym.plot.figure import Line, Panel, as_text, default_series, write_picture

from .algorithms import Setup
from .checkpoints import Checkpoint, Checkpoints, CheckpointSaver, flatten, model_digest
from .data import file_batches
from .engine import engine, optimizer
from .engine.distributed import barrier, join_process_group
from .engine.rank_hosts import check_equal, check_shared
from .engine.sanity_checks import TO_LOAD, NanGuard, NoSignalMonitor, explain_out_of_memory, to_fit
from .evaluation.heldout_loss import HeldOutNotFinite
from .loop import FileSource, LiveSource, Parts, make_room, temperature, train
from .model.images import has_vision
from .model.lora import write_base
from .model.policy import CriticNetwork, TrainedNetwork, load_policy, load_reward_model, load_tokenizer, unused_dropout
from .model.routing_replay import replay_routing
from .recipe.algorithms import PolicyGradientOptions, RewardModelOptions
from .recipe.recipe import Launch, ModelOptions, Recipe
from .recipe.recipe_reader import high_learning_rate
from .reporting import sinks
from .reporting.metrics import Metrics
from .run_folder import ADAPTER, CURVE, METRICS, POLICY, RESOLVED, SKIPPED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .data.samples import Batch
    from .online.services import Services


COMPARED = ("torch", "deepspeed", "transformers")  # their versions must be equal on all machines


class TrainingJob(NamedTuple):
    """A run as `train` has prepared it.

    Attributes:
        resolved: the recipe as YAML.
        services: of a live run, on rank 0; None elsewhere.
        new_policy: the model that a live run initializes in `recipe.model.path`.
        begin: called once, when everything is ready and training begins.
        warnings: a scheduler's signals (SIGUSR1) that came while the run was loading. It then ends before its first
            step, and --resume continues it.
        say: prints a line on rank 0.
    """

    recipe: Recipe
    launch: Launch
    resolved: str
    services: Services | None
    new_policy: ModelOptions | None
    resume: bool
    begin: Callable[[], None]
    warnings: Sequence[int]
    say: Callable[[str], None]


def train_policy(job: TrainingJob, imports: ExitStack) -> int:
    """Train on this rank. Returns the number of optimizer steps of the policy, those before a resumption included.

    imports: closed when the policy is loaded; until then, imports leave out what training does not need.
    """
    recipe = job.recipe
    engine.import_deepspeed()
    gc.freeze()
    gc.enable()
    with join_process_group(job.launch):
        _check_machines(job)
        if recipe.data is not None and job.launch.rank == 0:
            file_batches.make(recipe.data, job.say)
        if job.new_policy is not None and job.launch.rank == 0:
            _initialize(job.new_policy, job)
        barrier()
        with imports, explain_out_of_memory(lambda: "loading the model", TO_LOAD):
            learner, tokenizer = _load(job)
        with explain_out_of_memory(lambda: learner.activity, to_fit(recipe.micro_batch_tokens)):
            TrainingRun(job, learner, tokenizer).run()
    return learner.steps


def _check_machines(job: TrainingJob) -> None:
    """Check that the ranks of all machines have one recipe, the same versions and one output folder.

    Raises:
        UsageError: one differs; on every rank.
    """
    versions = {
        "ngym": __version__,
        "Python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        **{name: metadata.version(name) for name in COMPARED},
    }
    recipe = {key: repr(value) for key, value in flatten(yaml.safe_load(job.resolved)).items()}
    check_equal(job.launch, versions, "install the same versions on all machines")
    check_equal(job.launch, recipe, "start all ranks with the same recipe and overrides")
    check_shared(job.launch, job.recipe.output)


def _check_files(job: TrainingJob, models: Mapping[str, str]) -> None:
    """Check that the ranks of all machines read the same models and data.

    models: path -> digest.

    Raises:
        UsageError: one differs; on every rank.
    """
    recipe, data = job.recipe, job.recipe.data
    held_out = recipe.evaluation.data if recipe.evaluation else None
    paths = [path for path in (data.path if data else None, held_out) if path is not None]
    digests = {path: file_batches.digest(path) for path in paths} if job.launch.launched else {}
    read = {path: f"sha256 {digest[:12]}" for path, digest in {**models, **digests}.items()}
    check_equal(job.launch, read, "all machines need the same file")


def _initialize(options: ModelOptions, job: TrainingJob) -> None:
    """Save a new policy, unless the run resumes; its server has started and waits for it."""
    folder = Path(str(job.recipe.model.path))
    if folder.exists():
        return
    job.say(f"initialized a new policy in {folder}")
    tokenizer = load_tokenizer(options)
    with whole_folder(folder) as temporary:
        load_policy(options, tokenizer, job.recipe.seed).network.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


def _load(job: TrainingJob) -> tuple[engine.Engine, PreTrainedTokenizerBase]:
    """The engine with the policy in it, and the tokenizer."""
    recipe, is_main = job.recipe, job.launch.rank == 0
    tokenizer = load_tokenizer(recipe.model)
    policy: TrainedNetwork
    if isinstance(recipe.algorithm, RewardModelOptions):
        policy = load_reward_model(recipe.model, tokenizer, recipe.seed)
    else:
        policy = load_policy(recipe.model, tokenizer, recipe.seed, temperature(recipe))
    if has_vision(policy.network) and recipe.live and recipe.live.transport == "lora":
        raise ConfigError("rollouts.transport: lora is not supported for models with images; use http, which merges it")
    if not isinstance(policy.images, str) and (reason := _images_problem(recipe)):
        policy.images = reason
    _check_vision(recipe, policy)
    if policy.one_by_one:
        _check_one_by_one(job, policy.network.config.model_type)
    if policy.unused_vision:
        names = ", ".join(policy.unused_vision)
        job.say(f"model.train_vision: no image depends on these weights, which stay as they are: {names}")
    if isinstance(recipe.algorithm, PolicyGradientOptions) and recipe.algorithm.critic is not None:
        policy.critic = CriticNetwork(policy.network, recipe.algorithm.critic.lr, policy.images)
    if isinstance(recipe.algorithm, PolicyGradientOptions) and recipe.algorithm.routing_replay:
        policy.routers = replay_routing(policy.network)  # after the critic's copy, which routes by itself
    if dropout := unused_dropout(policy.network):
        text = ", ".join(f"{key} {value:g}" for key, value in dropout.items())
        job.say(f"the model's own dropout is off ({text}); only model.lora.dropout drops anything")
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    if job.new_policy is None and (warning := high_learning_rate(recipe, trained)):
        job.say(warning)
    if is_main and (base := recipe.served_base) is not None and not base.exists():
        write_base(base, policy.network, tokenizer, recipe.engine.dtype)
        job.say(f"the policy's servers load the dequantized base from {base}")
    if recipe.live and recipe.live.colocated:
        make_room(recipe, job.services)
        barrier()
    return engine.Engine(policy, job.launch, recipe.engine, recipe.optimizer), tokenizer


def _check_one_by_one(job: TrainingJob, kind: str) -> None:
    """Raise ConfigError if ranks must compute the same layers together and would have another number of sequences."""
    options, reason = job.recipe.engine, f"{kind} has linear attention or a state space"
    for key in ("sequence_parallel", "tensor_parallel"):
        if getattr(options, key) > 1:
            raise ConfigError(f"engine.{key}: {reason}, which ranks do not share; set it to 1")
    if options.zero_stage == 3 and job.launch.ranks > 1:
        raise ConfigError(
            f"engine.zero_stage: {reason}, and ZeRO 3 needs as many sequences on each rank; set 0, 1 or 2"
        )
    job.say(f"{reason}: each sequence is computed by itself, without common prefixes")


def _images_problem(recipe: Recipe) -> str | None:
    """The reason why rows with images cannot be trained with this recipe."""
    return "images are not supported with engine.tensor_parallel" if recipe.engine.tensor_parallel > 1 else None


def _check_vision(recipe: Recipe, policy: TrainedNetwork) -> None:
    """Raise ConfigError if the encoder of images is to be trained and no row can have images."""
    if recipe.model.train_vision and isinstance(policy.images, str):
        raise ConfigError(f"model.train_vision: {policy.images}; set it to false")


class TrainingRun:
    """Training from the loaded policy, or from the newest checkpoint, to the saved one."""

    def __init__(self, job: TrainingJob, learner: engine.Engine, tokenizer: PreTrainedTokenizerBase) -> None:
        recipe = job.recipe
        self._job, self._recipe, self._learner, self._tokenizer = job, recipe, learner, tokenizer
        self._is_main = job.launch.rank == 0
        models = {name: digest for name in _models(recipe) if (digest := model_digest(name)) is not None}
        _check_files(job, models)
        self._algorithm = recipe.algorithm.create(Setup(recipe, learner, tokenizer))
        _check_vision(recipe, learner.policy)  # teachers may read no images
        parts = Parts(recipe, learner, self._algorithm, tokenizer)
        self._source = LiveSource(parts, job.services, job.say) if recipe.live else FileSource(parts, job.say)
        self._guard = NanGuard(recipe.output / SKIPPED if self._is_main else None, recipe.max_skipped)
        self._checkpoints = Checkpoints(recipe.output, recipe.checkpoint)
        self._saver = CheckpointSaver(
            self._checkpoints,
            learner,
            tokenizer,
            self._guard,
            recipe.output / METRICS,
            self._source.state,
            self._source.steps,
            recipe.micro_batch_tokens,
            models,
        )
        self._untrained = NoSignalMonitor()

    def run(self) -> None:
        """Train to the end, and save the policy, the adapter and the curve.

        Raises:
            HeldOutNotFinite: the held-out loss is not finite; the checkpoint of that step is discarded.
            WriteFailed: a disk is full, for example. --resume continues after the last checkpoint.
        """
        recipe, saver, output = self._recipe, self._saver, self._recipe.output
        signal.signal(signal.SIGUSR1, lambda *_: saver.end())
        if self._job.warnings:
            saver.end()
        earlier, history = self._restore()
        done = earlier.step if earlier else 0
        run_sinks = None
        if self._is_main:
            run_sinks = sinks.open_sinks(recipe.logging, output, output / RESOLVED, done)
        with Metrics(output / METRICS, self._source.steps, self._is_main, history, run_sinks) as metrics:
            self._train(metrics, done, earlier)
            saver.tidy()
        saver.check()
        self._save(metrics)

    def _restore(self) -> tuple[Checkpoint | None, list[dict[str, float]]]:
        """The checkpoint that the run continues, and its metrics; None and no metrics for a new run."""
        newest = self._checkpoints.newest() if self._job.resume and self._is_main else None
        earlier: Checkpoint | None = self._learner.broadcast(newest)
        if earlier is None:
            self._job.begin()
            self._saver.begin()
            return None, []
        self._source.check(earlier.state.get("source"))
        history = self._saver.restore(earlier, self._job.say)
        self._job.begin()
        return earlier, history

    def _train(self, metrics: Metrics, done: int, earlier: Checkpoint | None) -> None:
        batches = self._source.batches(metrics, done, earlier.state.get("source") if earlier else None)
        try:
            self._saver.before(done)
            with closing(cast("Generator[Batch]", batches)):
                train(
                    self._learner,
                    self._algorithm,
                    batches,
                    self._recipe.micro_batch_tokens,
                    lambda step: optimizer.schedule(step, self._source.steps, self._recipe.schedule),
                    self._guard,
                    lambda step, values: self._report(metrics, step, values),
                    done,
                )
        except HeldOutNotFinite as error:
            self._saver.discard(error.step)
            raise
        except (KeyboardInterrupt, SystemExit):
            metrics.say(f"interrupted; --resume continues after step {self._checkpoints.last_step}")
            raise
        except WriteFailed as error:
            raise WriteFailed(f"{error}; --resume continues after step {self._checkpoints.last_step}") from error

    def _report(self, metrics: Metrics, step: int, values: dict[str, float]) -> None:
        """Log a batch, and write a checkpoint if one is due."""
        metrics.log(step, values)
        if idle := self._untrained.observe(values):
            metrics.say(f"step {step}: {idle}")
        self._saver.after(step)
        checkpoint = self._recipe.checkpoint
        if not self._is_main or checkpoint.best_is_held_out or not step == checkpoint.every < self._source.steps:
            return
        if message := self._checkpoints.missing_best(metrics.history):
            metrics.say(message)

    def _save(self, metrics: Metrics) -> None:
        recipe, output, say = self._recipe, self._recipe.output, self._job.say
        self._learner.save(output / POLICY, self._tokenizer)
        if recipe.model.lora is not None and not isinstance(recipe.algorithm, RewardModelOptions):
            self._learner.save_adapter(output / ADAPTER, recipe.model.lora, recipe.model.path)
        if not self._is_main:
            return
        if series_list := default_series(metrics.history):
            say(as_text(series_list))
            write_picture([Panel("", [Line(series) for series in series_list])], output / CURVE)
        if idle := self._untrained.summary(metrics.history):
            say(idle)
        if message := self._checkpoints.missing_best(metrics.history):
            say(message)


def _models(recipe: Recipe) -> list[str]:
    """The paths of the models that a resumed run reads again: the reference's, the adapter's base, teachers."""
    teacher = recipe.algorithm.teacher if isinstance(recipe.algorithm, PolicyGradientOptions) else None
    paths = [recipe.model.path, *(share.path for share in (teacher.sources if teacher else ()))]
    return [path for path in paths if path is not None]
