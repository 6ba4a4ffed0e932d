"""Checks of nodes, cpusets, memory and memory policies. Pure.

Comes in: `DoctorReadings` and the `Topology`; checks that only the running machine can answer take its `Live`.
Goes out: one `DoctorFinding` a check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.base import cpu_set, sizes
from numapin.base.cpu_set import CpuSet
from numapin.doctor.model import Check, DoctorSeverity
from numapin.topology.model import NodeSource

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numapin.doctor.model import DoctorFinding, DoctorReadings, Live
    from numapin.topology.model import Gpu, Node, Topology

NODES: Final = Check(
    name="nodes",
    where="/sys/devices/system/node, /proc/cmdline",
    why="Where the machine hides its NUMA nodes, nothing can be bound to the one that a GPU is on.",
)
GPU_NODES: Final = Check(
    name="gpu-nodes",
    where="/sys/bus/pci/devices/*/numa_node, nvmlDeviceGetMemoryAffinity",
    why="A rank whose GPU's node is unknown or wrong runs anywhere, and its batches cross the link between sockets.",
)
CPUSET: Final = Check(
    name="cpuset",
    where="sched_getaffinity, Cpus_allowed_list and Mems_allowed_list in /proc/self/status, /proc/self/cgroup",
    why="A rank cannot be bound to CPUs or memory that its cgroup, its scheduler or taskset keeps from it.",
)
POLICY: Final = Check(
    name="memory-policy",
    where="the calls themselves, in a forked child; /proc/self/status",
    why="Without memory policies a rank's pages are local by first touch only, and nobody can check where they are.",
)
MEMLOCK: Final = Check(
    name="memlock",
    where="Max locked memory in /proc/self/limits",
    why="NCCL over InfiniBand cannot register its buffers under a small limit; NVIDIA's driver, which pins for CUDA, "
    "does not ask for it.",
)
SHM: Final = Check(
    name="shm",
    where="statvfs /dev/shm",
    why="torch's DataLoader workers pass each batch through /dev/shm and die of SIGBUS when it is full; numapin's "
    "do not need it.",
)
NODE_MEMORY: Final = Check(
    name="node-memory",
    where="/sys/devices/system/node/node*/meminfo",
    why="When a node has no free page the kernel takes one of another node, without a word, rather than drop a cache.",
)
SWAP: Final = Check(
    name="swap",
    where="/proc/meminfo",
    why="Pinned pages never swap, so that all others must: a rank that waits for swap makes every rank wait.",
)

_SYS_NICE: Final = "docker run --cap-add SYS_NICE … (Kubernetes: securityContext.capabilities.add: [SYS_NICE])"
_OTHER_FILTER: Final = "docker run --security-opt seccomp=PROFILE.json … with a profile that lets these calls pass"
_HELD: Final = {None: "not told", True: "held", False: "not held"}
_CAP_IPC_LOCK: Final = 1 << 14
_CAP_SYS_NICE: Final = 1 << 23
_SMALL_SHM_BYTES: Final = 1 << 30  # Docker's default is 64 MiB; two workers hold that much in a few batches of images
_LITTLE_FREE: Final = 0.05
_MUCH_SWAP: Final = 0.01


def nodes(readings: DoctorReadings, topology: Topology) -> DoctorFinding:
    """Find nodes that firmware, hypervisor or kernel hide or mix up."""
    cpu_nodes, packages = topology.cpu_nodes, topology.packages
    if "numa=off" in (readings.command_line or "").split():
        return NODES.warning(
            "the kernel was started with numa=off", remedy="remove numa=off from the kernel's command line, and reboot"
        )
    if sum(len(node.cpus) for node in cpu_nodes) > len(CpuSet().union(*(node.cpus for node in cpu_nodes))):
        return NODES.warning("several nodes list the same CPUs: the firmware's tables are wrong", remedy="numactl -H")
    made_up = len(packages) == len(topology.cores)  # by a hypervisor, which made a package of every core
    if len(cpu_nodes) < len(packages) and not made_up:
        return NODES.warning(
            f"{len(packages)} packages, but only {len(cpu_nodes)} node with CPUs",
            remedy="switch node interleaving off in the firmware; for a virtual machine: virsh edit (cpu, numa, cell)",
        )
    if len(cpu_nodes) == 1:
        return NODES.ok("one node: all memory is local, whatever is bound")
    return NODES.ok(f"{len(cpu_nodes)} nodes with CPUs on {len(packages)} packages")


def gpu_nodes(readings: DoctorReadings, topology: Topology) -> DoctorFinding:
    """Find GPUs whose node is unknown, or of which the kernel and NVML tell different things."""
    gpus = topology.gpus
    unknown = [gpu for gpu in gpus if gpu.node is None]
    if unknown:
        pairs = ",".join(f"{gpu.index}=NODE" for gpu in unknown[:2]) + (",…" if len(unknown) > 2 else "")
        return GPU_NODES.warning(
            f"no source knows the node of {_names(unknown)}; the kernel says {_kernel_words(readings, unknown)}",
            remedy=f"numapin run --gpu-nodes {pairs} … (lstopo or the machine's manual says which)",
        )
    if contradictions := [text for gpu in gpus if (text := _contradiction(readings, gpu))]:
        return GPU_NODES.warning(
            "; ".join(contradictions),
            remedy=f"numapin run --gpu-nodes {','.join(f'{gpu.index}={gpu.node}' for gpu in gpus)} … (or the other)",
        )
    guessed = [gpu for gpu in gpus if gpu.node_source not in (NodeSource.SYSFS, NodeSource.SINGLE, NodeSource.USER)]
    if guessed and len(topology.cpu_nodes) > 1:
        sources = ", ".join(sorted({str(gpu.node_source) for gpu in guessed}))
        words = _kernel_words(readings, guessed)
        return GPU_NODES.note(f"the kernel says {words} for {_names(guessed)}; their node is known from {sources}")
    return GPU_NODES.ok(f"the node of each GPU is known ({len(gpus)})" if gpus else "there is no GPU to place")


def _kernel_words(readings: DoctorReadings, gpus: Iterable[Gpu]) -> str:
    words = {readings.gpu_nodes.get(gpu.pci or "") for gpu in gpus}
    return " and ".join(sorted("nothing" if word is None else f"numa_node {word}" for word in words))


def _contradiction(readings: DoctorReadings, gpu: Gpu) -> str | None:
    """Tell where NVML names one node and the kernel another. A GPU that the user placed is placed."""
    seen = readings.live.nvml.gpus if readings.live else None
    by_nvml = next((reading.memory_nodes for reading in seen or () if reading.pci == gpu.pci), None)
    by_kernel = readings.gpu_nodes.get(gpu.pci or "", "")
    if gpu.node_source is NodeSource.USER or not by_kernel.isdecimal() or by_nvml is None or len(by_nvml) != 1:
        return None
    (node,) = by_nvml
    return None if node == int(by_kernel) else f"{gpu.label}: the kernel says node {by_kernel}, NVML node {node}"


def cpuset(readings: DoctorReadings, topology: Topology) -> DoctorFinding:
    """Find GPUs whose node's CPUs or memory this process may not use."""
    allowed = topology.allowed
    near = [node for node in topology.cpu_nodes if any(gpu.node == node.id for gpu in topology.visible_gpus)]
    without_cpus = [node for node in near if not node.cpus & allowed.cpus]
    without_memory = [node for node in near if node.id not in allowed.nodes]
    cut_off = [
        f"not the {kind} of node {CpuSet(node.id for node in nodes)} ({_gpus_on(nodes, topology)})"
        for kind, nodes in (("CPUs", without_cpus), ("memory", without_memory))
        if nodes
    ]
    if cut_off:
        cgroups = ", ".join(_cpuset_cgroups(readings)) or "not told"
        return CPUSET.error(
            f"CPUs {allowed.cpus} and memory of nodes {allowed.nodes} may be used: "
            f"{', '.join(cut_off)}; cgroup: {cgroups}",
            remedy=_wider(near),
        )
    partly = [node for node in near if not node.cpus <= allowed.cpus]
    if partly:
        counts = ", ".join(
            f"{len(node.cpus & allowed.cpus)} of {len(node.cpus)} CPUs of node {node.id}" for node in partly
        )
        return CPUSET.note(f"only {counts} may be used", remedy=_wider(near))
    return CPUSET.ok(f"CPUs {allowed.cpus} and nodes {allowed.nodes} may be used")


def _cpuset_cgroups(readings: DoctorReadings) -> list[str]:
    """Return the cgroups of this process that may limit CPUs: version 1's cpuset, and version 2's."""
    lines = (line.split(":", 2) for line in readings.cgroups if line.count(":") > 1)
    return [f"{controllers or 'v2'}:{path}" for _number, controllers, path in lines if controllers in ("", "cpuset")]


def _gpus_on(nodes_: Iterable[Node], topology: Topology) -> str:
    ids = {node.id for node in nodes_}
    return _names(gpu for gpu in topology.visible_gpus if gpu.node in ids)


def _wider(near: Iterable[Node]) -> str:
    cpus = str(CpuSet(cpu for node in near for cpu in node.cpus))
    ids = str(CpuSet(node.id for node in near))
    return f"docker run --cpuset-cpus {cpus} --cpuset-mems {ids} … (srun --exclusive --cpu-bind=none; no taskset)"


def memory_policy(live: Live, _topology: Topology) -> DoctorFinding:
    """Find what seccomp, or a kernel that only pretends, does to memory policies."""
    if live.refused is None:
        return POLICY.unknown("not tried: libnuma cannot be used")
    refused = {call: word for call, word in live.refused.items() if word}
    held = None if live.capabilities is None else bool(live.capabilities & _CAP_SYS_NICE)
    mode = "not told" if live.seccomp is None else live.seccomp
    seen = f"seccomp mode {mode}, CAP_SYS_NICE {_HELD[held]}"
    if not refused:
        return POLICY.ok(f"{', '.join(live.refused)} work; {seen}")
    if set(live.refused.values()) <= {"ENOSYS"}:
        return POLICY.note("the kernel has no NUMA support (ENOSYS)", remedy="numapin run --memory none …")
    what = f"refused: {', '.join(f'{call} ({word})' for call, word in refused.items())}; {seen}"
    if set(refused) == {"move_pages"}:  # as Docker's own profile does even with SYS_NICE
        return POLICY.note(f"{what}; /proc/self/numa_maps is asked instead", remedy=_OTHER_FILTER)
    return POLICY.warning(what, remedy=_OTHER_FILTER if held else _SYS_NICE)


def memlock(readings: DoctorReadings, topology: Topology) -> DoctorFinding:
    """Find a limit on locked memory that InfiniBand would meet."""
    limit = readings.memlock
    if limit is None:
        return MEMLOCK.unknown("/proc/self/limits does not tell")
    if limit == "unlimited":
        return MEMLOCK.ok("unlimited")
    what = f"limited to {sizes.render(int(limit))}"
    if readings.live and (readings.live.capabilities or 0) & _CAP_IPC_LOCK:
        return MEMLOCK.ok(f"{what}, but CAP_IPC_LOCK is held, which lifts it")
    remedy = "ulimit -l unlimited (docker run --ulimit memlock=-1 …; LimitMEMLOCK=infinity for systemd)"
    adapters = [nic.name for nic in topology.nics if nic.kind.value == "infiniband"]
    if adapters:
        return MEMLOCK.warning(f"{what}, and there is InfiniBand ({', '.join(adapters)})", remedy=remedy)
    return MEMLOCK.note(f"{what}; no InfiniBand was seen", remedy=remedy)


def shared_memory(live: Live, _topology: Topology) -> DoctorFinding:
    """Find a /dev/shm that is too small for torch's loader, or nearly full."""
    size, free = live.shm_bytes, live.shm_free_bytes
    remedy = (
        "sudo mount -o remount,size=50% /dev/shm (docker run --shm-size 16g …), or numapin run --dataloader numapin"
    )
    if size is None or free is None:
        return SHM.error("there is no /dev/shm", remedy="docker run --shm-size 16g … (mount a tmpfs on /dev/shm)")
    what = f"{sizes.render(free)} of {sizes.render(size)} free"
    if free < _SMALL_SHM_BYTES:
        return SHM.warning(f"{what}: less than {sizes.render(_SMALL_SHM_BYTES)}", remedy=remedy)
    return SHM.ok(what)


def node_memory(_readings: DoctorReadings, topology: Topology) -> DoctorFinding:
    """Find nodes that are full while others are not."""
    shares = {
        node.id: node.free_bytes / node.memory_bytes
        for node in topology.cpu_nodes
        if node.memory_bytes and node.free_bytes is not None
    }
    if not shares:
        return NODE_MEMORY.unknown("the nodes do not tell how much of their memory is free")
    full = sorted(node for node, share in shares.items() if share < _LITTLE_FREE)
    if full and max(shares.values()) >= 2 * _LITTLE_FREE:
        words = ", ".join(f"node {node}: {share:.1%} free" for node, share in sorted(shares.items()))
        return NODE_MEMORY.warning(
            words, remedy="sync; echo 1 | sudo tee /proc/sys/vm/drop_caches (and see who has it: numastat -m)"
        )
    return NODE_MEMORY.ok(f"{min(shares.values()):.0%} or more free on every node")


def swap(readings: DoctorReadings, _topology: Topology) -> DoctorFinding:
    """Find swap that is in use."""
    keys = ("MemTotal", "SwapTotal", "SwapFree")
    total, swap_total, swap_free = (readings.memory.get(key) for key in keys)
    if total is None or swap_total is None or swap_free is None:
        return SWAP.unknown("/proc/meminfo does not tell")
    used = swap_total - swap_free
    if used <= 0:
        return SWAP.ok(f"none of {sizes.render(swap_total)} is in use" if swap_total else "there is none")
    severity = DoctorSeverity.WARNING if used > _MUCH_SWAP * total else DoctorSeverity.NOTE
    return SWAP.found(
        severity,
        f"{sizes.render(used)} of {sizes.render(swap_total)} are in use",
        "see whose they are: grep -H VmSwap /proc/[0-9]*/status; then: sudo sysctl vm.swappiness=1",
    )


def _names(gpus: Iterable[Gpu]) -> str:
    return f"gpu{cpu_set.render(gpu.index for gpu in gpus)}"
