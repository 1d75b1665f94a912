"""QLoRA (arXiv 2305.14314): the linear layers under an adapter in 4 bits, by bitsandbytes. A module of its own, because
the package is optional.

quantize_base(network, "nf4")            # the decoder's linear layers; embeddings, norms and the head keep their weights
layer.dequantized(torch.bfloat16)        # the weights that the layer computes with

Each 64 weights share a scale, and 256 scales share another (double quantization): 4.13 bits for each weight. A product
uses the dequantized weights in the dtype of its input. So the layer is exactly a linear layer with these weights, which
can be saved, pushed and served as a model that is not quantized.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from ngym.errors import ConfigError


def _import_bitsandbytes() -> Any:
    """bitsandbytes, without the package `kernels`: on CPUs with bfloat16 instructions, its import would download a kernel
    for inference from the Hub and load it, or log that it could not.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    before = {"kernels": sys.modules["kernels"]} if "kernels" in sys.modules else {}
    sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        import bitsandbytes
    finally:
        del sys.modules["kernels"]
        sys.modules.update(before)
    return bitsandbytes


bitsandbytes = _import_bitsandbytes()
quantize_4bit, dequantize_4bit = bitsandbytes.functional.quantize_4bit, bitsandbytes.functional.dequantize_4bit
KEY = "model.lora.base_4bit"


class Linear4bit(nn.Linear):
    """A frozen linear layer with 4-bit weights: `weight` is packed, two in a byte."""

    def __init__(self, layer: nn.Linear, kind: str, device: torch.device) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        weight = layer.weight.detach().to(device, torch.float32)
        packed, self.scales = quantize_4bit(weight, compress_statistics=True, quant_type=kind)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = layer.bias

    def forward(self, inputs: Tensor) -> Tensor:
        self.scales.dtype = inputs.dtype  # of the dequantized weights in the backward
        bias = None if self.bias is None else self.bias.to(inputs.dtype)
        product: Tensor = bitsandbytes.matmul_4bit(inputs, self.weight, quant_state=self.scales, bias=bias)
        return product

    @torch.no_grad()
    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weights that it computes with, [out, in], for inputs of this dtype."""
        self.scales.dtype = dtype
        weight: Tensor = dequantize_4bit(self.weight, self.scales)
        return weight

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """The scales follow the weights to a device, but keep their dtypes."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.scales.to(self.weight.device)
        return self


def quantize_base(network: Any, kind: str) -> None:
    """Replace the linear layers of the decoder by 4-bit ones, one at a time, and move everything to this rank's device.
    The rest is float32, as the master weights of an engine are.

    kind: nf4 or fp4.

    Raises:
        ConfigError: bitsandbytes does not work on this device.
    """
    device = working_device(KEY, "null")
    for parent in list(network.get_decoder().modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(parent, name, Linear4bit(layer, kind, device))
    network.float().to(device)


def working_device(key: str, instead: str) -> torch.device:
    """The device that this rank trains on; bitsandbytes is tried there.

    key: of the recipe. instead: its value without bitsandbytes.

    Raises:
        ConfigError: it does not work there.
    """
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    try:
        probe = torch.linspace(-1, 1, 4096, device=device).view(64, 64)
        error = (dequantize_4bit(*quantize_4bit(probe, compress_statistics=True, quant_type="nf4")) - probe).abs()
        problem = "" if float(error.max()) < 0.2 else "its results are wrong"
    except (RuntimeError, NotImplementedError, AttributeError, OSError) as failed:
        problem = next((line for line in str(failed).splitlines() if line.strip()), type(failed).__name__)
    if problem:
        raise ConfigError(
            f"{key}: bitsandbytes {bitsandbytes.__version__} does not work on {device}: {problem}; set it to {instead}, or "
            "see `python -m bitsandbytes`"
        )
    return device
