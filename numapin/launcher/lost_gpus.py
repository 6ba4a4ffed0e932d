"""GPUs that a plan names and the machine no longer shows. Pure.

Comes in: a `Plan`, and what NVML says now, once or more often. Goes out: nothing, or NumapinError that names the lost
GPUs. A GPU that fell off the bus stays away until the host is reset; restarting its rank would only use up restarts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numapin.errors import NumapinError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numapin.plan.model import Plan
    from numapin.topology.readings import NvmlReadings


def require_gpus(plan: Plan, looks: Iterable[NvmlReadings]) -> None:
    """Raise NumapinError for GPUs that none of the looks shows; one at which NVML says nothing at all is no loss."""
    planned = _gpus_of(plan)
    if not planned:
        return  # and nobody looks
    lost, notes = [told for _, told in planned], ""
    for now in looks:
        if now.gpus is None:
            return
        there = {name for gpu in now.gpus for name in (gpu.uuid, gpu.pci)}
        lost = [told for name, told in planned if name not in there]
        if not lost:
            return
        notes = "; ".join(["", *now.notes])
    raise NumapinError(
        f"the driver no longer shows {', '.join(lost)}: this host leaves the job, which goes on elsewhere if "
        f"--nnodes MIN:MAX lets it{notes}",
        "see what happened with: dmesg | grep -i xid; a reset or reboot brings the GPU back",
    )


def _gpus_of(plan: Plan) -> list[tuple[str, str]]:
    """Return each rank's GPU by UUID or PCI address, and in words: "GPU 1 (GPU-…, 0000:01:00.0) of local rank 1"."""
    return [
        (name, f"GPU {gpu.index} ({', '.join(filter(None, (gpu.uuid, gpu.pci)))}) of local rank {rank.local_rank}")
        for rank in plan.ranks
        if (gpu := rank.gpu) and (name := gpu.uuid or gpu.pci)
    ]
