"""Layers wrapped for torch.compile and for activation checkpointing.

A layout is Python that differs from micro-batch to micro-batch: compiled with it, each new one would take longer than the
steps that it serves. Attention is one fused kernel anyhow; what gains is the rest of a layer.

Transformers does it in layers that are in training mode, and a policy under reinforcement learning is in evaluation mode so
that no dropout breaks its ratios. So the layers are put into training mode one by one: what they are made of stays as it is.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import torch
from torch import nn

from ngym.errors import ConfigError

from . import attention

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
    ALL_ATTENTION_FUNCTIONS.register(attention.NAME, torch.compiler.disable(attention.packed_attention))
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(dynamic=True)


def checkpoint_layers(model: PreTrainedModel) -> None:
    """From now on its layers keep their inputs only; gradients stay the same.

    Raises:
        ConfigError: its layers cannot.
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
            _no_dropout_of_its_own(layer)
            layer.training = True  # not layer.train(): that is for all that it is made of


def _no_dropout_of_its_own(layer: nn.Module) -> None:
    """Some layers, OPT's for one, draw in their own forward, with a probability that is an attribute of theirs."""
    for name, value in vars(layer).items():
        if "drop" in name and isinstance(value, float):
            setattr(layer, name, 0.0)
