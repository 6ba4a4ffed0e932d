"""File descriptors for processes that are being started. Edge (multiprocessing).

Comes in: a descriptor of this process. Goes out: what pickles into the child's process, and is the descriptor there.
"""

from __future__ import annotations

from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Protocol


class SentDescriptor(Protocol):
    """A descriptor that travels to a child process; multiprocessing has no public type for it."""

    def detach(self) -> int:
        """Return the descriptor in the child; to be called once."""


def send(fd: int) -> SentDescriptor | None:
    """Return a descriptor to be pickled for the child that is being started; None while no child is."""
    sent: SentDescriptor | None = DupFd(fd) if get_spawning_popen() is not None else None
    return sent
