"""CPU time and memory of a rank and its workers, and the rank's share of the CPUs. Edge.

Comes in: this process, and the CPUs of the other ranks. Goes out: CPU seconds, memory in which each page counts once
(PSS), and a number of CPUs.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist

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


def cpus_per_rank(device: torch.device) -> float:
    """Return this rank's share of its CPUs: their number, divided by the number of ranks that may use some of them.

    Without binding, all ranks share all CPUs. Bound ranks share those of a node, or have their own. Every rank must
    call this at the same time, with the device of its process group.
    """
    own = os.sched_getaffinity(0)
    return len(own) / sum(not own.isdisjoint(cpus) for cpus in _cpus_of_ranks(own, device))


def _cpus_of_ranks(own: set[int], device: torch.device) -> list[set[int]]:
    """Gather the CPUs of all ranks as tensors: to gather objects, torch needs numpy, which may not be installed."""
    size = torch.tensor([max(own) + 1], device=device)
    dist.all_reduce(size, op=dist.ReduceOp.MAX)
    mask = torch.zeros(int(size), dtype=torch.int32, device=device)
    mask[sorted(own)] = 1
    masks = [torch.empty_like(mask) for _ in range(dist.get_world_size())]
    dist.all_gather(masks, mask)
    return [set(one.nonzero().flatten().tolist()) for one in masks]


def _workers(own: int) -> list[int]:
    return proc.descendants(own, proc.children_of())
