"""The ways of slots' descriptors: by a socket from workers to the rank, and with a new worker's process."""

from __future__ import annotations

import errno
import os
import socket
import struct
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import assert_spawning
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Any, Final

from numapin.data.slots import fault_in, map_memfd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

_TAG: Final = struct.Struct("<q")  # the number


class Handover:
    """A socket from the workers to the rank. A process that is started gets the end that sends.

    A descriptor is sent before the message that mentions it, so it is there when the message is read.
    """

    def __init__(self) -> None:
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Not as socket objects: those complain when they are collected before they were closed, as they are if an
        # iterator fails while it starts.
        self._reader, self._sender = (Connection(end.detach()) for end in ends)
        self._early: dict[int, int | None] = {}  # None: lost

    def __getstate__(self) -> Connection:
        """Return the end for a process that is being started. Fails otherwise, as multiprocessing's queues do."""
        assert_spawning(self)
        return self._sender

    def __setstate__(self, sender: Connection) -> None:
        """Take over the end that sends."""
        self._reader = self._sender = sender
        self._early = {}

    def send(self, number: int, fd: int) -> None:
        """Send a slot's descriptor. Raises OSError if the reader is gone."""
        with _socket(self._sender, waits=True) as end:
            socket.send_fds(end, [_TAG.pack(number)], [fd])

    def take(self, number: int) -> int:
        """Return the descriptor with a number that a message has mentioned; the caller closes it.

        Raises OSError EMFILE if this process has too many open files: the kernel has dropped the descriptor then.
        """
        while number not in self._early:
            self._receive()
        fd = self._early.pop(number)
        if fd is None:
            raise OSError(errno.EMFILE, "a descriptor was lost on its way; raise the limit: ulimit -n")
        return fd

    def discard(self) -> None:
        """Close the descriptors that were not taken. Only when the sender is gone."""
        with suppress(OSError):  # nothing is left, or the ends are closed
            while True:
                self._receive()
        self._close_early()

    def close(self) -> None:
        """Close both ends in this process, and the descriptors that were not taken."""
        self._close_early()
        self._reader.close()
        self._sender.close()

    def _close_early(self) -> None:
        while self._early:
            _number, fd = self._early.popitem()
            if fd is not None:
                os.close(fd)

    def _receive(self) -> None:
        with _socket(self._reader, waits=False) as end:
            tag, fds, _flags, _address = socket.recv_fds(end, _TAG.size, 1)
        if not tag:
            raise BrokenPipeError(errno.EPIPE, "the sender of descriptors is gone")
        for fd in fds:  # Python 3.11 ignores MSG_CMSG_CLOEXEC here; a program that os.system starts would keep the file
            os.set_inheritable(fd, False)
        # No descriptor: there are too many open files in this process.
        self._early[_TAG.unpack(tag)[0]] = fds[0] if fds else None


@contextmanager
def _socket(connection: Connection, *, waits: bool) -> Iterator[socket.socket]:
    """Give the socket behind one of the ends, and leave its descriptor open. Raises OSError if it is closed."""
    end = socket.socket(fileno=connection.fileno())
    end.setblocking(waits)  # whatever the user's default time-out is
    try:
        yield end
    finally:
        end.detach()


class HandedDown:
    """The slots of a worker, on their way to the process that takes its place."""

    def __init__(self, files: Callable[[], list[tuple[int, int, int]]]) -> None:
        """Take what returns (number, size, descriptor) of each, when the process starts."""
        self._files = files

    def __reduce__(self) -> tuple[object, ...]:
        """Send the descriptors to a process that is being started. A forked one has them."""
        return _take_over, ([(number, num_bytes, DupFd(fd)) for number, num_bytes, fd in self._files()],)

    def map(self) -> dict[int, tuple[torch.Tensor, int]]:
        """Map the slots in the worker, and close their descriptors. One for which there is no memory is left out.

        Each has its memory, and up to where pages exist for sure: a write beyond may be SIGBUS.
        """
        mapped = {}
        for number, num_bytes, fd in self._files():
            with suppress(OSError):
                try:
                    memory = map_memfd(fd, num_bytes)
                finally:
                    os.close(fd)
                mapped[number] = memory, num_bytes if fault_in(memory) else 0
        return mapped


def _take_over(files: list[tuple[int, int, Any]]) -> HandedDown:
    received = [(number, num_bytes, fd.detach()) for number, num_bytes, fd in files]
    return HandedDown(lambda: received)
