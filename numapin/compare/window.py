"""The steps of a loop that are measured: those after the first few, until there are enough. Pure.

Comes in: the times at which steps end. Goes out: when the window begins and ends, and the time of each step in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

FEWEST_STEPS: Final = 2
"""The fewest steps of a window: one step is no average."""


@dataclass(slots=True, kw_only=True)
class StepWindow:
    """The steps of one kind. The window begins with the end of step number `skip`. Times are in nanoseconds.

    Batches that a loader has fetched ahead would hide waiting, so `begin_after` moves the begin behind them.
    """

    skip: int
    steps: int
    limit_ns: int
    num_seen: int = 0
    first_ns: int | None = None
    begin_ns: int | None = None
    ends_ns: list[int] = field(default_factory=list)
    is_done: bool = False

    def begin_after(self, num_steps: int) -> None:
        """Skip at least this many steps, at most `steps`; no effect once the window has begun."""
        if self.begin_ns is None:
            self.skip = max(self.skip, min(num_steps, self.steps))

    def is_border(self, now_ns: int) -> bool:
        """Return whether a step that ends now begins or ends the window, so that the GPU has to catch up first."""
        if self.begin_ns is None:
            return self.num_seen + 1 >= self.skip
        return self._is_last(self.begin_ns, now_ns)

    def stepped(self, now_ns: int) -> bool:
        """Note the end of a step. Return whether it is the first one, begins the window, or ends it."""
        if self.is_done:
            return False
        self.num_seen += 1
        if self.first_ns is None:
            self.first_ns = now_ns
        if self.begin_ns is None:
            return self._stepped_before(now_ns)
        self.is_done = self._is_last(self.begin_ns, now_ns)
        self.ends_ns.append(now_ns)
        return self.is_done

    def _stepped_before(self, now_ns: int) -> bool:
        """Begin the window if enough steps came before. Return whether it begins, or this is the first step."""
        begins = self.num_seen >= self.skip
        self.begin_ns = now_ns if begins else None
        return begins or self.num_seen == 1

    def _is_last(self, begin_ns: int, now_ns: int) -> bool:
        num_steps = len(self.ends_ns) + 1
        is_late = now_ns - begin_ns >= self.limit_ns and num_steps >= FEWEST_STEPS
        return num_steps >= self.steps or is_late

    @property
    def step_ns(self) -> tuple[int, ...]:
        """The time of each step in the window."""
        if self.begin_ns is None:
            return ()
        starts = [self.begin_ns, *self.ends_ns]
        return tuple(end - start for start, end in zip(starts, self.ends_ns, strict=False))
