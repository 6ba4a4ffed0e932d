"""Which optimizer's steps a trace counts, and when the next step is overdue. Pure.

Comes in: optimizers as they step, and the time. Goes out: whether a step counts, and how long to wait for the next one.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final

_MANY: Final = 20  # steps of another optimizer; GANs train a critic five times per step of the generator
_RECENT: Final = 16
_SLOW: Final = 10
_SHORTEST_LIMIT_S: Final = 2.0  # a loop of small operators makes 250 MB of records per second
_FIRST_LIMIT_S: Final = 60.0  # before any step's time is known; the first steps compile and allocate


@dataclass(slots=True)
class FollowedOptimizer:
    """The optimizer whose steps count: the first one, until it is collected or no longer steps."""

    current: weakref.ref[object] | None = None
    other: weakref.ref[object] | None = None  # the first that stepped after the current one last did
    num_other_steps: int = 0

    def counts(self, optimizer: object) -> bool:
        """Return whether this optimizer's step is one of the loop's."""
        followed = _target(self.current)
        if followed is None or followed is optimizer or self._takes_over(optimizer):
            self.current, self.other = weakref.ref(optimizer), None
            return True
        return False

    def _takes_over(self, optimizer: object) -> bool:
        """Return whether this one stepped so often that the current one no longer does."""
        other = _target(self.other)
        if other is None:
            self.other, self.num_other_steps = weakref.ref(optimizer), 0
        elif other is not optimizer:
            return False
        self.num_other_steps += 1
        return self.num_other_steps >= _MANY


def _target(reference: weakref.ref[object] | None) -> object | None:
    return reference() if reference else None


@dataclass(slots=True)
class Pace:
    """The end of the last step, and the time between recent ones."""

    last_s: float | None = None
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def stepped(self, now_s: float) -> None:
        """Note that a step has ended."""
        if self.last_s is not None:
            self.recent_s.append(now_s - self.last_s)
        self.last_s = now_s

    @property
    def limit_s(self) -> float:
        """The time that the next step may take."""
        return max(_SLOW * median(self.recent_s), _SHORTEST_LIMIT_S) if self.recent_s else _FIRST_LIMIT_S

    def is_overdue(self, now_s: float) -> bool:
        """Return whether the next step takes longer than that limit."""
        return self.last_s is not None and now_s - self.last_s > self.limit_s
