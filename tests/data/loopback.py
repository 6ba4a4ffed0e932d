"""Both ends of a ring in one process: the worker's and the rank's.

Comes in: batches. Goes out: the parcels that the rank receives, over the ring's own memory.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from numapin.data.slots.control import OwnSlots
from numapin.data.slots.memory import RingSpec
from numapin.data.slots.ring import Ring

from numapin.base.cpu_set import CpuSet
from numapin.data.locality import Locality
from numapin.data.opening.host import Lender
from numapin.data.wire.message import Head, decode
from numapin.data.wire.parcel import Parcel
from numapin.data.worker.packing import Packer
from numapin.system import cuda
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numapin.data.opening.host import Opener

WAIT_S: Final = 20
ANYWHERE: Final = Locality(nodes=CpuSet(), cpus=CpuSet(), memory=None, num_machine_nodes=1, reason="a test")


def make_spec(told: list[str] | None = None, **changes: Any) -> RingSpec:
    """Return the properties of a ring for one worker: five slots, in memory that only this process reads."""
    told = [] if told is None else told
    spec = RingSpec(
        num_workers=1,
        prefetch=1,
        locality=ANYWHERE,
        device=0,
        driver=None,
        reader=lambda: None,
        budget_bytes=lambda: None,
        report=told.append,
    )
    return replace(spec, **changes)


def gpu() -> dict[str, Any]:
    """Return the properties of a ring whose memory is pinned for the stand-in's GPU, and read by it."""
    driver = cuda.driver()
    assert driver is not None
    return {"driver": driver, "reader": lambda: driver}


@contextmanager
def made(**changes: Any) -> Iterator[Ring]:
    """Make an empty ring, and close it after the block."""
    ring = Ring(make_spec(**changes))
    try:
        yield ring
    finally:
        ring.close()


def make_head(**changes: Any) -> Head:
    """Return the head of a batch that has nothing in memory."""
    head = Head(
        number=0,
        worker=0,
        generation=0,
        oldest_generation=0,
        parts=(None, None),
        wanted_bytes=0,
        miss=None,
        storages=(),
        buffers=(),
    )
    return head._replace(**changes)


def build(ring: Ring, num_bytes: int) -> None:
    """Make slots for batches of `num_bytes`, and wait until they exist or were refused."""
    ring.want(make_head(wanted_bytes=num_bytes))
    ring.prepare()
    wait_until_built(ring)


def wait_until_built(ring: Ring) -> None:
    """Wait until no slots are being made."""
    if (builder := ring._builder) is not None:
        builder.join(WAIT_S)
    assert ring._builder is None


def wait_until_closed(ring: Ring) -> None:
    """Wait until a closed ring has given its descriptor back."""
    assert wait_until(lambda: not is_open(ring), limit_s=WAIT_S)


def is_open(ring: Ring) -> bool:
    """Return whether the ring's descriptor is open in this process."""
    try:
        return str(Path(f"/proc/self/fd/{ring.control.fd}").readlink()).startswith("/memfd:numapin-ring")
    except FileNotFoundError:
        return False


def held_bytes(ring: Ring) -> int:
    """Return the memory that the kernel holds for the ring's memfd, including the control page."""
    return 512 * os.fstat(ring.control.fd).st_blocks


class Loopback:
    """A ring, and worker 0's end of it."""

    def __init__(self, ring: Ring, *, pins: bool = False, moves: bool = False) -> None:
        self.ring = ring
        self.slots = OwnSlots(ring.control, 0)
        self.packer = Packer(self.slots, worker=0, pins=pins, moves=moves)

    def post(self, batch: object) -> tuple[Head, memoryview]:
        """Pack a batch, and return what arrives."""
        head, body = decode(self.packer.pack(0, batch))
        assert head is not None
        return head, body

    def send(self, batch: object) -> Parcel:
        """Return the parcel of a batch, as the rank has it."""
        head, body = self.post(batch)
        return Parcel(head, body, self.ring.lend(head))

    def states(self) -> list[int]:
        """Return the words of all slots."""
        return [self.ring.control.state(slot) for slot in range(self.ring.num_slots)]

    def num_free(self) -> int:
        """Return the number of slots that are free as far as the rank is concerned."""
        return sum(state > 0 for state in self.states())


@contextmanager
def loopback(slot_bytes: int, *, pins: bool = False, moves: bool = False, **changes: Any) -> Iterator[Loopback]:
    """Make a ring of slots of at least `slot_bytes`, none if 0, and close it after the block."""
    with made(**changes) as ring:
        if slot_bytes:
            build(ring, slot_bytes)
        yield Loopback(ring, pins=pins, moves=moves)


def lent(loop: Loopback, batch: object) -> Any:
    """Return a batch as the loop receives it: over its slot, or wherever it traveled."""
    return batch_of(Lender(pins=False), loop.send(batch))


def batch_of(opener: Opener, parcel: Parcel) -> Any:
    """Return a parcel's batch."""
    return opener.open(parcel)
