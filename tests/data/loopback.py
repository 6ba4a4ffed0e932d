"""Both ends of a pool of slots in one process: the workers' and the rank's."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.data.seam import (
    NO_SLOT,
    CpuSet,
    HandedDown,
    Head,
    Lender,
    Locality,
    Packer,
    Parcel,
    Pool,
    PoolSpec,
    WorkerSlots,
    cuda,
    decode,
)
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.data.seam import Copier

WAIT_S: Final = 20
ANYWHERE: Final = Locality(nodes=CpuSet(), cpus=CpuSet(), memory=None, num_machine_nodes=1, reason="a test")


def make_spec(told: list[str] | None = None, **changes: Any) -> PoolSpec:
    """Return the properties of a pool for one worker, in memory that only this process reads."""
    told = [] if told is None else told
    spec = PoolSpec(
        num_workers=1,
        prefetch=2,
        locality=ANYWHERE,
        device=0,
        driver=None,
        reader=lambda: None,
        budget_bytes=lambda: None,
        report=told.append,
    )
    return replace(spec, **changes)


def gpu() -> dict[str, Any]:
    """Return the properties of a pool whose memory is pinned for the stand-in's GPU, and read by it."""
    driver = cuda.driver()
    assert driver is not None
    return {"driver": driver, "reader": lambda: driver}


def make_head(**changes: Any) -> Head:
    """Return the head of a batch that has nothing in memory."""
    none = dict.fromkeys(("number", "worker", "slot_bytes", "made_bytes", "num_bytes", "wanted_bytes"), 0)
    return Head(**{**none, "slot": NO_SLOT, "miss": None, "storages": (), "buffers": (), **changes})


class Loopback:
    """A pool, and its workers' ends. A worker gets a task with the first call that concerns its next batch."""

    def __init__(self, pool: Pool, *, pins: bool = False, moves: bool = False) -> None:
        self.pool = pool
        self._is_busy = [False] * pool.spec.num_workers
        self._pins, self._moves = pins, moves
        self.start_workers()

    def start_workers(self) -> None:
        """Replace the workers by new ones."""
        serial = self.pool.next_serial()
        num_workers = self.pool.spec.num_workers
        self.workers = []
        for n in range(num_workers):
            files = [(number, num_bytes, os.dup(fd)) for number, num_bytes, fd in self.pool.files_of(n)]
            mapped = HandedDown(partial(list, files)).map()
            self.workers.append(WorkerSlots(self.pool.arrivals, self.pool.spec.locality, mapped, serial=serial + n))
        self.packers = [Packer(own, worker=n, pins=self._pins, moves=self._moves) for n, own in enumerate(self.workers)]

    def begin(self, worker: int = 0) -> Packer:
        """Give a worker a task, unless it has one, and return its packer."""
        if not self._is_busy[worker]:
            self._is_busy[worker] = True
            self.pool.reclaim()
            self.packers[worker].accept(self.pool.grant(worker))
        return self.packers[worker]

    def pack(self, batch: object, worker: int = 0) -> bytes:
        """Return the message for a batch."""
        packer = self.begin(worker)
        self._is_busy[worker] = False
        return packer.pack(0, batch)

    def post(self, batch: object, worker: int = 0) -> tuple[Head, bytes]:
        """Pack a batch, and return what arrives."""
        head, body = decode(self.pack(batch, worker))
        assert head is not None
        return head, body

    def send(self, batch: object, worker: int = 0) -> Parcel:
        """Return the parcel of a batch, as the rank has it."""
        head, body = self.post(batch, worker)
        view, slot = self.pool.lend(head)
        return Parcel(head, body, view, slot)

    def settle(self) -> None:
        """Wait until no slot is being checked and pinned."""

        def is_idle() -> bool:
            self.pool.reclaim()
            return all(slot.is_settled for slot in self.pool.slots)

        assert wait_until(is_idle, limit_s=WAIT_S)

    def num_free(self) -> int:
        """Return the number of slots that wait for a task."""
        self.pool.reclaim()
        return sum(len(free) for free in self.pool._free)

    def num_on_loan(self) -> int:
        """Return the number of slots that the rank refers to, or that a copy may still read."""
        self.pool.reclaim()
        return sum(slot.lease is not None for slot in self.pool.slots)

    def close(self) -> None:
        """Close the pool."""
        self.pool.close()


@contextmanager
def loopback(*, pins: bool = False, moves: bool = False, **changes: Any) -> Iterator[Loopback]:
    """Make a pool without slots and its workers, and close it after the block."""
    made = Loopback(Pool(make_spec(**changes)), pins=pins, moves=moves)
    try:
        yield made
    finally:
        made.close()


def lent(loop: Loopback, batch: object, worker: int = 0) -> Any:
    """Return a batch as the loop receives it: over its slot, or wherever it traveled."""
    return batch_of(Lender(pins=False), loop.send(batch, worker))


def batch_of(opener: Copier, parcel: Parcel) -> Any:
    """Return a parcel's batch."""
    return opener.open(parcel)


def num_mapped() -> int:
    """Return the number of mappings of slots in this process."""
    return Path("/proc/self/maps").read_text(encoding="ascii").count("/memfd:numapin-slot")


def num_open() -> int:
    """Return the number of this process's descriptors of slots."""
    return len(slot_descriptors())


def slot_descriptors() -> list[int]:
    """Return this process's descriptors of slots; other threads may open and close some meanwhile."""
    found = []
    for entry in list(Path("/proc/self/fd").iterdir()):
        with suppress(FileNotFoundError):
            if "numapin-slot" in str(entry.readlink()):
                found.append(int(entry.name))
    return found


def held_bytes(pool: Pool) -> int:
    """Return the memory that the kernel holds for the slots that may be used again."""
    return sum(512 * os.fstat(slot.fd).st_blocks for slot in pool.slots if slot.fd is not None)
