"""Four verbs over DeepSpeed: scores, backward, step, save.

    engine.scores(packed, asks)                      # with a graph behind them; engine.logprobs is the short form
    engine.backward(loss_sum, weight, last=False)    # once for each micro-batch, `last` on the last one
    engine.step(lr_multiplier)                       # the learning rates, scaled by the schedule
    engine.save(folder, tokenizer)

All but scores are collective: every rank calls them, in the same order.

Offloading needs ZeRO; ZeRO-3 offloads only the states of DeepSpeed's fused Adam.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import resource
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, distributed, nn

from ngym.files.atomic import whole_folder
from ngym.runtime.lean_imports import lean_imports
from ngym.schema import Json

from ..data.samples import Sample
from ..model.chunked_logprobs import RequestedScores, Scores
from ..model.images import copy_processor, has_vision
from ..model.layers import check_rounding, checkpoint_layers, compile_layers
from ..model.lora import CheckpointTensor, adapter_off, adapter_tensors, checkpoint_tensors, write_adapter
from ..model.packing import MicroBatch, pack, plan
from ..model.policy import Policy, TrainedNetwork, dropout_off
from ..model.sequence_parallel import SequenceParallelGroup
from ..recipe.recipe import EngineOptions, Launch, LoraOptions, OptimizerOptions
from . import optimizer
from .distributed import barrier
from .loss_scale import INITIAL, LossScale
from .optimizer import gather_state, generator_states, load_state, restore_generators, steps_of, write_state
from .tensor_parallel import CUT_SIZES, mark_shards, parameter_shapes, tensor_parallel_settings, whole_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PLANNED_AT_ONCE = 1024
REDUCE_BUCKET = 500_000_000  # DeepSpeed's default
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of mallopt(3)
Shared = TypeVar("Shared")


def score(
    samples: Sequence[Sample], logprobs: Callable[[MicroBatch], Tensor], engine: Engine, budget: int
) -> list[list[list[float]]]:
    """Values by sample, by segment, by trained token, without dropout. Every rank calls it.

    logprobs: [N] of the trained tokens of a micro-batch, such as engine.logprobs. budget: tokens computed at once.
    """
    starts = range(0, len(samples), PLANNED_AT_ONCE)
    return [
        sample_logprobs
        for start in starts
        for sample_logprobs in _score(samples[start : start + PLANNED_AT_ONCE], logprobs, engine, budget)
    ]


def _score(
    samples: Sequence[Sample], logprobs: Callable[[MicroBatch], Tensor], engine: Engine, budget: int
) -> list[list[list[float]]]:
    places: dict[int, int] = {}
    count = 0
    for sample in samples:
        for segment in sample.segments:
            places[id(segment)] = count
            count += segment.trained
    flat = [0.0] * count
    for batch in engine.micro_batches(samples, budget):
        # a rank without work computes something and discards it: the ranks' collectives must match
        packed = pack(batch or samples[:1], engine.device)
        with torch.no_grad(), dropout_off(engine.policy):
            values = logprobs(packed).tolist()
        start = 0
        for segment in packed.segments if batch else ():
            place = places[id(segment)]
            flat[place : place + segment.trained] = values[start : start + segment.trained]
            start += segment.trained
    summed = engine.all_reduce(flat)
    return [[summed[places[id(segment)] :][: segment.trained] for segment in sample.segments] for sample in samples]


def keep_freed_memory() -> None:
    """Let the C library (glibc) keep memory that the process frees, unless its MALLOC_ variables are set. The heap shrinks
    only by more than 2 GiB.

    It returns large tensors to the system by default, and the next step's are new pages, each of which costs a page
    fault: 6 % of the steps of 38 million parameters.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_MAX, 0)


def import_deepspeed() -> Any:
    """deepspeed with less logging. Without a GPU this is set explicitly; otherwise it would look for a compiler."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        keep_freed_memory()
    # An installed mlflow, which only DeepSpeed's autotuner uses, is three quarters of the import: 1 of 1.35 CPU seconds.
    hides = "mlflow" not in sys.modules
    if hides:
        sys.modules["mlflow"] = None  # type: ignore[assignment]
    try:
        import deepspeed
    finally:
        if hides:
            del sys.modules["mlflow"]

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # a bug in DeepSpeed
    # On a CPU it would compile an operator here, and a killed build leaves a lock that blocks it forever. Through
    # sys.modules, because the attribute `deepspeed.comm.torch` is torch itself.
    backend: Any = sys.modules["deepspeed.comm.torch"]
    backend.build_shm_op = lambda: None
    accelerator = deepspeed.accelerator.get_accelerator()
    if accelerator.device_name() == "cpu":
        # It asks for AVX512-FP16; PyTorch computes in float16 on any CPU.
        accelerator.is_fp16_supported = lambda: True
    return deepspeed


def deepspeed_config(options: EngineOptions, optimizing: OptimizerOptions, ranks: int, trained: int) -> dict[str, Any]:
    """DeepSpeed's config. We handle micro-batches and their weights: for DeepSpeed each micro-batch is a batch.

    trained: parameters that have a gradient.
    """
    clips_itself = options.zero_stage > 0
    pinned = torch.cuda.is_available()
    zero: dict[str, Any] = {
        "stage": options.zero_stage,
        "overlap_comm": torch.cuda.is_available(),
        "reduce_bucket_size": min(REDUCE_BUCKET, trained),  # elements; its buffers have this size from the first step
    }
    if ranks == 1 and options.zero_stage == 1 and options.offload.optimizer is None:
        # nothing to reduce, so no second copy of the gradient to reduce it in
        zero |= {"overlap_comm": False, "contiguous_gradients": False}
    if options.offload.optimizer is not None:
        zero["offload_optimizer"] = {"device": options.offload.optimizer, "pin_memory": pinned}
    if options.offload.parameters is not None:
        zero["offload_param"] = {"device": options.offload.parameters, "pin_memory": pinned}
    shared = options.tensor_parallel
    return {
        **({"tensor_parallel": tensor_parallel_settings(shared)} if shared > 1 else {}),
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # torch's own fused AdamW is as fast, and needs no compiler
        "fp16": {"enabled": options.precision == "fp16", "loss_scale": INITIAL},  # Engine.step changes it
        # without the check, a bf16 step would use a gradient that is not finite
        "bf16": {"enabled": options.precision == "bf16", "check_grad_overflow": options.precision == "bf16"},
        "gradient_clipping": (optimizing.max_grad_norm or 0.0) if clips_itself else 0.0,
        "steps_per_print": 1 << 30,
    }


class Update(NamedTuple):
    """The result of a step.

    grad_norm: before clipping. critic_grad_norm: the critic's, where it is clipped separately.
    loss_scale: that of the gradient, with fp16. overflowed: the gradient overflowed float16 and the scale is lower now;
    nothing else changed, and the same micro-batches are to be computed again.
    """

    grad_norm: float
    lr: float
    critic_grad_norm: float | None = None
    loss_scale: float | None = None
    overflowed: bool = False


class Engine:
    """A policy or reward model under training, on one rank of several."""

    def __init__(
        self, policy: TrainedNetwork, launch: Launch, options: EngineOptions, optimizing: OptimizerOptions
    ) -> None:
        deepspeed = import_deepspeed()
        deepspeed.init_distributed(verbose=False)
        self.policy = policy
        self.rank = launch.rank
        self.ranks = launch.ranks
        self.steps = 0  # steps that changed the weights
        self._activity = "the model"
        self._group_size = options.together
        if options.sequence_parallel > 1:
            policy.check_shared("engine.sequence_parallel", options.sequence_parallel, "num_key_value_heads")
            policy.group = SequenceParallelGroup.of(options.sequence_parallel)
        if options.tensor_parallel > 1:
            policy.check_shared("engine.tensor_parallel", options.tensor_parallel, *CUT_SIZES)
            shapes = parameter_shapes(policy)
        self._options = options
        policy.always_encodes = policy.trains_vision or (options.zero_stage == 3 and launch.ranks > 1)
        self._optimizing = optimizing
        torch.set_float32_matmul_precision(options.float32_matmul_precision)
        checkpointing = options.activation_checkpointing
        budget = checkpointing if isinstance(checkpointing, float) else None
        if checkpointing or options.compile:
            for decoder in [policy.network, *([] if policy.critic is None else [policy.critic.backbone])]:
                if checkpointing and budget is None:
                    checkpoint_layers(
                        decoder, None if checkpointing is True else int(checkpointing), vision=policy.trains_vision
                    )
                if options.compile:
                    compile_layers(decoder, budget)
        if options.compile and isinstance(policy, Policy):
            policy.scorer.compiled = True
        trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
        self._deepspeed, *_ = deepspeed.initialize(
            model=policy,
            optimizer=optimizer.build(policy.network, optimizing, policy.critic),
            config=deepspeed_config(options, optimizing, launch.ranks, trained),
            dist_init_required=False,
        )
        if options.zero_stage in (1, 2) and options.offload.optimizer is None:
            # it looks into each gradient for what its norm shows next: on a GPU, hundreds of kernels
            self._deepspeed.optimizer.check_overflow = lambda **_: None
        if launch.ranks == 1 and options.zero_stage == 0:
            # it would copy the whole gradient into a buffer and back, to sum it over one rank
            self._deepspeed.enable_backward_allreduce = False
        self._loss_scale = LossScale() if options.precision == "fp16" else None
        self._finite: list[Tensor] = []  # with fp16: whether each loss of this rank was, since the last step
        if self._loss_scale is not None:
            self._deepspeed.optimizer.loss_scaler.update_scale = lambda overflow: None  # it would only log
        if options.tensor_parallel > 1:
            # it compares the first arguments across ranks, which works only for tensors, lists and dicts
            self._deepspeed.first_dataloader_check.remove()
            mark_shards(policy, shapes, self._deepspeed.mpu.get_tensor_model_parallel_group())
        self.device = torch.device(self._deepspeed.device)
        if options.compile and options.precision != "fp32":
            check_rounding(self.device)
        frozen = (parameter for parameter in policy.parameters() if not parameter.requires_grad)
        self._frozen = list(frozen)  # ZeRO does not manage these

    @property
    def dtype(self) -> str:
        """The dtype of the compute weights, in torch's name."""
        return self._options.dtype

    @property
    def product_dtype(self) -> str:
        """The dtype whose precision matrix products have, in torch's name: TF32 has that of float16."""
        is_tf32 = self.device.type == "cuda" and self._options.float32_matmul_precision == "high"
        return "float16" if is_tf32 and self.dtype == "float32" else self.dtype

    @property
    def activity(self) -> str:
        """The last computation, and its time."""
        rank = f" on rank {self.rank}" if self.ranks > 1 else ""
        return f"optimizer step {self.steps + 1}{rank}, {self._activity}"

    def micro_batches(self, samples: Sequence[Sample], budget: int) -> list[list[Sample]]:
        """This rank's micro-batches. Each rank has the same number, some may be empty; ranks that compute together
        share them.

        budget: tokens that a rank computes at once.
        """
        learners = self.ranks // self._group_size
        budget, shares = budget * self._options.sequence_parallel, not self.policy.one_by_one
        return plan(samples, budget, learners, common_prefixes=shares)[self.rank // self._group_size :: learners]

    def scores(self, packed: MicroBatch, asks: RequestedScores) -> Scores:
        """The requested outputs for the trained tokens, at the training temperature."""
        return self._forward(packed, asks)

    def logprobs(self, packed: MicroBatch, temperature: float | None = None) -> Tensor:
        """Log p of the trained tokens, [N]; under torch.no_grad() without a graph.

        temperature: None for the training temperature.
        """
        return self._forward(packed, RequestedScores(), temperature).logprobs_N

    def _forward(self, packed: MicroBatch, *arguments: Any) -> Scores:
        count, longest = len(packed.samples), max(sample.tokens for sample in packed.samples)
        tokens = len(packed.token_ids_T)
        self._activity = f"a micro-batch of {tokens:,} tokens (samples: {count}, the longest of {longest:,})"
        scores: Scores = self._deepspeed(packed, *arguments)
        return scores

    def values(self, packed: MicroBatch) -> Tensor:
        """The critic's values of the trained tokens, or the scores of a reward model, [N]."""
        values_N = self.scores(packed, RequestedScores(logprobs=False, values=True)).values_N
        assert values_N is not None
        return values_N

    def base_logprobs(self, packed: MicroBatch) -> Tensor:
        """Log p under the network without its adapter, which is the network before training."""
        with adapter_off(self.policy.network):
            return self.logprobs(packed)

    def backward(self, loss_sum: Tensor, weight: float, *, last: bool) -> None:
        """Add the gradient of loss_sum / weight, where `weight` is for the whole batch over all ranks.

        DeepSpeed averages over ranks (those that share a layer count as one), hence the factor. It must not divide by
        the number of micro-batches again.
        """
        if self._loss_scale is not None:
            self._finite.append(loss_sum.detach().isfinite())
        self._deepspeed.set_gradient_accumulation_boundary(last)
        averaged = self.ranks // self._options.tensor_parallel
        self._deepspeed.backward(loss_sum * (averaged / weight), scale_wrt_gas=False)
        if last and not self._deepspeed.enable_backward_allreduce:
            # as DeepSpeed does where it reduces: weight decay applies to parameters without a gradient, too
            for parameter in self.policy.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def step(self, lr_multiplier: float) -> Update:
        """Clip, update and clear the gradients; learning rates are scaled by `lr_multiplier`.

        Policy and critic are clipped separately; ZeRO knows only their joint norm and clips by that.

        A gradient that is not finite changes no weight on any rank; grad_norm shows it. With fp16 it lowers the loss
        scale, unless a loss was not finite.
        """
        self._activity = "the optimizer"
        for group in self._deepspeed.optimizer.param_groups:
            group["lr"] = group["base_lr"] * lr_multiplier
        lr = self._optimizing.lr * lr_multiplier
        if self._options.zero_stage > 0:  # then DeepSpeed skips such a step itself
            self._deepspeed.step()
            norm = float(self._deepspeed.get_global_grad_norm())
            self.steps += math.isfinite(norm)
            return (
                Update(norm, lr) if self._loss_scale is None else self._adjust_scale(Update(norm, lr), self._loss_scale)
            )
        # without ZeRO, DeepSpeed does not return the norm, and always steps
        norm, of_critic = self._clip(self.policy.network), None
        if self.policy.critic is not None:
            of_critic = self._clip(self.policy.critic)
            norm = norm if math.isfinite(of_critic) else of_critic
        if math.isfinite(norm):
            self._deepspeed.step()
            self.steps += 1
        else:
            self._deepspeed.zero_grad()
        return Update(norm, lr, of_critic)

    def _adjust_scale(self, update: Update, scale: LossScale) -> Update:
        """Adapt the loss scale to the result of a step."""
        value, overflowed = scale.value, False
        if math.isfinite(update.grad_norm):
            scale.record_step()
        elif all(self.all_gather(all(self._finite))):
            overflowed = scale.record_overflow()
        self._finite.clear()
        self._deepspeed.optimizer.loss_scale = scale.value
        return update._replace(loss_scale=value, overflowed=overflowed)

    def scaling(self) -> dict[str, float]:
        """Metrics of the loss scale; none without fp16."""
        scale = self._loss_scale
        return {} if scale is None else {"loss_scale": scale.value, "overflow_retries": scale.overflows}

    def _clip(self, network: nn.Module) -> float:
        """Clip the gradient; returns its norm before clipping."""
        bound = self._optimizing.max_grad_norm or float("inf")
        return float(nn.utils.clip_grad_norm_(network.parameters(), bound))

    @contextmanager
    def track_gradients(self) -> Iterator[set[str]]:
        """The names of the policy's parameters that get a gradient in this block, from this rank's micro-batches."""
        names: set[str] = set()
        hooks = [
            parameter.register_hook(lambda _, name=name: names.add(name))
            for name, parameter in self.policy.named_parameters()
            if parameter.requires_grad
        ]
        try:
            yield names
        finally:
            for hook in hooks:
                hook.remove()

    def nonfinite_parameters(self) -> list[str]:
        """The names of this rank's trainable parameters (or shards) whose norm is not finite in float32."""
        trainable = ((name, parameter) for name, parameter in self.policy.named_parameters() if parameter.requires_grad)
        # under ZeRO-3, the rank's shard of the parameter
        parts = ((name, getattr(parameter, "ds_tensor", parameter).detach()) for name, parameter in trainable)
        return [name for name, part in parts if not part.norm(dtype=torch.float32).isfinite()]

    def broadcast(self, value: Shared) -> Shared:
        """Rank 0's value, on every rank."""
        if self.ranks == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, device=self.device)
        return box[0]

    def all_gather(self, value: Shared) -> list[Shared]:
        """The value of each rank, on every rank."""
        values = [value] * self.ranks
        if self.ranks > 1:
            distributed.all_gather_object(values, value)
        return values

    def peak_memory(self) -> dict[str, float]:
        """Metrics in GiB, of the rank with the most: the process since its start, its GPU since the last call."""
        peaks = {"memory/peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}  # in KiB on Linux
        if self.device.type == "cuda":
            peaks["memory/peak_gpu"] = torch.cuda.max_memory_allocated(self.device) / 2**30
            torch.cuda.reset_peak_memory_stats(self.device)
        of_ranks = self.all_gather(peaks)
        return {name: max(peak[name] for peak in of_ranks) for name in peaks}

    def all_reduce(self, values: list[float]) -> list[float]:
        """Each value summed over all ranks; values of ranks that compute together count once."""
        if self.ranks == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(total)
        return [float(value) / self._group_size for value in total]

    def offload(self, *, weights: bool) -> None:
        """Free the GPU's memory; without `weights`, the compute weights stay or come back.

        The optimizer's own copies of the weights are always offloaded.
        """
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

        if not weights:
            self.reload()
        self._activity = "moving the states to the host"
        states = [state for state in State if weights or state is not State.lp_params]
        on_gpu = self.device.type == "cuda"
        self._deepspeed.offload_states(include=states, pin_memory=on_gpu)
        for parameter in self._frozen if weights else ():
            parameter.data = parameter.data.to("cpu")
        if on_gpu:
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Load everything back to where it is computed."""
        self._activity = "loading the states back"
        self._deepspeed.reload_states()
        for parameter in self._frozen:
            parameter.data = parameter.data.to(self.device)

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Commit a Hugging Face folder: config, safetensors, tokenizer. Every rank calls it, rank 0 writes."""
        weights = self.weights()
        if self.rank == 0:
            with whole_folder(folder) as temporary, lean_imports():  # saving asks whether FSDP wraps the network
                self.policy.network.save_pretrained(temporary, state_dict=weights, save_original_format=False)
                tokenizer.save_pretrained(temporary)
                copy_processor(self.policy.network, temporary)
                _make_readable(temporary)
        barrier()

    def save_adapter(self, folder: Path, options: LoraOptions, base: str | None) -> None:
        """Commit the adapter alone, in PEFT's format; `base` is the model that it belongs to. Every rank calls it."""
        tensors = self.adapter()
        if self.rank == 0:
            with whole_folder(folder) as temporary:
                write_adapter(temporary, tensors, options, base, whole_names=has_vision(self.policy.network))
                _make_readable(temporary)
        barrier()

    def save_state(self, folder: Path) -> Json:
        """Write the trained weights and the optimizer's state; returns what else `load_state` needs, as JSON.

        Every rank calls it, rank 0 writes.
        """
        tensors = gather_state(self._deepspeed, self.policy)
        write_state(folder if self.rank == 0 else None, tensors)
        return {
            "steps": self.steps,
            "optimizer_steps": steps_of(self._deepspeed, self.policy),
            "loss_scale": None if self._loss_scale is None else self._loss_scale.state(),
        } | {name: self.all_gather(state) for name, state in generator_states(self.device).items()}

    def load_state(self, folder: Path, state: Json) -> None:
        """Load what `save_state` wrote; every rank reads it. ZeRO stage, number of ranks and precision may differ.

        Raises:
            StateMissing: the state belongs to another model.
        """
        load_state(self._deepspeed, self.policy, folder, state["optimizer_steps"])
        self.steps = state["steps"]
        if self._loss_scale is not None and state.get("loss_scale") is not None:  # None: of another precision
            self._loss_scale.load(state["loss_scale"])
            self._deepspeed.optimizer.loss_scale = self._loss_scale.value
        restore_generators(self.device, state, self.rank)

    def weights(self) -> dict[str, Tensor]:
        """All weights on rank 0, none elsewhere, named as in the network's checkpoint; an adapter is merged into
        copies.

        Every rank calls it: under ZeRO-3 each holds a shard and helps to gather.
        """
        network = self.policy.network
        weights = self._gather(checkpoint_tensors(network))
        if not weights:
            return weights
        from transformers.core_model_loading import revert_weight_conversion

        tensors: dict[str, Tensor] = revert_weight_conversion(network, weights)  # transformers fuses experts
        return tensors

    def adapter(self) -> dict[str, Tensor]:
        """The adapter's weights on rank 0, none elsewhere, by PEFT's names. Every rank calls it."""
        return self._gather(adapter_tensors(self.policy.network))

    def _gather(self, stream: Iterable[CheckpointTensor]) -> dict[str, Tensor]:
        self._activity = "gathering the weights"
        sharded = self._options.zero_stage == 3
        if not sharded and self._options.tensor_parallel == 1:
            return {name: compute() for name, _, compute in stream} if self.rank == 0 else {}
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters if sharded else whole_parameters
        tensors: dict[str, Tensor] = {}
        for name, parameters, compute in stream:
            with gathered(parameters):
                if self.rank == 0:
                    tensors[name] = compute().cpu().clone()
        return tensors


def _make_readable(folder: Path) -> None:
    """Make the files readable for all: safetensors makes them private, but a server may run as another user."""
    for file in folder.iterdir():
        file.chmod(0o644)
