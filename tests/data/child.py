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


def echo(inbox: Channel, outbox: Channel) -> None:
    """Send the next message back, reversed."""
    outbox.number = 7
    outbox.send(inbox.receive(WAIT_S)[::-1])


def hand_over(handover: Handover, text: bytes) -> None:
    """Send a memfd with a text as number 7."""
    fd = os.memfd_create("a test")
    os.write(fd, text)
    handover.send(7, fd)
    os.close(fd)


def take_over(slots: HandedDown, outbox: Channel) -> None:
    """Map the slots, and send back which there are, what the first one has, and the number of open slots."""
    mapped = slots.map()
    paths = [path for path in Path("/proc/self/fd").iterdir() if path.exists()]
    num_open = sum("numapin-slot" in str(path.readlink()) for path in paths)
    outbox.number = 7
    memory, _populated = mapped[7]
    outbox.send(f"{list(mapped)} {bytes(memory.tolist()).decode()}, {num_open} open".encode())


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
