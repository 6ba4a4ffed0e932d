"""A job's share of a machine, given the `Topology` of one of the cluster's hosts: GPUs, CPUs, memory.

The --gpus of Slurm, of other launchers and of people is a number of GPUs; ours lists them, as in `numapin run`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from numapin.base.formats import gib
from numapin.base.text import counted
from numapin.errors import UsageError
from numapin.topology.model import NodeKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.jobs.request import JobRequest
    from numapin.topology.model import Topology

_MEMORY_PART: Final = 0.9  # of a host's memory; the rest is left to the system


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


def sized(request: JobRequest, topology: Topology, *, spare_cores: int, memory_by_number: bool) -> JobRequest:
    """Return the request with the CPUs and the memory that go with its GPUs, unless it has numbers of its own.

    They are the same fraction of the host's whole cores and memory as of its GPUs, without `spare_cores` of
    every NUMA node with CPUs. Without `memory_by_number` the manager gives all memory of a whole host by itself.
    Raises UsageError for more than the host has.
    """
    cpus, memory_bytes, num_gpus = request.cpus_per_node, request.memory_bytes, len(topology.vendor_gpus)
    sizes = [node.memory_bytes for node in topology.nodes if node.kind is not NodeKind.GPU]
    host_bytes = None if None in sizes else sum(filter(None, sizes))
    if cpus is not None and cpus > len(topology.cpus):
        raise UsageError(
            f"{cpus} CPUs per host are more than the {len(topology.cpus)} of {topology.source}",
            "give fewer --cpus-per-task, or a machine file of the job's hosts",
        )
    if memory_bytes is not None and host_bytes is not None and memory_bytes > host_bytes:
        raise UsageError(
            f"--mem-per-node {gib(memory_bytes)} is more than the {gib(host_bytes)} of {topology.source}",
            "give less --mem-per-node, or a machine file of the job's hosts",
        )
    if request.gpus_per_node > num_gpus:
        raise UsageError(
            f"--gpus-per-node {request.gpus_per_node}: {topology.source} has {counted(num_gpus, 'GPU')}",
            "give a machine file of the job's hosts",
        )
    part, whole = (request.gpus_per_node, num_gpus) if request.gpus_per_node else (1, 1)

    cpus_per_task = request.cpus_per_task
    if cpus_per_task is None:
        num_cores = len(topology.cores) - spare_cores * len(topology.cpu_nodes)
        cores = max(num_cores, 1) * part // whole
        if cores < request.tasks_per_node:
            raise UsageError(
                f"{request.tasks_per_node} tasks per host are more than the {counted(cores, 'core')} of their share",
                "give fewer --ranks-per-node, or the number of CPUs yourself: --cpus-per-task",
            )
        threads_per_core = min(len(core.cpus) for core in topology.cores) if request.smt else 1
        cpus_per_task = cores // request.tasks_per_node * threads_per_core
    is_implied = part == whole and not memory_by_number
    if memory_bytes is None and not is_implied and host_bytes is not None:
        memory_bytes = int(host_bytes * part // whole * _MEMORY_PART)
    return replace(
        request,
        cpus_per_task=cpus_per_task,
        memory_bytes=memory_bytes,
        whole_nodes=part == whole and request.cpus_per_task is None,
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
