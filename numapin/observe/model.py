"""Where a job's threads and pages are, as data. Pure.

Comes in: what `observe` read. Goes out: `Observed`, which `verify` holds against a plan. Sets that the kernel did not
tell are None, with the reason.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numapin.base.cpu_set import CpuSet


class Role(StrEnum):
    """What a process is to its rank."""

    RANK = "rank"
    WORKER = "data worker"
    OTHER = "child"


class MemoryKind(StrEnum):
    """What a mapping holds."""

    HEAP = "heap"
    ANONYMOUS = "anonymous"
    STACK = "stack"
    FILE = "file"
    """Program files and data files: the page cache, which processes share."""
    SHARED = "shared"
    TORCH_SHARED = "torch-shared"
    """Tensors that torch sends from process to process."""
    SPILL = "spill"
    """Batches of numapin.DataLoader that came without a slot."""
    RING = "ring"
    """The slots of numapin.DataLoader."""
    PINNED = "pinned"
    """What CUDA allocated page-locked (cudaHostAlloc)."""


PRIVATE: Final = frozenset({MemoryKind.HEAP, MemoryKind.ANONYMOUS, MemoryKind.STACK})
"""Kinds whose pages belong to one process; those of the others may be mapped by several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """One thread: the CPUs that it may use, and the one that it ran on last."""

    tid: int
    name: str
    cpus: CpuSet
    last_cpu: int

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {"tid": self.tid, "name": self.name, "cpus": str(self.cpus), "last_cpu": self.last_cpu}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A memory policy in the kernel's words: default, prefer, prefer (many), bind, interleave, local; and its nodes."""

    mode: str
    nodes: CpuSet

    def __str__(self) -> str:
        """Return it as numa_maps writes it, without flags."""
        return f"{self.mode}:{self.nodes}" if self.nodes else self.mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """What a process has of one kind of memory under one policy: node -> bytes that are there."""

    kind: MemoryKind
    policy: Policy
    bytes_by_node: Mapping[int, int]

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        nodes = {str(node): size for node, size in sorted(self.bytes_by_node.items())}
        return {"kind": self.kind.value, "policy": str(self.policy), "bytes_by_node": nodes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of a rank.

    `policy` is its main thread's. `pages` is None where the kernel does not tell, and `unreadable` says why.
    `openmp` are the variables in its environment by which OpenMP moves threads.
    """

    pid: int
    name: str
    role: Role
    threads: tuple[Thread, ...]
    policy: Policy | None
    pages: tuple[Pages, ...] | None
    unreadable: str | None = None
    openmp: tuple[str, ...] = ()

    def bytes_by_node(self, kind: MemoryKind) -> Counter[int]:
        """Return how many bytes of this kind lie on each node, under any policy."""
        found: Counter[int] = Counter()
        for pages in self.pages or ():
            if pages.kind is kind:
                found.update(pages.bytes_by_node)
        return found

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {
            "pid": self.pid,
            "name": self.name,
            "role": self.role.value,
            "threads": [thread.to_json() for thread in self.threads],
            "policy": None if self.policy is None else str(self.policy),
            "memory": None if self.pages is None else [pages.to_json() for pages in self.pages],
            "unreadable": self.unreadable,
            "openmp": list(self.openmp),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRank:
    """One rank's processes, its own first; none where it is gone."""

    local_rank: int
    pid: int
    processes: tuple[Process, ...]

    @property
    def is_gone(self) -> bool:
        """Return whether the rank's own process is not there."""
        return not any(process.role is Role.RANK for process in self.processes)

    def bytes_by_node(self, kinds: Iterable[MemoryKind]) -> Counter[int]:
        """Return how many bytes of these kinds lie on each node, over all processes whose memory could be read.

        Several processes map the same shared pages: of those the largest count of any one process is taken.
        """
        total: Counter[int] = Counter()
        for kind in kinds:
            found = [process.bytes_by_node(kind) for process in self.processes]
            for each in found:
                total = total + each if kind in PRIVATE else total
            if kind not in PRIVATE:
                total += Counter({node: max(each[node] for each in found) for node in set().union(*found)})
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What was seen of a job's ranks on this host; `nodes` are the NUMA nodes of the machine."""

    nodes: CpuSet
    ranks: tuple[ObservedRank, ...]
