"""The options of a training run, as one frozen record. recipe_reader.py makes it of YAML files and overrides.

A path that is read (data, tokenizer, model) is searched in the working directory first, then among the files that ship
with ngym; a path that is written is relative to the working directory.
"""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

from ngym.config.import_path import check_arguments, import_class, refusal
from ngym.config.service_config import Resources
from ngym.extras import needs

from .algorithms import AnyAlgorithm, PolicyGradientOptions
from .extensions import MetricSink, SinkPath
from .objective import Fraction, FrozenOptions, ModelName, Positive, Share, Word, existing
from .rollout_options import EvaluationOptions, RolloutOptions, evaluation_problem

Value = TypeVar("Value")
# key -> its default for a file, and the corresponding option of a live run
OF_A_FILE = {
    "epochs": (1, "live rollouts have no epochs, they end after max_steps"),
    "batch_size": (32, "the size of a live step is rollouts.tasks_per_step x group_size / updates_per_step"),
}
DATABASES = ("sqlite:", "postgresql", "mysql", "mssql")
"""How the `uri` of MLflow begins if it is a database, which needs SQLAlchemy."""
BASE = "base"
SWEEP = "NGYM_SWEEP"  # environment variable: the folder of the sweep that a run belongs to


def run_file(folder: Path, sink: str) -> Path:
    """The file with the id of the folder's run in W&B or MLflow (`wandb`, `mlflow`)."""
    return folder / f"{sink}_run.json"


class WandbOptions(FrozenOptions):
    """Weights & Biases."""

    project: str = Field(description="Where the run is listed.")
    name: str | None = Field(default=None, description="Name of the run; null: the output folder's.")
    mode: Literal["online", "offline"] | None = Field(
        default=None,
        description="Offline runs are kept in the output folder, for `wandb sync`; null: WANDB_MODE, else online.",
    )


class MlflowOptions(FrozenOptions):
    """MLflow."""

    uri: str = Field(
        description="Address of the tracking server or database, such as http://host:5000 or sqlite:///runs/mlflow.db."
    )
    experiment: str = Field(description="Where the run is listed.")
    name: str | None = Field(default=None, description="Name of the run; null: the output folder's.")


class SinkOptions(FrozenOptions):
    """A sink of your own."""

    sink: SinkPath = Field(
        description="Import path of a subclass of ngym.trainer.recipe.extensions.MetricSink: my_file.py:MySink."
    )
    options: dict[str, Any] = Field(default={}, description="Keyword arguments of its constructor.")

    @model_validator(mode="after")
    def _check_constructor_arguments(self) -> Self:
        try:
            check_arguments(self.sink, import_class(self.sink, MetricSink), self.options, own=("output", "recipe"))
        except ValueError as error:
            raise refusal("options", list(self.options), error) from None
        return self


class LoggingOptions(FrozenOptions):
    """The destinations of metrics in addition to metrics.jsonl."""

    tensorboard: bool | Path = Field(
        default=False,
        union_mode="left_to_right",
        description="A folder for event files; true: `tensorboard` in the output folder.",
    )
    wandb: WandbOptions | None = None
    mlflow: MlflowOptions | None = None
    sinks: tuple[SinkOptions, ...] = Field(default=(), description="Sinks of your own.")

    @field_validator("tensorboard")
    @classmethod
    def _has_tensorboard(cls, value: bool | Path) -> bool | Path:
        return _require_package(value, "tensorboard")

    @field_validator("wandb")
    @classmethod
    def _has_wandb(cls, value: WandbOptions | None) -> WandbOptions | None:
        return _require_package(value, "wandb")

    @field_validator("mlflow")
    @classmethod
    def _has_mlflow(cls, value: MlflowOptions | None) -> MlflowOptions | None:
        if value and find_spec("mlflow") and value.uri.startswith(DATABASES) and find_spec("sqlalchemy") is None:
            raise ValueError(
                f"uri {value.uri!r} is a database, which the package mlflow-skinny cannot open; `pip install mlflow`, "
                "or give the address of a server"
            )
        return _require_package(value, "mlflow")


def _require_package(value: Value, package: str) -> Value:
    if value and find_spec(package) is None:
        raise ValueError(f"the package {package} is not installed; `pip install {package}`, or remove this")
    return value


class Qwen3Shape(FrozenOptions):
    """A new Qwen3 network, with the tokenizer's vocabulary."""

    hidden_size: Positive = Field(description="As in its Hugging Face config.")
    intermediate_size: Positive = Field(description="As in its Hugging Face config.")
    num_hidden_layers: Positive = Field(description="As in its Hugging Face config.")
    num_attention_heads: Positive = Field(description="As in its Hugging Face config.")
    num_key_value_heads: Positive = Field(description="As in its Hugging Face config.")
    head_dim: Positive = Field(description="As in its Hugging Face config.")
    max_position_embeddings: Positive = Field(description="As in its Hugging Face config.")
    tie_word_embeddings: bool = Field(default=True, description="As in its Hugging Face config.")
    rope_theta: float = Field(default=10000.0, gt=0, description="As in its Hugging Face config.")
    initializer_range: float = Field(default=0.02, gt=0, description="Standard deviation of the initial weights.")


class LoraOptions(FrozenOptions):
    """Train a low-rank adapter instead of the weights."""

    rank: Positive = Field(default=16, description="Rank of its matrices.")
    alpha: Positive = Field(default=32, description="The adapter's output is multiplied by alpha / rank.")
    targets: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        default=None,
        description="The last parts of the names of linear layers; null: all linear layers of the decoder.",
    )
    dropout: Share = Field(
        default=0.0, description="Dropout on the adapter's input; must be 0 in reinforcement learning."
    )
    base_4bit: Literal["nf4", "fp4"] | None = Field(
        default=None,
        description="QLoRA: the decoder's linear layers in 4 bits (bitsandbytes), with double quantization; they compute "
        "in engine.precision. null: not quantized.",
    )

    @field_validator("base_4bit")
    @classmethod
    def _has_bitsandbytes(cls, value: str | None) -> str | None:
        if value is not None and find_spec("bitsandbytes") is None:
            raise ValueError(f"{needs('quantized', 'a 4-bit base')}, or use null")
        return value


class ModelOptions(FrozenOptions):
    """The model to train: the weights of `path`, or new ones with the shape `from_scratch`."""

    path: ModelName | None = Field(default=None, description="A Hugging Face folder, or owner/name on the hub.")
    from_scratch: Qwen3Shape | None = None
    lora: LoraOptions | None = None
    train_vision: bool = Field(
        default=False,
        description="Train the encoder of images and its projection, too; false: only the decoder and its head.",
    )
    tokenizer: ModelName | None = Field(
        default=None, validate_default=True, description="Default: the tokenizer of `path`."
    )

    @field_validator("from_scratch")
    @classmethod
    def _check_one_source(cls, value: Qwen3Shape | None, info: ValidationInfo) -> Qwen3Shape | None:
        if value is not None and info.data.get("path") is not None:
            raise ValueError("model.path is given too; keep one of the two")
        return value

    @field_validator("lora")
    @classmethod
    def _check_lora_base(cls, value: LoraOptions | None, info: ValidationInfo) -> LoraOptions | None:
        if value is not None and info.data.get("from_scratch") is not None:
            raise ValueError("an adapter needs trained base weights; name them with model.path")
        return value

    @field_validator("train_vision")
    @classmethod
    def _check_trains_weights(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("lora") is not None:
            raise ValueError("an adapter is trained in the decoder only; remove model.lora, or set this to false")
        if value and info.data.get("from_scratch") is not None:
            raise ValueError("a model from scratch reads text only; name a model that reads images with model.path")
        return value

    @field_validator("tokenizer")
    @classmethod
    def _check_model_named(cls, value: str | None, info: ValidationInfo) -> str | None:
        if "path" not in info.data or "from_scratch" not in info.data:
            return value  # reported elsewhere
        if info.data["path"] is None and info.data["from_scratch"] is None:
            raise ValueError("name a model: model.path=FOLDER, or model.from_scratch with a shape")
        if info.data["from_scratch"] is not None and value is None:
            raise ValueError("a model from scratch needs a tokenizer, such as data/tiny_policy/tokenizer")
        return value


class OffloadOptions(FrozenOptions):
    """The parts that are kept in CPU memory instead of the GPU's; slower."""

    optimizer: Literal["cpu"] | None = Field(
        default=None,
        description="cpu: the optimizer's states, the float32 weights and the gradients; its step runs there, too.",
    )
    parameters: Literal["cpu"] | None = Field(
        default=None, description="cpu: the weights too, while no layer needs them."
    )

    @field_validator("parameters")
    @classmethod
    def _check_parameter_offload(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("optimizer") is None:
            raise ValueError("the optimizer's states are several times larger; set engine.offload.optimizer too")
        return value


class EngineOptions(FrozenOptions):
    """Options of DeepSpeed and of the computation."""

    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=0,
        description="What is sharded across ranks: 1 the optimizer's states, 2 also gradients, 3 also weights.",
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32",
        description="Precision of weights and arithmetic; bf16 and fp16 keep float32 master weights, and fp16 has a "
        "dynamic loss scale.",
    )
    float32_matmul_precision: Literal["highest", "high"] = Field(
        default="highest",
        description="torch's setting of the same name, for matrix products of float32 tensors on a GPU. high: TF32, which "
        "has 10 bits of precision.",
    )
    activation_checkpointing: bool | Positive | Fraction = Field(
        default=False,
        description="Layers keep only their inputs and are recomputed in the backward: less memory, more time. A number: "
        "so many of the layers. A fraction such as 0.5, with `compile`: so much of the activations' memory is kept, and "
        "the cheapest operations are recomputed.",
    )
    compile: bool = Field(
        default=False,
        validate_default=True,
        description="Layers through torch.compile; slows down the first step, and pays off in runs of more than a "
        "few minutes.",
    )
    offload: OffloadOptions = OffloadOptions()
    sequence_parallel: Positive = Field(
        default=1, description="Number of ranks that share each micro-batch: its tokens, and in attention its heads."
    )
    tensor_parallel: Positive = Field(default=1, description="Number of ranks that share each layer.")

    @field_validator("precision")
    @classmethod
    def _check_master_weights(cls, value: str, info: ValidationInfo) -> str:
        if value != "fp32" and info.data.get("zero_stage") == 0:
            raise ValueError(f"the float32 master weights of {value} need ZeRO; set engine.zero_stage to 1, 2 or 3")
        return value

    @property
    def dtype(self) -> str:
        """The dtype of the compute weights, in torch's name."""
        return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[self.precision]

    @property
    def together(self) -> int:
        """The number of ranks that compute the same samples."""
        return self.sequence_parallel * self.tensor_parallel

    @field_validator("tensor_parallel")
    @classmethod
    def _check_tensor_parallel(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("zero_stage") not in (1, 2):
            raise ValueError("it trains with ZeRO 1 and 2 only; set engine.zero_stage to 1 or 2")
        if value > 1 and info.data.get("sequence_parallel", 1) > 1:
            raise ValueError("engine.sequence_parallel is given too; keep one of the two")
        if value > 1 and info.data.get("compile"):
            raise ValueError("engine.compile is given too, and it replaces layers; keep one of the two")
        if value > 1 and info.data.get("offload") != OffloadOptions():
            raise ValueError("engine.offload is given too; keep one of the two")
        return value

    @field_validator("compile")
    @classmethod
    def _check_checkpointing_compile(cls, value: bool, info: ValidationInfo) -> bool:
        checkpointing = info.data.get("activation_checkpointing")
        if isinstance(checkpointing, float) and not value:
            raise ValueError(
                f"engine.activation_checkpointing={checkpointing} needs it; "
                "set engine.compile=true, or checkpoint whole layers"
            )
        if value and info.data.get("zero_stage") == 3:
            raise ValueError("ZeRO-3 gathers weights while a layer runs; set engine.zero_stage to 0, 1 or 2")
        return value

    @field_validator("offload")
    @classmethod
    def _check_offload(cls, value: OffloadOptions, info: ValidationInfo) -> OffloadOptions:
        stage = info.data.get("zero_stage")
        if value.optimizer is not None and stage == 0:
            raise ValueError("offloading needs ZeRO; set engine.zero_stage to 1, 2 or 3")
        if value.parameters is not None and stage != 3:
            raise ValueError("only ZeRO-3 offloads parameters; set engine.zero_stage to 3")
        return value


class DataOptions(FrozenOptions):
    """A file of samples, or the script that writes it."""

    path: str = Field(description="The JSONL file.")
    made_by: tuple[Word, ...] = Field(
        default=(),
        description="A script and its arguments, run with `--output PATH` if the recipe's own `path` is missing; that "
        "of a later file or the command line must exist.",
    )
    max_tokens: Positive | None = Field(
        default=None, description="Longer samples are left out; null: the model's context length."
    )

    @field_validator("made_by")
    @classmethod
    def _resolve_script(cls, made_by: tuple[str, ...]) -> tuple[str, ...]:
        return (existing(made_by[0]), *made_by[1:]) if made_by else made_by


# names of torch and transformers -> ours
EIGHT_BIT = ("adamw_8bit", "paged_adamw_8bit")
OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "adamw8bit": "adamw_8bit",
    "pagedadamw8bit": "paged_adamw_8bit",
} | {name: name for name in ("adamw", "adam", "sgd", "muon", *EIGHT_BIT)}


class OptimizerOptions(FrozenOptions):
    """One optimizer for all weights, or Muon for matrices and AdamW for the rest. No weight decay on norms and biases."""

    name: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adam", "sgd", "muon"] = Field(
        default="adamw",
        description="Which optimizer; muon trains matrices with Muon and the rest with AdamW; adamw_8bit keeps the states "
        "of AdamW in 8 bits, and the paged one moves them to the host when the GPU is full. The names of torch, "
        "transformers and bitsandbytes (AdamW, adamw_torch, adamw_bnb_8bit) mean the same.",
    )
    lr: float = Field(gt=0, description="The full learning rate, with muon that of AdamW.")
    betas: tuple[Share, Share] = Field(default=(0.9, 0.95), description="Decay rates of Adam's and AdamW's moments.")
    eps: float = Field(default=1e-8, gt=0, description="Epsilon of Adam and AdamW.")
    momentum: Share = Field(default=0.0, description="Momentum of sgd.")
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="Weight decay: decoupled and times the learning rate, or added to the gradient (adam, sgd).",
    )
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="null: no clipping.")
    muon_lr: float = Field(default=0.02, gt=0, description="The full learning rate of Muon.")
    muon_momentum: Share = Field(default=0.95, description="Momentum of Muon.")

    @field_validator("name", mode="before")
    @classmethod
    def _normalize_name(cls, value: Any) -> Any:
        return OPTIMIZERS.get(value.lower(), value) if isinstance(value, str) else value

    @field_validator("name")
    @classmethod
    def _has_bitsandbytes(cls, value: str) -> str:
        if value in EIGHT_BIT and find_spec("bitsandbytes") is None:
            raise ValueError(f"{needs('quantized', value)}, or use adamw")
        return value

    @field_validator("momentum")
    @classmethod
    def _check_momentum(cls, value: float, info: ValidationInfo) -> float:
        if value and info.data.get("name", "sgd") != "sgd":
            raise ValueError(f"{info.data['name']} does not use it; use betas or muon_momentum, or optimizer.name=sgd")
        return value


class ScheduleOptions(FrozenOptions):
    """The learning rate over the run, as a factor: from 0 up over the warm-up, then to `final`."""

    name: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Form of the schedule after the warm-up."
    )
    warmup_steps: int | None = Field(default=0, ge=0, description="Steps of the warm-up; null: none.")
    warmup_ratio: Share | None = Field(default=None, description="The warm-up as a share of the run's steps.")
    final: float = Field(default=0.0, ge=0, le=1, description="Factor at the end; not for `constant`.")

    @field_validator("warmup_ratio")
    @classmethod
    def _check_warmup(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("warmup_steps"):
            raise ValueError(f"schedule.warmup_steps is {info.data['warmup_steps']}; set one of the two to null")
        return value

    def warmup(self, steps: int) -> int:
        """The number of warm-up steps in a run of this many steps."""
        return (self.warmup_steps or 0) if self.warmup_ratio is None else math.ceil(self.warmup_ratio * steps)


class CheckpointOptions(FrozenOptions):
    """The times of checkpoints, and the checkpoints that are kept."""

    every: Positive = Field(default=50, description="Steps between checkpoints; the last step always has one.")
    keep: Positive = Field(default=2, description="How many of the newest checkpoints to keep.")
    best: str | None = Field(
        default=None, description="A metric; the checkpoint of the step with its best value is kept too."
    )
    mode: Literal["max", "min"] | None = Field(
        default=None, description="Which values of `best` are better; null: min if its name ends with loss, else max."
    )

    @property
    def lower_is_better(self) -> bool:
        return self.mode == "min" if self.mode else (self.best or "").endswith("loss")

    @property
    def best_is_held_out(self) -> bool:
        """Whether `best` is a metric of held-out tasks or samples, which may be evaluated later than the first checkpoint."""
        return (self.best or "").startswith(("val/", "eval/"))


class TrainerOptions(FrozenOptions):
    """The ranks of `ng_train --on ray`. A launcher such as torchrun decides them itself."""

    ranks: Positive = Field(default=1, description="Processes that train together.")
    resources: Resources = Field(default=Resources(), description="Of each rank: gpus, cpus, memory_gb.")
    pool: str | None = Field(default=None, description="The custom resource of the nodes for the ranks.")
    max_failures: int = Field(default=3, ge=0, description="How often all ranks start again when one is lost.")


class Recipe(FrozenOptions):
    """All settings of a training run."""

    algorithm: AnyAlgorithm = Field(description="The algorithm by its name, and the keys that differ from its setting.")
    output: Path = Field(description="The run's folder: recipe.yaml, metrics.jsonl, policy/.")
    seed: int = Field(default=0, description="Seed of new weights, orders and draws.")
    model: ModelOptions
    data: DataOptions | None = Field(default=None, description="A finished file; it is used instead of `rollouts`.")
    epochs: Positive | None = Field(
        default=None, validate_default=True, description="Passes over the file. Default: 1."
    )
    max_steps: Positive | None = Field(
        default=None, description="The run ends after this many steps; null: at the end of its file."
    )
    batch_size: Positive | None = Field(
        default=None, validate_default=True, description="Samples of a file in a step, over all ranks. Default: 32."
    )
    micro_batch_tokens: Positive = Field(
        default=8192, description="Tokens that one rank computes at once. A prefix that samples share counts once."
    )
    optimizer: OptimizerOptions
    schedule: ScheduleOptions = ScheduleOptions()
    engine: EngineOptions = EngineOptions()
    max_skipped: Positive = Field(
        default=3, description="Limit of consecutive optimizer steps whose loss or gradient is not finite."
    )
    checkpoint: CheckpointOptions = CheckpointOptions()
    trainer: TrainerOptions | None = Field(default=None, description="The ranks, with --on ray.")
    rollouts: RolloutOptions | None = Field(default=None, validate_default=True, description="Live ones.")
    evaluation: EvaluationOptions | None = None
    logging: LoggingOptions = LoggingOptions()

    @property
    def live(self) -> RolloutOptions | None:
        """The options of live rollouts; None for a run on a file."""
        return self.rollouts if self.data is None else None

    @property
    def served_base(self) -> Path | None:
        """The folder of the dequantized base, which this run writes and its servers load: if the base is quantized and
        only the adapter is pushed. None: they load the model itself.
        """
        lora = self.model.lora
        if self.live is None or self.live.transport != "lora" or lora is None or lora.base_4bit is None:
            return None
        return self.output.resolve() / BASE

    @field_validator("epochs", "batch_size")
    @classmethod
    def _check_not_live(cls, value: int | None, info: ValidationInfo) -> int | None:
        """Refuse the keys of a file in a live run, which has other keys for the same and would ignore these."""
        algorithm = info.data.get("algorithm")
        live = isinstance(algorithm, PolicyGradientOptions) and info.data.get("data", ...) is None
        assert info.field_name is not None
        default, instead = OF_A_FILE[info.field_name]
        if not live:
            return default if value is None else value
        if value is not None:
            raise ValueError(f"{instead}; remove it")
        return None

    @field_validator("rollouts")
    @classmethod
    def _check_training_data(cls, value: RolloutOptions | None, info: ValidationInfo) -> RolloutOptions | None:
        algorithm = info.data.get("algorithm")
        if algorithm is None or "data" not in info.data:
            return value  # reported elsewhere
        of_rollouts = isinstance(algorithm, PolicyGradientOptions)
        if value is not None and not of_rollouts:
            raise ValueError(f"{algorithm.name} trains on a file; remove rollouts, and name data.path")
        if info.data["data"] is None and value is None:
            raise ValueError(
                "no training data; name a file with data.path"
                + (", or give rollouts an agent and tasks" if of_rollouts else "")
            )
        if info.data["data"] is None and info.data.get("max_steps", ...) is None:
            raise ValueError("live rollouts do not end by themselves; set max_steps")
        return value

    @field_validator("evaluation")
    @classmethod
    def _check_evaluation(cls, value: EvaluationOptions | None, info: ValidationInfo) -> EvaluationOptions | None:
        data = info.data
        if value is None or not {"algorithm", "data", "rollouts"} <= data.keys():
            return value  # reported elsewhere
        live = data["rollouts"] if data["data"] is None else None
        algorithm = data["algorithm"]
        of_rollouts = isinstance(algorithm, PolicyGradientOptions)
        if problem := evaluation_problem(value, live, algorithm.name, learns_from_rollouts=of_rollouts):
            raise ValueError(problem)
        return value if live is None else value.with_default_tasks(live)

    @field_validator("engine")
    @classmethod
    def _check_muon_unsharded(cls, value: EngineOptions, info: ValidationInfo) -> EngineOptions:
        optimizer = info.data.get("optimizer")
        if optimizer is not None and optimizer.name == "muon" and value.zero_stage > 0:
            raise ValueError(
                "muon needs whole matrices, but ZeRO shards them: set zero_stage 0, or optimizer.name=adamw"
            )
        if optimizer is not None and optimizer.name == "sgd" and value.zero_stage > 0:
            raise ValueError("DeepSpeed's ZeRO does not shard sgd: set zero_stage 0, or optimizer.name=adamw")
        if optimizer is not None and optimizer.name in EIGHT_BIT and value.zero_stage > 0:
            raise ValueError(
                f"{optimizer.name} has blocks of 8-bit states, which ZeRO would cut: set zero_stage 0 and precision fp32, "
                "or optimizer.name=adamw"
            )
        return value


class Launch(NamedTuple):
    """This process among those of the run, from the environment of torchrun or the DeepSpeed launcher.

    local_ranks: the number of ranks on this machine.
    """

    rank: int
    local_rank: int
    ranks: int
    local_ranks: int = 1

    @property
    def launched(self) -> bool:
        """Whether a launcher started several processes for the run."""
        return self.ranks > 1


def read_launch() -> Launch:
    variable = os.environ.get
    ranks = int(variable("WORLD_SIZE", 1))
    return Launch(
        rank=int(variable("RANK", 0)),
        local_rank=int(variable("LOCAL_RANK", 0)),
        ranks=ranks,
        local_ranks=int(variable("LOCAL_WORLD_SIZE", ranks)),
    )
