"""Checks of nodes, cpusets, memory, kernel settings and PCIe, from the files of the machine or a capture.

Sources: proc(5); Documentation/ABI/testing/sysfs-class-iommu, sysfs-kernel-iommu_groups, sysfs-devices-system-cpu;
Documentation/admin-guide/sysctl/kernel.rst, mm/transhuge.rst.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Final

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.base.formats import render_size
from numapin.base.text import counted, listed
from numapin.doctor.check import (
    DoctorSeverity,
    Host,
    Live,
    Result,
    check,
    error,
    live_check,
    note,
    ok,
    unknown,
    warning,
)
from numapin.system.refusals import SYS_NICE
from numapin.topology.model import NodeSource, Pcie
from numapin.topology.nics import NicKind
from numapin.topology.readings import pcie_generation, pcie_width

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numapin.topology.model import Gpu

_CPU: Final = "sys/devices/system/cpu"
_PCI: Final = "sys/bus/pci/devices"
_HUGE_PAGES: Final = "sys/kernel/mm/transparent_hugepage"
_MEASURE_NODES: Final = "numapin bench transfer"
_MEMLOCK_REMEDY: Final = "ulimit -l unlimited (docker run --ulimit memlock=-1 …; systemd: LimitMEMLOCK=infinity)"
_CAP_IPC_LOCK: Final = 1 << 14
_CAP_SYS_NICE: Final = 1 << 23
_SMALL_SHM_BYTES: Final = 1 << 30  # Docker's default is 64 MiB; two workers hold that much in a few batches of images
_LITTLE_FREE: Final = 0.05
_MUCH_SWAP: Final = 0.01
_PASSES_THROUGH: Final = frozenset({"iommu=pt", "iommu.passthrough=1", "iommu=off", "intel_iommu=off", "amd_iommu=off"})


# --- nodes, cpusets and limits ---------------------------------------------------------------------------------------


@check(
    "nodes",
    where="/sys/devices/system/node, /proc/cmdline",
    why="If the machine hides its NUMA nodes, no rank can be bound to the node of its GPU.",
)
def nodes(host: Host) -> Result:
    """Find nodes that the firmware, the hypervisor or the kernel hides or mixes up."""
    topology = host.topology
    cpu_sets, num_packages = [node.cpus for node in topology.cpu_nodes], len(topology.packages)
    if "numa=off" in (host.tree.text("proc/cmdline") or "").split():
        remedy = "remove numa=off from the kernel command line and reboot"
        return warning("the kernel was started with numa=off", remedy=remedy)
    if sum(map(len, cpu_sets)) > len(CpuSet().union(*cpu_sets)):
        remedy = "update the firmware; to see what it reports: numactl -H"
        return warning("several nodes list the same CPUs: the firmware's tables are wrong", remedy=remedy)
    has_packages_by_hypervisor = num_packages == len(topology.cores)  # some report every core as a package
    if len(cpu_sets) < num_packages and not has_packages_by_hypervisor:
        return warning(
            f"fewer NUMA nodes with CPUs ({len(cpu_sets)}) than sockets ({num_packages})",
            remedy="disable node interleaving in the firmware; in a virtual machine: virsh edit (cpu, numa, cell)",
        )
    if len(cpu_sets) == 1:
        return ok("one node: all memory is local to all CPUs")
    packages = f"on {counted(num_packages, 'socket')}" if num_packages else "on an unknown number of sockets"
    return ok(f"{len(cpu_sets)} nodes with CPUs {packages}")


@check(
    "gpu-nodes",
    where="/sys/bus/pci/devices/*/numa_node, nvmlDeviceGetMemoryAffinity",
    why="A rank whose GPU's node is unknown or wrong may run on any node, and its batches then cross the link between "
    "the sockets.",
)
def gpu_nodes(host: Host) -> Result:
    """Find GPUs whose node is unknown, or about whose node the kernel and NVML disagree."""
    topology, live = host.topology, host.live
    by_kernel = _words_of_gpus(host, "numa_node")
    readings = (live.nvml.gpus if live else None) or ()
    by_nvml: dict[str | None, CpuSet | None] = {reading.pci: reading.memory_nodes for reading in readings}
    homeless = [gpu for gpu in topology.gpus if gpu.node is None]
    if homeless:
        pairs = [f"{gpu.index}=NODE" for gpu in homeless]
        shown = ",".join([*pairs[:2], "…"] if len(pairs) > 2 else pairs)
        remedy = f"numapin run --gpu-nodes {shown} …; to measure the nodes: {_MEASURE_NODES}"
        return warning(f"no source reports the node of {_names(homeless)}", remedy=remedy)
    contradictions = []
    for gpu in topology.gpus:
        word, of_nvml = by_kernel.get(gpu.index, ""), by_nvml.get(gpu.pci) or CpuSet()
        both_name_one = word.isdecimal() and len(of_nvml) == 1
        if both_name_one and int(word) not in of_nvml and gpu.node_source is not NodeSource.USER:
            what = f"{gpu.label} is on node {word} according to the kernel, on node {of_nvml} according to NVML"
            contradictions.append(what)
    if contradictions:
        shown = ",".join(f"{gpu.index}={gpu.node}" for gpu in topology.gpus)
        remedy = f"numapin run --gpu-nodes {shown} … with the right nodes; to measure them: {_MEASURE_NODES}"
        return warning("; ".join(contradictions), remedy=remedy)
    return ok(f"known for all GPUs ({len(topology.gpus)})" if topology.gpus else "no GPU")


@check(
    "cpuset",
    where="sched_getaffinity, Cpus_allowed_list and Mems_allowed_list in /proc/self/status",
    why="A rank cannot be bound to CPUs or memory that its cgroup, the scheduler or taskset excludes.",
)
def cpuset(host: Host) -> Result:
    """Find GPUs whose node's CPUs or memory this process may not use."""
    topology, allowed = host.topology, host.topology.allowed
    homes = {gpu.node for gpu in topology.visible_gpus}
    near = [node for node in topology.cpu_nodes if node.id in homes]
    usable = f"CPUs {allowed.cpus} and memory of {listed('node', allowed.nodes)}"
    cpus, ids = CpuSet().union(*(node.cpus for node in near)), CpuSet(node.id for node in near)
    wider = (
        f"docker run --cpuset-cpus {cpus} --cpuset-mems {ids} … (Slurm: srun --exclusive --cpu-bind=none; "
        "otherwise: start it without taskset)"
    )
    excluded = []
    without_cpus = CpuSet(node.id for node in near if not node.cpus & allowed.cpus)
    for what, lacking in (("CPU", without_cpus), ("memory", ids - allowed.nodes)):
        if lacking:
            gpus = _names(gpu for gpu in topology.visible_gpus if gpu.node in lacking)
            excluded.append(f"no {what} of {listed('node', lacking)} ({gpus})")
    if excluded:
        return error(f"{' and '.join(excluded)} may be used; allowed: {usable}", remedy=wider)
    missing = cpus - allowed.cpus
    return note(f"CPUs {missing} may not be used", remedy=wider) if missing else ok(f"{usable} may be used")


# --- memory ----------------------------------------------------------------------------------------------------------


@check(
    "node-memory",
    where="/sys/devices/system/node/node*/meminfo",
    why="When a node is full, the kernel silently takes pages of another node rather than drop its file caches.",
)
def node_memory(host: Host) -> Result:
    """Find nodes that are full while others are not."""
    shares = {
        node.id: node.free_bytes / node.memory_bytes
        for node in host.topology.cpu_nodes
        if node.memory_bytes and node.free_bytes is not None
    }
    if not shares:
        return unknown("the free memory of the nodes is unknown")
    lowest, highest = min(shares.values()), max(shares.values())
    if lowest >= _LITTLE_FREE or highest < 2 * _LITTLE_FREE:
        return ok(f"at least {lowest:.0%} free on every node")
    full = CpuSet(node for node, share in shares.items() if share < _LITTLE_FREE)
    free = ", ".join(f"{share:.1%} of node {node}" for node, share in sorted(shares.items()))
    remedy = "sync; echo 1 | sudo tee /proc/sys/vm/drop_caches (to see what uses the memory: numastat -m)"
    return warning(f"almost full: {listed('node', full)} (free: {free})", remedy=remedy)


@check(
    "memlock",
    where="Max locked memory in /proc/self/limits",
    why="Under a small limit, NCCL cannot register its buffers with InfiniBand. Memory that CUDA pins is not "
    "subject to the limit.",
)
def memlock(host: Host) -> Result:
    """Find a limit on locked memory that is too small for InfiniBand."""
    limit = host.match("proc/self/limits", r"^Max locked memory\s+(unlimited|[0-9]{1,19})\s")
    if limit is None:
        return unknown("/proc/self/limits does not show it")
    if limit == "unlimited":
        return ok("unlimited")
    what = f"limited to {render_size(int(limit))}"
    if host.live and host.has_capability(_CAP_IPC_LOCK):
        return ok(f"{what}, but CAP_IPC_LOCK lifts the limit")
    adapters = [nic.name for nic in host.topology.nics if nic.kind is NicKind.INFINIBAND]
    if adapters:
        return warning(f"{what}, and there is InfiniBand ({', '.join(adapters)})", remedy=_MEMLOCK_REMEDY)
    return note(f"{what}; no InfiniBand was found", remedy=_MEMLOCK_REMEDY)


@check(
    "swap",
    where="/proc/meminfo",
    why="Pinned pages are never swapped out, so other pages are. One rank that waits for swap makes all ranks wait.",
)
def swap(host: Host) -> Result:
    """Find swap that is in use."""
    lines = re.findall(r"^(\w+):\s+([0-9]{1,15}) kB$", host.tree.text("proc/meminfo") or "", re.MULTILINE)
    memory = {key: int(kilobytes) * 1024 for key, kilobytes in lines}
    if not memory.keys() >= {"MemTotal", "SwapTotal", "SwapFree"}:
        return unknown("/proc/meminfo does not show it")
    if not memory["SwapTotal"]:
        return ok("no swap")
    used = max(0, memory["SwapTotal"] - memory["SwapFree"])
    what = f"{render_size(used)} of {render_size(memory['SwapTotal'])} in use"
    if not used:
        return ok(what)
    severity = DoctorSeverity.WARNING if used > _MUCH_SWAP * memory["MemTotal"] else DoctorSeverity.NOTE
    remedy = "find the processes: grep -H VmSwap /proc/[0-9]*/status; then: sudo sysctl vm.swappiness=1"
    return Result(severity, what, remedy)


# --- hardware and the kernel's settings ------------------------------------------------------------------------------


@check(
    "pcie-link",
    where="nvmlDeviceGetCurrPcieLink*, /sys/bus/pci/devices/*/{current,max}_link_*, also of the port above the GPU",
    why="Half the lanes, or one PCIe generation less, halves the rate at which batches can be copied to the GPU.",
)
def pcie_link(host: Host) -> Result:
    """Find GPUs whose link is slower than they support, because of the slot or at the moment."""
    if not host.topology.gpus:
        return ok("no GPU")
    gpus = [gpu for gpu in host.topology.gpus if gpu.pcie != Pcie()]
    if not gpus:
        return unknown("the links of the GPUs are unknown")

    def is_below(link: tuple[int | None, int | None], other: tuple[int | None, int | None]) -> bool:
        return any(a is not None and b is not None and a < b for a, b in zip(link, other, strict=True))

    def shown(link: tuple[int | None, int | None]) -> str:
        gen, width = ("?" if number is None else number for number in link)
        return f"PCIe {gen} x{width}"

    slow_slots, slow_links = [], []
    for gpu in gpus:
        now, best = (gpu.pcie.gen, gpu.pcie.width), (gpu.pcie.max_gen, gpu.pcie.max_width)
        port = f"{_PCI}/{gpu.pci}/.."  # a device's entry is a link, so `..` leads to the port above it
        slot: tuple[int | None, int | None] = (None, None)
        if gpu.pci:
            speed, width = host.tree.text(f"{port}/max_link_speed"), host.tree.number(f"{port}/max_link_width")
            slot = (pcie_generation(speed), pcie_width(width))
        is_made_up_by_hypervisor = is_below(slot, now)
        if is_below(slot, best) and not is_made_up_by_hypervisor:
            slow_slots.append(f"{gpu.label} supports {shown(best)}, but its slot only {shown(slot)}")
        if is_below(now, best):
            slow_links.append(f"{gpu.label} runs at {shown(now)} instead of {shown(best)}")
    if slow_slots:
        return warning("; ".join(slow_slots), remedy="move the card to a faster slot (LnkCap in: sudo lspci -vv)")
    if slow_links:
        return note(
            f"{'; '.join(slow_links)}; idle GPUs lower their link, so check again while a job runs",
            remedy="nvidia-smi --query-gpu=pcie.link.gen.current,pcie.link.width.current --format=csv",
        )
    return ok(", ".join(sorted({shown((gpu.pcie.max_gen, gpu.pcie.max_width)) for gpu in gpus})))


@check(
    "iommu",
    where="/sys/class/iommu, /sys/bus/pci/devices/*/iommu_group/type, /proc/cmdline",
    why="A translating IOMMU slows every DMA transfer, and sends traffic between GPUs through the root complex.",
)
def iommu(host: Host) -> Result:
    """Find an IOMMU that translates the DMA of GPUs."""
    if not host.tree.names("sys/class/iommu"):
        return host.absent("no IOMMU, or it is off")
    types, remedy = _words_of_gpus(host, "iommu_group/type"), "add iommu=pt to the kernel command line and reboot"
    translated = [f"gpu{index}" for index, word in types.items() if word.startswith("DMA")]
    if translated:
        what = f"translates for {', '.join(translated)} ({', '.join(sorted(set(types.values())))})"
        return warning(what, remedy=remedy)
    signs = {*types.values(), *_PASSES_THROUGH.intersection((host.tree.text("proc/cmdline") or "").split())}
    if signs:
        return ok(f"passes through ({', '.join(sorted(signs))})")
    if not host.topology.gpus:
        return ok("on, but there is no GPU")
    return note("on; whether it translates for the GPUs is unknown", remedy=remedy)


@check(
    "numa-balancing",
    where="/proc/sys/kernel/numa_balancing",
    why="Automatic NUMA balancing causes page faults to find pages to migrate. For bound ranks that is cost without "
    "gain, and pinned pages cannot be migrated.",
)
def numa_balancing(host: Host) -> Result:
    """Find automatic NUMA balancing."""
    mode = host.word("proc/sys/kernel/numa_balancing")
    if mode is None:
        return host.absent("the kernel does not have it")
    if not mode.isdecimal():
        return unknown(f"the kernel says {mode!r}")
    if int(mode) == 0:
        return ok("off")
    if len(host.topology.nodes) < 2:
        return ok("on, but there is only one node")
    return warning(f"on ({mode})", remedy="sudo sysctl kernel.numa_balancing=0")


@check(
    "huge-pages",
    where="/sys/kernel/mm/transparent_hugepage/enabled",
    why="Workers touch new memory for every batch. With 4 KiB pages, each GiB of it costs 262144 page faults.",
)
def huge_pages(host: Host) -> Result:
    """Find transparent huge pages that are off."""
    return _huge_pages(host, "enabled", off=("never",), on="madvise")


@check(
    "shmem-huge-pages",
    where="/sys/kernel/mm/transparent_hugepage/shmem_enabled",
    why="numapin's DataLoader asks for huge pages in shared memory. With them, batches of 154 MB were 5 to 20% faster.",
)
def shared_huge_pages(host: Host) -> Result:
    """Find huge pages of shared memory that are off."""
    return _huge_pages(host, "shmem_enabled", off=("never", "deny"), on="advise")


def _huge_pages(host: Host, name: str, *, off: tuple[str, ...], on: str) -> Result:
    """Judge a file such as "always [madvise] never"."""
    mode = host.match(f"{_HUGE_PAGES}/{name}", r"\[(\w+)\]")
    if mode is None:
        return unknown("the kernel does not show the setting")
    if mode in off:
        return note(f"off ({mode})", remedy=f"echo {on} | sudo tee /{_HUGE_PAGES}/{name}")
    return ok(mode)


@check(
    "governor",
    where="/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
    why="A CPU that clocks down while its rank waits for the GPU launches the next kernels late.",
)
def governor(host: Host) -> Result:
    """Find frequency governors that save power."""
    cpus = sorted(host.topology.cpus)
    words = (host.word(f"{_CPU}/cpu{cpu}/cpufreq/scaling_governor") for cpu in cpus)
    found = Counter(word for word in words if word and word.isidentifier())
    if not found:
        return host.absent("no frequency governor: the firmware or the hypervisor sets the clock")
    driver = host.word(f"{_CPU}/cpu{min(cpus, default=0)}/cpufreq/scaling_driver")
    counts = ", ".join(f"{name} (CPUs: {count})" for name, count in sorted(found.items()))
    what = f"{counts}, driver {driver}" if driver else counts
    slow = found.keys() - {"performance"}
    if not slow:
        return ok(what)
    # With these drivers, "powersave" leaves the clock to the processor, which raises it under load.
    scales_by_itself = slow == {"powersave"} and driver in ("intel_pstate", "amd-pstate-epp")
    severity = DoctorSeverity.NOTE if slow == {"schedutil"} or scales_by_itself else DoctorSeverity.WARNING
    return Result(severity, what, "sudo cpupower frequency-set -g performance")


@check(
    "kernel",
    where="/proc/sys/kernel/osrelease",
    why="numapin uses features of newer kernels to place pages exactly and to end the workers of a killed rank.",
)
def kernel(host: Host) -> Result:
    """Find a kernel that lacks features that numapin uses; captures often have only /proc/version."""
    release = host.word("proc/sys/kernel/osrelease") or host.match("proc/version", r"^Linux version ([\w.+~-]{1,64})\s")
    match = re.match(r"(\d{1,4})\.(\d{1,4})", release or "", re.ASCII)
    if match is None:
        return unknown("the kernel's release is unknown")
    version, remedy = (int(match[1]), int(match[2])), "install Linux 5.15 or newer and reboot"
    if version < (5, 3):
        return warning(f"Linux {release} has no pidfds (5.3): workers outlive a killed rank", remedy=remedy)
    if version < (5, 15):
        return note(f"Linux {release} prefers only the first of several nodes (5.15)", remedy=remedy)
    return ok(f"Linux {release}")


# --- what only the running machine tells -----------------------------------------------------------------------------


@live_check(
    "memory-policy",
    where="get_mempolicy, set_mempolicy, mbind and move_pages, tried in a child process; /proc/self/status",
    why="Without memory policies, a page is local to its rank only if the rank's own CPUs touch it first. Without "
    "move_pages, numapin cannot ask the kernel for the node of a page.",
)
def memory_policy(live: Live, host: Host) -> Result:
    """Find memory-policy calls that seccomp refuses, or that the kernel accepts without effect."""
    if live.refused is None:
        return unknown("not tried: libnuma cannot be used")
    refused = {call: problem for call, problem in live.refused.items() if problem}
    held = {None: "unknown", True: "held", False: "not held"}[host.has_capability(_CAP_SYS_NICE)]
    mode = host.match("proc/self/status", r"^Seccomp:\s*([0-9])$") or "unknown"  # 2: filtered
    confinement = f"seccomp mode {mode}, CAP_SYS_NICE {held}"
    if not refused:
        return ok(f"{', '.join(live.refused)} work; {confinement}")
    if set(live.refused.values()) == {"ENOSYS"}:
        return note("the kernel has no NUMA support (ENOSYS)", remedy="numapin run --memory none …")
    what = f"refused: {', '.join(f'{call} ({problem})' for call, problem in refused.items())}; {confinement}"
    profile = "docker run --security-opt seccomp=PROFILE.json … with a profile that allows these calls"
    if set(refused) == {"move_pages"}:  # Docker's own profile refuses it even with SYS_NICE
        return note(f"{what}; numapin reads /proc/self/numa_maps instead", remedy=profile)
    return warning(what, remedy=profile if host.has_capability(_CAP_SYS_NICE) else SYS_NICE)


@live_check(
    "shm",
    where="statvfs /dev/shm",
    why="Workers of torch's DataLoader pass each batch through /dev/shm and die of SIGBUS when it is full. numapin's "
    "workers do not use it.",
)
def shared_memory(live: Live, _host: Host) -> Result:
    """Find a /dev/shm that is too small for torch's loader, or nearly full."""
    size, free = live.shm_bytes, live.shm_free_bytes
    if size is None or free is None:
        return error("there is no /dev/shm", remedy="docker run --shm-size 16g … (or mount a tmpfs on /dev/shm)")
    what = f"{render_size(free)} of {render_size(size)} free"
    if free < _SMALL_SHM_BYTES:
        larger = "sudo mount -o remount,size=50% /dev/shm (docker run --shm-size 16g …)"
        small = f"{what}: less than {render_size(_SMALL_SHM_BYTES)}"
        return warning(small, remedy=f"{larger}, or numapin run --dataloader numapin")
    return ok(what)


def _words_of_gpus(host: Host, name: str) -> dict[int, str]:
    """Return the word in a file of each GPU, by index; a GPU without one is left out."""
    words = {gpu.index: host.word(f"{_PCI}/{gpu.pci}/{name}") for gpu in host.topology.gpus if gpu.pci}
    return {index: word for index, word in words.items() if word}


def _names(gpus: Iterable[Gpu]) -> str:
    return f"gpu{cpu_set.render(gpu.index for gpu in gpus)}"
