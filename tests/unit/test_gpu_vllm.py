"""`scripts/gpu_vllm`: a library keeps its size, its host code and the machine code of one kind of GPU."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from script_module import script_module

PTX, CUBIN = 1, 2
KERNEL = b".text._ZN5flash8MainloopILi%dENS_%bEfNS_4arch4Sm90ELb1ELb0ELb%dELb1EEE"


@pytest.fixture
def gpu_vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    return script_module("gpu_vllm", monkeypatch)


def entry(kind: int, capability: int, code: bytes) -> bytes:
    """A header of 64 bytes, and the code in whole words."""
    padded = code + bytes(-len(code) % 8)
    header = struct.pack("<HHIQ", kind, 0x101, 64, len(padded)) + bytes(12) + struct.pack("<I", capability)
    return header + bytes(64 - len(header)) + padded


def fat_binary(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_the_machine_code_of_other_gpus_becomes_zeros(gpu_vllm: Any) -> None:
    binary = fat_binary(entry(CUBIN, 80, b"old"), entry(PTX, 90, b"source"), entry(CUBIN, 90, b"ours"))
    library = b"host" + binary + b"more host" + fat_binary(entry(CUBIN, 120, b"newer"))
    left = gpu_vllm.pruned(library, flash=False)
    assert len(left) == len(library)
    assert left.startswith(b"host") and b"more host" in left and b"ours" in left
    assert not any(code in left for code in (b"old", b"source", b"newer"))
    assert gpu_vllm.pruned(left, flash=False) == left


@pytest.mark.parametrize(
    ("head", "kind", "softcap", "is_left"),
    [
        (64, b"10bfloat16_t", 0, True),
        (128, b"10bfloat16_t", 0, True),
        (256, b"10bfloat16_t", 0, False),
        (64, b"6half_t", 0, False),
        (64, b"10bfloat16_t", 1, False),
    ],
)
def test_of_flash_attention_some_kernels_are_left(
    gpu_vllm: Any, head: int, kind: bytes, softcap: int, is_left: bool
) -> None:
    library = fat_binary(entry(CUBIN, 90, KERNEL % (head, kind, softcap)), entry(CUBIN, 90, b".text.FwdCombine"))
    left = gpu_vllm.pruned(library, flash=True)
    assert (b"Mainloop" in left) is is_left
    assert b"FwdCombine" in left
