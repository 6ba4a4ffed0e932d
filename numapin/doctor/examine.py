"""All checks, in the order of the report. Pure.

Comes in: `DoctorReadings` and the `Topology`. Goes out: one `DoctorFinding` per check. Checks that need the running
machine are skipped on a captured one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.doctor import host, memory, network, placement, software
from numapin.doctor.model import Check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numapin.doctor.model import DoctorFinding, DoctorReadings, Live
    from numapin.topology.model import Topology

NOT_CHECKED: Final = "not checked: needs the running machine, and this is a capture"

_TOPOLOGY: Final = Check(
    name="topology",
    where="the notes of: numapin topo --json",
    why="Facts that could not be read are not used for binding.",
)

FROM_FILES: Final[tuple[Callable[[DoctorReadings, Topology], DoctorFinding], ...]] = (
    placement.nodes,
    placement.gpu_nodes,
    placement.cpuset,
    memory.host_memory,
    memory.node_memory,
    placement.memlock,
    memory.swap,
    host.pcie_link,
    network.sharing,
    network.package,
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
    (software.TORCH, software.torch),
    (software.STRAYS, software.strays),
    (software.OPENMP, software.openmp),
    (software.DEVICE_ORDER, software.device_order),
    (software.NCCL, software.nccl),
    (software.NCCL_AFFINITY, software.nccl_affinity),
    (network.NAMES, network.names),
    (network.SAME_HCA, network.same_hca),
    (software.PERSISTENCE, software.persistence),
    (software.STORES, software.streaming_stores),
)


def examine(readings: DoctorReadings, topology: Topology) -> tuple[DoctorFinding, ...]:
    """Run every check once."""
    return (
        *(check(readings, topology) for check in FROM_FILES),
        *_live_findings(readings.live, topology),
        *_unread(readings, topology),
    )


def _live_findings(live: Live | None, topology: Topology) -> Iterator[DoctorFinding]:
    for check, function in FROM_LIVE:
        yield check.unknown(NOT_CHECKED) if live is None else function(live, topology)


def _unread(readings: DoctorReadings, topology: Topology) -> Iterator[DoctorFinding]:
    """Yield what could not be read of the machine; the finding about the driver already has NVML's notes."""
    reported = _driver_notes(readings.live)
    yield from (_TOPOLOGY.note(note) for note in topology.notes if note not in reported)


def _driver_notes(live: Live | None) -> tuple[str, ...]:
    return live.nvml.notes if live and live.nvml.gpus is None else ()
