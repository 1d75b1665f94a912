"""Steps before the import of vLLM: finding the model, and the variables that vLLM, torch and oneDNN read once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ngym.config.service_config import model_problem
from ngym.errors import ConfigError
from ngym.files.atomic import appeared
from ngym.files.hub_download import hub_model_problem
from ngym.runtime.cpu_threads import limit_spinning


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


async def written(name: str, root: Path, service: str, within_s: float) -> Model:
    """Wait for a checkpoint in the folder of that name. Raises ConfigError if there is none after `within_s`.

    The folder must appear complete, by a rename, as the trainer writes a new policy.
    """
    await appeared(root / name / "config.json", within_s)
    return find_model(name, root, service)


def prepare_environment(*, local: bool, address: str | None = None) -> None:
    """Set variables that are read at import time. The user's values are kept, unless they would break the service.

    address: of this node, for the other nodes of this replica.
    """
    limit_spinning(alone="OMP_WAIT_POLICY" not in os.environ)  # ng_train has set it for its own case
    if address is not None:
        os.environ.setdefault("VLLM_HOST_IP", address)
    os.environ["OMP_NUM_THREADS"] = "1"  # until the model is found, whose size decides (engine.py)
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")  # else 1.5 GB after 600 batch shapes
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # "auto" pins two servers to the same core
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override kv_cache_mb, in whole GiB
    os.environ.pop("VLLM_SERVER_DEV_MODE", None)  # registers routes that change the engine
    if local:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
