"""vLLM's engine as a child process that ends with us. Records the tokens of each call, and loads new weights."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import math
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, Awaitable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors import SafetensorError
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models import ModelRegistry
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from ngym.errors import BadRequest, ConfigError, ServiceError
from ngym.runtime.cpu_threads import cache_memory, serving_threads
from ngym.runtime.lean_imports import has_compiler
from ngym.weight_push.routes import PauseMode, PromptLogprobs, Seconds
from ngym.weight_push.stage import AdapterFiles, Shapes, shapes_in

from .cpu import bundle, pad_matrix_products, register_kernels, skip_ranks
from .options import Options, kv_cache_bytes
from .serving.arguments import parse_arguments, transfer_backend
from .serving.chat import SampledLogprobs, recorded
from .serving.environment import Model
from .serving.loading_server import Say
from .serving.startup_errors import LoggedErrors, explain_startup_errors, package_advice
from .weights.adapter import Adapter, linear_layers
from .weights.cpu_worker import Repacking

PR_SET_PDEATHSIG = 1
WATCH_S = 0.5
HEAD = "lm_head.weight"


class StartedEngine(NamedTuple):
    arguments: Namespace
    engine: Engine


class Engine(AsyncLLM):
    """vLLM's client of the engine process; records the tokens of each request for its caller."""

    broken: str | None = None
    """Why the loaded weights must not be served, or None."""
    adapter: Adapter | None = None
    """The adapter of all generations; None: adapters are off."""
    asleep: frozenset[str] = frozenset()
    """The parts of MEMORY that are released; generation is paused while there are any."""
    weights_dropped: bool = False
    """Whether the weights are dropped until the next push."""
    errors: LoggedErrors | None = None
    """What its processes log when they die."""
    base_version: int = 0
    """The pushed version of the weights under the adapter; 0: the checkpoint."""

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        tokens = recorded.get()
        if tokens is not None and sampling_params.logprobs is None:
            sampling_params.logprobs = 0  # only that of the sampled token
            sampling_params.flat_logprobs = sampling_params.prompt_logprobs is None
        if self.adapter is not None:
            kwargs["lora_request"] = self.adapter.request
        async for output in super().generate(prompt, sampling_params, request_id, **kwargs):
            if tokens is not None:
                tokens.add(output)
            yield output

    async def _add_request(self, request: Any, *args: Any) -> None:
        await super()._add_request(request, *args)
        state = self.output_processor.request_states.get(request.request_id)
        if state is not None and request.sampling_params.flat_logprobs:
            # The text of each token is not used, and decoding it would be half of this process's work.
            state.logprobs_processor = SampledLogprobs.from_new_request(tokenizer=None, request=request)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        dtype: torch.dtype = self.model_config.dtype
        return dtype

    @property
    def sleep_problem(self) -> str | None:
        """The reason why this engine cannot release its memory, or None."""
        if current_platform.is_cpu() or self.model_config.enable_sleep_mode:
            return None
        return "this server cannot release its memory; set engine.enable_sleep_mode: true in its stanza"

    async def release_memory(self, level: int) -> None:
        """Release the memory of the paused engine (vLLM's level of sleep). Raises ServiceError: it must restart."""
        await self._or_broken(self.sleep(level, "keep"))

    async def restore_memory(self, parts: list[str]) -> None:
        """Restore these parts of the memory. With the last one, vLLM resumes generation. Raises ServiceError: it must
        restart.
        """
        await self._or_broken(self.wake_up(parts))

    async def _or_broken(self, work: Awaitable[object]) -> None:
        try:
            await work
        except Exception as error:
            self.broken = f"vLLM could not release or restore its memory: {error}; the server must restart"
            raise ServiceError(self.broken, retryable=True) from error

    @property
    def adapted_layers(self) -> list[str]:
        """The layers that an adapter may change, by the last part of their names."""
        config = self.vllm_config.lora_config
        return (config.target_modules or []) if config is not None else []

    async def policy_version(self) -> int:
        return int(await self.get_weight_version())

    def checkpoint_shapes(self) -> Shapes | None:
        """The shapes of the loaded checkpoint by name; None: the weights cannot be replaced."""
        config = self.vllm_config
        packed_elsewhere = current_platform.is_cpu() and not config.parallel_config.worker_extension_cls
        loader = get_model_loader(config.load_config)
        # vLLM's reloading skips the experts and sinks of this family; only weights/cpu_worker.py (one CPU worker) loads them.
        one_cpu_worker = current_platform.is_cpu() and config.parallel_config.world_size == 1
        left_out = config.model_config.hf_text_config.model_type == "gpt_oss" and not one_cpu_worker
        if packed_elsewhere or left_out or not isinstance(loader, DefaultModelLoader):
            return None
        source = {"model_name_or_path": config.model_config.model, "revision": config.model_config.revision}
        _, files, are_safetensors, _ = loader._prepare_weights(
            **source, subfolder=None, fall_back_to_pt=False, allow_patterns_overrides=None
        )
        if not are_safetensors:
            return None
        shapes = shapes_in(files)
        if config.model_config.hf_text_config.tie_word_embeddings:
            shapes.pop(HEAD, None)  # some checkpoints have the embedding twice; vLLM reads the other one
        return shapes

    async def switch_weights(self, folder: Path, version: int, mode: PauseMode, patience_s: float) -> Seconds:
        """Serve the checkpoint in this folder from now on, with empty caches.

        Args:
            patience_s: how long generations in flight may take to end (mode wait).

        Raises:
            ServiceError: they took longer, and the old weights are still served; or the new ones are only partly
                loaded, and `raise_when_dead` ends the server.
        """
        began = time.monotonic()
        await self.pause_for_push(mode, patience_s)
        paused = time.monotonic()
        try:
            method = "reload_packed_weights" if current_platform.is_cpu() else "reload_weights"
            await self.collective_rpc(method, kwargs={"weights_path": str(folder)})
            await self.serve_pushed(version)
        except BaseException as error:
            self.broken = f"the weights of version {version} were only partly loaded: {error}; the server must restart"
            raise ServiceError(self.broken, retryable=True) from error
        return Seconds(paused - began, time.monotonic() - paused)

    async def serve_pushed(self, version: int) -> None:
        """Resume generation with the weights of this version, which were just loaded."""
        if self.adapter is not None:
            await self.adapter.clear()  # vLLM has dropped it, and it belonged to the old weights
        await self.update_weight_version(str(version))
        self.base_version = version
        self.weights_dropped = False
        await self.resume_generation()

    async def switch_adapter(self, source: AdapterFiles, version: int, mode: PauseMode, patience_s: float) -> Seconds:
        """Generate with this adapter from now on, with empty caches.

        Raises:
            ServiceError: as switch_weights; or vLLM refuses the adapter, and the old one is still served.
        """
        assert self.adapter is not None
        began = time.monotonic()
        await self.pause_for_push(mode, patience_s)
        paused = time.monotonic()
        try:
            await self.adapter.replace(source)
            await self.update_weight_version(str(version))
        except ServiceError:
            await self.resume_generation()
            raise
        except BaseException as error:
            self.broken = f"the adapter of version {version} was only partly loaded: {error}; the server must restart"
            raise ServiceError(self.broken, retryable=True) from error
        await self.resume_generation()
        return Seconds(paused - began, time.monotonic() - paused)

    async def pause_for_push(self, mode: PauseMode, patience_s: float) -> None:
        """Pause generation and empty the prefix cache. Raises ServiceError if that takes too long."""
        if self.asleep:
            return
        try:
            async with asyncio.timeout(patience_s):
                # AsyncLLM.pause_generation, without its last 20 ms: they let a caller see outputs before the end of the
                # pause, and every output here says which weights sampled it.
                await self.renderer.clear_mm_cache_async()
                await self.engine_core.pause_scheduler_async(mode=mode, clear_cache=True)
        except BaseException as error:
            await self.resume_generation()
            if isinstance(error, TimeoutError):
                problem = f"generations in flight did not end within {patience_s:.0f} s; push with mode keep or abort"
                raise ServiceError(problem, status=409, retryable=True) from None
            raise

    async def resume_generation(self) -> None:
        """Resume generation, unless memory is released: then waking resumes it."""
        if not self.asleep:
            await super().resume_generation()

    async def prove(self, prompt: list[int]) -> PromptLogprobs:
        """Logprobs of a prompt with the current weights. Raises BadRequest if the prompt does not fit this model."""
        if self.asleep:
            raise ServiceError("this server is asleep; wake it first", status=409)
        asking = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        request_id = f"proof-{time.monotonic_ns()}"
        try:
            async for output in self.generate({"prompt_token_ids": prompt}, asking, request_id):
                last = output
        except VLLMClientError as error:
            raise BadRequest(f"field 'prompt_token_ids': {' '.join(str(error).split())}") from None
        logprobs = [one[token].logprob for one, token in zip(last.prompt_logprobs[1:], prompt[1:], strict=True)]
        [span] = last.outputs[0].weight_versions
        return PromptLogprobs(int(span.version), str(self.model_config.dtype).removeprefix("torch."), logprobs)

    async def raise_when_dead(self) -> None:
        """Stop serving when the engine process dies or is broken, so that the supervisor restarts both."""
        while not (self.errored or self.broken):
            await asyncio.sleep(WATCH_S)
        signal.raise_signal(signal.SIGTERM)
        reason = self.errors.reason if self.errors else None
        died = f"vLLM's engine process died: {reason}" if reason else "vLLM's engine process died; its log says why"
        raise ServiceError(self.broken or died)


def start_engine(service: str, options: Options, model: Model, say: Say) -> StartedEngine:
    """Start the engine process and wait until it has loaded the model.

    On a CPU it is forked with all imports done: ready after 7 CPU seconds instead of 27. On a GPU vLLM starts it.

    Raises:
        ConfigError: vLLM does not know an argument, or cannot load such a model.
        ServiceError: it could not be started this time, such as for memory that another process has.
    """
    say("loading: reading the model's configuration")
    arguments, engine_arguments, config = _configure(service, options, model)
    if current_platform.is_cpu() and _is_single(arguments):
        if options.bundle_tokens:
            bundle(config, service, required=options.bundle_tokens is True)
        skip_ranks()
        pad_matrix_products()
    if _is_forked(arguments):
        _prepare_fork()
    say(f"loading: {options.model}")
    errors = LoggedErrors(config)
    with explain_startup_errors(errors, service, options.model, on_cpu=current_platform.is_cpu()):
        engine = Engine.from_vllm_config(
            vllm_config=config,
            usage_context=UsageContext.OPENAI_API_SERVER,
            disable_log_stats=engine_arguments.disable_log_stats,
            enable_log_requests=engine_arguments.enable_log_requests,
        )
    engine.errors = errors
    return StartedEngine(arguments, engine)


def compute(service: str, options: Options, model: Model) -> NoReturn:
    """Run the workers of a further node of this replica, until one of them ends. Rank 0 sends them their work.

    Raises:
        ConfigError: as start_engine.
        ServiceError: as start_engine; or a worker ended.
    """
    arguments, _, config = _configure(service, options, model)
    if _is_forked(arguments):
        _prepare_fork()
    with explain_startup_errors(LoggedErrors(config), service, options.model, on_cpu=current_platform.is_cpu()):
        executor = MultiprocExecutor(config, monitor_workers=False)
    executor.start_worker_monitor(inline=True)
    raise ServiceError("a worker of vLLM's engine ended; its log says why")


def _configure(service: str, options: Options, model: Model) -> tuple[Namespace, AsyncEngineArgs, VllmConfig]:
    """Set the variables that vLLM reads from now on, and check the arguments. Raises ConfigError."""
    on_cpu = current_platform.is_cpu()
    arguments = parse_arguments(service, options, model, on_cpu=on_cpu)
    if transfer_backend(arguments) == "ipc":
        # vLLM takes the handles of GPU memory only pickled; weights/transfer.py pickles what it has checked.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    # A server of an allowed domain could redirect into this network, to a host that is not checked.
    os.environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
    single = _is_single(arguments)
    if not on_cpu:
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as `vllm serve` does
    elif single:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine process is its own only worker
        register_kernels(arguments)
    if _is_forked(arguments):
        # This module name exists only in forked processes.
        arguments.worker_extension_cls = f"{Repacking.__module__}.{Repacking.__name__}"
    engine_arguments = AsyncEngineArgs.from_cli_args(arguments)
    headless = options.node is not None and options.node.rank > 0
    try:
        if on_cpu and model.local:
            _inspect_here(Path(model.name))
        config = engine_arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER, headless=headless)
    except (ImportError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:600]
        raise ConfigError(f"service {service!r}: model {options.model!r}: {reason}{package_advice(reason)}") from error
    if config.lora_config is not None and options.lora_rank is not None:
        config.lora_config.target_modules = linear_layers(config, service)
    if on_cpu and arguments.enforce_eager and has_compiler():
        from torch._dynamo import config as compiler

        compiler.disable = True  # else vLLM compiles its sampler anyway, and the first request waits 17 s
    if on_cpu:
        if config.cache_config.kv_cache_memory_bytes is None:
            config.cache_config.kv_cache_memory_bytes = _kv_cache_bytes(config)
        parameters = _parameters(service, model)
        threads = serving_threads(options.threads, parameters, config.parallel_config.local_world_size)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of processes that are not forks of this one
        # This process keeps one: a fork loses the others, and OpenMP would wait for them.
        os.register_at_fork(after_in_child=partial(torch.set_num_threads, threads))
    return arguments, engine_arguments, config


def _kv_cache_bytes(config: VllmConfig) -> int:
    """The default size of the KV cache of each process, with keys and values of its layers and heads."""
    model, parallel = config.model_config, config.parallel_config
    per_token = 2 * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
    return kv_cache_bytes(per_token * model.dtype.itemsize, model.max_model_len, cache_memory())


def _parameters(service: str, model: Model) -> int | None:
    """The model's number of parameters; None if it has no safetensors here. Raises ConfigError if one cannot be read."""
    count = 0
    for file in Path(model.name).glob("*.safetensors") if model.local else ():
        try:
            count += sum(map(math.prod, shapes_in([str(file)]).values()))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"service {service!r}: {file}: {error}") from error
    return count or None


def _is_single(arguments: Namespace) -> bool:
    """Whether the engine has one worker."""
    sizes = (arguments.tensor_parallel_size, arguments.pipeline_parallel_size, arguments.data_parallel_size)
    return sizes == (1, 1, 1)


def _is_forked(arguments: Namespace) -> bool:
    """Whether the engine's processes are forks of this one."""
    return bool(current_platform.is_cpu() and arguments.data_parallel_size == 1)


def _inspect_here(folder: Path) -> None:
    """Import the model's class in this process, which needs it anyway.

    vLLM would start another Python process for that, so as not to initialise a GPU: 14 seconds on the first start.
    """
    for architecture in json.loads((folder / "config.json").read_text()).get("architectures") or []:
        if architecture in ModelRegistry.models:
            ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def _prepare_fork() -> None:
    """Import what the child needs, avoid copies of shared memory, and have the child end with us."""
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.engine.core
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    # Only now: create_engine_config sets it to "spawn" on a CPU.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        # Without this, SIGKILL of the server would leave the engine running.
        os.register_at_fork(after_in_child=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    gc.collect()
    gc.freeze()
