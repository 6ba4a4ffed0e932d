"""Whose steps a trace counts, and when the next one is overdue. Pure.

Comes in: optimizers as they step, and the time. Goes out: whether a step counts, how long to wait for the next.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final

_MANY: Final = 20  # steps of another optimizer: GANs train a critic 5 times for each step of the generator
_RECENT: Final = 16
_SLOW: Final = 10
_SHORTEST_LIMIT_S: Final = 2.0  # a loop of small operators makes 250 MB of records a second
_FIRST_LIMIT_S: Final = 60.0  # before any step's time is known: the first ones compile and allocate


@dataclass(slots=True)
class Followed:
    """The optimizer whose steps count: the first one, another when that is gone or steps no more."""

    current: weakref.ref[object] | None = None
    other: weakref.ref[object] | None = None  # one that stepped since the current one did
    num_other_steps: int = 0

    def counts(self, optimizer: object) -> bool:
        """Return whether this optimizer's step is one of the loop's."""
        followed = self.current() if self.current else None
        if followed is not optimizer and followed is not None:
            other = self.other() if self.other else None
            if other is None:
                self.other, self.num_other_steps = weakref.ref(optimizer), 0
            elif other is not optimizer:
                return False
            self.num_other_steps += 1
            if self.num_other_steps < _MANY:
                return False
        self.current, self.other = weakref.ref(optimizer), None
        return True


@dataclass(slots=True)
class Pace:
    """When the last step ended, and how long recent ones took."""

    last_s: float | None = None
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def stepped(self, now_s: float) -> None:
        """Note that a step has ended."""
        if self.last_s is not None:
            self.recent_s.append(now_s - self.last_s)
        self.last_s = now_s

    @property
    def limit_s(self) -> float:
        """Return how long the next step may take."""
        return max(_SLOW * median(self.recent_s), _SHORTEST_LIMIT_S) if self.recent_s else _FIRST_LIMIT_S

    def is_overdue(self, now_s: float) -> bool:
        """Return whether the next step takes longer than that."""
        return self.last_s is not None and now_s - self.last_s > self.limit_s
