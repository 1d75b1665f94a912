"""Seeds: every random choice of a run is a function of the recipe's `seed` and of its place in the run.

A resumed run repeats the choices without stored generators. `seeded_random` shuffles files and batches and draws tasks;
`sampling_seed` seeds the sampling of rollouts. New weights (LoRA, a reward head) come from torch's generator, which
trainer/model/policy.py seeds.
"""

from __future__ import annotations

import hashlib
import random


def seeded_random(*parts: object) -> random.Random:
    """The generator of one place: the seed and the names of the place, such as `"epoch", 3`."""
    return random.Random(" ".join(map(str, parts)))


def sampling_seed(*parts: object) -> int:
    """A seed for the sampling of an attempt: a hash of the parts."""
    digest = hashlib.sha256(" ".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
