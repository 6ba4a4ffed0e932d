"""What is otherwise while the launcher imports torch: Ctrl-C waits, and no garbage is collected. Edge.

Comes in: SIGINT. Goes out: KeyboardInterrupt, once the import is done. Torch's modules catch exceptions of many kinds
while they are imported, and go on without what failed; an interrupt among them would be lost. They leave some 300 000
objects that live until the end: to look for garbage among them takes a tenth of the import's time, and at the
process's end a third of a second.
"""

from __future__ import annotations

import gc
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def importing_torch() -> Iterator[None]:
    """Import torch in the block. For the main thread."""
    gc.disable()
    try:
        with _kept_until_done():
            yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _kept_until_done() -> Iterator[None]:
    """Keep a first Ctrl-C until the block ends; a second one ends the process at once."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # ignored, as below nohup, or somebody else's
        return
    came = False

    def keep(*_: object) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    signal.signal(signal.SIGINT, keep)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt
