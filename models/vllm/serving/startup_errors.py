"""The reason why vLLM's engine did not start, or died.

A process of the engine that fails only logs its error, and the server learns that a process failed. So vLLM's logging, whose
config all of its processes apply, writes these errors into a file in memory, too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ngym.errors import ConfigError, ServiceError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

STARTERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")  # the loggers of processes that start
RECORD = "\x1e"  # begins each record
TRACEBACK = "Traceback (most recent call last):\n"
IN_USE = "Available memory on node"  # of a CPU's machine, where the size of the KV cache is fixed
MAX_CHARACTERS = 800
REFUSALS = ("ValueError", "ImportError", "ModuleNotFoundError")
TORCHVISION = ". How to install torchvision: models/vllm/README.md, section Images"
MORE_ROOM = {
    "cpu": "Options of the stanza for that: kv_cache_mb, engine.max_model_len",
    "gpu": "Options of the stanza for that: engine.gpu_memory_utilization, engine.max_model_len, resources.gpus (docs/gpus.md)",
}


class LoggedErrors:
    """Collects the errors that the processes of one engine log. Does nothing under Ray or with a custom logging config."""

    def __init__(self, config: VllmConfig) -> None:
        """Change the logging config; no process may have started."""
        self._file: int | None = None
        logging, parallel = config.logging_config, config.parallel_config
        is_default = logging == type(logging)(log_level=logging.log_level) and logging.configure_logging
        on_ray = "ray" in (parallel.distributed_executor_backend, parallel.data_parallel_backend)
        if sys.platform != "linux" or not is_default or logging.pylogging_config_file or on_ray:
            return
        errors, written = os.memfd_create("errors"), os.memfd_create("logging")
        os.write(written, json.dumps(with_errors(logging.log_level, _path(errors))).encode())
        if all(os.access(_path(fd), os.R_OK | os.W_OK) for fd in (errors, written)):  # some sandboxes hide them
            self._file = errors
            config.logging_config = replace(logging, pylogging_config_file=_path(written))

    @property
    def reason(self) -> str | None:
        """The first logged exception as one line, such as `ValueError: ...`, or None."""
        if self._file is None:
            return None
        reason = first_reason(os.pread(self._file, os.fstat(self._file).st_size, 0).decode(errors="replace"))
        return None if reason is None else " ".join(reason.split())[:MAX_CHARACTERS].rstrip(".")


@contextmanager
def explain_startup_errors(errors: LoggedErrors, service: str, model: str, *, on_cpu: bool) -> Iterator[None]:
    """Raise an error with the reason that a process of the engine has logged, in place of vLLM's own.

    Raises:
        ConfigError: vLLM refuses the model or the options.
        ServiceError: the start failed, and may succeed the next time. On a GPU, other processes may use memory meanwhile.
    """
    try:
        yield
    except Exception as error:
        reason = errors.reason or reason_here(error)
        if reason is None:
            raise
        kind, _, message = reason.partition(": ")
        lacks_memory = "memory" in message
        advice = f". {MORE_ROOM['cpu' if on_cpu else 'gpu']}" if lacks_memory else package_advice(message)
        text = f"service {service!r}: model {model!r}: {message}{advice}"
        may_pass = lacks_memory and (not on_cpu or message.startswith(IN_USE))
        if kind in REFUSALS and not may_pass:
            raise ConfigError(text) from error
        raise ServiceError(text, retryable=True) from error


def reason_here(error: Exception) -> str | None:
    """The first cause of an error of this process as one line, if it is the model's; None for other errors."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if not isinstance(cause, ImportError) and (cause is error or not isinstance(cause, ValueError)):
        return None
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:MAX_CHARACTERS].rstrip('.')}"


def package_advice(message: str) -> str:
    """Advice to install the package that the message misses, or ""."""
    return TORCHVISION if "torchvision" in message.lower() else ""


def with_errors(level: str, path: str) -> dict[str, Any]:
    """vLLM's own logging config, which also writes what STARTERS log as an error into this file."""
    from vllm.logger import DEFAULT_LOGGING_CONFIG  # here: tests use the rest of the module without vLLM

    config: dict[str, Any] = deepcopy(DEFAULT_LOGGING_CONFIG)
    config["handlers"]["vllm"]["level"] = config["loggers"]["vllm"]["level"] = level
    for formatter in config["formatters"].values():
        formatter["log_level"] = level
    config["formatters"]["errors"] = {"format": f"{RECORD}%(message)s"}
    config["handlers"]["errors"] = {
        "class": "logging.FileHandler",
        "filename": path,
        "level": "ERROR",
        "formatter": "errors",
        "delay": True,
    }
    config["loggers"] |= {name: {"handlers": ["errors"]} for name in STARTERS}
    return config


def first_reason(text: str) -> str | None:
    """The first exception in the records, such as `ValueError: ...`. Other processes fail because of it."""
    for record in text.split(RECORD):
        _, separator, trace = record.rpartition(TRACEBACK)
        lines = trace.splitlines()
        while lines and lines[0].startswith(" "):
            del lines[0]
        if separator and lines:
            return "\n".join(lines)
    return None


def _path(fd: int) -> str:
    """The name of an open file of this process for other processes."""
    return f"/proc/{os.getpid()}/fd/{fd}"
