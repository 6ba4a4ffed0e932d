"""A job's share of a machine, given the `Topology` of one of the cluster's hosts: GPUs, CPUs, memory.

The --gpus of Slurm, of other launchers and of people is a number of GPUs; ours lists them, as in `numapin run`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from numapin.base.formats import gib
from numapin.base.text import counted
from numapin.errors import UsageError
from numapin.topology.model import NodeKind
from numapin.topology.vendors import GpuVendor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.jobs.request import JobRequest
    from numapin.topology.model import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a host that belongs to some of its GPUs: whole cores, and memory if its size is known."""

    cores: int
    threads_per_core: int
    memory_bytes: int | None
    is_whole: bool

    def cpus_of(self, tasks: int) -> int:
        """Return the CPUs of each of `tasks` tasks, in whole cores. Raises UsageError if there are too few cores."""
        if self.cores < tasks:
            raise UsageError(
                f"{tasks} tasks per host are more than the {counted(self.cores, 'core')} of their share",
                "give fewer --ranks-per-node, or the number of CPUs yourself: --cpus-per-task",
            )
        return self.cores // tasks * self.threads_per_core


def gpus_per_host(given: int | None, topology: Topology | None, *, named: Sequence[str] | None) -> int:
    """Return the number of GPUs per host. Raises UsageError if it is unknown."""
    if given is not None:
        return given
    if topology is not None:
        return len(topology.vendor_gpus)
    number = _only_number(named)
    if number is not None:
        raise UsageError(
            f"the number of GPUs per host is unknown: --gpus {number} names one GPU, number {number}",
            f"for {number} GPUs per host, give --gpus-per-node {number}",
        )
    raise UsageError(
        "the number of GPUs per host is unknown",
        "give --gpus-per-node N (0 for none), or --machine FILE (topo --save)",
    )


def require_gpu_per_rank(named: Sequence[str] | None, *, num_ranks: int) -> None:
    """Raise UsageError if --gpus names too few GPUs for a host's ranks, because NCCL accepts no GPU twice."""
    if named is None or len(named) >= num_ranks:
        return
    number = _only_number(named)
    if number is not None:
        raise UsageError(
            f"--gpus {number} names one GPU, number {number}, for the {num_ranks} ranks of a host",
            f"for {number} GPUs per host, give --gpus-per-node {number}; --gpus lists GPUs by number: --gpus 0,1",
        )
    raise UsageError(
        f"--gpus {','.join(named)} names {counted(len(named), 'GPU')} for the {num_ranks} ranks of a host",
        f"each rank needs its own GPU: --ranks-per-node {len(named)}, or name more GPUs",
    )


def _only_number(named: Sequence[str] | None) -> str | None:
    """Return the value of --gpus if it is one number, which may have been meant as a number of GPUs."""
    return named[0] if named and len(named) == 1 and named[0].isdecimal() else None


def share_of(topology: Topology, *, gpus: int, smt: bool, spare_cores_per_node: int = 0) -> Share:
    """Return the share of `gpus` GPUs of this machine: the same fraction of its cores and memory as of its GPUs.

    `spare_cores_per_node` are left to the system on every NUMA node with CPUs.
    """
    num_gpus = len(topology.vendor_gpus)
    if gpus > num_gpus:
        raise UsageError(
            f"--gpus-per-node {gpus}: {topology.source} has {counted(num_gpus, 'GPU')}",
            "give a machine file of the job's hosts",
        )
    part, whole = (gpus, num_gpus) if gpus else (1, 1)
    num_cores = len(topology.cores) - spare_cores_per_node * len(topology.cpu_nodes)
    memory_bytes = _memory_bytes(topology)
    return Share(
        cores=max(num_cores, 1) * part // whole,
        threads_per_core=min(len(core.cpus) for core in topology.cores) if smt else 1,
        memory_bytes=memory_bytes and memory_bytes * part // whole,
        is_whole=part == whole,
    )


def why_whole_hosts(request: JobRequest) -> tuple[str, ...]:
    """Return a warning if a job takes whole hosts because nothing says which part of them belongs to its GPUs."""
    if not request.whole_nodes or request.cpus_per_task is not None or not request.gpus_per_node:
        return ()
    return (
        f"the job takes whole hosts: the CPUs and memory that belong to {counted(request.gpus_per_node, 'GPU')} are "
        "unknown; to share hosts, give --machine FILE (numapin topo --save FILE), or --cpus-per-task N and "
        "--mem-per-node SIZE",
    )


def vendor_of_ranks(topology: Topology | None) -> GpuVendor:
    """Return the maker of the GPUs that ranks use; NVIDIA without a machine file or without GPUs."""
    gpus = topology.vendor_gpus if topology else ()
    return next((gpu.vendor for gpu in gpus if gpu.vendor), GpuVendor.NVIDIA)


def tiles_per_gpu(topology: Topology | None) -> int:
    """Return the number of tiles of each Intel GPU; 1 for others, whose partitions clusters count as GPUs."""
    gpus = topology.vendor_gpus if topology else ()
    tiles = [gpu.pci for gpu in gpus if gpu.vendor is GpuVendor.INTEL and gpu.partition is not None]
    return len(tiles) // len(set(tiles)) if tiles else 1


def require_present(topology: Topology, *, cpus: int | None, memory_bytes: int | None) -> None:
    """Raise UsageError if a job requests more CPUs or memory of a host than this machine has. None: no request."""
    num_cpus = len(topology.cpus)
    if cpus is not None and cpus > num_cpus:
        raise UsageError(
            f"{cpus} CPUs per host are more than the {num_cpus} of {topology.source}",
            "give fewer --cpus-per-task, or a machine file of the job's hosts",
        )
    _require_memory(topology, memory_bytes)


def _require_memory(topology: Topology, memory_bytes: int | None) -> None:
    size_bytes = _memory_bytes(topology)
    if memory_bytes is not None and size_bytes is not None and memory_bytes > size_bytes:
        raise UsageError(
            f"--mem-per-node {gib(memory_bytes)} is more than the {gib(size_bytes)} of {topology.source}",
            "give less --mem-per-node, or a machine file of the job's hosts",
        )


def _memory_bytes(topology: Topology) -> int | None:
    """Return the size of the host's memory, without that of GPUs. None: a node's size is unknown."""
    sizes = [node.memory_bytes for node in topology.nodes if node.kind is not NodeKind.GPU]
    return None if None in sizes else sum(filter(None, sizes))
