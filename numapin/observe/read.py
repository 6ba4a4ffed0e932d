"""Reader for the threads and pages of running processes.

No process is stopped. The kernel walks each process's page tables once. A process that ends in the meantime is left
out.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.cpu_set import CpuSet
from numapin.base.text import printable
from numapin.observe.model import MemoryKind, NcclLibrary, Observed, ObservedRank, Pages, Policy, Process, Role, Thread
from numapin.observe.verify import VerifyReport, verify
from numapin.system import numa_maps, proc
from numapin.system.cgroup import cpuset_of
from numapin.system.libraries import binding_variables, ignores_affinity, mapped_library
from numapin.system.nccl_files import library_version
from numapin.system.tree import NODES, Tree

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numapin.observe.find import RunningJob

LIVE: Final = Path(proc.LIVE)

_MOMENT_S: Final = 0.2
_WORKER_NAME: Final = "pt_data_worker"  # torch's name for DataLoader workers since 2.6
_CPUS_ONLINE: Final = "sys/devices/system/cpu/online"

_FILE: Final = re.compile(r" file=(\S+)")

_SHM: Final = "/dev/shm/"  # noqa: S108 - compared with names, never opened
# A prefix of the mapped file's name -> the kind of memory; the first match counts.
_KINDS: Final = (
    ("/memfd:numapin-slot", MemoryKind.SLOT),
    (f"{_SHM}torch_", MemoryKind.TORCH_SHARED),
    (_SHM, MemoryKind.SHARED),
    ("/memfd:", MemoryKind.SHARED),
    ("/SYSV", MemoryKind.SHARED),
    ("/dev/zero", MemoryKind.SHARED),  # an anonymous mapping that is shared
    ("/anon_hugepage", MemoryKind.ANONYMOUS),  # hugetlbfs's name for memory without a file
)
_OTHER_GPUS: Final = ("/dev/kfd", "/dev/dri/render")  # AMD's compute driver; AMD's and Intel's GPUs
_UNNAMED_KINDS: Final = {"heap": MemoryKind.HEAP, "stack": MemoryKind.STACK}


def verify_running(job: RunningJob) -> VerifyReport:
    """Observe a job and compare it with its plan; threads that are on other CPUs than planned are read once more.

    CUDA and NCCL put a rank's main thread on one CPU for a moment while they start.
    """
    report = verify(job, observe(job.pids, gone=job.gone))
    if any(rank.num_off_plan for rank in report.ranks):
        time.sleep(_MOMENT_S)
        report = verify(job, observe(job.pids, gone=job.gone))
    return report


def observe(pids: Mapping[int, int], *, gone: frozenset[int] = frozenset(), root: Path = LIVE) -> Observed:
    """Read the ranks' process trees; `pids` are by local rank, and `root` holds proc/ and sys/.

    Ranks that are `gone` have ended, and other processes may have their ids. Raises MachineError for a file that does
    not hold what kernels write.
    """
    system = Tree(str(root).rstrip("/"))
    nodes = system.numbers(f"{NODES}/online") or CpuSet({0})  # a kernel without NUMA shows no nodes and has one
    online = system.numbers(_CPUS_ONLINE)
    # A rank that starts another one does not contain it. A rank may have started this process, too.
    others = {*pids.values(), os.getpid()} if root == LIVE else {*pids.values()}
    children = proc.children_of(dict(proc.processes(root, without=others)))
    ranks = []
    for rank, pid in sorted(pids.items()):
        tree: list[Process] = []
        for member in () if rank in gone else (pid, *proc.descendants(pid, children)):
            with suppress(proc.Gone):
                tree.append(_process(member, root=root, online=online, is_rank=member == pid))
        cpuset = cpuset_of(system, pid) if tree else None
        ranks.append(ObservedRank(local_rank=rank, pid=pid, processes=tuple(tree), cpuset=cpuset))
    return Observed(nodes=nodes, ranks=tuple(ranks))


class MemoryReading(NamedTuple):
    """The mappings of a process with their kinds, and the policy of its main thread; or the reason why not.

    `hides_pinned` is as in `Process`.
    """

    mappings: tuple[tuple[numa_maps.Mapping, Policy, MemoryKind], ...] = ()
    policy: Policy | None = None
    unreadable: str | None = None
    hides_pinned: bool = False


def _process(pid: int, *, root: Path, online: CpuSet | None, is_rank: bool) -> Process:
    """Read a process; `online` are the CPUs that are present, None if unknown. Raises Gone."""
    folder = proc.folder_of(pid, root)
    stat = proc.stat(folder)
    if stat.has_ended:
        raise proc.Gone
    try:
        tids = sorted(int(path.name) for path in Path(folder, "task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        raise proc.Gone from None
    threads = []
    for tid in tids:
        with suppress(proc.Gone):  # threads end, too
            threads.append(_thread(tid, f"{folder}/task/{tid}", online))
    memory = read_memory(folder)
    sizes: dict[tuple[MemoryKind, Policy], Counter[int]] = {}
    for mapping, policy, kind in memory.mappings:
        sizes.setdefault((kind, policy), Counter()).update(mapping.bytes_by_node)
    pages = tuple(
        Pages(kind=kind, policy=policy, bytes_by_node=found) for (kind, policy), found in sizes.items() if found
    )
    # Workers are known by their name, or as the only children that map a slot.
    is_worker = stat.name.startswith(_WORKER_NAME) or any(each.kind is MemoryKind.SLOT for each in pages)
    role = Role.WORKER if is_worker else Role.OTHER
    environ = proc.environment_of(pid, root=root) or {}
    return Process(
        pid=pid,
        name=stat.name,
        role=Role.RANK if is_rank else role,
        threads=tuple(threads),
        policy=memory.policy,
        pages=pages if memory.unreadable is None else None,
        unreadable=memory.unreadable,
        openmp=tuple(printable(f"{name}={value}") for name, value in binding_variables(environ).items()),
        nccl=_nccl(folder, environ) if is_rank else None,
        hides_pinned=memory.hides_pinned,
    )


def _thread(tid: int, folder: str, online: CpuSet | None) -> Thread:
    stat, path = proc.stat(folder), f"{folder}/status"
    found = re.search(r"^Cpus_allowed_list:\s*(\S+)$", proc.read(path), re.MULTILINE)
    try:
        cpus = CpuSet.parse(found[1] if found else "no list")
    except ValueError as error:
        raise proc.garbled(path, f"Cpus_allowed_list: {error}") from None
    # A mask may have CPUs that are possible but not present, as on virtual machines.
    return Thread(tid=tid, name=stat.name, cpus=cpus if online is None else cpus & online, last_cpu=stat.last_cpu)


def _nccl(process: str, environ: Mapping[str, str]) -> NcclLibrary | None:
    """Return the NCCL library that a process has mapped; its path may be that of a container."""
    try:
        path = mapped_library(proc.read(f"{process}/maps"))
    except (proc.Gone, PermissionError):
        return None
    if path is None:
        return None
    version = library_version(f"{process}/root{path}")
    return NcclLibrary(library=printable(path), version=version, ignores_affinity=ignores_affinity(environ))


def read_memory(process: str) -> MemoryReading:
    """Read the numa_maps of a process by its folder. Raises Gone, and MachineError for text that no kernel writes.

    The line of the first stack shows the thread's policy: programs give that mapping no policy of its own.
    """
    path = f"{process}/numa_maps"
    try:
        text = proc.read(path)
    except PermissionError:
        return MemoryReading(unreadable="its memory cannot be read; run this as the job's user, or as root")
    except proc.Gone:
        proc.stat(process)  # raises Gone if the process has ended, too
        return MemoryReading(unreadable="the kernel has no numa_maps")
    if not text:
        raise proc.Gone  # it has released its memory already
    has_gpu = " file=/dev/nvidia" in text
    mappings = []
    try:
        for mapping in numa_maps.parse(text):
            policy = Policy(mode=mapping.mode, nodes=CpuSet.parse(mapping.nodes))
            mappings.append((mapping, policy, _kind(mapping.words, has_gpu=has_gpu)))
    except ValueError as error:
        raise proc.garbled(path, str(error)) from None
    return MemoryReading(
        mappings=tuple(mappings),
        policy=next((policy for _, policy, kind in mappings if kind is MemoryKind.STACK), None),
        hides_pinned=not has_gpu and any(f" file={device}" in text for device in _OTHER_GPUS),
    )


def _kind(words: str, *, has_gpu: bool) -> MemoryKind:
    """Return the kind of a mapping. With a GPU, CUDA's driver maps page-locked memory through /dev/zero."""
    file = _FILE.search(words)
    if file is None:
        first = "".join(words.split()[:1])
        return _UNNAMED_KINDS.get(first, MemoryKind.ANONYMOUS)
    if has_gpu and file[1].startswith("/dev/zero"):
        return MemoryKind.PINNED
    return next((kind for prefix, kind in _KINDS if file[1].startswith(prefix)), MemoryKind.FILE)
