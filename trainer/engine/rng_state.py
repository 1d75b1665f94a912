"""Which random numbers come next on this rank? Its CPU's, and its GPU's: dropout draws there."""

from __future__ import annotations

import base64

import torch

from ngym.schema import Json


def states(device: torch.device) -> dict[str, str | None]:
    """Of each generator, in base64; None where this rank has no such device."""
    return {
        name: None if generator is None else base64.b64encode(bytes(generator.get_state().numpy())).decode()
        for name, generator in _generators(device).items()
    }


def restore(device: torch.device, told: Json, rank: int) -> None:
    """told: `states` of every rank under each name. A rank, or a device, that was not there then draws as it would."""
    for name, generator in _generators(device).items():
        of_ranks = told.get(name, [])
        if generator is not None and rank < len(of_ranks) and of_ranks[rank] is not None:
            state = bytearray(base64.b64decode(of_ranks[rank]))
            generator.set_state(torch.frombuffer(state, dtype=torch.uint8))


def _generators(device: torch.device) -> dict[str, torch.Generator | None]:
    gpu = torch.cuda.default_generators[torch.cuda.current_device()] if device.type == "cuda" else None
    return {"random": torch.default_generator, "random_gpu": gpu}
