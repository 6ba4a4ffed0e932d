"""Counts of a loader's work and reports of what it could not do, kept while it runs."""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from numapin.base import formats
from numapin.base.stderr import say
from numapin.data.message import NO_SLOT, Miss
from numapin.errors import BindingRefused

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numapin.base.cpu_set import CpuSet
    from numapin.data.message import Head
    from numapin.data.slots import Slot


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
        slots_on_loan: Slots of batches that the rank refers to.
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
        wrap = partial(textwrap.fill, width=80, subsequent_indent=" " * 12, break_on_hyphens=False)
        return "\n".join(wrap(f"{name:<12}{text}") for name, text in lines if text)


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
        """Count a batch that was yielded, and the time since the one before; None: it is an iterator's first."""
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


def share_on(nodes: CpuSet, slots: Iterable[Slot]) -> float | None:
    """Return the share of slots' pages on these nodes, 0 to 1; None if the kernel has not reported all pages."""
    pages: Counter[int | None] = Counter()
    for slot in slots:
        if slot.pages is None and slot.is_settled:
            return None
        pages.update(slot.pages or {})
    num_pages = pages.total()
    return sum(pages[node] for node in nodes) / num_pages if num_pages and nodes else None


class Notices:
    """Collects a loader's notices and reports each once."""

    def __init__(self, *, is_strict: bool) -> None:
        """With `is_strict`, a refusal is an error at the next `check` instead of a warning."""
        self._is_strict = is_strict
        self._texts: dict[str, None] = {}  # in order
        self._refusal: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """Return all notices so far, in order."""
        return tuple(self._texts)

    def warn(self, text: str) -> None:
        """Report a notice on stderr, unless it was reported before."""
        if text not in self._texts:
            self._texts[text] = None
            rank = os.environ.get("RANK")
            say(f"warning: {text}" if rank is None else f"warning: rank {rank}: {text}")

    def report_refusal(self, text: str) -> None:
        """Report something that the kernel or the driver refused. Under `strict`, keep it for `check` instead."""
        if not self._is_strict:
            self.warn(text)
        elif text not in self._texts:
            self._texts[text] = None
            self._refusal = self._refusal or text

    def report_miss(self, miss: Miss) -> None:
        """Report why a batch did not travel in a slot, if the user can do something about it."""
        if miss is Miss.UNSUPPORTED:
            self.warn(
                f"a batch traveled outside the slots: {miss}; sparse, quantized and nested tensors, tensors that "
                "require gradients (.detach() helps), and subclasses that pickle themselves travel in torch's shared "
                "memory"
            )

    def check(self) -> None:
        """Raise BindingRefused for the first refusal under `strict`."""
        if self._refusal is not None:
            raise BindingRefused(self._refusal, "to run with what the kernel allows, remove strict=True")
