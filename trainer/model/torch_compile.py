"""torch.compile of the layers, around attention: one compilation for all layers, lengths and layouts.

A layout is Python that differs from micro-batch to micro-batch: compiled with it, each new one would take longer than the
steps that it serves. Attention is one fused kernel anyhow; what gains is the rest of a layer.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import torch

from ngym.errors import ConfigError

from . import packed_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COMPILERS = ("g++", "clang++")


def compile_layers(model: PreTrainedModel) -> None:
    """From now on its layers are compiled when they are first called: without a gradient, with one.

    Raises:
        ConfigError: they cannot be.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if not any(map(shutil.which, COMPILERS)):
        raise ConfigError(
            f"engine.compile: there is no C++ compiler ({' or '.join(COMPILERS)}); install one, or set it to false"
        )
    ALL_ATTENTION_FUNCTIONS.register(packed_attention.NAME, torch.compiler.disable(packed_attention.packed_attention))
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(dynamic=True)
