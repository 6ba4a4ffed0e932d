"""What a loader has done: counted while it runs, read with `DataLoader.stats()`.

Comes in: heads of batches, times. Goes out: `Stats`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from numapin.data.wire.parcel import SLOT

if TYPE_CHECKING:
    from numapin.data.wire.parcel import Head


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What a loader has done since it was made, over all its iterators. None: unknown, or not applicable.

    Attributes:
        batches: Batches that were yielded.
        bytes: The bytes of slot that batches from workers needed.
        hits: Batches that traveled in a slot as a whole.
        misses: Reason to the number of batches that did not.
        wait_s_per_batch: The mean time inside `next()`.
        wait_share: The share of the time between two batches that was spent in `next()`, 0 to 1.
        transfer_gbps: The speed of the copies to the device in 1e9 bytes per second, sampled.
        slots: The slots of the rings that exist now.
        slot_bytes: The size of a slot.
        slots_on_loan: Slots that the rank refers to, or that a copy may still read.
        pinned_bytes: Pinned memory of the rings.
        nodes: The nodes on which the memory belongs.
        share_on_node: The share of the ring's pages on `nodes`, 0 to 1, as the kernel reports it.
        placement: Why these nodes.
        notes: What could not be done as requested, each with its remedy.
    """

    batches: int
    bytes: int
    hits: int
    misses: dict[str, int]
    wait_s_per_batch: float | None
    wait_share: float | None
    transfer_gbps: float | None
    slots: int
    slot_bytes: int
    slots_on_loan: int
    pinned_bytes: int
    nodes: tuple[int, ...]
    share_on_node: float | None
    placement: str
    notes: tuple[str, ...]


@dataclass(slots=True)
class Counts:
    """The running counts of one loader."""

    batches: int = 0
    num_bytes: int = 0
    hits: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    waited_s: float = 0.0
    waited_in_steps_s: float = 0.0
    stepped_s: float = 0.0

    def note_arrival(self, head: Head) -> None:
        """Count a batch that came from a worker."""
        self.num_bytes += head.wanted_bytes
        if head.miss is not None:
            self.misses[head.miss] += 1
        elif head.parts[SLOT] is not None:
            self.hits += 1

    def note_step(self, *, waited_s: float, stepped_s: float | None) -> None:
        """Count a batch that was yielded; `stepped_s` is the time since the one before, None for the first."""
        self.batches += 1
        self.waited_s += waited_s
        if stepped_s is not None:
            self.waited_in_steps_s += waited_s
            self.stepped_s += stepped_s
