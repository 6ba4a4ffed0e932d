"""The processes at and below given ones that stand for ranks, and the GPU of each, whatever started them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.bounds import MAX_RANKS
from numapin.base.text import listed
from numapin.errors import MachineError, UsageError
from numapin.system import proc
from numapin.tasks.identify import parse_count
from numapin.topology.sources.nvml import read_processes
from numapin.topology.vendors import hiding_variables, seen_by_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numapin.topology.model import Gpu, Topology

LIST_PROCESSES: Final = "list processes with: nvidia-smi, or pgrep -af COMMAND"
_FIRST_NAMESPACE: Final = 0xEFFFFFFC  # PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h


class KnownGpu(NamedTuple):
    """A process's GPU and how it is known. `gpu` None: unknown, and `source` has the reason."""

    gpu: Gpu | None
    source: str


class Candidate(NamedTuple):
    """A process that stands for a rank, the environment that it started with (None: unreadable), and its GPU."""

    pid: int
    environ: Mapping[str, str] | None
    known: KnownGpu


def targets_below(pids: Sequence[int], topology: Topology, children: Mapping[int, list[int]]) -> list[Candidate]:
    """Return the processes at and below these that stand for ranks, each once.

    A process with a LOCAL_RANK is one. So is one that computes on a GPU or sees a single GPU, unless it started a
    process with a LOCAL_RANK. Its descendants belong to it, unless the driver sees one compute on another GPU. Any
    other process, such as a launcher, stands for the nearest ones below it, or for itself if there are none.
    `children` are as of `proc.children_of`.
    """
    computing = read_processes()
    if computing and proc.pid_namespace() != _FIRST_NAMESPACE:
        # In a container, the driver may report the host's process ids: only a process with a GPU open counts there.
        computing = {pid: uuids for pid, uuids in computing.items() if proc.has_open(pid, "/dev/nvidia")}
    environ_of = cache(proc.environment_of)

    def rank_of(pid: int) -> int | None:
        return local_rank(environ_of(pid) or {})

    def candidate(pid: int) -> Candidate:
        environ = environ_of(pid)
        return Candidate(pid, environ, gpu_of(topology, environ or {}, computing.get(pid, ())))

    def is_target(pid: int) -> bool:
        if rank_of(pid) is not None:
            return True
        if any(rank_of(below) is not None for below in proc.descendants(pid, children)):
            return False  # a launcher, even if it computes: a notebook, or a search for parameters
        environ = environ_of(pid) or {}
        is_limited = any(name in environ for name in hiding_variables())
        return pid in computing or (is_limited and len(visible_gpus(topology, environ)) == 1)

    nearest: dict[int, list[int]] = {}  # to each process that was given, in order -> the processes below it
    for given in pids:
        found_here: list[int] = []
        covered: set[int] = set()
        for pid in (given, *proc.descendants(given, children)):
            if pid not in covered and is_target(pid):
                found_here.append(pid)
                covered.update(proc.descendants(pid, children))
        nearest |= {pid: proc.descendants(pid, children) for pid in found_here or [given]}

    found: dict[int, Candidate] = {}
    for pid, below in nearest.items():
        # The processes were not read at one moment, so two may each appear below the other.
        above = [other for other, others in nearest.items() if pid in others and other not in below]
        if any(rank_of(pid) in (None, rank_of(other)) for other in above):
            continue  # it belongs to another one that was given, too
        found[pid] = candidate(pid)
        for other in map(candidate, filter(computing.__contains__, below)):
            if other.known.gpu not in (None, found[pid].known.gpu):
                found[other.pid] = other
    return list(found.values())


def gpu_of(  # noqa: PLR0911 - one return per way to know
    topology: Topology, environ: Mapping[str, str], uuids: Sequence[str]
) -> KnownGpu:
    """Return the GPU of a process; `uuids` are those of the GPUs on which the driver sees it compute.

    1. The GPU on which the driver sees it compute. Of several, the one that its LOCAL_RANK names.
    2. The GPU that LOCAL_RANK names among those that CUDA_VISIBLE_DEVICES (AMD, Intel: their variables) shows.
    3. The only GPU that these variables show.
    """
    computing = [gpu for gpu in topology.gpus if gpu.uuid in uuids]
    visible, rank = visible_gpus(topology, environ), local_rank(environ)
    named = visible[rank % len(visible)] if visible and rank is not None else None
    given = [f"{name}={environ[name][:60]}" for name in hiding_variables() if name in environ]
    shown = f" ({', '.join(given)})" if given else ""
    if computing:
        if named not in computing and len(computing) > 1:
            names = listed("GPU", [gpu.index for gpu in computing])
            return KnownGpu(None, f"it computes on {names}, and no LOCAL_RANK says which is its own")
        return KnownGpu(named if named in computing else computing[0], "the driver sees it compute there")
    if named is not None:
        return KnownGpu(named, f"LOCAL_RANK={environ['LOCAL_RANK']}{shown}")
    if not topology.has_usable_gpu:
        return KnownGpu(None, "this host has no GPU")
    if len(visible) == 1:
        return KnownGpu(visible[0], f"the only GPU that it sees{shown}")
    if not visible:
        return KnownGpu(None, f"it sees no GPU{shown}, or CUDA's order is unknown")
    names = listed("GPU", [gpu.index for gpu in visible])
    return KnownGpu(None, f"it computes on none yet, has no LOCAL_RANK, and sees {names}{shown}")


def visible_gpus(topology: Topology, environ: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that a process's runtime sees, in its order; none if the order is unknown."""
    seen, _ = seen_by_ranks(topology.vendor_gpus, environ)
    ordered = sorted((gpu.cuda_index, gpu.index) for gpu in seen if gpu.visible and gpu.cuda_index is not None)
    by_index = {gpu.index: gpu for gpu in topology.gpus}
    return [by_index[index] for _, index in ordered]


def gpus_of_ranks(visible: Sequence[int], given: Mapping[int, int], num_ranks: int) -> tuple[int | None, ...]:
    """Return the GPU of each rank: the one that it was given, or that of its turn among several visible ones.

    A rank that was given another GPU than that of its turn trades with the rank whose turn it is: otherwise that one
    would be taken to use the same GPU. None: unknown.
    """
    turns = [visible[rank % len(visible)] if len(visible) > 1 else None for rank in range(num_ranks)]
    for rank, gpu in given.items():
        others = (other for other, turn in enumerate(turns) if turn == gpu and other not in given)
        turns[next(others, rank)] = turns[rank]
        turns[rank] = gpu
    return tuple(turns)


def local_rank(environ: Mapping[str, str], name: str = "LOCAL_RANK") -> int | None:
    """Return a process's LOCAL_RANK; None if it is unset, or not a number that a launcher would write."""
    number = parse_count(environ.get(name, ""))
    return number if number is not None and number < MAX_RANKS else None


def numbered(environs: Sequence[Mapping[str, str]]) -> tuple[list[int], int]:
    """Return the local rank of each process, and the number of ranks of their job, those that were not given included.

    They are numbered in their order if LOCAL_RANK does not distinguish them.
    """
    ranks = [rank for environ in environs if (rank := local_rank(environ)) is not None]
    numbers = ranks if len(set(ranks)) == len(environs) else list(range(len(environs)))
    sizes = (local_rank(environ, "LOCAL_WORLD_SIZE") or 0 for environ in environs)
    return numbers, max(max(numbers) + 1, *sizes)


def require_program(pid: int) -> proc.Stat:
    """Return the `stat` of a process that a user may name.

    Raises UsageError for one that does not exist, is a thread or of the kernel, or is the first process, which is an
    ancestor of every job; MachineError if it is hidden.
    """
    folder = proc.folder_of(pid)
    try:
        leader, found = int(proc.status_field(folder, "Tgid")), proc.stat(folder)
    except proc.Gone:
        raise UsageError(f"there is no process {pid}", LIST_PROCESSES) from None
    except PermissionError:
        raise MachineError(f"process {pid} belongs to another user", "run this as that user, or as root") from None
    if leader != pid:
        raise UsageError(f"{pid} is a thread of process {leader}", f"name its process: --pid {leader}")
    if found.has_ended:
        raise UsageError(f"there is no process {pid}", LIST_PROCESSES)
    if found.is_kernel_thread:
        raise UsageError(f"process {pid} is a kernel thread", LIST_PROCESSES)
    if pid == 1:
        raise UsageError(
            "process 1 is the first process of this host or container, above all jobs",
            f"name a rank or its launcher; {LIST_PROCESSES}",
        )
    return found
