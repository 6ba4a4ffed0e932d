"""Page-locked blocks that nothing uses, kept for reuse by the nodes that they are on and by their size.

torch's cache rounds a block up to a power of two, does not know nodes, and keeps its blocks until it is told otherwise.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from bisect import bisect_left, insort_left
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Final

from numapin.base.cpu_set import CpuSet

_SPARE: Final = 8  # a block may be larger than what is asked for by one part in this many
IDLE_S: Final = 300.0
"""Longest wait for reuse: re-registering 10 GB every 5 min costs 0.9 to 1.7 % of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Locked:
    """Memory that is page-locked, registered with the driver for a device, and counted in PINNED.

    Attributes:
        memory: Its owner: the last reference unmaps it.
        address: Its first byte.
        num_bytes: Its size.
        device: The device on whose behalf it is registered; every device can use it.
        nodes: The nodes that all its pages are on (empty: where the memory policy put them). None: it is not reused.
        num_forks: The value of `IdleBlocks.num_forks` when it was lent.
    """

    memory: object
    address: int
    num_bytes: int
    device: int
    nodes: CpuSet | None = None
    num_forks: int = 0


class IdleBlocks:
    """The idle blocks of one process. Its methods are for one thread at a time."""

    def __init__(self) -> None:
        self._by_nodes: defaultdict[CpuSet, list[Locked]] = defaultdict(list)  # each from the smallest to the largest
        self._since_s: dict[Locked, float] = {}  # the longest idle first
        self.num_forks = 0
        """Changes with each fork. A child may read what was lent at that time, for as long as it lives."""
        os.register_at_fork(before=self._note_fork, after_in_parent=self._note_fork, after_in_child=self._forget)

    @property
    def num_bytes(self) -> int:
        """Return the size of all of them; for any thread."""
        return sum(block.num_bytes for block in self._since_s.copy())

    def add(self, block: Locked) -> bool:
        """Keep a block that nothing uses; return False if it must not be reused."""
        if block.nodes is None or block.num_forks != self.num_forks:
            return False
        insort_left(self._by_nodes[block.nodes], block, key=_size_of)  # before equal ones: it is taken first
        self._since_s[block] = time.monotonic()
        return True

    def take(self, nodes: CpuSet, num_bytes: int) -> Locked | None:
        """Return the smallest block on `nodes` that holds this many bytes, and is at most an eighth larger."""
        blocks = self._by_nodes[nodes]
        place = bisect_left(blocks, num_bytes, key=_size_of)
        if place == len(blocks) or blocks[place].num_bytes > num_bytes + num_bytes // _SPARE:
            return None
        block = blocks.pop(place)
        del self._since_s[block]
        return replace(block, num_forks=self.num_forks)

    def drop(self, *, num_bytes: float = math.inf, since_s: float = math.inf) -> list[Locked]:
        """Remove and return idle blocks, longest idle first, until `num_bytes` are dropped.

        Only those are dropped that have been idle since `since_s` or before.
        """
        dropped: list[Locked] = []
        for block, block_since_s in self._since_s.items():
            if num_bytes <= 0 or block_since_s > since_s:
                break
            num_bytes -= block.num_bytes
            dropped.append(block)
        for block in dropped:
            del self._since_s[block]
            self._by_nodes[block.nodes or CpuSet()].remove(block)
        return dropped

    def _note_fork(self) -> None:
        self.num_forks += 1

    def _forget(self) -> None:
        """Unmap all in a child: otherwise what the parent gives back stays until the child ends."""
        self._since_s.clear()
        self._by_nodes.clear()


def whole_pages(num_bytes: int) -> int:
    """Return the size of a block for this many bytes."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _size_of(block: Locked) -> int:
    return block.num_bytes
