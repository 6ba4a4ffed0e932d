"""One slot in the rank: a memfd that a worker made, mapped, checked and pinned."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from numapin.data.slots.mapping import fault_in, map_memfd
from numapin.data.slots.reclaim import Locked, reclaimer
from numapin.system import memory, pages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numapin.data.locality import Locality
    from numapin.system.cuda import Driver
    from numapin.system.memory import Window

_POISON: Final = 0xA5


class Lease(weakref.ref["Window"]):
    """A weak reference to the memory that a batch uses, which knows its slot.

    Its callback should be a function of C: Ctrl-C that arrives in a callback of Python's is lost.
    """

    __slots__ = ("slot",)
    slot: Slot


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """A slot. `owner` unmaps the memory with its last reference.

    Attributes:
        number: The number, unique in the loader's lifetime.
        fd: The descriptor with which the worker's successor gets the memory. None: the slot is not used again.
        num_bytes: The size.
        worker: The number of the worker that made it. Only this one, or its successor, writes to it.
        is_unkept: With poison: whether the worker has reported that nothing there refers to it any more.
        is_inherited: Whether a child that the user forked may read what was lent.
        is_settled: Whether the kernel was asked where the pages lie, and the driver to pin them.
        pages: Pages per node as the kernel reports them; None if it does not.
        pinned_on: The device on whose behalf it is pinned; None if it is pageable.
    """

    number: int
    fd: int | None
    num_bytes: int
    address: int
    owner: torch.Tensor
    worker: int
    is_unkept: bool = False
    is_settled: bool = False
    is_inherited: bool = False
    pages: Mapping[int | None, int] | None = None
    pinned_on: int | None = None
    lease: Lease | None = None

    @classmethod
    def map(cls, number: int, fd: int, num_bytes: int, *, worker: int) -> Slot:
        """Map a worker's memfd. Raises OSError."""
        owner = map_memfd(fd, num_bytes)
        return cls(number=number, fd=fd, num_bytes=num_bytes, address=owner.data_ptr(), owner=owner, worker=worker)

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
        self.watch(window, note_end)
        return memory.view_of(window)[:num_bytes]

    def watch(self, window: Window, note_end: Callable[[Lease], None]) -> None:
        """Have `note_end`, and no function named before, called when nothing refers to what was lent any more."""
        lease = Lease(window, note_end)
        lease.slot = self
        self.lease = lease

    def settle(self, locality: Locality, driver: Driver | None, device: int) -> tuple[str, ...]:
        """Ask where the pages lie and pin them; return the shortfalls. Raises CudaRefused and OSError."""
        fault_in(self.owner)  # the rest, beyond what the batch needed
        found = pages.check(
            self.address, self.num_bytes, nodes=locality.nodes, num_machine_nodes=locality.num_machine_nodes
        )
        self.pages = found.pages
        if driver is not None:
            driver.register(device, self.address, self.num_bytes)
            pages.PINNED.add(self.num_bytes)
            self.pinned_on = device
        return found.shortfalls

    def poison(self) -> None:
        """Overwrite the memory, so that code that still reads it gets wrong values."""
        window = memory.view_of(memory.window(self.address, self.num_bytes, owner=self.owner))
        torch.frombuffer(window, dtype=torch.uint8).fill_(_POISON)

    def retire(self) -> None:
        """Close the descriptor: the memory goes when the last batch over it is gone."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def unpin(self, driver: Driver | None) -> None:
        """Unpin at once. Only when no device can be reading."""
        if self.pinned_on is not None and driver is not None:
            device, self.pinned_on = self.pinned_on, None
            driver.unregister(device, self.address)
            pages.PINNED.remove(self.num_bytes)

    def unpin_later(self, driver: Driver | None) -> None:
        """Have the process's reclaiming thread unpin the memory once no device can be reading it. For finalizers."""
        if self.pinned_on is not None and driver is not None:
            device, self.pinned_on = self.pinned_on, None
            locked = Locked(memory=self.owner, address=self.address, num_bytes=self.num_bytes, device=device)
            reclaimer(driver).add(locked)
