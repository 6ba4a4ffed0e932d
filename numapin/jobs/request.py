"""The user's request for a job script, and its share of a machine: GPUs, CPUs, memory."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from numapin.base.bounds import MAX_CPUS, MAX_GPUS, MAX_NUMBER, MAX_RANKS
from numapin.base.formats import gib
from numapin.base.text import counted
from numapin.errors import UsageError
from numapin.jobs.notation import SAMPLE_IMAGE, require_known_image
from numapin.jobs.pod_options import PodOptions
from numapin.topology.model import NodeKind
from numapin.topology.vendors import GpuVendor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.topology.model import Topology

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,62}")
_QUEUE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:@/+-]{0,127}")
_IMAGE: Final = re.compile(r"[A-Za-z0-9./_][A-Za-z0-9._:/@#+=-]{0,511}")
_MAX_NODES: Final = 100_000
_MEMORY_PART: Final = 0.9  # of a host's memory; the rest is left to the system


class Form(StrEnum):
    """The tasks that the manager starts."""

    NODE = "node"
    """One task per host: `numapin run`, which starts the ranks and meets the other hosts over c10d."""
    TASK = "task"
    """One task per rank: `numapin exec`, which binds it."""


class KubernetesKind(StrEnum):
    """The kind of a Kubernetes job."""

    JOB = "job"
    JOBSET = "jobset"
    TRAINJOB = "trainjob"
    LEADERWORKERSET = "leaderworkerset"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """The options that were given, and what a machine file adds to them. Raises UsageError if they are invalid."""

    command: tuple[str, ...]  # the script, module or program, and its arguments
    gpus_per_node: int  # 0: a job without GPUs
    module: bool = False  # whether the command is a Python module; neither this nor the next: a Python script
    no_python: bool = False
    form: Form = Form.NODE
    name: str = ""  # "": derived from the script's name
    nodes: int = 1
    ranks_per_node: int = 0  # 0: one per GPU, or one without GPUs
    cpus_per_task: int | None = None  # as `form` defines tasks; None: the manager decides
    memory_bytes: int | None = None  # per host; None: the manager decides
    whole_nodes: bool = False  # whether the job shares no host with other jobs
    smt: bool = True  # whether to use all hardware threads of a core, or one
    time_s: int | None = None
    signal_s: int | None = None  # the time before the limit at which the ranks get a signal
    requeue: bool = False  # whether the job is restarted after a preemption or the loss of a host
    queue: str | None = None
    account: str | None = None
    container: str | None = None  # an image
    hostfile: str | None = None  # for mpirun
    options: tuple[str, ...] = ()  # the binding options of numapin run or exec, not yet quoted
    dataloader: str | None = None  # as in `numapin run`; None: torch's
    setup: tuple[str, ...] = ()  # shell lines that run first
    kind: KubernetesKind = KubernetesKind.JOB
    pod: PodOptions = PodOptions()
    array: str | None = None  # the indices of a job array
    directives: tuple[str, ...] = ()  # further lines for the manager, without its mark
    gpu_type: str | None = None  # the manager's name for it, such as a100; None: any
    vendor: GpuVendor = GpuVendor.NVIDIA
    tiles_per_gpu: int = 1  # Intel's tiles, each a GPU for ranks, that a cluster counts as one GPU
    engine: str = "slurm"  # its name on the command line, for hints
    written_by: str = "numapin job"  # one line of text: the version and the command line

    def __post_init__(self) -> None:
        """Check everything that can be checked without a cluster."""
        for option, number, least, most in (
            ("--nodes", self.nodes, 1, _MAX_NODES),
            ("--gpus-per-node", self.gpus_per_node, 0, MAX_GPUS),
            ("--ranks-per-node", self.ranks_per_node, 0, MAX_RANKS),
            ("--cpus-per-task", self.cpus_per_task, 1, MAX_CPUS),
            ("--mem-per-node", self.memory_bytes, 1 << 20, MAX_NUMBER),
        ):
            hint = f"numapin job {self.engine} --help"
            if number is not None and number < least:
                raise UsageError(f"{option} is {number}; it must be at least {least}", hint)
            if number is not None and number > most:
                raise UsageError(f"{option} is {str(number)[:20]}; it must be at most {most}", hint)
        if self.gpus_per_node and self.num_ranks > self.gpus_per_node:
            raise UsageError(
                f"--ranks-per-node {self.num_ranks} is more than the {counted(self.gpus_per_node, 'GPU')} of a host",
                f"each rank needs its own GPU: --ranks-per-node {self.gpus_per_node}, or more --gpus-per-node",
            )
        if self.signal_s is not None and not 1 <= self.signal_s <= 65535:
            raise UsageError(f"--signal is {self.signal_s} seconds; it must be 1 to 65535", "for example: --signal 300")
        if self.signal_s is not None and self.time_s is None:
            raise UsageError("--signal requires --time", "for example: --time 24:00:00 --signal 300")
        if self.signal_s and self.time_s and self.signal_s >= self.time_s:
            raise UsageError(
                f"--signal {self.signal_s} is not less than --time: {self.time_s} seconds",
                "give a longer --time, or a shorter --signal",
            )

        characters = "letters, digits and _ . , : @ / + -"
        for option, name, pattern, sample in (
            ("--job-name", self.name or None, _NAME, "letters, digits and . _ + -, at most 63"),
            ("--partition/--queue", self.queue, _QUEUE, f"{characters}, such as gpu"),
            ("--account", self.account, _QUEUE, f"{characters}, such as physics"),
            ("--container", self.container, _IMAGE, SAMPLE_IMAGE),
        ):
            if name is not None and not pattern.fullmatch(name):
                raise UsageError(f"{option} {name!r} is not valid", f"use {sample}")
        if self.container:
            require_known_image(self.container)

        script = self.command[0] if self.command else ""
        if not script:
            raise UsageError(
                "there is no script to run", f"put it last: numapin job {self.engine} --nodes 2 train.py --lr 0.1"
            )
        if script.startswith("-"):
            raise UsageError(f"the script's name {script!r} begins with a dash", f"write ./{script}")
        for line in self.directives:
            if not line.isprintable():
                raise UsageError(f"--directive {line!r} is not one printable line", "give each line by itself")
        if self.dataloader and self.form is Form.TASK:
            raise UsageError(
                f"--dataloader {self.dataloader} with --form task: numapin exec does not change the script's loaders",
                "use --form node, or numapin.DataLoader in the script",
            )

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks on each host."""
        return self.ranks_per_node or max(self.gpus_per_node, 1)

    @property
    def tasks_per_node(self) -> int:
        """Return the number of tasks on each host."""
        return 1 if self.form is Form.NODE else self.num_ranks

    @property
    def cpus_per_node(self) -> int | None:
        """Return the number of CPUs of all tasks on a host. None: the manager decides."""
        return None if self.cpus_per_task is None else self.cpus_per_task * self.tasks_per_node

    @property
    def run_options(self) -> tuple[str, ...]:
        """Return the options of numapin run or exec, with --dataloader."""
        return (*self.options, f"--dataloader={self.dataloader}") if self.dataloader else self.options

    @property
    def job_name(self) -> str:
        """Return the given name, or one derived from the script's."""
        return self.name or name_of(self.command[0])


def name_of(script: str) -> str:
    """Return a job name derived from a script's: its last part without .py and without unusual characters."""
    last = script.rstrip("/").rpartition("/")[2].removesuffix(".py")
    return re.sub(r"[^A-Za-z0-9]+", "-", last, flags=re.ASCII).strip("-")[:40].strip("-") or "numapin"


# --- a share of a machine, given the topology of one of the hosts -----------------------------------------------------
# The --gpus of Slurm, of other launchers and of people is a number of GPUs; ours lists them, as in `numapin run`.


def gpus_per_host(given: int | None, topology: Topology | None) -> int:
    """Return the number of GPUs per host. Raises UsageError if it is unknown."""
    if given is not None:
        return given
    if topology is None:
        raise UsageError(
            "the number of GPUs per host is unknown",
            "give --gpus-per-node N (0 for none), or --machine FILE (topo --save)",
        )
    return len(topology.vendor_gpus)


def require_gpu_per_rank(named: Sequence[str] | None, *, num_ranks: int) -> None:
    """Raise UsageError if --gpus names too few GPUs for a host's ranks, because NCCL accepts no GPU twice."""
    if named is not None and len(named) < num_ranks:
        raise UsageError(
            f"--gpus {','.join(named)} names {counted(len(named), 'GPU')} for the {num_ranks} ranks of a host",
            f"each rank needs its own GPU: --ranks-per-node {len(named)}, or name more GPUs, as in --gpus 0,1",
        )


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
    takes_whole_nodes = part == whole and request.cpus_per_task is None
    is_implied = takes_whole_nodes and not memory_by_number
    if memory_bytes is None and not is_implied and host_bytes is not None:
        memory_bytes = int(host_bytes * part // whole * _MEMORY_PART)
    return replace(request, cpus_per_task=cpus_per_task, memory_bytes=memory_bytes, whole_nodes=takes_whole_nodes)


def why_whole_hosts(request: JobRequest) -> tuple[str, ...]:
    """Return a warning if a job takes whole hosts because nothing says which part of them belongs to its GPUs."""
    if not request.whole_nodes or request.cpus_per_task is not None or not request.gpus_per_node:
        return ()
    return (
        f"the job takes whole hosts: the CPUs and memory that belong to {counted(request.gpus_per_node, 'GPU')} are "
        "unknown; to share hosts, give --machine FILE (numapin topo --save FILE), or --cpus-per-task N and "
        "--mem-per-node SIZE",
    )
