"""Detect an overdue step of a traced loop, with periodic calls in the main thread while no step comes."""

from __future__ import annotations

import _thread
import signal
import threading
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_RECENT: Final = 16
_SLOW: Final = 10
_SHORTEST_LIMIT_S: Final = 2.0  # a loop of small operators makes 250 MB of records per second
_FIRST_LIMIT_S: Final = 60.0  # before any step's time is known; the first steps compile and allocate
_LONGEST_PAUSE_S: Final = 300.0  # then the loader hangs
_NAMED_S: Final = 0.5
_CHECK_EVERY_S: Final = 0.5


@dataclass(slots=True)
class Pace:
    """The end of the last step, and the time between recent ones.

    Time in a loader with workers does not make a step overdue: it is what the trace is to show, and only the workers
    are busy then, which are not recorded. `paused_s` is when the loop entered it; `in_loader_s` sums up earlier times.
    """

    last_s: float | None = None
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    paused_s: float | None = None
    in_loader_s: float = 0.0
    num_entered: int = 0

    def stepped(self, now_s: float) -> None:
        """Note that a step has ended."""
        if self.last_s is not None:
            self.recent_s.append(now_s - self.last_s)
        self.last_s, self.in_loader_s = now_s, 0.0

    def enter_loader(self, now_s: float) -> None:
        """Do not count the time from now on, in which the loop waits for a loader with workers."""
        self.num_entered += 1  # one loader's batches may be made from another's
        if self.num_entered == 1:
            self.paused_s = now_s

    def leave_loader(self, now_s: float) -> None:
        """Count the time again."""
        if self.num_entered:
            self.num_entered -= 1
        if not self.num_entered and self.paused_s is not None:
            self.in_loader_s += now_s - self.paused_s
            self.paused_s = None

    def _not_counted_s(self, now_s: float) -> float:
        now = 0.0 if self.paused_s is None else now_s - self.paused_s
        return min(self.in_loader_s + now, _LONGEST_PAUSE_S)

    @property
    def limit_s(self) -> float:
        """The time that the next step may take."""
        return max(_SLOW * median(self.recent_s), _SHORTEST_LIMIT_S) if self.recent_s else _FIRST_LIMIT_S

    def is_overdue(self, now_s: float) -> bool:
        """Return whether the next step takes longer than that limit, besides the time in loaders."""
        return self.last_s is not None and now_s - self.last_s - self._not_counted_s(now_s) > self.limit_s

    def overdue_reason(self, step_unit: str, now_s: float) -> str:
        """Return why the trace ends, with the time in loaders if there was any."""
        in_loader_s = self._not_counted_s(now_s)
        besides = f", besides {in_loader_s:.0f} s in DataLoaders" if in_loader_s >= _NAMED_S else ""
        return f"no {step_unit} for {self.limit_s:.0f} s{besides}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodicCall:
    """Periodic calls of a function in the main thread, until `stop`, while the script's own code runs there.

    The profiler can be stopped only in the thread that it records, and that thread may never call us again.
    `interrupt_main` runs Python's handler of a signal there without sending the signal, so no system call is
    interrupted. SIGURG is ignored by default.
    """

    handler: Callable[[int, FrameType | None], None]
    stopped: threading.Event

    @classmethod
    def start(cls, function: Callable[[], None]) -> PeriodicCall | None:
        """Begin; return None outside the main thread, or if the script uses the signal itself."""
        if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGURG):
            return None

        def handler(_signal: int, _frame: FrameType | None) -> None:
            function()

        signal.signal(signal.SIGURG, handler)
        watch = cls(handler=handler, stopped=threading.Event())
        threading.Thread(target=watch._run, daemon=True, name="numapin trace").start()
        return watch

    def _run(self) -> None:
        while not self.stopped.wait(_CHECK_EVERY_S):
            if signal.getsignal(signal.SIGURG) is not self.handler:
                return
            _thread.interrupt_main(signal.SIGURG)

    def stop(self) -> None:
        """End the calls. Outside the main thread the handler stays, but is no longer called."""
        self.stopped.set()
        is_ours = signal.getsignal(signal.SIGURG) is self.handler
        if is_ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGURG, signal.SIG_DFL)
