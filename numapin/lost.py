"""GPUs that a plan names and the machine no longer shows. Pure.

Comes in: a `Plan`, and what NVML says now. Goes out: which ranks lost their GPU. A GPU that fell off the bus stays away
until the host is reset; restarting its rank would only use up restarts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numapin.plan import Plan, RankPlan
    from numapin.topology.readings import NvmlReadings


def ranks_without_gpu(plan: Plan, now: NvmlReadings) -> tuple[RankPlan, ...]:
    """Return the ranks whose GPU NVML does not show any more; none where NVML says nothing at all."""
    if now.gpus is None:
        return ()
    there = {name for gpu in now.gpus for name in (gpu.uuid, gpu.pci)}
    return tuple(
        rank for rank in plan.ranks if rank.gpu and (name := rank.gpu.uuid or rank.gpu.pci) and name not in there
    )


def describe(ranks: tuple[RankPlan, ...]) -> str:
    """Name the GPUs: "GPU 1 (GPU-…, 0000:01:00.0) of local rank 1"."""
    told = [
        f"GPU {rank.gpu.index} ({', '.join(name for name in (rank.gpu.uuid, rank.gpu.pci) if name)}) of local rank "
        f"{rank.local_rank}"
        for rank in ranks
        if rank.gpu
    ]
    return ", ".join(told)
