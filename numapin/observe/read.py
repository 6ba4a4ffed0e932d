"""Read where the threads and the pages of running processes are. Edge.

Comes in: the process ids of a job's ranks. Goes out: `Observed`: of each rank's process and all its descendants the
CPUs of every thread and the nodes of every page, from /proc (proc(5), proc_pid_numa_maps(5)). Stops nothing; the kernel
walks a process's page tables once. A process that ends meanwhile is left out.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from numapin.base.cpu_set import CpuSet
from numapin.base.printable import printable
from numapin.observe.model import MemoryKind, Observed, ObservedRank, Pages, Policy, Process, Role, Thread
from numapin.system import numa_maps, proc
from numapin.system.openmp import binding_variables
from numapin.system.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LIVE: Final = Path(proc.LIVE)

_WORKER_NAME: Final = "pt_data_worker"  # torch names its DataLoader's workers so since 2.6
_NODES_ONLINE: Final = "sys/devices/system/node/online"
_CPUS_ONLINE: Final = "sys/devices/system/cpu/online"

_FILE: Final = re.compile(r" file=(\S+)")

# What a mapping's file begins with -> what it holds; the first that fits.
_KINDS: Final = (
    ("/memfd:numapin-ring", MemoryKind.RING),
    ("/memfd:numapin-spill", MemoryKind.SPILL),
    ("/dev/shm/torch_", MemoryKind.TORCH_SHARED),  # noqa: S108 - not opened here
    ("/dev/shm/", MemoryKind.SHARED),  # noqa: S108
    ("/memfd:", MemoryKind.SHARED),
    ("/SYSV", MemoryKind.SHARED),
    ("/dev/zero", MemoryKind.SHARED),  # an anonymous mapping that is shared
    ("/anon_hugepage", MemoryKind.ANONYMOUS),  # hugetlbfs's name for memory without a file
)


def observe(pids: Mapping[int, int], *, gone: frozenset[int] = frozenset(), root: Path = LIVE) -> Observed:
    """Read the ranks' process trees; `pids` are local rank -> process id.

    Of the ranks in `gone` it is known that their processes ended; what has their process ids now is another's.

    `root` holds proc/ and sys/. Raises MachineError for what no kernel writes there.
    """
    system = Tree(str(root).rstrip("/"))
    nodes = system.numbers(_NODES_ONLINE) or CpuSet({0})  # a kernel without NUMA shows no nodes and has one
    reader = _Reader(root=root, online=system.numbers(_CPUS_ONLINE))
    observer = os.getpid() if root == LIVE else None  # started by a rank, it is no part of what it looks at
    children = {pid: [child for child in below if child != observer] for pid, below in proc.children_of(root).items()}
    ranks = tuple(
        ObservedRank(local_rank=rank, pid=pid, processes=() if rank in gone else tuple(reader.tree(pid, children)))
        for rank, pid in sorted(pids.items())
    )
    return Observed(nodes=nodes, ranks=ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Reads processes below `root`; `online` are the CPUs there are, None where that is unknown."""

    root: Path
    online: CpuSet | None

    def tree(self, rank: int, children: Mapping[int, list[int]]) -> Iterator[Process]:
        """Read a rank and its descendants, parents first."""
        todo = [rank]
        while todo:
            pid = todo.pop(0)
            todo += children.get(pid, [])
            try:
                yield self._process(pid, is_rank=pid == rank)
            except proc.Gone:
                continue

    def _process(self, pid: int, *, is_rank: bool) -> Process:
        folder = proc.folder_of(pid, self.root)
        stat = proc.stat(folder)
        if stat.has_ended:
            raise proc.Gone
        threads = tuple(self._threads(folder))
        maps, unreadable = _numa_maps(folder)
        policy, pages = (None, None) if maps is None else maps
        environ = proc.environment_of(pid, root=self.root) or {}
        return Process(
            pid=pid,
            name=stat.name,
            role=_role(stat.name, pages or (), is_rank=is_rank),
            threads=threads,
            policy=policy,
            pages=pages,
            unreadable=unreadable,
            openmp=tuple(printable(f"{name}={value}") for name, value in binding_variables(environ).items()),
        )

    def _threads(self, process: str) -> Iterator[Thread]:
        try:
            tids = sorted(map(int, os.listdir(f"{process}/task")))  # noqa: PTH208 - names are enough
        except (FileNotFoundError, ProcessLookupError):
            raise proc.Gone from None
        for tid in tids:
            folder = f"{process}/task/{tid}"
            try:
                stat, cpus = proc.stat(folder), _allowed_cpus(f"{folder}/status")
            except proc.Gone:
                continue  # threads end, too
            # A mask may have CPUs that are possible but not present, as on virtual machines.
            cpus = cpus if self.online is None else cpus & self.online
            yield Thread(tid=tid, name=stat.name, cpus=cpus, last_cpu=stat.last_cpu)


def _role(name: str, pages: tuple[Pages, ...], *, is_rank: bool) -> Role:
    """Tell what a process is: workers by their name, or since they alone of the children map a ring."""
    if is_rank:
        return Role.RANK
    has_ring = any(each.kind is MemoryKind.RING for each in pages)
    return Role.WORKER if has_ring or name.startswith(_WORKER_NAME) else Role.OTHER


def _allowed_cpus(status: str) -> CpuSet:
    found = re.search(r"^Cpus_allowed_list:\s*(\S+)$", proc.read(status), re.MULTILINE)
    try:
        return CpuSet.parse(found[1] if found else "no list")
    except ValueError as error:
        raise proc.garbled(status, f"Cpus_allowed_list: {error}") from None


def _numa_maps(process: str) -> tuple[tuple[Policy | None, tuple[Pages, ...]] | None, str | None]:
    """Read where a process's memory is; None, and the reason, where the kernel does not say."""
    path = f"{process}/numa_maps"
    try:
        text = proc.read(path)
    except PermissionError:
        return None, "its memory may not be read; run this as the job's user, or as root"
    except proc.Gone:
        proc.stat(process)  # raises Gone if the process ended, too
        return None, "the kernel has no numa_maps"
    if not text:
        raise proc.Gone  # it has let go of its memory already
    return _pages(text, source=path), None


def _pages(text: str, *, source: str) -> tuple[Policy | None, tuple[Pages, ...]]:
    """Return the main thread's policy, and the bytes on each node by kind and policy.

    The first stack is no mapping that a program gave a policy of its own, so that its line shows the thread's.
    """
    sizes: dict[tuple[MemoryKind, Policy], Counter[int]] = {}
    task_policy = None
    has_gpu = " file=/dev/nvidia" in text  # there /dev/zero is how CUDA's driver maps what it page-locks
    try:
        for mapping in numa_maps.parse(text):
            policy = Policy(mode=mapping.mode, nodes=CpuSet.parse(mapping.nodes))
            kind = _kind(mapping.words)
            if kind is MemoryKind.SHARED and has_gpu and " file=/dev/zero" in mapping.words:
                kind = MemoryKind.PINNED
            if kind is MemoryKind.STACK:
                task_policy = policy
            sizes.setdefault((kind, policy), Counter()).update(mapping.bytes_by_node)
    except ValueError as error:
        raise proc.garbled(source, str(error)) from None
    pages = tuple(
        Pages(kind=kind, policy=policy, bytes_by_node=found) for (kind, policy), found in sizes.items() if found
    )
    return task_policy, pages


def _kind(words: str) -> MemoryKind:
    file = _FILE.search(words)
    if file is not None:
        return next((kind for start, kind in _KINDS if file[1].startswith(start)), MemoryKind.FILE)
    first = words.split()[:1]
    return {"heap": MemoryKind.HEAP, "stack": MemoryKind.STACK}.get("".join(first), MemoryKind.ANONYMOUS)
