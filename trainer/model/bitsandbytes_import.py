"""The import of bitsandbytes. A module of its own, because the package is optional and needs precautions."""

from __future__ import annotations

import logging
import sys
from typing import Any


def imported() -> Any:
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
