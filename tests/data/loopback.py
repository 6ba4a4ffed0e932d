"""Both ends of a pool of slots in one process: the workers' and the rank's."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch

from tests.contract.describe import describe
from tests.data import seam
from tests.data.seam import cuda, decode
from tests.waiting import wait_until

WAIT_S: Final = 120
BATCH: Final = torch.arange(1000.0)  # 4000 bytes: a slot of a page
ANYWHERE: Final = seam.Locality(
    nodes=seam.CpuSet(), cpus=seam.CpuSet(), memory=None, num_machine_nodes=1, reason="a test"
)


def make_spec(told: list[str] | None = None, **changes: Any) -> seam.PoolSpec:
    told = [] if told is None else told
    spec = seam.PoolSpec(
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


def make_head(**changes: Any) -> seam.Head:
    none = dict.fromkeys(("number", "worker", "slot_bytes", "made_bytes", "num_bytes", "wanted_bytes"), 0)
    return seam.Head(**{**none, "slot": seam.NO_SLOT, "miss": None, "storages": (), "buffers": (), **changes})


def make_slot(number: int) -> seam.Slot:
    """Return a slot without memory."""
    return seam.Slot(number=number, fd=None, num_bytes=0, address=0, owner=torch.empty(0), worker=0)


class Loopback:
    """A pool, and its workers' ends. A worker gets a task with the first call that concerns its next batch."""

    def __init__(self, pool: seam.Pool, *, pins: bool = False, moves: bool = False) -> None:
        self.pool = pool
        self._is_busy = [False] * pool.spec.num_workers
        self._pins, self._moves = pins, moves
        self.start_workers()

    def start_workers(self) -> None:
        serial = self.pool.next_serial()
        num_workers = self.pool.spec.num_workers
        self.workers = []
        for n in range(num_workers):
            files = [(number, num_bytes, os.dup(fd)) for number, num_bytes, fd in self.pool.files_of(n)]
            mapped = seam.HandedDown(partial(list, files)).map()
            self.workers.append(
                seam.WorkerSlots(self.pool.arrivals, self.pool.spec.locality, mapped, serial=serial + n)
            )
        self.packers = [
            seam.Packer(own, worker=n, pins=self._pins, moves=self._moves) for n, own in enumerate(self.workers)
        ]

    def begin(self, worker: int = 0) -> seam.Packer:
        """Give a worker a task, unless it has one, and return its packer."""
        if not self._is_busy[worker]:
            self._is_busy[worker] = True
            self.pool.reclaim()
            self.packers[worker].accept(self.pool.grant(worker))
        return self.packers[worker]

    def pack(self, batch: object, worker: int = 0) -> bytes:
        packer = self.begin(worker)
        self._is_busy[worker] = False
        return packer.pack(0, batch)

    def post(self, batch: object, worker: int = 0) -> tuple[seam.Head, bytes]:
        head, body = decode(self.pack(batch, worker))
        assert head is not None
        return head, body

    def send(self, batch: object, worker: int = 0) -> seam.Parcel:
        head, body = self.post(batch, worker)
        view, slot = self.pool.lend(head)
        return seam.Parcel(head, body, view, slot)

    def settle(self) -> None:
        def is_idle() -> bool:
            self.pool.reclaim()
            return all(slot.is_settled for slot in self.pool.slots)

        assert wait_until(is_idle, limit_s=WAIT_S)

    def pin(self, num_slots: int) -> None:
        """Have slots for BATCH made, settled and free."""
        while sum(slot.is_settled for slot in self.pool.slots) < num_slots:
            kept = [lent(self, BATCH) for _ in range(num_slots)]
            del kept
            self.settle()

    def num_free(self) -> int:
        self.pool.reclaim()
        return sum(len(free) for free in self.pool._free)

    def num_on_loan(self) -> int:
        self.pool.reclaim()
        return sum(slot.lease is not None for slot in self.pool.slots)


@contextmanager
def loopback(*, pins: bool = False, moves: bool = False, **changes: Any) -> Iterator[Loopback]:
    made = Loopback(seam.Pool(make_spec(**changes)), pins=pins, moves=moves)
    try:
        yield made
    finally:
        made.pool.close()


def lent(loop: Loopback, batch: object, worker: int = 0) -> Any:
    return batch_of(seam.Lender(pins=False), loop.send(batch, worker))


def batch_of(opener: seam.Copier, parcel: seam.Parcel) -> Any:
    return opener.open(parcel)


def same(one: Any, other: Any) -> bool:
    return describe(one).tree == describe(other).tree


def ramp(*size: int) -> torch.Tensor:
    return torch.arange(torch.Size(size).numel(), dtype=torch.float32).reshape(size)


def in_slot(loop: Loopback, batch: Any) -> seam.Head:
    """Assert that a batch travels in one slot as a whole and comes out unchanged; return its head."""
    parcel = loop.send(batch)
    for opener in (seam.Copier(pins=False), seam.Lender(pins=False)):
        assert same(opener.open(parcel), batch)
    head = parcel.head
    assert (head.miss, head.slot >= 0) == (None, True)
    return head


@contextmanager
def interrupted(num_passed: int, file: str) -> Iterator[None]:
    """Raise KeyboardInterrupt where a function of a file is called, or a C function returns there, but not at first."""
    left = num_passed

    def interrupt(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal left
        left -= event in ("call", "c_return") and frame.f_code.co_filename == file
        if left < 0:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        yield
    finally:
        sys.setprofile(None)


def in_forked_child(check: Callable[[], bool]) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a fork beside threads
        pid = os.fork()
    if not pid:
        status = 2
        try:
            status = 0 if check() else 1
        except BaseException:  # noqa: BLE001 - the status says it
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def num_mapped() -> int:
    return Path("/proc/self/maps").read_text(encoding="ascii").count("/memfd:numapin-slot")


def num_open() -> int:
    return len(slot_descriptors())


def slot_descriptors() -> list[int]:
    """Return this process's descriptors of slots; other threads may open and close some meanwhile."""
    found = []
    for entry in list(Path("/proc/self/fd").iterdir()):
        with suppress(FileNotFoundError):
            if "numapin-slot" in str(entry.readlink()):
                found.append(int(entry.name))
    return found


def held_bytes(pool: seam.Pool) -> int:
    return sum(512 * os.fstat(slot.fd).st_blocks for slot in pool.slots if slot.fd is not None)
