"""The plan of one rank, on node 1 of two, with which the tests of verify and top compare observations."""

from __future__ import annotations

from numapin import Memory, RankPlan
from tests.unit.seam import CpuSet, GpuRef, Policy

MIB = 1 << 20
PLANNED = RankPlan(
    local_rank=0,
    gpu=GpuRef(index=1, uuid="GPU-1", pci="0000:81:00.0"),
    node=1,
    cpus=CpuSet(range(4, 8)),
    nodes=CpuSet({1}),
    memory=Memory.PREFERRED,
    num_threads=4,
    exact=True,
    reason="",
)
PREFER = Policy(mode="prefer", nodes=CpuSet({1}))
