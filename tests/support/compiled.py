"""Skips and options of tests of `engine.compile`."""

import shutil

import pytest
import torch

from ngym.trainer.model.layers import COMPILERS, ROUNDS_ON_CPU

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no C++ compiler")
rounds_on_cpu = torch.__version__ >= ROUNDS_ON_CPU
needs_rounding = pytest.mark.skipif(not rounds_on_cpu, reason="the trainer refuses half precision with this torch")
# Options of torch._inductor.config. The C++ compiler takes most of the time: it need not make scalar loops fast. For all
# tests that compile for a CPU: a process and its compile workers must agree about vector instructions.
QUICKLY_COMPILED = {"cpp.vec_isa_ok": False, "aot_inductor.debug_compile": True}
