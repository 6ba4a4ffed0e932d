"""Checks of the kernel's settings and of the hardware. Pure.

Comes in: `DoctorReadings` and the `Topology`. Goes out: one `DoctorFinding` per check.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.doctor.model import Check, DoctorSeverity
from numapin.topology.model import Pcie

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numapin.doctor.model import DoctorFinding, DoctorReadings
    from numapin.topology.model import Gpu, Topology

KERNEL: Final = Check(
    name="kernel",
    where="/proc/sys/kernel/osrelease",
    why="numapin uses features of newer kernels to place pages exactly and to end the workers of a killed rank.",
)
NUMA_BALANCING: Final = Check(
    name="numa-balancing",
    where="/proc/sys/kernel/numa_balancing",
    why="Automatic NUMA balancing causes page faults to find pages to migrate. For bound ranks that is cost without "
    "gain, and pinned pages cannot be migrated.",
)
HUGE_PAGES: Final = Check(
    name="huge-pages",
    where="/sys/kernel/mm/transparent_hugepage/enabled",
    why="Workers touch new memory for every batch. With 4 KiB pages, each GiB of it costs 262144 page faults.",
)
SHARED_HUGE_PAGES: Final = Check(
    name="shmem-huge-pages",
    where="/sys/kernel/mm/transparent_hugepage/shmem_enabled",
    why="numapin's DataLoader asks for huge pages in shared memory. With them, batches of 154 MB were 5 to 20% faster.",
)
GOVERNOR: Final = Check(
    name="governor",
    where="/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
    why="A CPU that clocks down while its rank waits for the GPU launches the next kernels late.",
)
SMT: Final = Check(
    name="smt",
    where="/sys/devices/system/cpu/smt/control, thread_siblings_list",
    why="The CPUs of a core share its execution units: a worker on one of them slows the rank's own thread.",
)
PCIE: Final = Check(
    name="pcie-link",
    where="nvmlDeviceGetCurrPcieLink*, /sys/bus/pci/devices/*/{current,max}_link_*, also of the port above the GPU",
    why="Half the lanes, or one PCIe generation less, halves the rate at which batches can be copied to the GPU.",
)
IOMMU: Final = Check(
    name="iommu",
    where="/sys/class/iommu, /sys/bus/pci/devices/*/iommu_group/type, /proc/cmdline",
    why="A translating IOMMU slows every DMA transfer, and sends traffic between GPUs through the root complex.",
)

_NEEDS: Final = (
    ((5, 15), "MPOL_PREFERRED_MANY (5.15): only the first of several nodes is preferred"),
    ((5, 14), "MADV_POPULATE_WRITE (5.14): pages are touched one by one"),
    ((5, 3), "pidfds (5.3): workers outlive a killed rank"),
)
_PASSES_THROUGH: Final = frozenset({"iommu=pt", "iommu.passthrough=1", "iommu=off", "intel_iommu=off", "amd_iommu=off"})
_IOMMU_REMEDY: Final = "add iommu=pt to the kernel command line and reboot"
_SCALES_BY_ITSELF: Final = frozenset({"intel_pstate", "amd-pstate-epp"})
"""Drivers whose "powersave" leaves the clock to the processor, which raises it under load."""


def kernel(readings: DoctorReadings, _topology: Topology) -> DoctorFinding:
    """Find a kernel that lacks features that numapin uses."""
    version = _version(readings.kernel or "")
    if version is None:
        return KERNEL.unknown("the kernel's release is unknown")
    missing = [feature for needed, feature in _NEEDS if version < needed]
    if not missing:
        return KERNEL.ok(f"Linux {readings.kernel}")
    what, remedy = f"Linux {readings.kernel} lacks {'; '.join(missing)}", "install Linux 5.15 or newer and reboot"
    return KERNEL.warning(what, remedy=remedy) if version < (5, 3) else KERNEL.note(what, remedy=remedy)


def _version(release: str) -> tuple[int, int] | None:
    match = re.match(r"(\d{1,4})\.(\d{1,4})", release, re.ASCII)
    return None if match is None else (int(match[1]), int(match[2]))


def numa_balancing(readings: DoctorReadings, topology: Topology) -> DoctorFinding:
    """Find automatic NUMA balancing."""
    mode = readings.numa_balancing
    if mode is None:
        return readings.without(NUMA_BALANCING, "the kernel does not have it")
    if not mode.isdecimal():
        return NUMA_BALANCING.unknown(f"the kernel says {mode!r}")
    if int(mode) == 0:
        return NUMA_BALANCING.ok("off")
    if len(topology.nodes) < 2:
        return NUMA_BALANCING.ok("on, but there is only one node")
    return NUMA_BALANCING.warning(f"on ({mode})", remedy="sudo sysctl kernel.numa_balancing=0")


def huge_pages(readings: DoctorReadings, _topology: Topology) -> DoctorFinding:
    """Find transparent huge pages that are off."""
    return _huge_pages(HUGE_PAGES, readings.huge_pages, off={"never"}, on="madvise")


def shared_huge_pages(readings: DoctorReadings, _topology: Topology) -> DoctorFinding:
    """Find huge pages of shared memory that are off."""
    return _huge_pages(SHARED_HUGE_PAGES, readings.shared_huge_pages, off={"never", "deny"}, on="advise")


def _huge_pages(check: Check, mode: str | None, *, off: set[str], on: str) -> DoctorFinding:
    if mode is None:
        return check.unknown("the kernel does not show the setting")
    if mode in off:
        return check.note(f"off ({mode})", remedy=f"echo {on} | sudo tee {check.where}")
    return check.ok(mode)


def governor(readings: DoctorReadings, _topology: Topology) -> DoctorFinding:
    """Find frequency governors that save power."""
    if not readings.governors:
        return readings.without(GOVERNOR, "no frequency governor: the firmware or the hypervisor sets the clock")
    counts = [f"{name} (CPUs: {count})" for name, count in sorted(readings.governors.items())]
    driver = f", driver {readings.frequency_driver}" if readings.frequency_driver else ""
    what = f"{', '.join(counts)}{driver}"
    if set(readings.governors) == {"performance"}:
        return GOVERNOR.ok(what)
    severity = DoctorSeverity.NOTE if _raises_clock_under_load(readings) else DoctorSeverity.WARNING
    return GOVERNOR.found(severity, what, "sudo cpupower frequency-set -g performance")


def _raises_clock_under_load(readings: DoctorReadings) -> bool:
    """Return whether every governor raises the clock as soon as there is work."""
    slow = readings.governors.keys() - {"performance"}
    return slow == {"schedutil"} or (slow == {"powersave"} and readings.frequency_driver in _SCALES_BY_ITSELF)


def smt(readings: DoctorReadings, topology: Topology) -> DoctorFinding:
    """Find cores with several CPUs."""
    num_cpus = max((len(core.cpus) for core in topology.cores), default=1)
    control = f" (control: {readings.smt})" if readings.smt else ""
    if num_cpus > 1:
        return SMT.note(f"{num_cpus} CPUs per core{control}", remedy="numapin run --no-smt … (uses one CPU per core)")
    return SMT.ok(f"one CPU per core{control}")


class _Link(NamedTuple):
    """A PCIe link: generation and number of lanes. None: unknown."""

    gen: int | None
    width: int | None

    @classmethod
    def now(cls, pcie: Pcie) -> _Link:
        return cls(pcie.gen, pcie.width)

    @classmethod
    def best(cls, pcie: Pcie) -> _Link:
        return cls(pcie.max_gen, pcie.max_width)

    def is_below(self, other: _Link) -> bool:
        """Return whether the generation or the width is known to be less."""
        return any(a is not None and b is not None and a < b for a, b in zip(self, other, strict=True))

    def __str__(self) -> str:
        gen, width = ("?" if number is None else number for number in self)
        return f"PCIe {gen} x{width}"


def pcie_link(readings: DoctorReadings, topology: Topology) -> DoctorFinding:
    """Find GPUs whose link is slower than they support, because of the slot or at the moment."""
    if not topology.gpus:
        return PCIE.ok("no GPU")
    known = [gpu for gpu in topology.gpus if gpu.pcie != Pcie()]
    if not known:
        return PCIE.unknown("the links of the GPUs are unknown")
    return _of_links(readings, known)


def _of_links(readings: DoctorReadings, gpus: Sequence[Gpu]) -> DoctorFinding:
    """Judge the links that are known."""
    slow_slots = list(_slow_slots(readings, gpus))
    if slow_slots:
        return PCIE.warning("; ".join(slow_slots), remedy="move the card to a faster slot (LnkCap in: sudo lspci -vv)")
    slow_links = list(_slow_links(gpus))
    if slow_links:
        return PCIE.note(
            f"{'; '.join(slow_links)}; idle GPUs lower their link, so check again while a job runs",
            remedy="nvidia-smi --query-gpu=pcie.link.gen.current,pcie.link.width.current --format=csv",
        )
    return PCIE.ok(", ".join(sorted({str(_Link.best(gpu.pcie)) for gpu in gpus})))


def _slow_slots(readings: DoctorReadings, gpus: Iterable[Gpu]) -> Iterator[str]:
    """Yield the GPUs that support a faster link than the port above them."""
    for gpu in gpus:
        slot, best = _Link.best(readings.slots.get(gpu.index, Pcie())), _Link.best(gpu.pcie)
        made_up_by_hypervisor = slot.is_below(_Link.now(gpu.pcie))
        if slot.is_below(best) and not made_up_by_hypervisor:
            yield f"{gpu.label} supports {best}, but its slot only {slot}"


def _slow_links(gpus: Iterable[Gpu]) -> Iterator[str]:
    """Yield the GPUs whose link is now slower than they support."""
    for gpu in gpus:
        now, best = _Link.now(gpu.pcie), _Link.best(gpu.pcie)
        if now.is_below(best):
            yield f"{gpu.label} runs at {now} instead of {best}"


def iommu(readings: DoctorReadings, topology: Topology) -> DoctorFinding:
    """Find an IOMMU that translates the DMA of GPUs."""
    if not readings.iommus:
        return readings.without(IOMMU, "no IOMMU, or it is off")
    types = set(readings.iommu_types.values())
    translated = _translated_gpus(readings)
    if translated:
        return IOMMU.warning(
            f"translates for {', '.join(translated)} ({', '.join(sorted(types))})", remedy=_IOMMU_REMEDY
        )
    signs = types | (_PASSES_THROUGH & readings.kernel_options)
    if signs:
        return IOMMU.ok(f"passes through ({', '.join(sorted(signs))})")
    if not topology.gpus:
        return IOMMU.ok("on, but there is no GPU")
    return IOMMU.note("on; whether it translates for the GPUs is unknown", remedy=_IOMMU_REMEDY)


def _translated_gpus(readings: DoctorReadings) -> list[str]:
    return [f"gpu{index}" for index, word in readings.iommu_types.items() if word.startswith("DMA")]
