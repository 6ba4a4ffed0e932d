"""Import torch with Ctrl-C deferred and garbage collection off, or say how to install it.

Some of torch's modules catch all exceptions while they are imported and continue without what failed, so an interrupt
could be lost there. The import leaves some 300,000 objects that live until the end. Collections would take a tenth of
the import's time, and a third of a second when the process ends.
"""

from __future__ import annotations

import gc
import signal
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from numapin.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator


def require_torch(what: str) -> None:
    """Raise UsageError if torch, which `what` needs, is not installed; does not import it."""
    if find_spec("torch") is None:
        raise UsageError(
            f"{what} needs torch, which is not installed for {sys.executable}", "pip install 'numapin[torch]'"
        )


@contextmanager
def importing_torch() -> Iterator[None]:
    """Defer Ctrl-C and collect no garbage in the block, which imports torch. For the main thread only."""
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
