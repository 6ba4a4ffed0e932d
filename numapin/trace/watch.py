"""Periodic calls of a function in the main thread, while the script's own code runs there.

The profiler can be stopped only in the thread that it records, and that thread may never call us again.
`interrupt_main` runs Python's handler of a signal there without sending the signal, so no system call is interrupted.
SIGURG is ignored by default.
"""

from __future__ import annotations

import _thread
import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_EVERY_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodicCall:
    """Periodic calls, until `stop`."""

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
        while not self.stopped.wait(_EVERY_S):
            if not self._is_ours:
                return
            _thread.interrupt_main(signal.SIGURG)

    @property
    def _is_ours(self) -> bool:
        return signal.getsignal(signal.SIGURG) is self.handler

    def stop(self) -> None:
        """End the calls. Outside the main thread the handler stays, but is no longer called."""
        self.stopped.set()
        if self._is_ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGURG, signal.SIG_DFL)
