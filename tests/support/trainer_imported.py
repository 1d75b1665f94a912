"""The imports of `ng_train`, made once for the processes that forked.py forks."""

from __future__ import annotations

import gc
import importlib

for _module in (
    "deepspeed.runtime.engine",
    "deepspeed.runtime.zero.stage_1_and_2",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "matplotlib.style",
    "ngym.cli.train",
    "ngym.export",
    "ngym.plot.figure",
    "ngym.trainer.algorithms.policy_gradient",
    "ngym.trainer.algorithms.sft",
    "ngym.trainer.engine.engine",
    "ngym.trainer.evaluation.heldout_loss",
    "ngym.trainer.evaluation.live_eval",
    "ngym.trainer.loop",
    "ngym.trainer.online.live_batches",
    "ngym.trainer.online.services",
    "ngym.trainer.sweep",
    "ngym.trainer.train",
    "ngym.trainer.training_run",
    "ngym.trainer.weights.weight_sync",
    "omegaconf.grammar_parser",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
):
    importlib.import_module(_module)
gc.collect()
gc.freeze()
