"""The decoder's layers: normalization and rotary embeddings with their own gradients, torch.compile, and activation
checkpointing.

Eager layers of Hugging Face compute RMSNorm (arXiv 1910.07467) and rotary embeddings (arXiv 2104.09864) by elementary
operations, each of which reads and writes all activations, and RMSNorm keeps two copies of its input for the backward.
`fuse_layers` replaces them by functions with a gradient in closed form.

Attention over padded groups of sequences stays outside of what torch.compile compiles: its layout is Python that differs
between micro-batches, and each recompilation would take longer than the steps that it serves.

Transformers checkpoints activations only in layers in training mode, but a network is in evaluation mode, because its
own dropout would break the ratios of reinforcement learning. So each layer is put into training mode by itself, without its
submodules.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from functools import cache, partial
from inspect import signature
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ngym.errors import ConfigError

from . import attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A fused kernel rounds where separate ones would: otherwise the pass without a gradient and the one with it differ in
# bf16 by what they keep, and the ratios of an unchanged policy are not 1.
ROUND_AS_EAGER: dict[str, str | int | bool | Callable[..., Any]] = {"emulate_precision_casts": True}
ROUNDS_ON_CPU = "2.13"  # torch's first version known to do so in its C++ kernels; 2.11 does in Triton's only
COMPILERS = ("g++", "clang++")
# Graphs of a layer: for one sequence, several of equal length, and others, each with and without a gradient; again for
# models with several kinds of layers. Beyond the limit, torch compiles no more.
GRAPHS = 64
ROTARY, ROTARY_ARGUMENTS = "apply_rotary_pos_emb", ["q", "k", "cos", "sin", "unsqueeze_dim"]  # in a model's module
IS_FUSED = "ngym_fused"
INPUTS = ("input_ids", "inputs_embeds")  # of a decoder; one is None


class RmsNorm(torch.autograd.Function):
    """y = w * x / rms(x) over the last dimension, as Hugging Face's RMSNorm rounds it; x [..., H], w [H].

    With r = 1 / rms(x) and g the gradient of y, that of x is r w g - r^3 x sum(w g x) / H, that of w the sum of r x g.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        y, r = _divide_by_rms(x, weight_H, eps)
        ctx.save_for_backward(x, weight_H, r)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight_H, r = ctx.saved_tensors
        size = x.shape[-1]
        grad_TH, x_TH, r_T1 = grad.reshape(-1, size).float(), x.reshape(-1, size).float(), r.reshape(-1, 1)
        products_TH = grad_TH * x_TH
        of_weight_H = products_TH.T.mv(r_T1[:, 0]).to(weight_H.dtype) if ctx.needs_input_grad[1] else None
        factor_T1 = products_TH.mv(weight_H.float())[:, None].mul_(r_T1.pow(3)).div_(-size)
        of_x_TH = torch.mul(grad_TH, weight_H, out=products_TH).mul_(r_T1).addcmul_(x_TH, factor_T1)
        return of_x_TH.to(x.dtype).view(x.shape), of_weight_H, None


def _divide_by_rms(x: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """w * x / rms(x) and 1 / rms(x)."""
    r = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    r = r.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    y: Tensor = (x * r).to(x.dtype)
    return y.mul_(weight_H) if y.dtype == weight_H.dtype else y * weight_H, r


class Rotary(torch.autograd.Function):
    """Rotary embedding of queries or keys: x * cos + rotated(x) * sin, where rotated(x1, x2) = (-x2, x1) are the halves of
    the last dimension. The gradient is rotated back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, *_signed_halves(sin))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        half = grad.shape[-1] // 2
        return _rotate(grad, cos, sin[..., half:], -sin[..., :half]), None, None


def _signed_halves(sin: Tensor) -> tuple[Tensor, Tensor]:
    """-sin of the first half, and sin of the second."""
    half = sin.shape[-1] // 2
    return -sin[..., :half], sin[..., half:]


def _rotate(x: Tensor, cos: Tensor, first_sin: Tensor, second_sin: Tensor) -> Tensor:
    """x * cos, plus the second half of x times `first_sin` in the first half, and the other way round."""
    half = x.shape[-1] // 2
    rotated = x * cos
    rotated[..., :half].addcmul_(x[..., half:], first_sin)
    rotated[..., half:].addcmul_(x[..., :half], second_sin)
    return rotated


@torch.no_grad()
def fuse_layers(model: PreTrainedModel) -> None:
    """Replace the model's RMSNorm layers, and the rotary embedding of its family in this process.

    Those that compute something else (such as Gemma's norm, with a factor of 1 + w) are found by their outputs, and are
    kept. Compiled layers use the originals, which Inductor fuses itself.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if _eps(module) is None or hasattr(module, IS_FUSED) or not isinstance(weight, Tensor):
            continue
        probe = torch.linspace(-2, 3, 2 * len(weight), dtype=weight.dtype, device=weight.device).view(2, -1)
        if _agree(module(probe), _fused_norm(probe, weight, _eps(module))):
            kind: Any = type(module)
            module.__class__ = _fused_class(kind)
    modeling = sys.modules[type(model.get_decoder()).__module__]
    original = getattr(modeling, ROTARY, None)
    if original is None or isinstance(original, partial) or list(signature(original).parameters) != ROTARY_ARGUMENTS:
        return  # the family has none, it is replaced already, or it takes something else
    q, k = torch.linspace(-2, 3, 24).view(1, 2, 3, 4), torch.linspace(3, -1, 12).view(1, 1, 3, 4)
    cos, sin = torch.linspace(-1, 1, 12).view(1, 3, 4), torch.linspace(0, 1, 12).view(1, 3, 4)
    fused = partial(_fused_rotary, original)
    try:
        expected = original(q, k, cos, sin)
    except RuntimeError:  # other shapes
        return
    if all(map(_agree, expected, fused(q, k, cos, sin))):
        setattr(modeling, ROTARY, fused)


def _eps(module: nn.Module) -> float | None:
    """The constant of an RMSNorm layer; None for another layer."""
    if not type(module).__name__.endswith("RMSNorm"):
        return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) else None


@cache
def _fused_class(kind: Any) -> Any:
    """The same class of RMSNorm layers with the fused function."""

    def forward(self: Any, x: Tensor) -> Any:
        if torch.compiler.is_compiling():
            return kind.forward(self, x)
        return _fused_norm(x, self.weight, _eps(self))

    return type(kind.__name__, (kind,), {"forward": forward, IS_FUSED: True})


def _fused_norm(x: Tensor, weight_H: Tensor, eps: float | None) -> Any:
    if not torch.is_grad_enabled():
        return _divide_by_rms(x, weight_H, cast(float, eps))[0]
    return RmsNorm.apply(x, weight_H, eps)  # type: ignore[no-untyped-call]


def _fused_rotary(original: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """Hugging Face's `apply_rotary_pos_emb`; some families rotate only a part of each head."""
    if torch.compiler.is_compiling() or cos.shape[-1] != q.shape[-1]:
        return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    if not torch.is_grad_enabled():
        first_sin, second_sin = _signed_halves(sin)
        return _rotate(q, cos, first_sin, second_sin), _rotate(k, cos, first_sin, second_sin)
    return tuple(Rotary.apply(states, cos, sin) for states in (q, k))  # type: ignore[no-untyped-call]


def _agree(expected: Tensor, actual: Any) -> bool:
    rtol = max(1e-4, 2 * torch.finfo(expected.dtype).eps)
    return expected.shape == actual.shape and torch.allclose(expected, actual, rtol=rtol, atol=1e-6)


def compile_layers(model: PreTrainedModel, memory_budget: float | None = None) -> None:
    """Compile the model's layers on their first call, separately with and without a gradient. On a GPU, attention in half
    precision becomes FlexAttention where sequences share prefixes or differ in length.

    Args:
        memory_budget: how much of the memory of a layer's activations the backward may use, from 0 to 1;
            it recomputes what does not fit, cheap operations first (torch.compile's activation memory budget).

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
    decoder = model.get_decoder()
    decoder.set_attn_implementation(attention.COMPILED_NAME)
    decoder.register_forward_pre_hook(_with_block_mask, with_kwargs=True)
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = max(GRAPHS, dynamo.recompile_limit)
    # one backend for all layers: a layer is compiled again for another one
    backend = partial(_compile, memory_budget=memory_budget)
    for layer in decoder.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(dynamic=True, backend=backend)


def check_rounding(device: torch.device) -> None:
    """Raise ConfigError if compiled layers in half precision do not round as eager ones do on this device."""
    if device.type == "cpu" and torch.__version__ < ROUNDS_ON_CPU:
        raise ConfigError(
            f"engine.compile: in half precision on a CPU, torch {torch.__version__} gives an unchanged policy ratios other "
            f"than 1; use torch {ROUNDS_ON_CPU} or newer, precision: fp32, or compile: false"
        )


def _with_block_mask(decoder: Any, arguments: Any, keywords: dict[str, Any]) -> None:
    """Make FlexAttention's mask before the layers are called: making it is not compiled."""
    layout: attention.Layout = keywords["layout"]
    device = next(tensor.device for name in INPUTS if (tensor := keywords.get(name)) is not None)
    if not layout.equal and device.type == "cuda" and decoder.dtype.itemsize == 2:
        layout.make_block_mask(device)


def _compile(graph: Any, inputs: Any, memory_budget: float | None) -> Any:
    """The backend of torch.compile for a layer: Inductor, with the settings of this module."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    with config.patch({} if memory_budget is None else {"activation_memory_budget": memory_budget}):
        return compile_fx(graph, inputs, config_patches=ROUND_AS_EAGER)


def checkpoint_layers(model: PreTrainedModel, most: int | None = None, *, vision: bool = False) -> None:
    """Make the decoder's layers, or the first `most` of them, keep only their inputs and recompute the rest in the
    backward; gradients stay the same.

    vision: the layers of the encoder of images, too, which are counted after those of the decoder.

    Raises:
        ConfigError: the layers do not support it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    modules = dict.fromkeys(chain(model.get_decoder().modules(), model.modules() if vision else ()))
    layers = [module for module in modules if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"engine.activation_checkpointing: the layers of {type(model).__name__} cannot be checkpointed; set it to false"
        )
    (model if vision else model.get_decoder()).gradient_checkpointing_enable({"use_reentrant": False})
    for number, layer in enumerate(layers):
        if most is not None and number >= most:
            layer.gradient_checkpointing = False
        elif not layer.training:
            for name, value in vars(layer).items():  # some layers (OPT's) have the probability of their own dropout
                if "drop" in name and isinstance(value, float):
                    setattr(layer, name, 0.0)
            layer.training = True  # not layer.train(), which includes the submodules
