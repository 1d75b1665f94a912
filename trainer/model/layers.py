"""Layers wrapped for torch.compile and for activation checkpointing.

torch.compile leaves attention out: its layout is Python that differs between micro-batches, and each recompilation
would take longer than the steps that it serves. Attention is one fused kernel anyway.

Transformers checkpoints activations only in layers in training mode, but a policy under reinforcement learning is in
evaluation mode, because dropout would break its ratios. So each layer is put into training mode by itself, without its
submodules.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import torch

from ngym.errors import ConfigError

from . import attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


COMPILERS = ("g++", "clang++")


def compile_layers(model: PreTrainedModel) -> None:
    """Compile the model's layers on their first call, separately with and without a gradient.

    Raises:
        ConfigError: there is no C++ compiler.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if not any(map(shutil.which, COMPILERS)):
        raise ConfigError(
            f"engine.compile: there is no C++ compiler ({' or '.join(COMPILERS)}); install one, or set it to false"
        )
    ALL_ATTENTION_FUNCTIONS.register(attention.NAME, torch.compiler.disable(attention.packed_attention))
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(dynamic=True)


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Make the layers keep only their inputs and recompute the rest in the backward; gradients stay the same.

    Raises:
        ConfigError: the layers do not support it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"engine.activation_checkpointing: the layers of {type(model).__name__} cannot be checkpointed; set it to false"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        if not layer.training:
            for name, value in vars(layer).items():  # some layers (OPT's) have the probability of their own dropout
                if "drop" in name and isinstance(value, float):
                    setattr(layer, name, 0.0)
            layer.training = True  # not layer.train(), which includes the submodules
