"""Seeds: every random choice of a run is a function of the recipe's `seed` and of its place in the run.

A resumed run repeats the choices without stored generators. `seeded_random` shuffles files and batches and draws tasks;
`sampling_seed` (ngym/collect/plan.py) seeds the sampling of rollouts. New weights (LoRA, a reward head) come from
torch's generator, which trainer/model/policy.py seeds.
"""

from __future__ import annotations

import random


def seeded_random(*parts: object) -> random.Random:
    """The generator of one place: the seed and the names of the place, such as `"epoch", 3`."""
    return random.Random(" ".join(map(str, parts)))
