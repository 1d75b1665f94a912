"""When a model with `replicas: {min, max}` grows and shrinks."""

import pytest

from ngym.config.service_config import ReplicaRange
from ngym.supervise.scaling import GROW_AFTER_S, SHRINK_AFTER_S, Load, step

BOUNDS = ReplicaRange(min=1, max=3)
LONG_S = 3600.0


@pytest.mark.parametrize(
    ("load", "waiting_s", "idle_s", "by"),
    [
        (Load(1, 0, 4, 6), GROW_AFTER_S, 0, 1),
        (Load(1, 0, 4, 6), GROW_AFTER_S - 0.1, 0, 0),  # a burst
        (Load(1, 1, 4, 6), LONG_S, 0, 0),  # one is on its way
        (Load(3, 0, 4, 6), LONG_S, 0, 0),  # as many as allowed
        (Load(3, 0, 0, 2), 0, SHRINK_AFTER_S, -1),
        (Load(3, 0, 0, 2), 0, SHRINK_AFTER_S - 0.1, 0),
        (Load(3, 0, 0, 3), 0, LONG_S, 0),  # each has a call
        (Load(3, 1, 0, 0), 0, LONG_S, 0),  # one is on its way out
        (Load(3, 0, 1, 1), 0, LONG_S, 0),
        (Load(1, 0, 0, 0), 0, LONG_S, 0),  # never under min
    ],
)
def test_it_grows_while_calls_wait_and_shrinks_when_idle(load: Load, waiting_s: float, idle_s: float, by: int):
    assert step(BOUNDS, load, waiting_s, idle_s) == by
