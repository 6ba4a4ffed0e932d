"""Ctrl-C and other signals in commands: they end a measurement early, and wait for the import of torch."""

from __future__ import annotations

import gc
import signal
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from numapin.errors import Stopped, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType
    from typing import Self


_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Signaled(BaseException):
    """Leaves the measuring block. Not an Exception: what the block calls may catch those."""


class EarlyEnd:
    """Ends its block at the first Ctrl-C, SIGTERM or SIGHUP, so that the caller can report the results so far.

    The block cleans up as for any exception. From the first signal to `leave`, later ones are ignored: the block cleans
    up, and the caller writes its report. A block that `hurries` is interrupted again by the second signal, to clean up
    at once. Without a signal, the former handlers are back at the end of the block.

    Example:
        >>> runs = []
        >>> with EarlyEnd() as end:
        ...     for run in measure():
        ...         runs.append(run)
        >>> show(report(runs, is_complete=not end.came))
        >>> end.leave("the report covers the runs until then")
    """

    def __init__(self, *, hurries: bool = False) -> None:
        self._hurries = hurries
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
        self._hurries = False
        if not self.came:
            self._restore()
        return isinstance(error, _Signaled)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        """End the block at the first signal, and its clean-up at the second one if it hurries."""
        if self._number is None:
            self._number = signal.Signals(number)
            raise _Signaled
        if self._hurries:
            self._hurries = False  # a third one would interrupt what the second one hurried
            raise _Signaled

    def _restore(self) -> None:
        while self._former:
            signal.signal(*self._former.popitem())


# --- the import of torch ---------------------------------------------------------------------------------------------


def require_torch(what: str) -> None:
    """Raise UsageError if torch, which `what` needs, is not installed; does not import it."""
    if find_spec("torch") is None:
        raise UsageError(
            f"{what} needs torch, which is not installed for {sys.executable}", "pip install 'numapin[torch]'"
        )


@contextmanager
def importing_torch() -> Iterator[None]:
    """Defer Ctrl-C and collect no garbage in the block, which imports torch. For the main thread only.

    Some of torch's modules catch all exceptions while they are imported and continue without what failed, so an
    interrupt could be lost there. The import leaves some 300,000 objects that live until the end. Collections would
    take a tenth of the import's time, and a third of a second when the process ends.
    """
    import logging

    from numapin.base.text import printable_lines

    class VisibleRecord(logging.LogRecord):
        """A record of torch's log without control characters: the log names scripts, folders and hosts."""

        def getMessage(self) -> str:  # noqa: N802 - logging's name
            """Return the message. Line ends stay, because torch adds the origin to each line."""
            return printable_lines(super().getMessage())

    interrupted, former = False, signal.getsignal(signal.SIGINT)
    is_ours = former is signal.default_int_handler  # else it is ignored, as under nohup, or handled by other code

    def defer(*_: object) -> None:
        """Note a first Ctrl-C; a second one ends the process at once."""
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    gc.disable()
    logging.setLogRecordFactory(VisibleRecord)
    if is_ours:
        signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, former)
        gc.freeze()
        gc.enable()
    if interrupted:
        raise KeyboardInterrupt
