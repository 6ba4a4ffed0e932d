"""Every check, in the order in which a report tells them. Pure.

Comes in: `DoctorReadings` and the `Topology`. Goes out: one `DoctorFinding` a check. Those that only the running
machine can answer are not asked of a captured one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.doctor import host, placement, software
from numapin.doctor.model import Check

if TYPE_CHECKING:
    from collections.abc import Callable

    from numapin.doctor.model import DoctorFinding, DoctorReadings, Live
    from numapin.topology.model import Topology

NOT_ASKED: Final = "not asked: a captured machine"

_TOLD: Final = Check(
    name="topology",
    where="what reading the machine left open",
    why="What cannot be read is not used for binding.",
)

FROM_FILES: Final[tuple[Callable[[DoctorReadings, Topology], DoctorFinding], ...]] = (
    placement.nodes,
    placement.gpu_nodes,
    placement.cpuset,
    placement.node_memory,
    placement.memlock,
    placement.swap,
    host.pcie_link,
    host.iommu,
    host.numa_balancing,
    host.huge_pages,
    host.shared_huge_pages,
    host.governor,
    host.smt,
    host.kernel,
)
FROM_LIVE: Final[tuple[tuple[Check, Callable[[Live, Topology], DoctorFinding]], ...]] = (
    (software.DRIVER, software.driver),
    (software.LIBNUMA, software.libnuma),
    (placement.POLICY, placement.memory_policy),
    (placement.SHM, placement.shared_memory),
    (software.PYTHON, software.python),
    (software.OPENMP, software.openmp),
    (software.DEVICE_ORDER, software.device_order),
    (software.NCCL, software.nccl),
    (software.NCCL_AFFINITY, software.nccl_affinity),
    (software.PERSISTENCE, software.persistence),
    (software.STORES, software.streaming_stores),
)


def examine(readings: DoctorReadings, topology: Topology) -> tuple[DoctorFinding, ...]:
    """Make every check once."""
    live = readings.live
    return (
        *(check(readings, topology) for check in FROM_FILES),
        *(check.unknown(NOT_ASKED) if live is None else ask(live, topology) for check, ask in FROM_LIVE),
        *_notes(readings, topology),
    )


def _notes(readings: DoctorReadings, topology: Topology) -> tuple[DoctorFinding, ...]:
    """Pass on what the readers of the machine could not tell; what NVML says is in the driver's finding already."""
    said = readings.live.nvml.notes if readings.live and readings.live.nvml.gpus is None else ()
    return tuple(_TOLD.note(note) for note in topology.notes if note not in said)
