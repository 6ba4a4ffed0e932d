"""End a measurement early, and keep what it measured."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final

from numapin.errors import Stopped

if TYPE_CHECKING:
    from types import FrameType
    from typing import Self

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Signaled(BaseException):
    """Leaves the measuring block. Not an Exception: what the block calls may catch those."""


class EarlyEnd:
    """Ends its block at the first Ctrl-C, SIGTERM or SIGHUP, so that the caller can report the results so far.

    The block cleans up as for any exception. From the first signal to `leave`, later ones are ignored: the block cleans
    up, and the caller writes its report. Without a signal, the former handlers are back at the end of the block.
    """

    def __init__(self) -> None:
        self._number: signal.Signals | None = None
        self._former: dict[signal.Signals, signal._HANDLER] = {}

    @property
    def came(self) -> bool:
        """Whether the measurement was ended early."""
        return self._number is not None

    def leave(self, kept: str) -> None:
        """Raise Stopped if a signal came; `kept` describes what was kept of the measurement."""
        self._restore()
        if self._number is not None:
            raise Stopped(self._number, kept)

    def __enter__(self) -> Self:
        """Watch these signals, but leave one ignored that the parent process ignores, as nohup does."""
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        """End the block for good if a signal did."""
        if not self.came:
            self._restore()
        return isinstance(error, _Signaled)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        """End the block at the first signal."""
        if self._number is None:
            self._number = signal.Signals(number)
            raise _Signaled

    def _restore(self) -> None:
        while self._former:
            signal.signal(*self._former.popitem())
