"""Checks of the kernel's settings and of the hardware. Pure.

Comes in: `DoctorReadings` and the `Topology`. Goes out: one `DoctorFinding` a check.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, TypeAlias

from numapin.doctor.model import Check, DoctorSeverity
from numapin.topology.model import Pcie

if TYPE_CHECKING:
    from numapin.doctor.model import DoctorFinding, DoctorReadings
    from numapin.topology.model import Gpu, Topology

KERNEL: Final = Check(
    name="kernel",
    where="/proc/sys/kernel/osrelease",
    why="numapin uses what newer kernels have to place pages exactly and to end workers whose rank was killed.",
)
NUMA_BALANCING: Final = Check(
    name="numa-balancing",
    where="/proc/sys/kernel/numa_balancing",
    why="The kernel takes page faults on purpose to find pages to move: a cost without a gain where ranks are bound, "
    "and pinned pages cannot move.",
)
HUGE_PAGES: Final = Check(
    name="huge-pages",
    where="/sys/kernel/mm/transparent_hugepage/enabled",
    why="Workers touch new memory for every batch; with 4 KiB pages each gigabyte of it is 262144 page faults.",
)
SHARED_HUGE_PAGES: Final = Check(
    name="shmem-huge-pages",
    where="/sys/kernel/mm/transparent_hugepage/shmem_enabled",
    why="numapin's DataLoader asks for huge pages in shared memory: with them batches of 154 MB were 5 to 20 % faster.",
)
GOVERNOR: Final = Check(
    name="governor",
    where="/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
    why="A CPU that is clocked down while a rank waits for its GPU launches the next kernels late.",
)
SMT: Final = Check(
    name="smt",
    where="/sys/devices/system/cpu/smt/control, thread_siblings_list",
    why="Two threads of a core share its units: a worker on the sibling slows the thread that feeds the GPU.",
)
PCIE: Final = Check(
    name="pcie-link",
    where="nvmlDeviceGetCurrPcieLink*, /sys/bus/pci/devices/*/{current,max}_link_*, the same of the port above",
    why="A link of half the lanes or one generation less halves what a batch's copy to the GPU can reach.",
)
IOMMU: Final = Check(
    name="iommu",
    where="/sys/class/iommu, /sys/bus/pci/devices/*/iommu_group/type, /proc/cmdline",
    why="An IOMMU that translates costs time on each DMA, and sends traffic between GPUs through the root complex.",
)

_Link: TypeAlias = "tuple[int | None, int | None]"
"""PCI Express generation and lanes."""
_NEEDS: Final = (
    ((5, 15), "several preferred nodes (5.15): only the first is preferred"),
    ((5, 14), "MADV_POPULATE_WRITE (5.14): pages are touched one by one"),
    ((5, 3), "pidfds (5.3): workers outlive a rank that was killed"),
)
_PASSES_THROUGH: Final = frozenset({"iommu=pt", "iommu.passthrough=1", "iommu=off", "intel_iommu=off", "amd_iommu=off"})
_SCALES_BY_ITSELF: Final = frozenset({"intel_pstate", "amd-pstate-epp"})
"""Drivers whose "powersave" leaves the clock to the processor, which raises it under load."""


def kernel(readings: DoctorReadings, _topology: Topology) -> DoctorFinding:
    """Find a kernel that lacks what numapin uses."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})", readings.kernel or "", re.ASCII)
    if match is None:
        return KERNEL.unknown("the kernel does not tell its release")
    version = (int(match[1]), int(match[2]))
    missing = [what for needed, what in _NEEDS if version < needed]
    if missing:
        severity = DoctorSeverity.WARNING if version < (5, 3) else DoctorSeverity.NOTE
        return KERNEL.found(
            severity, f"Linux {readings.kernel} lacks {'; '.join(missing)}", "install Linux 5.15 or later, and reboot"
        )
    return KERNEL.ok(f"Linux {readings.kernel}")


def numa_balancing(readings: DoctorReadings, topology: Topology) -> DoctorFinding:
    """Find automatic NUMA balancing."""
    mode = readings.numa_balancing
    if mode is None:
        return readings.without(NUMA_BALANCING, "the kernel has none")
    if not mode.isdecimal():
        return NUMA_BALANCING.unknown(f"the kernel says {mode!r}")
    if int(mode) == 0 or len(topology.nodes) < 2:
        return NUMA_BALANCING.ok("off" if int(mode) == 0 else "on, but there is one node")
    return NUMA_BALANCING.warning(f"on ({mode})", remedy="sudo sysctl kernel.numa_balancing=0")


def huge_pages(readings: DoctorReadings, _topology: Topology) -> DoctorFinding:
    """Find transparent huge pages that are off."""
    mode = readings.huge_pages
    if mode is None:
        return HUGE_PAGES.unknown("the kernel does not tell")
    if mode == "never":
        return HUGE_PAGES.note("never", remedy=_write("madvise", HUGE_PAGES.where))
    return HUGE_PAGES.ok(mode)


def shared_huge_pages(readings: DoctorReadings, _topology: Topology) -> DoctorFinding:
    """Find huge pages of shared memory that are off."""
    mode = readings.shared_huge_pages
    if mode is None:
        return SHARED_HUGE_PAGES.unknown("the kernel does not tell")
    if mode in ("never", "deny"):
        return SHARED_HUGE_PAGES.note(mode, remedy=_write("advise", SHARED_HUGE_PAGES.where))
    return SHARED_HUGE_PAGES.ok(mode)


def governor(readings: DoctorReadings, _topology: Topology) -> DoctorFinding:
    """Find frequency governors that save power."""
    slow = {name: count for name, count in readings.governors.items() if name != "performance"}
    if not readings.governors:
        return readings.without(GOVERNOR, "none is shown: firmware or hypervisor sets the clock")
    what = ", ".join(f"{name} (CPUs: {count})" for name, count in sorted(readings.governors.items()))
    what += f", driver {readings.frequency_driver}" if readings.frequency_driver else ""
    if not slow:
        return GOVERNOR.ok(what)
    mild = set(slow) <= {"powersave"} and readings.frequency_driver in _SCALES_BY_ITSELF
    severity = DoctorSeverity.NOTE if mild or set(slow) <= {"schedutil"} else DoctorSeverity.WARNING
    return GOVERNOR.found(severity, what, "sudo cpupower frequency-set -g performance")


def smt(readings: DoctorReadings, topology: Topology) -> DoctorFinding:
    """Find cores of several threads."""
    num_threads = max((len(core.cpus) for core in topology.cores), default=1)
    told = "" if readings.smt is None else f" (control: {readings.smt})"
    if num_threads > 1:
        return SMT.note(f"{num_threads} threads a core{told}", remedy="numapin run --no-smt … (for one thread a core)")
    return SMT.ok(f"one thread a core{told}")


def pcie_link(readings: DoctorReadings, topology: Topology) -> DoctorFinding:
    """Find links that are slower than the GPU: now, which idle GPUs do by themselves, or at most, which is the slot."""
    known = [gpu for gpu in topology.gpus if gpu.pcie != Pcie()]
    if not known:
        return PCIE.unknown("the GPUs' links are not told") if topology.gpus else PCIE.ok("there is no GPU")
    slots = {gpu.index: _slot(readings, gpu) for gpu in known}
    cramped = [gpu for gpu in known if _is_less(_most(slots[gpu.index]), _most(gpu.pcie))]
    if cramped:
        words = (
            f"{gpu.label} can do {_link(_most(gpu.pcie))}, its slot {_link(_most(slots[gpu.index]))}" for gpu in cramped
        )
        return PCIE.warning("; ".join(words), remedy="move the card to a faster slot; see: sudo lspci -vv, LnkCap")
    slow = [gpu for gpu in known if _is_less(_now(gpu), _most(gpu.pcie))]
    if slow:
        words = (f"{gpu.label} {_link(_now(gpu))} of {_link(_most(gpu.pcie))}" for gpu in slow)
        return PCIE.note(
            f"{'; '.join(words)}: idle GPUs lower their link, so look while a job runs",
            remedy="nvidia-smi --query-gpu=pcie.link.gen.current,pcie.link.width.current --format=csv",
        )
    return PCIE.ok(", ".join(sorted({_link(_most(gpu.pcie)) for gpu in known})))


def _slot(readings: DoctorReadings, gpu: Gpu) -> Pcie:
    """Return what the port above a GPU can do; nothing where the GPU does more now: a hypervisor made that port up."""
    slot = readings.slots.get(gpu.pci or "", Pcie())
    return Pcie() if _is_less(_most(slot), _now(gpu)) else slot


def _most(link: Pcie) -> _Link:
    return link.max_gen, link.max_width


def _now(gpu: Gpu) -> _Link:
    return gpu.pcie.gen, gpu.pcie.width


def _is_less(one: _Link, other: _Link) -> bool:
    """Say whether generation or width is less; what is unknown is not."""
    return any(a is not None and b is not None and a < b for a, b in zip(one, other, strict=True))


def _link(link: _Link) -> str:
    gen, width = ("?" if number is None else number for number in link)
    return f"PCIe {gen} x{width}"


def iommu(readings: DoctorReadings, topology: Topology) -> DoctorFinding:
    """Find an IOMMU that translates what GPUs read and write."""
    if not readings.iommus:
        return readings.without(IOMMU, "there is none, or it is off")
    remedy = "add iommu=pt to the kernel's command line, and reboot"
    types = readings.iommu_types
    translated = [gpu.label for gpu in topology.gpus if types.get(gpu.pci or "", "").startswith("DMA")]
    if translated:
        return IOMMU.warning(
            f"translates for {', '.join(translated)} ({', '.join(sorted(set(types.values())))})", remedy=remedy
        )
    words = _PASSES_THROUGH.intersection((readings.command_line or "").split())
    if types or words:
        return IOMMU.ok(f"passes through ({', '.join(sorted({*types.values(), *words}))})")
    if not topology.gpus:
        return IOMMU.ok(f"{len(readings.iommus)} there, and no GPU")
    return IOMMU.note(f"{len(readings.iommus)} there; whether GPUs are translated is not told", remedy=remedy)


def _write(word: str, path: str) -> str:
    return f"echo {word} | sudo tee {path}"
