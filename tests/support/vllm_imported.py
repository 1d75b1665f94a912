"""The imports of a model server, made once for the servers that forked.py forks."""

from __future__ import annotations

import gc
import importlib

from paths import ROOT

from ngym.services.base.app import load

_name = load(ROOT / "models" / "vllm" / "app.py").__name__
_environment = importlib.import_module(f"{_name}.serving.environment")
_environment.prepare_environment(local=True)  # torch and vLLM read it once
with _environment.vllm_imports({}):
    for _module in (f"{_name}.engine", f"{_name}.routes"):
        importlib.import_module(_module)
for _module in (
    "vllm.model_executor.models.qwen3",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
):
    importlib.import_module(_module)
gc.collect()
gc.freeze()
