"""The decoder's layers: torch.compile, and activation checkpointing.

Attention over padded groups of sequences stays outside of what torch.compile compiles: its layout is Python that differs
between micro-batches, and each recompilation would take longer than the steps that it serves.

Transformers checkpoints activations only in layers in training mode, but a policy under reinforcement learning is in
evaluation mode, because dropout would break its ratios. So each layer is put into training mode by itself, without its
submodules.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ngym.errors import ConfigError

from . import attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A fused kernel rounds where separate ones would: otherwise the pass without a gradient and the one with it differ in
# bf16 by what they keep, and the ratios of an unchanged policy are not 1.
ROUND_AS_EAGER: dict[str, str | int | bool | Callable[..., Any]] = {"emulate_precision_casts": True}
COMPILERS = ("g++", "clang++")
# Graphs of a layer: for one sequence, several of equal length, and others, each with and without a gradient; again for
# models with several kinds of layers. Beyond the limit, torch compiles no more.
GRAPHS = 64


def compile_layers(model: PreTrainedModel, kept: float | None = None) -> None:
    """Compile the model's layers on their first call, separately with and without a gradient. On a GPU, attention in half
    precision becomes FlexAttention where sequences share prefixes or differ in length.

    Args:
        kept: how much of the memory of a layer's activations the backward may use, from 0 to 1; it recomputes what does
            not fit, cheap operations first (torch.compile's activation memory budget).

    Raises:
        ConfigError: there is no C++ compiler.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if not any(map(shutil.which, COMPILERS)):
        raise ConfigError(
            f"engine.compile: there is no C++ compiler ({' or '.join(COMPILERS)}); install one, or set it to false"
        )
    # A name of its own: loading another model registers the plain function again.
    outside = torch.compiler.disable(partial(attention.packed_attention, flex=True))
    ALL_ATTENTION_FUNCTIONS.register(attention.COMPILED_NAME, partial(attention.compiled_attention, outside=outside))
    model.set_attn_implementation(attention.COMPILED_NAME)
    model.get_decoder().register_forward_pre_hook(_with_block_mask, with_kwargs=True)
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = max(GRAPHS, dynamo.recompile_limit)
    backend = partial(_compiled, kept=kept)  # one for all layers: a layer is compiled again for another backend
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(dynamic=True, backend=backend)


def _with_block_mask(decoder: Any, arguments: Any, named: dict[str, Any]) -> None:
    """Make FlexAttention's mask before the layers are called: making it is not compiled."""
    layout: attention.Layout = named["layout"]
    device: torch.device = named["input_ids"].device
    if not layout.equal and device.type == "cuda" and decoder.dtype.itemsize == 2:
        layout.make_block_mask(device)


def _compiled(graph: Any, inputs: Any, kept: float | None) -> Any:
    """The backend of torch.compile for a layer: Inductor, with the settings of this module."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    with config.patch({} if kept is None else {"activation_memory_budget": kept}):
        return compile_fx(graph, inputs, config_patches=ROUND_AS_EAGER)


def checkpoint_layers(model: PreTrainedModel, most: int | None = None) -> None:
    """Make the layers, or the first `most` of them, keep only their inputs and recompute the rest in the backward;
    gradients stay the same.

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
    for number, layer in enumerate(layers):
        if most is not None and number >= most:
            layer.gradient_checkpointing = False
        elif not layer.training:
            for name, value in vars(layer).items():  # some layers (OPT's) have the probability of their own dropout
                if "drop" in name and isinstance(value, float):
                    setattr(layer, name, 0.0)
            layer.training = True  # not layer.train(), which includes the submodules
