"""CPU time and memory of a rank and its workers. Edge.

Comes in: this process. Goes out: CPU seconds, and memory in which each page counts once (PSS).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Self

from numapin.system import proc


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUsage:
    """CPU seconds so far at a time: of this process with its descendants, and of its descendants alone."""

    at_s: float
    cpu_s: float
    workers_cpu_s: float

    @classmethod
    def now(cls) -> RankUsage:
        """Read it; this looks at all processes of the host."""
        found = dict(proc.processes())
        own = os.getpid()
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
        workers = [found[pid].cpu_ticks for pid in _workers(own) if pid in found]
        in_workers_s = sum(workers) * tick_s
        return cls(
            at_s=time.perf_counter(), cpu_s=in_workers_s + found[own].cpu_ticks * tick_s, workers_cpu_s=in_workers_s
        )

    def since(self, earlier: Self) -> RankUsage:
        """Return the use in between."""
        return RankUsage(
            at_s=self.at_s - earlier.at_s,
            cpu_s=self.cpu_s - earlier.cpu_s,
            workers_cpu_s=self.workers_cpu_s - earlier.workers_cpu_s,
        )


def memory_bytes() -> int:
    """Return the memory of this process and its descendants: each page once, shared ones in parts."""
    own = os.getpid()
    sizes = [proc.size_bytes(pid, "smaps_rollup", "Pss:") for pid in (own, *_workers(own))]
    return sum(size for size in sizes if size is not None)


def _workers(own: int) -> list[int]:
    return proc.descendants(own, proc.children_of())
