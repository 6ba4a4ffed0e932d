"""Functions that tests run in started processes, and in forked ones."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.data.seam import Channel, HandedDown, Handover

WAIT_S: Final = 20


def take_all(inbox: Channel, outbox: Channel, handover: Handover, slots: HandedDown) -> None:
    """Map the slots, send a memfd as number 7, and answer the next message reversed, with what was there."""
    mapped = slots.map()
    paths = [path for path in Path("/proc/self/fd").iterdir() if path.exists()]
    num_open = sum("numapin-slot" in str(path.readlink()) for path in paths)
    memory, _populated = mapped[7]
    fd = os.memfd_create("a test")
    os.write(fd, b"from a child")
    handover.send(7, fd)
    os.close(fd)
    outbox.number = 7
    told = f"{list(mapped)} {bytes(memory.tolist()).decode()}, {num_open} open"
    outbox.send(inbox.receive(WAIT_S)[::-1] + f": {told}".encode())


def in_forked_child(check: Callable[[], bool]) -> bool:
    """Return the result of a check in a forked child."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a fork beside threads
        pid = os.fork()
    if not pid:
        status = 2
        try:
            status = 0 if check() else 1
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0
