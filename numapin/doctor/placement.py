"""Checks of nodes, cpusets, limits and memory policies. Pure.

Comes in: `DoctorReadings` and the `Topology`; checks that need the running machine take its `Live`. Goes out: one
`DoctorFinding` per check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.base import cpu_set, sizes
from numapin.base.cpu_set import CpuSet
from numapin.base.plural import counted, listed
from numapin.doctor.model import Check
from numapin.system.refusals import SYS_NICE
from numapin.topology.model import NicKind, NodeSource

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from numapin.doctor.model import DoctorFinding, DoctorReadings, Live
    from numapin.topology.model import Gpu, Node, Topology

NODES: Final = Check(
    name="nodes",
    where="/sys/devices/system/node, /proc/cmdline",
    why="If the machine hides its NUMA nodes, no rank can be bound to the node of its GPU.",
)
GPU_NODES: Final = Check(
    name="gpu-nodes",
    where="/sys/bus/pci/devices/*/numa_node, nvmlDeviceGetMemoryAffinity",
    why="A rank whose GPU's node is unknown or wrong may run on any node, and its batches then cross the link between "
    "the sockets.",
)
CPUSET: Final = Check(
    name="cpuset",
    where="sched_getaffinity, Cpus_allowed_list and Mems_allowed_list in /proc/self/status, /proc/self/cgroup",
    why="A rank cannot be bound to CPUs or memory that its cgroup, the scheduler or taskset excludes.",
)
POLICY: Final = Check(
    name="memory-policy",
    where="get_mempolicy, set_mempolicy, mbind and move_pages, tried in a child process; /proc/self/status",
    why="Without memory policies, a page is local to its rank only if the rank's own CPUs touch it first. Without "
    "move_pages, numapin cannot ask the kernel for the node of a page.",
)
MEMLOCK: Final = Check(
    name="memlock",
    where="Max locked memory in /proc/self/limits",
    why="Under a small limit, NCCL cannot register its buffers with InfiniBand. Memory that CUDA pins is not "
    "subject to the limit.",
)
SHM: Final = Check(
    name="shm",
    where="statvfs /dev/shm",
    why="Workers of torch's DataLoader pass each batch through /dev/shm and die of SIGBUS when it is full. numapin's "
    "workers do not use it.",
)

_RELIABLE_SOURCES: Final = frozenset({NodeSource.SYSFS, NodeSource.SINGLE, NodeSource.USER})
_MEASURE_NODES: Final = "numapin bench transfer"
_OTHER_FILTER: Final = "docker run --security-opt seccomp=PROFILE.json … with a profile that allows these calls"
_HELD: Final = {None: "unknown", True: "held", False: "not held"}
_MEMLOCK_REMEDY: Final = "ulimit -l unlimited (docker run --ulimit memlock=-1 …; systemd: LimitMEMLOCK=infinity)"
_SHM_REMEDY: Final = (
    "sudo mount -o remount,size=50% /dev/shm (docker run --shm-size 16g …), or numapin run --dataloader numapin"
)
_CAP_IPC_LOCK: Final = 1 << 14
_CAP_SYS_NICE: Final = 1 << 23
_SMALL_SHM_BYTES: Final = 1 << 30  # Docker's default is 64 MiB; two workers hold that much in a few batches of images


def nodes(readings: DoctorReadings, topology: Topology) -> DoctorFinding:
    """Find nodes that the firmware, the hypervisor or the kernel hides or mixes up."""
    cpu_sets, num_packages = [node.cpus for node in topology.cpu_nodes], len(topology.packages)
    if "numa=off" in readings.kernel_options:
        remedy = "remove numa=off from the kernel command line and reboot"
        return NODES.warning("the kernel was started with numa=off", remedy=remedy)
    if _overlap(cpu_sets):
        remedy = "update the firmware; to see what it reports: numactl -H"
        return NODES.warning("several nodes list the same CPUs: the firmware's tables are wrong", remedy=remedy)
    if len(cpu_sets) < num_packages and not _has_packages_by_hypervisor(topology):
        return NODES.warning(
            f"fewer NUMA nodes with CPUs ({len(cpu_sets)}) than packages ({num_packages})",
            remedy="disable node interleaving in the firmware; in a virtual machine: virsh edit (cpu, numa, cell)",
        )
    if len(cpu_sets) == 1:
        return NODES.ok("one node: all memory is local to all CPUs")
    packages = f"on {counted(num_packages, 'package')}" if num_packages else "on an unknown number of packages"
    return NODES.ok(f"{len(cpu_sets)} nodes with CPUs {packages}")


def _has_packages_by_hypervisor(topology: Topology) -> bool:
    """Return whether every core is reported as a separate package, as by some hypervisors."""
    return len(topology.packages) == len(topology.cores)


def _overlap(cpu_sets: Collection[CpuSet]) -> bool:
    return sum(map(len, cpu_sets)) > len(CpuSet().union(*cpu_sets))


def gpu_nodes(readings: DoctorReadings, topology: Topology) -> DoctorFinding:
    """Find GPUs whose node is unknown, or about whose node the kernel and NVML disagree."""
    findings = (find(readings, topology) for find in (_unknown_nodes, _contradicting_nodes, _guessed_nodes))
    num_gpus = len(topology.gpus)
    return next(filter(None, findings), GPU_NODES.ok(f"known for all GPUs ({num_gpus})" if num_gpus else "no GPU"))


def _unknown_nodes(readings: DoctorReadings, topology: Topology) -> DoctorFinding | None:
    gpus = [gpu for gpu in topology.gpus if gpu.node is None]
    if not gpus:
        return None
    pairs = _pairs_to_fill_in(gpus)
    return GPU_NODES.warning(
        f"no source reports the node of {_names(gpus)}; the kernel reports {_kernel_words(readings, gpus)}",
        remedy=f"numapin run --gpu-nodes {pairs} …; to measure the nodes: {_MEASURE_NODES} --save FILE",
    )


def _pairs_to_fill_in(gpus: list[Gpu]) -> str:
    """Return "0=NODE,1=NODE,…"."""
    pairs = [f"{gpu.index}=NODE" for gpu in gpus]
    return ",".join([*pairs[:2], "…"] if len(pairs) > 2 else pairs)


def _contradicting_nodes(readings: DoctorReadings, topology: Topology) -> DoctorFinding | None:
    contradictions = list(filter(None, (_contradiction(readings, gpu) for gpu in topology.gpus)))
    if not contradictions:
        return None
    pairs = ",".join(f"{gpu.index}={gpu.node}" for gpu in topology.gpus)
    remedy = f"numapin run --gpu-nodes {pairs} … with the right nodes; to measure them: {_MEASURE_NODES}"
    return GPU_NODES.warning("; ".join(contradictions), remedy=remedy)


def _guessed_nodes(readings: DoctorReadings, topology: Topology) -> DoctorFinding | None:
    """Return a note if the node of a GPU comes from a source other than the kernel and the user."""
    gpus = [gpu for gpu in topology.gpus if gpu.node_source not in _RELIABLE_SOURCES]
    if not gpus or len(topology.cpu_nodes) < 2:
        return None
    sources = ", ".join(sorted({str(gpu.node_source) for gpu in gpus}))
    words = _kernel_words(readings, gpus)
    return GPU_NODES.note(f"the kernel reports {words} for {_names(gpus)}; source of the node: {sources}")


def _kernel_words(readings: DoctorReadings, gpus: Iterable[Gpu]) -> str:
    """Return "numa_node -1", or "no numa_node" if there is no such file."""
    words = {readings.gpu_nodes.get(gpu.index) for gpu in gpus}
    return " and ".join(sorted("no numa_node" if word is None else f"numa_node {word}" for word in words))


def _contradiction(readings: DoctorReadings, gpu: Gpu) -> str | None:
    """Return where the kernel and NVML place a GPU if each names one node and they differ."""
    by_kernel = readings.gpu_nodes.get(gpu.index, "")
    by_nvml = _nodes_by_nvml(readings.live).get(gpu.pci) or CpuSet()
    both_name_one = by_kernel.isdecimal() and len(by_nvml) == 1
    placed_by_user = gpu.node_source is NodeSource.USER
    if placed_by_user or not both_name_one or int(by_kernel) in by_nvml:
        return None
    return f"{gpu.label} is on node {by_kernel} according to the kernel, on node {by_nvml} according to NVML"


def _nodes_by_nvml(live: Live | None) -> Mapping[str | None, CpuSet | None]:
    """Return the nodes that NVML reports for each GPU, by PCI address."""
    readings = live.nvml.gpus if live else None
    return {reading.pci: reading.memory_nodes for reading in readings or ()}


def cpuset(readings: DoctorReadings, topology: Topology) -> DoctorFinding:
    """Find GPUs whose node's CPUs or memory this process may not use."""
    allowed, near = topology.allowed, _nodes_with_gpus(topology)
    usable = f"CPUs {allowed.cpus} and memory of {_node_names(allowed.nodes)}"
    excluded = _excluded(near, topology)
    if excluded:
        cgroups = ", ".join(_cpuset_cgroups(readings)) or "unknown"
        return CPUSET.error(
            f"{' and '.join(excluded)} may be used; allowed: {usable}; cgroup: {cgroups}", remedy=_wider(near)
        )
    counts = _restricted(near, allowed.cpus)
    if counts:
        return CPUSET.note(f"only {', '.join(counts)} may be used", remedy=_wider(near))
    return CPUSET.ok(f"{usable} may be used")


def _nodes_with_gpus(topology: Topology) -> list[Node]:
    ids = {gpu.node for gpu in topology.visible_gpus}
    return [node for node in topology.cpu_nodes if node.id in ids]


def _excluded(near: Collection[Node], topology: Topology) -> list[str]:
    """Return which nodes have no allowed CPU or no allowed memory, with their GPUs."""
    allowed = topology.allowed
    without = {
        "CPU": CpuSet(node.id for node in near if not node.cpus & allowed.cpus),
        "memory": CpuSet(node.id for node in near) - allowed.nodes,
    }
    return [f"no {what} of {_node_names(ids)} ({_gpus_on(ids, topology)})" for what, ids in without.items() if ids]


def _restricted(near: Iterable[Node], allowed: CpuSet) -> list[str]:
    """Return how many CPUs are allowed of each node, unless all are."""
    restricted = (node for node in near if not node.cpus <= allowed)
    return [f"{len(node.cpus & allowed)} of {counted(len(node.cpus), 'CPU')} of node {node.id}" for node in restricted]


def _gpus_on(ids: CpuSet, topology: Topology) -> str:
    return _names(gpu for gpu in topology.visible_gpus if gpu.node in ids)


def _cpuset_cgroups(readings: DoctorReadings) -> list[str]:
    """Return the cgroups of this process that may limit CPUs: version 1's cpuset, and version 2's."""
    lines = (line.split(":", 2) for line in readings.cgroups if line.count(":") > 1)
    return [f"{controllers or 'v2'}:{path}" for _number, controllers, path in lines if controllers in ("", "cpuset")]


def _wider(near: Collection[Node]) -> str:
    cpus = CpuSet().union(*(node.cpus for node in near))
    ids = CpuSet(node.id for node in near)
    return (
        f"docker run --cpuset-cpus {cpus} --cpuset-mems {ids} … (Slurm: srun --exclusive --cpu-bind=none; "
        "otherwise: start it without taskset)"
    )


def memory_policy(live: Live, _topology: Topology) -> DoctorFinding:
    """Find memory-policy calls that seccomp refuses, or that the kernel accepts without effect."""
    if live.refused is None:
        return POLICY.unknown("not tried: libnuma cannot be used")
    refused = {call: error for call, error in live.refused.items() if error}
    if not refused:
        return POLICY.ok(f"{', '.join(live.refused)} work; {_confinement(live)}")
    if set(live.refused.values()) == {"ENOSYS"}:
        return POLICY.note("the kernel has no NUMA support (ENOSYS)", remedy="numapin run --memory none …")
    return _refused_calls(refused, live)


def _refused_calls(refused: Mapping[str, str], live: Live) -> DoctorFinding:
    calls = ", ".join(f"{call} ({error})" for call, error in refused.items())
    what = f"refused: {calls}; {_confinement(live)}"
    if set(refused) == {"move_pages"}:  # Docker's own profile refuses it even with SYS_NICE
        return POLICY.note(f"{what}; numapin reads /proc/self/numa_maps instead", remedy=_OTHER_FILTER)
    return POLICY.warning(what, remedy=_OTHER_FILTER if live.has_capability(_CAP_SYS_NICE) else SYS_NICE)


def _confinement(live: Live) -> str:
    mode = "unknown" if live.seccomp is None else live.seccomp
    return f"seccomp mode {mode}, CAP_SYS_NICE {_HELD[live.has_capability(_CAP_SYS_NICE)]}"


def memlock(readings: DoctorReadings, topology: Topology) -> DoctorFinding:
    """Find a limit on locked memory that is too small for InfiniBand."""
    limit, live = readings.memlock, readings.live
    if limit is None:
        return MEMLOCK.unknown("/proc/self/limits does not show it")
    if limit == "unlimited":
        return MEMLOCK.ok("unlimited")
    what = f"limited to {sizes.render(int(limit))}"
    if live and live.has_capability(_CAP_IPC_LOCK):
        return MEMLOCK.ok(f"{what}, but CAP_IPC_LOCK lifts the limit")
    adapters = _infiniband(topology)
    if adapters:
        return MEMLOCK.warning(f"{what}, and there is InfiniBand ({', '.join(adapters)})", remedy=_MEMLOCK_REMEDY)
    return MEMLOCK.note(f"{what}; no InfiniBand was found", remedy=_MEMLOCK_REMEDY)


def _infiniband(topology: Topology) -> list[str]:
    return [nic.name for nic in topology.nics if nic.kind is NicKind.INFINIBAND]


def shared_memory(live: Live, _topology: Topology) -> DoctorFinding:
    """Find a /dev/shm that is too small for torch's loader, or nearly full."""
    size, free = live.shm_bytes, live.shm_free_bytes
    if size is None or free is None:
        return SHM.error("there is no /dev/shm", remedy="docker run --shm-size 16g … (or mount a tmpfs on /dev/shm)")
    what = f"{sizes.render(free)} of {sizes.render(size)} free"
    if free < _SMALL_SHM_BYTES:
        return SHM.warning(f"{what}: less than {sizes.render(_SMALL_SHM_BYTES)}", remedy=_SHM_REMEDY)
    return SHM.ok(what)


def _names(gpus: Iterable[Gpu]) -> str:
    return f"gpu{cpu_set.render(gpu.index for gpu in gpus)}"


def _node_names(ids: CpuSet) -> str:
    return listed("node", ids)
