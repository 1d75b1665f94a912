"""vLLM's engine as a child process that dies with us, and that tells which tokens each call was made of."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import signal
import sys
from argparse import Namespace
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch._dynamo
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from ngym.errors import ConfigError, ServiceError

from . import kernels
from .arguments import parse_arguments
from .doorkeeper import Say
from .environment import Model
from .tokens import recorded

if TYPE_CHECKING:
    from .app import Options

PR_SET_PDEATHSIG = 1
WATCH_S = 0.5


class Started(NamedTuple):
    arguments: Namespace
    engine: Engine


class Engine(AsyncLLM):
    """vLLM's client of the engine process; what passes through is recorded for the request that asked for it."""

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **more: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        tokens = recorded.get()
        if tokens is not None and sampling_params.logprobs is None:
            sampling_params.logprobs = 0  # that of the sampled token, and no alternatives
            sampling_params.flat_logprobs = True
        async for output in super().generate(prompt, sampling_params, request_id, **more):
            if tokens is not None:
                tokens.add(output)
            yield output

    async def _add_request(self, request: Any, *more: Any) -> None:
        await super()._add_request(request, *more)
        state = self.output_processor.request_states.get(request.request_id)
        if state is not None and request.sampling_params.flat_logprobs and state.logprobs_processor is not None:
            # Nobody reads the text of each single token, and decoding it would be half of this process's work.
            state.logprobs_processor.tokenizer = None

    async def policy_version(self) -> int:
        return int(await self.get_weight_version())

    async def raise_when_dead(self) -> None:
        """Stop serving when the engine process dies, so that whoever supervises us starts both again."""
        while not self.errored:
            await asyncio.sleep(WATCH_S)
        signal.raise_signal(signal.SIGTERM)
        raise ServiceError("vLLM's engine process died; its log says why")


def start_engine(service: str, options: Options, model: Model, say: Say) -> Started:
    """Start the engine process and wait until it has loaded the model.

    On a CPU it is forked, with everything imported: 7 CPU seconds to ready instead of 27. On a GPU vLLM starts it.

    Raises:
        ConfigError: vLLM does not know an argument, or cannot load such a model.
    """
    on_cpu = current_platform.is_cpu()
    arguments = parse_arguments(service, options, model, on_cpu=on_cpu)
    single = arguments.tensor_parallel_size * arguments.pipeline_parallel_size * arguments.data_parallel_size == 1
    if not on_cpu:
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as `vllm serve` does
    elif single:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine process is its own only worker
    say("loading: reading the model's configuration")
    if on_cpu and single:
        kernels.prefer_ours(arguments)
    if on_cpu and model.local:
        _inspect_here(Path(model.name))
    engine_arguments = AsyncEngineArgs.from_cli_args(arguments)
    try:
        config = engine_arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:600]
        raise ConfigError(f"service {service!r}: model {options.model!r}: {reason}") from error
    if on_cpu and arguments.enforce_eager:
        torch._dynamo.config.disable = True  # vLLM compiles its sampler even so: the first request would wait 17 s
    if on_cpu and single:
        _prepare_fork()
    say(f"loading: {options.model}")
    engine = Engine.from_vllm_config(
        vllm_config=config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        disable_log_stats=engine_arguments.disable_log_stats,
        enable_log_requests=engine_arguments.enable_log_requests,
    )
    return Started(arguments, engine)


def _inspect_here(folder: Path) -> None:
    """Import the model's class in this process, which will need it anyway.

    vLLM would start another Python for that, so as not to touch a GPU: 14 seconds before the first model ever served.
    """
    for architecture in json.loads((folder / "config.json").read_text()).get("architectures") or []:
        if architecture in ModelRegistry.models:
            ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def _prepare_fork() -> None:
    """Import what the child needs, let none of it be copied, and have the child die with us."""
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.engine.core
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    # Only now: create_engine_config sets it to "spawn" on a CPU.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        # vLLM's own server, killed with -9, leaves its engine running for ever.
        os.register_at_fork(after_in_child=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    gc.collect()
    gc.freeze()
