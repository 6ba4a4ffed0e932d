"""Memory for a batch that has no slot, and its transfer to the rank. Edge.

Comes in (worker): the bytes of a batch. Goes out (rank): a mapping of the same memory.

Each such batch has its own memfd. It needs no /dev/shm, and is freed when both sides have released it, however they
end. Its descriptor travels over a socket, ahead of the batch's message, and both sides close it once the memory is
mapped.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import torch

from numapin.data.wire import descriptors
from numapin.system import memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numapin.data.wire.descriptors import SentDescriptor

SPILL_BYTES: Final = 4 << 30  # address space, not memory, that one spilled batch may use

_TAG: Final = struct.Struct("<qq")  # worker, number


class Spill:
    """New memory for one batch, in its worker."""

    def __init__(self) -> None:
        """Reserve address space. Raises OSError without a free descriptor or enough address space."""
        self._fd = os.memfd_create("numapin-spill")
        try:
            os.ftruncate(self._fd, SPILL_BYTES)  # reserves nothing: a page exists once it is written
            self.view = memoryview(memory.map_shared(self._fd, SPILL_BYTES))
        except OSError:
            self.close()
            raise

    def send(self, handover: Handover, worker: int, number: int) -> None:
        """Hand the descriptor to the rank. Raises OSError if the rank is gone."""
        handover.send(worker, number, self._fd)

    def close(self) -> None:
        """Close the descriptor; the memory lives as long as a view of it."""
        os.close(self._fd)


def map_spilled(fd: int, num_bytes: int) -> memoryview:
    """Map what a worker spilled. The mapping holds no descriptor, so the file limit does not bound how many are kept.

    torch unmaps it with the last reference. A finalizer of ours might do so while garbage still refers to it.
    """
    owner = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=num_bytes, dtype=torch.uint8)
    return memory.view_of(memory.window(owner.data_ptr(), num_bytes, owner=owner))


class Handover:
    """A socket on which workers hand descriptors to the rank. Travels to child processes."""

    def __init__(self, ends: tuple[int, int] | None = None) -> None:
        # Descriptors, because socket objects warn if the garbage collector closes them.
        self._rank, self._workers = ends or _socket_pair()
        self._early: dict[tuple[int, int], int | None] = {}  # None: lost

    def __reduce__(self) -> tuple[object, ...]:
        """Send the workers' end to a process that is being started."""
        return _attach, (descriptors.send(self._workers),)

    def send(self, worker: int, number: int, fd: int) -> None:
        """Send a descriptor under its batch's number; waits while the rank has too many to take."""
        with _socket(self._workers, waits=True) as end:
            socket.send_fds(end, [_TAG.pack(worker, number)], [fd])

    def take(self, worker: int, number: int) -> int:
        """Return the descriptor of a batch whose message has arrived; the caller closes it.

        Raises OSError EMFILE if this process had too many open files: the kernel has then dropped the descriptor.
        """
        while (worker, number) not in self._early:
            self._receive()
        fd = self._early.pop((worker, number))
        if fd is None:
            raise OSError(errno.EMFILE, "too many open files, so a worker's descriptor was lost; see: ulimit -n")
        return fd

    def discard(self) -> None:
        """Close the descriptors that were never taken. Call it only when the workers are gone."""
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
        with _socket(self._rank, waits=False) as end:  # a descriptor arrives before its batch's message
            tag, fds, _flags, _address = socket.recv_fds(end, _TAG.size, 1)
        self._early[_TAG.unpack(tag)] = fds[0] if fds else None


def _socket_pair() -> tuple[int, int]:
    rank, workers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return rank.detach(), workers.detach()


@contextmanager
def _socket(fd: int, *, waits: bool) -> Iterator[socket.socket]:
    """Give a socket object for a descriptor, which stays open."""
    end = socket.socket(fileno=fd)
    end.setblocking(waits)  # independent of socket.setdefaulttimeout()
    try:
        yield end
    finally:
        end.detach()


def _attach(fd: SentDescriptor) -> Handover:
    workers = fd.detach()
    return Handover((workers, workers))
