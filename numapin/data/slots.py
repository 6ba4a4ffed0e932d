"""One slot in the rank: a memfd that a worker made, mapped, checked and pinned; and the sizes of slots."""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from numapin.data.pinning import Locked, reclaimer, settlers
from numapin.system import memory, pages
from numapin.system.calls import call

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from threading import Event

    from numapin.data.locality import Locality
    from numapin.system.cuda import Driver

ALIGNMENT: Final = 256  # bytes; what cudaMalloc gives, so that every dtype and vector load fits

_NUM_RECENT: Final = 32
_TAIL: Final = 10  # one batch in this many may be larger than expected; a single outlier does not count
_MAX_RATIO: Final = 2  # a slot may be this many times as large as the expected size
_STEPS: Final = 8  # sizes of slots per power of two, so that batches of slightly different sizes share slots
_REVIEW_EVERY: Final = 64  # returned slots between two looks at how many were never in use
_POISON: Final = 0xA5


def map_memfd(fd: int, num_bytes: int) -> torch.Tensor:
    """Map a memfd, shared and writable, as a uint8 tensor. The mapping holds no descriptor, unlike `mmap.mmap`.

    torch unmaps it with its last reference; a finalizer of ours could run while other garbage still reads the memory.
    The kernel may use huge pages where the machine allows that for shared memory. Raises OSError.
    """
    mmap.mmap(fd, num_bytes).close()  # raises where torch would, which leaks a descriptor then (2.13)
    try:
        path = f"/proc/self/fd/{fd}"
        tensor = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise OSError(errno.ENOMEM, f"{num_bytes} bytes of a memfd cannot be mapped: {error}") from None
    with suppress(OSError):  # a kernel without huge pages
        call("madvise", tensor.data_ptr(), num_bytes, mmap.MADV_HUGEPAGE)
    return tensor


def ordinary_memory(num_bytes: int) -> memoryview:
    """Return memory of this process, aligned as torch aligns it."""
    owner = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    return memory.view_of(memory.window(owner.data_ptr(), num_bytes, owner=owner))


def fault_in(tensor: torch.Tensor, advice: int = memory.MADV_POPULATE_WRITE) -> bool:
    """Fault in every page of a mapping without changing its contents. Raises OSError if the kernel has no memory.

    Before Linux 5.14 it does nothing and returns False: pinning faults pages in, too, and so does the first write.
    """
    try:
        memory.populate(tensor.data_ptr(), tensor.nbytes, advice)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def hide_from_children(tensor: torch.Tensor, *, hide: bool) -> None:
    """Keep a mapping out of children that are forked from now on, or let them inherit it again."""
    with suppress(OSError):
        call("madvise", tensor.data_ptr(), tensor.nbytes, mmap.MADV_DONTFORK if hide else mmap.MADV_DOFORK)


class Lease(weakref.ref[memory.Window]):
    """A weak reference to the memory that a batch uses, which knows its slot.

    Its callback should be a function of C: Ctrl-C that arrives in a callback of Python's is lost.
    """

    __slots__ = ("slot",)
    slot: Slot


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """A slot. `owner` unmaps the memory with its last reference."""

    number: int  # unique in the loader's lifetime
    fd: int | None  # with which the worker's successor gets the memory; None: the slot is not used again
    num_bytes: int
    address: int
    owner: torch.Tensor
    worker: int  # that made it; only this one, or its successor, writes to it
    is_private: bool = False  # only our own copies read what was lent; they refer to it until they have ended
    is_unkept: bool = False  # with poison: the worker has reported that nothing there refers to it any more
    is_let_go: bool = False  # nothing here refers to it, and it is never lent again, so that it must not be pinned
    is_settled: bool = False  # the kernel was asked where the pages lie, and the driver to pin them
    settled: Event | None = None  # is set then, or when Python ends first; None: it has not been asked for
    is_inherited: bool = False  # a child that was forked may read what was lent
    pages: Mapping[int | None, int] | None = None  # per node as the kernel reports them; None if it does not
    pinned_on: int | None = None  # the device on whose behalf it is pinned; None if it is pageable
    lease: Lease | None = None

    @property
    def is_in_use(self) -> bool:
        """Return whether anything in this process refers to what was lent. Copies may read the slot all the same."""
        return self.lease is not None and self.lease() is not None

    @property
    def pinned_bytes(self) -> int:
        """Return how much of it is pinned: all or nothing."""
        return 0 if self.pinned_on is None else self.num_bytes

    def lend(self, num_bytes: int, note_end: Callable[[Lease], None]) -> memoryview:
        """Return a view of the first bytes; `note_end` is called when nothing refers to them any more."""
        window = memory.window(self.address, self.num_bytes, owner=self.owner)
        self.is_private = False
        lease = Lease(window, note_end)
        lease.slot = self
        self.lease = lease
        return memory.view_of(window)[:num_bytes]

    def check(self, locality: Locality) -> tuple[str, ...]:
        """Map all pages and ask where they lie; return the shortfalls. Raises OSError."""
        # Also the rest, beyond what the batch needed. Reading maps many pages at once, and they stay writable.
        fault_in(self.owner, memory.MADV_POPULATE_READ)
        found = pages.check(
            self.address, self.num_bytes, nodes=locality.nodes, num_machine_nodes=locality.num_machine_nodes
        )
        self.pages = found.pages
        return found.shortfalls

    def pin(self, driver: Driver, device: int) -> None:
        """Pin the pages. Raises CudaRefused."""
        driver.register(device, self.address, self.num_bytes)
        pages.PINNED.add(self.num_bytes)
        self.pinned_on = device

    def wait_until_settled(self) -> bool:
        """Wait until the slot is settled; return whether it is pinned."""
        if not self.is_settled and self.settled is not None:
            settlers[os.getpid()].finish(self.settled)
        return self.pinned_on is not None

    def poison(self) -> None:
        """Overwrite the memory, so that code that still reads it gets wrong values."""
        window = memory.view_of(memory.window(self.address, self.num_bytes, owner=self.owner))
        torch.frombuffer(window, dtype=torch.uint8).fill_(_POISON)

    def retire(self) -> None:
        """Close the descriptor: the memory goes when the last batch over it is gone."""
        fd, self.fd = self.fd, None  # first: a signal or another thread in between must not close it once more
        if fd is not None:
            os.close(fd)

    def let_go(self, driver: Driver | None) -> None:
        """Use the slot no more: unpin it now if it is not lent, else later. The last reference unmaps it."""
        lease = self.lease
        window = None if lease is None else lease()
        if window is not None and driver is not None:  # first: Ctrl-C must not lose memory that is registered
            weakref.finalize(window, self.unpin_later, driver).atexit = False  # at exit the driver releases all
        self.retire()
        if lease is None:
            self.is_let_go = True  # first: whoever pins it at this moment unpins it again
            device, self.pinned_on = self.pinned_on, None
            if device is not None and driver is not None:
                driver.unregister(device, self.address)
                pages.PINNED.remove(self.num_bytes)
            return
        if window is None:  # a copy may still read it
            self.unpin_later(driver)
        self.lease = None  # the pool hears no more of it

    def unpin_later(self, driver: Driver | None) -> None:
        """Have the process's reclaiming thread unpin the memory once no device can be reading it. For finalizers."""
        self.is_let_go = True
        device, self.pinned_on = self.pinned_on, None  # first: two threads may be here at once
        if device is not None and driver is not None and driver.pid == os.getpid():  # not in a forked child
            locked = Locked(memory=self.owner, address=self.address, num_bytes=self.num_bytes, device=device)
            reclaimer(driver).add(locked)


def align(num_bytes: int, to: int = ALIGNMENT) -> int:
    """Return the next multiple of `to` bytes."""
    return -(-num_bytes // to) * to


def capacity_for(num_bytes: int) -> int:
    """Return the size of a slot for a batch of `num_bytes`: at most an eighth larger, in whole pages."""
    step = (1 << max(0, num_bytes - 1).bit_length()) // (2 * _STEPS)
    return align(max(1, num_bytes), max(step, mmap.PAGESIZE))


class RecentSizes:
    """The sizes of the last batches."""

    def __init__(self) -> None:
        self._sizes: deque[int] = deque(maxlen=_NUM_RECENT)
        self.expected_bytes = 0
        """The size of a new slot: nine of ten recent batches fit into it. 0 before the first batch."""
        self._smallest, self._largest = 0, 0

    def note(self, num_bytes: int) -> None:
        """Add a batch."""
        if len(self._sizes) == _NUM_RECENT and num_bytes == self._sizes[0]:
            self._sizes.append(num_bytes)  # one leaves, the same comes: nothing changes
            return
        self._sizes.append(num_bytes)
        ranked = sorted(self._sizes)
        self.expected_bytes = capacity_for(ranked[-1 - len(ranked) // _TAIL])
        self._smallest, self._largest = ranked[len(ranked) // 2], _MAX_RATIO * self.expected_bytes

    def is_useful(self, capacity: int) -> bool:
        """Return whether a slot holds at least every other batch, and is not far larger than what batches need."""
        return self._smallest <= capacity <= self._largest


class FreeSlots(list["Slot"]):
    """The free slots of one worker. The last one to come back goes first: parts of it are most likely in a cache."""

    _fewest = _num_returns = _num_surplus = 0

    def is_surplus(self) -> bool:
        """Count a slot that came back, and return whether there are enough without it.

        One free slot is not too many: the worker gets its next task while its last batch is in use.
        """
        self._fewest = min(self._fewest, len(self))
        self._num_returns += 1
        if self._num_returns % _REVIEW_EVERY == 0:
            self._num_surplus, self._fewest = max(0, self._fewest - 1), len(self)
        if not self._num_surplus:
            return False
        self._num_surplus -= 1
        return True
