"""Running jobs as data, for the tests of the table and of the metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.unit.planned import PLANNED
from tests.unit.seam import CpuSet, GpuLoad, GpuRef, Top, TopRank, Waited

if TYPE_CHECKING:
    from numapin import RankPlan

_LOAD = GpuLoad(busy_share=0.87, h2d_gbps=12.4, used_bytes=40 << 30, memory_bytes=80 << 30, power_w=612.3)


def loop(waited_s: float, stepped_s: float, num_steps: int) -> Waited:
    return Waited(waited_s=waited_s, stepped_s=stepped_s, num_steps=num_steps, num_bytes=num_steps * 10**6)


def planned(number: int) -> RankPlan:
    gpu = GpuRef(index=number, uuid=f"GPU-{number}", pci=f"0000:{number:02x}:00.0")
    return replace(PLANNED, local_rank=number, gpu=gpu, cpus=CpuSet(range(number * 8, number * 8 + 8)))


def rank(number: int = 0, **facts: object) -> TopRank:
    usual = TopRank(
        plan=planned(number),
        pid=40000 + number,
        is_gone=False,
        num_threads=120,
        num_off_plan=0,
        remote_share=0.001,
        pinned_bytes=3 << 30,
        wait_share=0.1,
        load=_LOAD,
        cpu_share=4.25,
        up_s=3723.0,
        loop=loop(10.0, 100.0, 1000),
    )
    return replace(usual, **facts)  # type: ignore[arg-type] # the fields by name


def job(*ranks: TopRank, interval_s: float = 1.0) -> Top:
    """Return a job that does not swap."""
    return Top(run="run-20261123-101500-host-8e8e0dd1", interval_s=interval_s, ranks=ranks, swap_per_s=(0.0, 0.0))
