"""Functions that tests run in started processes, and in forked ones."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.data.seam import Channel, Handover

WAIT_S: Final = 20


def echo(inbox: Channel, outbox: Channel) -> None:
    """Send the next message back, reversed."""
    outbox.number = 7
    outbox.send(inbox.receive(WAIT_S)[::-1])


def hand_over(handover: Handover, text: bytes) -> None:
    """Send a memfd with a text as number 7."""
    fd = os.memfd_create("a test")
    os.write(fd, text)
    handover.send({7: fd})
    os.close(fd)


def take_over(handover: Handover, outbox: Channel) -> None:
    """Take the descriptor with number 7, and send back what it has."""
    outbox.number = 7
    outbox.send(os.pread(handover.take(7), 100, 0))


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
