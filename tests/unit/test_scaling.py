"""Growth and shrinkage of a model with `replicas: {min, max}`."""

import pytest

from ngym.config.service_config import ReplicaRange
from ngym.supervise.scaling import GROW_AFTER_S, SHRINK_AFTER_S, ReplicaLoad, step

BOUNDS = ReplicaRange(min=1, max=3)
LONG_S = 3600.0


@pytest.mark.parametrize(
    ("load", "waiting_s", "idle_s", "by"),
    [
        (ReplicaLoad(1, 0, 4, 6), GROW_AFTER_S, 0, 1),
        (ReplicaLoad(1, 0, 4, 6), GROW_AFTER_S - 0.1, 0, 0),  # a burst
        (ReplicaLoad(1, 1, 4, 6), LONG_S, 0, 0),  # one is on its way
        (ReplicaLoad(3, 0, 4, 6), LONG_S, 0, 0),  # as many as allowed
        (ReplicaLoad(3, 0, 0, 2), 0, SHRINK_AFTER_S, -1),
        (ReplicaLoad(3, 0, 0, 2), 0, SHRINK_AFTER_S - 0.1, 0),
        (ReplicaLoad(3, 0, 0, 3), 0, LONG_S, 0),  # each has a call
        (ReplicaLoad(3, 1, 0, 0), 0, LONG_S, 0),  # one is on its way out
        (ReplicaLoad(3, 0, 1, 1), 0, LONG_S, 0),
        (ReplicaLoad(1, 0, 0, 0), 0, LONG_S, 0),  # never under min
        (ReplicaLoad(1, 0, 4, 6, failed=1), LONG_S, 0, 0),  # not another one while one has failed
        (ReplicaLoad(1, 0, 0, 0, failed=1), 0, SHRINK_AFTER_S, -1),  # the failed one
    ],
)
def test_it_grows_while_calls_wait_and_shrinks_when_idle(load: ReplicaLoad, waiting_s: float, idle_s: float, by: int):
    assert step(BOUNDS, load, waiting_s, idle_s) == by
