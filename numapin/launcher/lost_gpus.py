"""GPUs that a plan names and the machine no longer shows.

A GPU that fell off the bus stays away until the host is reset; restarting its rank would only use up restarts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numapin.errors import NumapinError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numapin.plan.model import Plan
    from numapin.topology.readings import NvmlReadings


def require_gpus(plan: Plan, looks: Iterable[NvmlReadings]) -> None:
    """Raise NumapinError for planned GPUs that none of the readings shows.

    A reading without any answer from NVML counts as showing all of them. No reading is taken if no GPU is planned; none
    are given for GPUs that NVML does not know.
    """
    planned: list[tuple[str, str]] = []  # the name by which each GPU is found again, and a text about it
    for rank in plan.ranks:
        names = [name for name in (rank.gpu.uuid, rank.gpu.pci) if name] if rank.gpu else []
        if rank.gpu and names:
            planned.append((names[0], f"GPU {rank.gpu.index} ({', '.join(names)}) of local rank {rank.local_rank}"))
    if not planned:
        return
    lost: list[str] = []
    notes: tuple[str, ...] = ()
    for readings in looks:
        if readings.gpus is None:
            return
        shown = {name for gpu in readings.gpus for name in (gpu.uuid, gpu.pci)}
        lost, notes = [text for name, text in planned if name not in shown], readings.notes
        if not lost:
            return
    if not lost:
        return
    problem = (
        f"the driver no longer shows {', '.join(lost)}: this host leaves the job, which continues on the other hosts "
        "if --nnodes MIN:MAX allows it"
    )
    raise NumapinError(
        "; ".join((problem, *notes)),
        "see what happened with: dmesg | grep -i xid; a reset or reboot brings the GPU back",
    )
