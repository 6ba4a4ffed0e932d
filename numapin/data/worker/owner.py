"""End a worker when its rank ends. Edge.

Comes in: the rank's process. Goes out: workers that do not outlive it.
"""

from __future__ import annotations

import os
import select
import threading
from typing import TYPE_CHECKING

from numapin.data.wire import descriptors

if TYPE_CHECKING:
    from numapin.data.wire.descriptors import SentDescriptor


class OwnerProcess:
    """The rank's process, as its workers see it: a pidfd, which cannot be mistaken for a later process."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    @classmethod
    def this(cls) -> OwnerProcess:
        """Return this process. Kernels before 5.3 have no pidfd; nothing is watched there."""
        try:
            return cls(os.pidfd_open(os.getpid()))
        except OSError:
            return cls(None)

    def __reduce__(self) -> tuple[object, ...]:
        """Send the descriptor to a process that is being started."""
        return _attach, (None if self._fd is None else descriptors.send(self._fd),)

    def end_with(self) -> None:
        """End this process as soon as the rank has ended, whatever ended it and whichever thread forked this one."""
        if self._fd is not None:
            threading.Thread(target=_exit_after, args=(self._fd,), name="numapin-watch", daemon=True).start()


def _exit_after(fd: int) -> None:
    ended = select.poll()
    ended.register(fd, select.POLLIN)
    ended.poll()
    os._exit(1)


def _attach(fd: SentDescriptor | None) -> OwnerProcess:
    return OwnerProcess(None if fd is None else fd.detach())
