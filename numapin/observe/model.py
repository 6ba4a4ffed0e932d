"""A job's threads and pages, as data.

A value that the kernel does not report is None, with the reason.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from typing import TYPE_CHECKING, Final

from numapin.base.records import to_json
from numapin.system.libraries import narrows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numapin.base.cpu_set import CpuSet


class Role(StrEnum):
    """The role of a process in its rank."""

    RANK = "rank"
    WORKER = "data worker"
    OTHER = "child"


class MemoryKind(StrEnum):
    """The kind of memory in a mapping."""

    HEAP = "heap"
    ANONYMOUS = "anonymous"
    STACK = "stack"
    FILE = "file"  # program and data files: the page cache, which processes share
    SHARED = "shared"
    TORCH_SHARED = "torch-shared"  # tensors that torch sends between processes
    SLOT = "slot"  # the slots of numapin.DataLoader
    PINNED = "pinned"  # page-locked memory that CUDA allocated (cudaHostAlloc)


PRIVATE: Final = frozenset({MemoryKind.HEAP, MemoryKind.ANONYMOUS, MemoryKind.STACK})
"""Kinds whose pages belong to one process. Several processes may map pages of the other kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """One thread: the CPUs that it may use, and the CPU that it ran on last. None: that was not read."""

    tid: int
    name: str
    cpus: CpuSet
    last_cpu: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A memory policy and its nodes. `mode` is the kernel's word.

    The words are default, prefer, prefer (many), bind, interleave and local.
    """

    mode: str
    nodes: CpuSet

    def __str__(self) -> str:
        """Return the policy as numa_maps writes it, without flags."""
        return f"{self.mode}:{self.nodes}" if self.nodes else self.mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """The resident bytes of one kind of memory under one policy in a process, by node."""

    kind: MemoryKind
    policy: Policy
    bytes_by_node: Mapping[int, int]

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        nodes = {str(node): size for node, size in sorted(self.bytes_by_node.items())}
        return {"kind": self.kind.value, "policy": str(self.policy), "bytes_by_node": nodes}


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLibrary:
    """The NCCL library of a process: its path, its version (None: unknown), and whether it ignores the affinity."""

    library: str
    version: str | None
    ignores_affinity: bool

    @property
    def narrows(self) -> bool | None:
        """Whether it leaves its caller on the CPUs of the GPU's node; None: unknown."""
        return narrows(self.version)

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {**to_json(self), "narrows": self.narrows}


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of a rank.

    With `hides_pinned` it has mapped the device file of an AMD or Intel GPU, but none of NVIDIA's. What is page-locked
    for such a GPU counts as files or anonymous memory, because its mappings are not known.
    """

    pid: int
    name: str
    role: Role
    threads: tuple[Thread, ...]
    policy: Policy | None  # of its main thread; None: unknown
    pages: tuple[Pages, ...] | None  # None: the kernel does not report its memory
    unreadable: str | None = None  # the reason if `pages` is None
    openmp: tuple[str, ...] = ()  # the variables in its environment that make OpenMP move threads
    nccl: NcclLibrary | None = None  # that a rank has loaded
    hides_pinned: bool = False

    def bytes_by_node(self, kind: MemoryKind) -> Counter[int]:
        """Return the bytes of this kind on each node, under any policy."""
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
            "threads": [to_json(thread) for thread in self.threads],
            "policy": None if self.policy is None else str(self.policy),
            "memory": None if self.pages is None else [pages.to_json() for pages in self.pages],
            "unreadable": self.unreadable,
            "openmp": list(self.openmp),
            "nccl": None if self.nccl is None else self.nccl.to_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRank:
    """One rank's processes, its own first; empty if the rank is gone.

    `cpuset` are the CPUs that the cgroup of the rank's process allows. None: unknown.
    """

    local_rank: int
    pid: int
    processes: tuple[Process, ...]
    cpuset: CpuSet | None = None

    @property
    def is_gone(self) -> bool:
        """Return whether the rank's own process has ended."""
        return not any(process.role is Role.RANK for process in self.processes)

    @property
    def has_memory(self) -> bool:
        """Return whether the memory of the rank's own process could be read."""
        return any(process.role is Role.RANK and process.pages is not None for process in self.processes)

    @property
    def hides_pinned(self) -> bool:
        """Return whether page-locked memory of a process counts as other memory."""
        return any(process.hides_pinned for process in self.processes)

    @property
    def pids(self) -> frozenset[int]:
        """Return the ids of the rank's own process and of the others."""
        return frozenset({self.pid, *(process.pid for process in self.processes)})

    @property
    def threads(self) -> Iterator[tuple[Process, Thread]]:
        """Return the threads of all processes, each with its process."""
        return ((process, thread) for process in self.processes for thread in process.threads)

    def bytes_by_node(self, kinds: Iterable[MemoryKind]) -> Counter[int]:
        """Return the bytes of these kinds on each node, over all processes whose memory could be read.

        Several processes map the same shared pages, so the largest count of any one process is taken for those.
        """
        total: Counter[int] = Counter()
        for kind in kinds:
            combine = operator.add if kind in PRIVATE else operator.or_  # a sum, or the maximum of each node
            total += reduce(combine, (process.bytes_by_node(kind) for process in self.processes), Counter())
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A job's ranks on this host, as observed; `nodes` are the NUMA nodes of the machine."""

    nodes: CpuSet
    ranks: tuple[ObservedRank, ...]
