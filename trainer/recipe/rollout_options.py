"""The recipe's options for reinforcement learning: the objective, the source of its rollouts, and its evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field, ValidationInfo, field_validator

from .extensions import TRANSPORTS, Transport
from .objective import ExistingPath, FrozenOptions, Positive, Share

HELD_OUT = "validation.jsonl"
SPOOL = "rollouts.jsonl"  # collected rollouts, in the run's folder
SPOOL_FAILURES = "rollouts_failures.jsonl"
ADVANTAGES = "advantages.jsonl"  # of the trained ones, a line for each step


class HeldOutOptions(FrozenOptions):
    """Tasks from a JSONL file, and the agent that attempts them."""

    agent: str = Field(description="The name of the agent's service.")
    tasks: ExistingPath = Field(description="JSONL file of the tasks.")
    name: str | None = Field(
        default=None, pattern=r"^[\w.-]+$", description="Its name in the metrics; null: the agent's."
    )
    max_output_tokens: Positive | None = Field(
        default=None, description="Limit of one model call; null: the rows' own."
    )

    @property
    def key(self) -> str:
        return self.name or self.agent


class CurriculumOptions(FrozenOptions):
    """Draws tasks that are always or never solved less often."""

    decay: Share = Field(default=0.5, description="Weight of the past in a task's running mean.")
    floor: float = Field(default=0.1, gt=0, le=1, description="Minimum weight of a task; an unseen one has 1.")


class EnvironmentOptions(HeldOutOptions):
    """An environment of a live run, and its share of the tasks."""

    weight: float = Field(
        default=1.0, gt=0, description="Its share of a step's tasks, relative to the weights of the other environments."
    )


class RolloutOptions(FrozenOptions):
    """Live rollouts: each step, group_size attempts at each of tasks_per_step tasks."""

    agent: str | None = Field(default=None, description="The agent of a run with one environment.")
    tasks: ExistingPath | None = Field(default=None, description="The tasks of a run with one environment.")
    environments: tuple[EnvironmentOptions, ...] = Field(
        default=(),
        validate_default=True,
        description="Agents and tasks of several environments, instead of agent and tasks.",
    )
    curriculum: CurriculumOptions | None = Field(
        default=None,
        description="Draw tasks that are always or never solved less often; null: each task once an epoch.",
    )
    easy_first: bool = Field(
        default=False,
        description="In the first epoch, draw tasks by the `difficulty` of their rows, a number, the lowest first.",
    )
    services: ExistingPath | None = Field(
        default=None,
        description="The config file whose services are started; a folder: the services of the `ng_run` that runs "
        "there; null: of the one in this folder.",
    )
    policy: str = Field(default="policy", description="The name of the model service to train.")
    policy_app: str | None = Field(
        default=None,
        description="With `services`: serve the policy with this app, such as models/vllm, instead of its stanza.",
    )
    tasks_per_step: Positive = Field(default=32, description="Tasks of one step.")
    group_size: Positive = Field(default=8, description="Attempts at each task; 1 if nothing compares them.")
    updates_per_step: Positive = Field(default=1, description="Optimizer steps on the rollouts of a step.")
    max_lag: int = Field(
        default=0,
        ge=0,
        description="How many batches the trainer may be ahead of the weights that sampled a rollout. 0: collect, "
        "train, collect; above 0: collect while training.",
    )
    dynamic_sampling: Positive = Field(
        default=1,
        description="Attempt up to this many times tasks_per_step per step, until enough groups have a learning "
        "signal.",
    )
    seeded: bool | None = Field(
        default=None,
        validate_default=True,
        description="Give each attempt a seed, so that the same weights give the same rollouts; null: only with "
        "max_lag 0.",
    )
    max_output_tokens: Positive | None = Field(
        default=None, description="Limit of one model call; null: the rows' own."
    )
    concurrency: Positive = Field(default=256, description="Limit of rollouts in flight.")
    timeout_s: float = Field(default=600, gt=0, description="Seconds that one rollout may take.")
    transport: Transport = Field(
        default="http",
        description="How new weights reach the policy service: http and filesystem send a checkpoint, delta only the "
        "values that changed, lora an adapter; nccl moves a checkpoint from GPU to GPU; with ipc, servers on this machine "
        "copy it from the trainer's memory. "
        "Or the import path of a PushTransport: my_file.py:MyTransport.",
    )
    push_folder: Path | None = Field(
        default=None,
        validate_default=True,
        description="For the transport filesystem: weights_root of the policy's stanza; for your own, its folder.",
    )
    push_mode: Literal["keep", "wait", "abort"] = Field(
        default="keep",
        description="What happens to generations in flight: keep (they continue with the new weights), wait, abort.",
    )
    colocated: bool = Field(
        default=False,
        description="The policy's servers run on the trainer's GPUs: they sleep while it trains, and its states "
        "are in host memory while they sample.",
    )

    @field_validator("easy_first")
    @classmethod
    def _check_first_epoch(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("curriculum") is not None:
            raise ValueError("curriculum draws tasks by weight, so there is no first epoch; set one of the two")
        return value

    @field_validator("push_folder")
    @classmethod
    def _check_push_folder(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        transport = info.data.get("transport")
        if transport == "filesystem" and value is None:
            raise ValueError("the transport filesystem needs the folder that the policy's stanza calls weights_root")
        if transport in TRANSPORTS.names and transport != "filesystem" and value is not None:
            raise ValueError(
                "push_folder is only for the transport filesystem or one of your own; remove push_folder, or change transport"
            )
        return value

    @field_validator("environments")
    @classmethod
    def _check_one_form(
        cls, value: tuple[EnvironmentOptions, ...], info: ValidationInfo
    ) -> tuple[EnvironmentOptions, ...]:
        if not {"agent", "tasks"} <= info.data.keys():
            return value  # reported elsewhere
        short = [key for key in ("agent", "tasks") if info.data[key] is not None]
        if value and short:
            raise ValueError(f"rollouts.{short[0]} is given too; keep one of the two forms (rollouts.{short[0]}=null)")
        if not value and len(short) < 2:
            raise ValueError("name rollouts.agent and rollouts.tasks, or rollouts.environments with both for each")
        return _check_distinct(value)

    @field_validator("seeded")
    @classmethod
    def _default_seeded(cls, value: bool | None, info: ValidationInfo) -> bool:
        return info.data.get("max_lag") == 0 if value is None else value

    @property
    def config(self) -> Path | None:
        """The config whose services the run starts; None: it uses those of an `ng_run`."""
        return None if self.services is None or Path(self.services).is_dir() else Path(self.services)

    @property
    def sources(self) -> tuple[EnvironmentOptions, ...]:
        """The environments, from the short or the long form."""
        if self.environments:
            return self.environments
        assert self.agent is not None and self.tasks is not None
        return (EnvironmentOptions(agent=self.agent, tasks=self.tasks),)


class EvaluationOptions(FrozenOptions):
    """The times and tasks of evaluations: before the first step, every so many steps and after the last."""

    tasks: ExistingPath | None = Field(default=None, description="Held-out tasks of a live run with one environment.")
    environments: tuple[HeldOutOptions, ...] = Field(
        default=(),
        description="The long form, for several files. Without both: the file validation.jsonl next to the tasks "
        "of each environment of the rollouts.",
    )
    data: ExistingPath | None = Field(default=None, description="A held-out file for a run on a file.")
    limit: Positive | None = Field(default=None, description="Only the first rows of each file.")
    every: Positive = Field(default=10, description="Steps between evaluations.")
    attempts: Positive = Field(default=1, description="Sampled attempts at each task.")
    greedy: bool = Field(default=True, description="One more attempt, without sampling.")

    @field_validator("environments")
    @classmethod
    def _check_one_form(cls, value: tuple[HeldOutOptions, ...], info: ValidationInfo) -> tuple[HeldOutOptions, ...]:
        if value and info.data.get("tasks") is not None:
            raise ValueError("evaluation.tasks is given too; keep one of the two forms (evaluation.tasks=null)")
        return _check_distinct(value)

    def held_out(self, rollouts: RolloutOptions) -> tuple[HeldOutOptions, ...]:
        """The files of a live run, from the short or the long form."""
        if self.tasks is None:
            return self.environments
        source = rollouts.sources[0]
        return (source.model_copy(update={"tasks": self.tasks}),)

    def with_default_tasks(self, rollouts: RolloutOptions) -> EvaluationOptions:
        """These options, with the held-out tasks next to the rollouts' own if none are named.

        Raises:
            ValueError: an environment has no validation.jsonl next to its tasks.
        """
        if self.tasks is not None or self.environments:
            return self
        files = [str(Path(source.tasks).with_name(HELD_OUT)) for source in rollouts.sources]
        for file, source in zip(files, rollouts.sources, strict=True):
            if file == source.tasks or not Path(file).is_file():
                raise ValueError(
                    f"there is no {HELD_OUT} next to {source.tasks}; name held-out tasks with evaluation.tasks (of several "
                    "environments: evaluation.environments), or train without an evaluation: evaluation=null"
                )
        if len(files) == 1:
            return self.model_copy(update={"tasks": files[0]})
        held_out = (
            HeldOutOptions(tasks=file, **source.model_dump(include={"agent", "name", "max_output_tokens"}))
            for file, source in zip(files, rollouts.sources, strict=True)
        )
        return self.model_copy(update={"environments": tuple(held_out)})


Held = TypeVar("Held", bound=HeldOutOptions)


def _check_distinct(environments: tuple[Held, ...]) -> tuple[Held, ...]:
    names = [environment.key for environment in environments]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two environments are called {twice!r}; give each a different `name`")
    return environments


def evaluation_problem(
    options: EvaluationOptions, live: RolloutOptions | None, name: str, *, learns_from_rollouts: bool
) -> str | None:
    """The reason why this run cannot be evaluated that way, or None.

    name: of the algorithm. live: None for a run on a file.
    """
    if live is None:
        if options.data is not None and learns_from_rollouts:
            return f"{name} has no metric on a finished file; remove evaluation.data"
        if options.data is None and not learns_from_rollouts:
            return f"{name} trains on a file and is evaluated on one; name evaluation.data"
        return None
    if options.data is not None:
        return "data is a held-out file of a run on a file; name held-out tasks with evaluation.tasks, and remove evaluation.data"
    if options.tasks is not None and len(live.sources) > 1:
        return "evaluation.tasks does not say which agent attempts them; use evaluation.environments"
    return None
