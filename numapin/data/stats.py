"""Counts of a loader's work, kept while it runs and read with `DataLoader.stats()`."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from numapin.base import formats
from numapin.data.message import NO_SLOT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numapin.base.cpu_set import CpuSet
    from numapin.data.message import Head, Miss
    from numapin.data.pool import Pool

_WIDTH: Final = 80
_INDENT: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The work of a loader since it was made, over all its iterators. None: unknown, or not applicable.

    `print()` shows it as a block of lines, of which each has something to report.

    Attributes:
        batches: Batches that were yielded.
        bytes: The memory of the tensors and arrays in batches that came from workers.
        hits: Batches that arrived with all their tensors and arrays in slots, except those below 1 KiB, or that were so
            small that they needed none. This includes batches that were never yielded, for example after a `break`.
        misses: The number of other batches that arrived, by reason.
        wait_s_per_batch: The mean time inside `next()`.
        wait_share: The share of the time between two batches that was spent in `next()`, 0 to 1.
        transfer_gbps: The speed of the copies to the device in 1e9 bytes per second, sampled.
        slots: The number of slots that exist now.
        slots_made: The number of slots that workers have made so far; it stays the same while batches reuse them.
        slot_bytes: The size of the largest slot.
        slots_on_loan: Slots that the rank refers to, or that a copy may still read.
        pinned_bytes: The pinned memory of the slots.
        nodes: The nodes where the memory belongs.
        share_on_node: The share of the slots' pages on `nodes`, 0 to 1, as the kernel reports it.
        placement: Why these nodes.
        notes: What could not be done as requested, each with its remedy.

    Example:
        ```python
        stats = loader.stats()
        print(stats)
        log.write(json.dumps(stats.as_dict()))
        ```
    """

    batches: int
    bytes: int
    hits: int
    misses: dict[str, int]
    wait_s_per_batch: float | None
    wait_share: float | None
    transfer_gbps: float | None
    slots: int
    slots_made: int
    slot_bytes: int
    slots_on_loan: int
    pinned_bytes: int
    nodes: tuple[int, ...]
    share_on_node: float | None
    placement: str
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes by name, for logs.

        Returns:
            Numbers, texts, lists, a dict of numbers, and None. `json.dumps` accepts them.

        Example:
            ```python
            wandb.log(loader.stats().as_dict())
            ```
        """
        return {**asdict(self), "nodes": list(self.nodes), "notes": list(self.notes)}

    def __str__(self) -> str:
        """Return the block of lines, at most 80 columns wide."""
        num_arrived = max(self.batches, self.hits + sum(self.misses.values()))
        mean = f", {formats.render_size(self.bytes // num_arrived)} each" if self.batches and self.bytes else ""
        lines = [("batches", f"{self.batches:,}{mean}")]
        others = "".join(f"; {count:,}: {reason}" for reason, count in self.misses.items())
        if self.hits or others:
            unyielded = ", not all of them yielded" if self.hits > self.batches else ""
            lines.append(("in slots", f"{self.hits:,}{unyielded}{others}"))
        if self.wait_s_per_batch is not None:
            share = "" if self.wait_share is None else f", {self.wait_share:.0%} of the loop's time"
            lines.append(("waiting", f"{_time(self.wait_s_per_batch)} per batch{share}"))
        if self.transfer_gbps is not None:
            lines.append(("to the GPU", f"{self.transfer_gbps:.1f} GB/s"))
        if self.slots:
            pinned = f", {formats.render_size(self.pinned_bytes)} pinned" if self.pinned_bytes else ""
            size = formats.render_size(self.slot_bytes)
            lines.append(("slots", f"{self.slots} of up to {size}, {self.slots_on_loan} in use{pinned}"))
        share = "" if self.share_on_node is None else f"; {self.share_on_node:.1%} of the pages there"
        nodes = ", ".join(map(str, self.nodes))
        lines.append(("node", f"{nodes} ({self.placement}){share}" if nodes else self.placement))
        lines += [("note", note) for note in self.notes]
        wrap = partial(textwrap.fill, width=_WIDTH, subsequent_indent=" " * _INDENT, break_on_hyphens=False)
        return "\n".join(wrap(f"{name:<{_INDENT}}{text}") for name, text in lines if text)


def _time(seconds: float) -> str:
    """Return a duration in the unit that suits it."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


@dataclass(slots=True)
class Counts:
    """The running counts of one loader."""

    batches: int = 0
    num_bytes: int = 0
    hits: int = 0
    slots_made: int = 0
    misses: Counter[Miss] = field(default_factory=Counter)
    total_wait_s: float = 0.0
    wait_in_steps_s: float = 0.0
    total_step_s: float = 0.0

    def note_arrival(self, head: Head) -> None:
        """Count a batch that came from a worker."""
        self.num_bytes += head.num_bytes
        if head.miss is not None:
            self.misses[head.miss] += 1
        elif head.slot != NO_SLOT:
            self.hits += 1
        self.slots_made += head.made_bytes > 0

    def note_step(self, *, waited_s: float, stepped_s: float | None) -> None:
        """Count a batch that was yielded.

        Args:
            waited_s: The time inside `next()`.
            stepped_s: The time since the previous batch was yielded. None: this is the first.
        """
        self.batches += 1
        self.total_wait_s += waited_s
        if stepped_s is not None:
            self.wait_in_steps_s += waited_s
            self.total_step_s += stepped_s

    @property
    def wait_s_per_batch(self) -> float | None:
        """Return the mean time inside `next()`; None before the first batch."""
        return self.total_wait_s / self.batches if self.batches else None

    @property
    def wait_share(self) -> float | None:
        """Return the share of the steps that was spent inside `next()`; None before the first step."""
        return min(1.0, self.wait_in_steps_s / self.total_step_s) if self.total_step_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTotals:
    """The slots of all pools of a loader; `pages` counts pages by node."""

    num_slots: int
    slot_bytes: int
    num_on_loan: int
    pinned_bytes: int
    pages: Counter[int | None]
    is_verified: bool

    @classmethod
    def of(cls, pools: Iterable[Pool]) -> PoolTotals:
        """Add the slots of pools up; the size of a slot is the largest."""
        slots = [slot for pool in pools for slot in pool.slots]
        return cls(
            num_slots=len(slots),
            slot_bytes=max((slot.num_bytes for slot in slots), default=0),
            num_on_loan=sum(slot.lease is not None for slot in slots),
            pinned_bytes=sum(slot.pinned_bytes for slot in slots),
            pages=sum((Counter(slot.pages) for slot in slots if slot.pages), start=Counter()),
            is_verified=all(slot.pages is not None or not slot.is_settled for slot in slots),
        )

    def share_on(self, nodes: CpuSet) -> float | None:
        """Return the share of the pages on these nodes, 0 to 1; None if the kernel has not reported all pages."""
        num_pages = self.pages.total()
        if not (num_pages and nodes and self.is_verified):
            return None
        return sum(self.pages[node] for node in nodes) / num_pages
