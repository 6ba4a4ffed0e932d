"""Memory of its own for a batch that has no slot, and its way to the rank. Edge.

Comes in (worker): the bytes of a batch. Goes out (rank): a mapping of the same memory.

A memfd a batch, which needs no /dev/shm and goes when both sides have let go of it, however they end. Its descriptor
travels over a socket, ahead of the batch's message, and is closed on both sides as soon as the memory is mapped.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from contextlib import contextmanager, suppress
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Any, Final

import torch

from numapin.system import memory

if TYPE_CHECKING:
    from collections.abc import Iterator

SPILL_BYTES: Final = 4 << 30  # address space, not memory, that one spilled batch may use

_TAG: Final = struct.Struct("<qq")  # worker, number


class Spill:
    """Fresh memory for one batch, in its worker."""

    def __init__(self) -> None:
        """Raises OSError where there is no descriptor or no address space."""
        self._fd = os.memfd_create("numapin-spill")
        try:
            os.ftruncate(self._fd, SPILL_BYTES)  # a number only: pages come when written
            self.view = memoryview(memory.map_shared(self._fd, SPILL_BYTES))
        except OSError:
            self.close()
            raise

    def send(self, handover: Handover, worker: int, number: int) -> None:
        """Hand the descriptor to the rank. Raises OSError where the rank is gone."""
        handover.send(worker, number, self._fd)

    def close(self) -> None:
        """Close the descriptor; the memory stays as long as a view of it."""
        os.close(self._fd)


def map_spilled(fd: int, num_bytes: int) -> memoryview:
    """Map what a worker spilled. The mapping holds no descriptor, so that a loop may keep more batches than files.

    torch unmaps it when its last reference is gone; a finalizer of ours might do so while garbage still looks at it.
    """
    owner = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=num_bytes, dtype=torch.uint8)
    return memory.view_of(memory.window(owner.data_ptr(), num_bytes, owner=owner))


class Handover:
    """A socket on which workers hand descriptors to the rank. Travels to child processes."""

    def __init__(self, ends: tuple[int, int] | None = None) -> None:
        # Descriptors and not socket objects: those complain when the garbage collector comes upon them before us.
        self._rank, self._workers = ends or _socket_pair()
        self._early: dict[tuple[int, int], int | None] = {}  # None: lost

    def __reduce__(self) -> tuple[object, ...]:
        """Give the workers' end to a process that is being started."""
        return _attach, (DupFd(self._workers) if get_spawning_popen() is not None else None,)

    def send(self, worker: int, number: int, fd: int) -> None:
        """Send a descriptor under its batch's number; waits where the rank has not taken many before it."""
        with _socket(self._workers, waits=True) as end:
            socket.send_fds(end, [_TAG.pack(worker, number)], [fd])

    def take(self, worker: int, number: int) -> int:
        """Return the descriptor of a batch whose message has arrived; the caller closes it.

        Raises OSError EMFILE where this process has too many open files: the kernel has dropped the descriptor then.
        """
        while (worker, number) not in self._early:
            self._receive()
        fd = self._early.pop((worker, number))
        if fd is None:
            raise OSError(errno.EMFILE, "a descriptor from a worker was lost; raise the limit: ulimit -n")
        return fd

    def discard(self) -> None:
        """Close what was never taken. Only when the workers are gone."""
        with suppress(BlockingIOError):
            while True:
                self._receive()
        while self._early:
            _tag, fd = self._early.popitem()
            if fd is not None:
                os.close(fd)

    def close(self) -> None:
        """Close both ends in this process."""
        os.close(self._rank)
        os.close(self._workers)

    def _receive(self) -> None:
        with _socket(self._rank, waits=False) as end:  # a descriptor is there before the message that speaks of it
            tag, fds, _flags, _address = socket.recv_fds(end, _TAG.size, 1)
        self._early[_TAG.unpack(tag)] = fds[0] if fds else None


def _socket_pair() -> tuple[int, int]:
    rank, workers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return rank.detach(), workers.detach()


@contextmanager
def _socket(fd: int, *, waits: bool) -> Iterator[socket.socket]:
    """Give the socket that a descriptor is, and leave the descriptor open."""
    end = socket.socket(fileno=fd)
    end.setblocking(waits)  # whatever the user's default time-out is
    try:
        yield end
    finally:
        end.detach()


def _attach(fd: Any) -> Handover:  # noqa: ANN401 - DupFd has no public type
    workers = fd.detach()
    return Handover((workers, workers))
