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

from numapin.base import cpu_set
from numapin.base.printable import printable
from numapin.errors import MachineError
from numapin.observe.model import MemoryKind, Observed, ObservedRank, Pages, Policy, Process, Role, Thread
from numapin.system.openmp import binding_variables
from numapin.system.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LIVE: Final = Path("/")

_WORKER_NAME: Final = "pt_data_worker"  # torch names its DataLoader's workers so since 2.6
_NODES_ONLINE: Final = "sys/devices/system/node/online"
_CPUS_ONLINE: Final = "sys/devices/system/cpu/online"

_LINE: Final = re.compile(
    r"[0-9a-f]+ (?P<mode>(?:weighted )?[a-z]+(?: \(many\))?)(?:=[a-z|]+)?(?::(?P<nodes>[0-9,-]+))?(?P<words>(?: .*)?)"
)
_PAGES_OF_NODE: Final = re.compile(r" N(\d{1,6})=(\d{1,18})(?= |$)", re.ASCII)
_PAGE_KB: Final = re.compile(r" kernelpagesize_kB=(\d{1,12})(?= |$)", re.ASCII)
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

_ENDED: Final = ("Z", "X")  # states of a process that waits to be waited for
_GONE_ERRORS: Final = (FileNotFoundError, ProcessLookupError)


class _Gone(Exception):  # noqa: N818 - no error: processes end
    """The process ended while it was read."""


def observe(pids: Mapping[int, int], *, gone: frozenset[int] = frozenset(), root: Path = LIVE) -> Observed:
    """Read the ranks' process trees; `pids` are local rank -> process id.

    Of the ranks in `gone` it is known that their processes ended; what has their process ids now is another's.

    `root` holds proc/ and sys/. Raises MachineError for what no kernel writes there.
    """
    system = Tree(str(root).rstrip("/"))
    nodes = system.numbers(_NODES_ONLINE) or frozenset({0})  # a kernel without NUMA shows no nodes and has one
    reader = _Reader(root=root, online=system.numbers(_CPUS_ONLINE))
    observer = os.getpid() if root == LIVE else None  # started by a rank, it is no part of what it looks at
    children = {pid: [child for child in below if child != observer] for pid, below in children_of(root).items()}
    ranks = tuple(
        ObservedRank(local_rank=rank, pid=pid, processes=() if rank in gone else tuple(reader.tree(pid, children)))
        for rank, pid in sorted(pids.items())
    )
    return Observed(nodes=nodes, ranks=ranks)


def children_of(root: Path = LIVE) -> dict[int, list[int]]:
    """Return the children of every process that has some; not every kernel tells them itself (CONFIG_PROC_CHILDREN)."""
    children: dict[int, list[int]] = {}
    for folder in sorted((root / "proc").iterdir()):
        if folder.name.isdecimal():
            try:
                _, state, parent, _ = _stat(folder / "stat")
            except (
                _Gone,
                PermissionError,
            ):  # mounted with hidepid=1, /proc shows others' processes and not what they are
                continue
            if state not in _ENDED:
                children.setdefault(parent, []).append(int(folder.name))
    return children


def thread_cpus(pid: int) -> tuple[frozenset[int], ...]:
    """Return the CPUs that each thread of a process may use; none where it ended.

    System calls instead of text, some microseconds a thread: fit to be asked every second.
    """
    try:
        if _stat(LIVE / "proc" / str(pid) / "stat")[1] in _ENDED:
            return ()
        tids = [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208 - a Path a thread costs more
    except (_Gone, *_GONE_ERRORS):
        return ()
    return tuple(cpus for tid in tids if (cpus := _affinity(tid)))


def _affinity(tid: int) -> frozenset[int]:
    try:
        return frozenset(os.sched_getaffinity(tid))
    except ProcessLookupError:  # threads end
        return frozenset()


def is_running(pid: int, start: int | None = None, *, root: Path = LIVE) -> bool:
    """Return whether a process is there and has not ended; one that may not be read is there.

    With `start`, as its record has it, one that started at another time has got the process id of one that ended.
    """
    path = root / "proc" / str(pid) / "stat"
    try:
        return _stat(path)[1] not in _ENDED and start in (None, _start_time(path))
    except _Gone:
        return False
    except PermissionError:
        return True


def state_of(pid: int) -> str | None:
    """Return a process's state ("S" sleeps, "T" is stopped: proc_pid_stat(5)), None where it cannot be read."""
    try:
        return _stat(LIVE / "proc" / str(pid) / "stat")[1]
    except (_Gone, OSError):  # not ours, or no descriptor is left
        return None


def environment_of(pid: int, *, root: Path = LIVE) -> dict[str, str] | None:
    """Return the environment that a process started with, None where it is gone or another user's."""
    try:
        text = _read(root / "proc" / str(pid) / "environ")
    except (_Gone, PermissionError):
        return None
    pairs = (line.partition("=") for line in text.split("\0"))
    return {name: value for name, equals, value in pairs if equals}


def parent_of(pid: int, *, root: Path = LIVE) -> int:
    """Return the parent's process id, 0 where that is outside of this container, or nobody tells."""
    try:
        return _stat(root / "proc" / str(pid) / "stat")[2]
    except (_Gone, PermissionError):
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Reads processes below `root`; `online` are the CPUs there are, None where that is unknown."""

    root: Path
    online: frozenset[int] | None

    def tree(self, rank: int, children: Mapping[int, list[int]]) -> Iterator[Process]:
        """Read a rank and its descendants, parents first."""
        todo = [rank]
        while todo:
            pid = todo.pop(0)
            todo += children.get(pid, [])
            try:
                yield self._process(pid, is_rank=pid == rank)
            except _Gone:
                continue

    def _process(self, pid: int, *, is_rank: bool) -> Process:
        folder = self.root / "proc" / str(pid)
        name, state, _, _ = _stat(folder / "stat")
        if state in _ENDED:
            raise _Gone
        threads = tuple(self._threads(folder))
        maps, unreadable = _numa_maps(folder)
        policy, pages = (None, None) if maps is None else maps
        environ = environment_of(pid, root=self.root) or {}
        return Process(
            pid=pid,
            name=name,
            role=_role(name, pages or (), is_rank=is_rank),
            threads=threads,
            policy=policy,
            pages=pages,
            unreadable=unreadable,
            openmp=tuple(printable(f"{name}={value}") for name, value in binding_variables(environ).items()),
        )

    def _threads(self, process: Path) -> Iterator[Thread]:
        try:
            folders = sorted((process / "task").iterdir(), key=lambda folder: int(folder.name))
        except _GONE_ERRORS:
            raise _Gone from None
        for folder in folders:
            try:
                name, _, _, last_cpu = _stat(folder / "stat")
                cpus = _allowed_cpus(folder / "status")
            except _Gone:
                continue  # threads end, too
            # A mask may have CPUs that are possible and not there, as on virtual machines.
            cpus = cpus if self.online is None else cpus & self.online
            yield Thread(tid=int(folder.name), name=name, cpus=cpus, last_cpu=last_cpu)


def _role(name: str, pages: tuple[Pages, ...], *, is_rank: bool) -> Role:
    """Tell what a process is: workers by their name, or since they alone of the children map a ring."""
    if is_rank:
        return Role.RANK
    has_ring = any(each.kind is MemoryKind.RING for each in pages)
    return Role.WORKER if has_ring or name.startswith(_WORKER_NAME) else Role.OTHER


def _allowed_cpus(status: Path) -> frozenset[int]:
    found = re.search(r"^Cpus_allowed_list:\s*(\S+)$", _read(status), re.MULTILINE)
    try:
        return cpu_set.parse(found[1] if found else "no list")
    except ValueError as error:
        raise _garbled(status, f"Cpus_allowed_list: {error}") from None


def _stat(path: Path) -> tuple[str, str, int, int]:
    """Return name, state, parent and last CPU; the name may have blanks and brackets in it."""
    before, _, after = _read(path).rpartition(")")
    fields = after.split()
    try:
        state, parent, last_cpu = fields[0], int(fields[1]), int(fields[36])  # fields 3, 4 and 39 of proc_pid_stat(5)
    except (IndexError, ValueError):
        raise _garbled(path, f"{(before + after)[:60]!r}") from None
    name = before.partition("(")[2]
    return printable(name), state, parent, last_cpu


def _start_time(path: Path) -> int:
    """Return when a process started: field 22 of proc_pid_stat(5), as `rank.py` records it."""
    try:
        return int(_read(path).rpartition(")")[2].split()[19])
    except (IndexError, ValueError):
        raise _garbled(path, "no start time") from None


def _numa_maps(process: Path) -> tuple[tuple[Policy | None, tuple[Pages, ...]] | None, str | None]:
    """Read where a process's memory is; None, and the reason, where the kernel does not tell."""
    path = process / "numa_maps"
    try:
        text = _read(path)
    except PermissionError:
        return None, "its memory may not be read; run this as the job's user, or as root"
    except _Gone:
        _stat(process / "stat")  # it is gone, too; or else the file alone is not there
        return None, "the kernel has no numa_maps"
    if not text:
        raise _Gone  # it has let go of its memory already
    return _parse_numa_maps(text, source=path), None


def _parse_numa_maps(text: str, *, source: Path) -> tuple[Policy | None, tuple[Pages, ...]]:
    """Return the main thread's policy, and what lies where by kind and policy.

    The first stack is no mapping that a program gave a policy of its own, so that its line shows the thread's.
    Huge pages are counted as one, with their size in kernelpagesize_kB.
    """
    sizes: dict[tuple[MemoryKind, Policy], Counter[int]] = {}
    task_policy = None
    has_gpu = " file=/dev/nvidia" in text  # there /dev/zero is how CUDA's driver maps what it page-locks
    for line in text.removesuffix("\n").split("\n"):
        found = _LINE.fullmatch(line)
        if found is None:
            raise _garbled(source, repr(line[:80]))
        policy = Policy(mode=found["mode"], nodes=cpu_set.parse(found["nodes"] or ""))
        kind = _kind(found["words"])
        if kind is MemoryKind.SHARED and has_gpu and " file=/dev/zero" in line:
            kind = MemoryKind.PINNED
        if kind is MemoryKind.STACK:
            task_policy = policy
        page = _PAGE_KB.search(line)
        page_bytes = int(page[1]) * 1024 if page else 0  # a mapping without a page has no size
        counts = {int(node): int(count) * page_bytes for node, count in _PAGES_OF_NODE.findall(line)}
        sizes.setdefault((kind, policy), Counter()).update(counts)
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


def _read(path: Path) -> str:
    """Return a file's text. Raises _Gone, and PermissionError where the file is another user's."""
    try:
        return path.read_bytes().decode(errors="replace")  # text mode would take a \r in a file's name for a line's end
    except _GONE_ERRORS:
        raise _Gone from None


def _garbled(path: Path, problem: str) -> MachineError:
    return MachineError(f"{path} is not what the kernel writes: {problem}", f"see it with: cat {path}")
