"""GPUs that a plan names and the machine no longer shows.

A GPU that fell off the bus stays away until the host is reset; restarting its rank would only use up restarts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numapin.errors import NumapinError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numapin.plan.model import GpuRef, Plan
    from numapin.topology.readings import NvmlReadings


def require_gpus(plan: Plan, looks: Iterable[NvmlReadings]) -> None:
    """Raise NumapinError for planned GPUs that none of the readings shows.

    A reading without any answer from NVML counts as showing all of them. No reading is taken if no GPU is planned; none
    are given for GPUs that NVML does not know.
    """
    planned = _gpus_of(plan)
    if not planned:
        return
    lost: list[str] = []
    notes: tuple[str, ...] = ()
    for readings in looks:
        lost, notes = _missing(planned, readings), readings.notes
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


def _missing(planned: Sequence[tuple[str | None, str]], readings: NvmlReadings) -> list[str]:
    """Return the labels of the planned GPUs that a reading does not show."""
    if readings.gpus is None:
        return []
    shown = {name for gpu in readings.gpus for name in (gpu.uuid, gpu.pci)}
    return [label for name, label in planned if name not in shown]


def _gpus_of(plan: Plan) -> list[tuple[str | None, str]]:
    """Return the name of each rank's GPU, with its label; GPUs without a name are left out."""
    gpus = [(rank.gpu, rank.local_rank) for rank in plan.ranks if rank.gpu is not None]
    return [(_name(gpu), _label(gpu, local_rank)) for gpu, local_rank in gpus if _name(gpu)]


def _name(gpu: GpuRef) -> str | None:
    """Return the name by which a GPU is found again: its UUID, else its PCI address."""
    return gpu.uuid or gpu.pci


def _label(gpu: GpuRef, local_rank: int) -> str:
    """Return text such as "GPU 1 (GPU-…, 0000:01:00.0) of local rank 1"."""
    return f"GPU {gpu.index} ({', '.join(filter(None, (gpu.uuid, gpu.pci)))}) of local rank {local_rank}"
