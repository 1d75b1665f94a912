"""The dynamic loss scale of fp16.

The gradients of float16 weights are float16, too: between 6e-8 and 65,504. So that small ones do not become 0, the loss is
multiplied by a scale, and the float32 copy of the gradient is divided by it before clipping and the step. A gradient
that overflows halves the scale, and the same batch is computed again; after `WINDOW` steps without an overflow it is
doubled (arXiv 1710.03740, section 3.2).

DeepSpeed multiplies, divides and finds the overflow. Its own scaler is not used: in a step that doubles the scale, its
ZeRO optimizers divide the gradient by the new scale, not by the one that multiplied the loss.
"""

from __future__ import annotations

from ngym.schema import Json

INITIAL = 2.0**16
MINIMUM = 1.0
FACTOR = 2.0
WINDOW = 1000


class LossScale:
    """The scale of the next backward. Powers of 2, so that it changes no digit of a gradient.

    overflows: how many times a step was computed again, since the start of the run.
    """

    def __init__(self) -> None:
        self.value = INITIAL
        self.overflows = 0
        self._stable = 0  # steps since the last change
        self._initial: float | None = None  # the value before the overflows of the step in progress

    def record_step(self) -> None:
        """Note a step with a finite gradient."""
        self._initial = None
        self._stable += 1
        if self._stable == WINDOW:
            self.value, self._stable = self.value * FACTOR, 0

    def record_overflow(self) -> bool:
        """Lower the scale after a gradient that was not finite; returns whether the step is to be computed again.

        If it is not finite at the lowest scale either, the scale is not the cause, and goes back to where it was.
        """
        if self.value <= MINIMUM:
            self.value, self._initial = self._initial or self.value, None
            return False
        self._initial = self._initial or self.value
        self.value, self._stable = max(MINIMUM, self.value / FACTOR), 0
        self.overflows += 1
        return True

    def state(self) -> Json:
        return {"value": self.value, "stable": self._stable, "overflows": self.overflows}

    def load(self, state: Json) -> None:
        """state: the result of `state()`, between two steps."""
        self.value, self._stable, self.overflows = state["value"], state["stable"], state["overflows"]
