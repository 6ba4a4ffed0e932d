"""Lost GPUs: found by UUID, or by PCI address if there is no UUID; never guessed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from numapin import Bind, Memory, Plan, RankPlan
from numapin.errors import NumapinError
from tests.unit.launcher.seam import CpuSet, GpuRef, NvmlReading, NvmlReadings, Pcie, require_gpus

if TYPE_CHECKING:
    from collections.abc import Sequence


def plan(gpus: Sequence[GpuRef | None]) -> Plan:
    """Return a plan with these GPUs, by rank."""
    rank = RankPlan(
        local_rank=0,
        gpu=None,
        node=0,
        cpus=CpuSet({0}),
        nodes=CpuSet({0}),
        memory=Memory.NONE,
        num_threads=1,
        exact=True,
        reason="",
    )
    ranks = tuple(replace(rank, local_rank=n, gpu=gpu) for n, gpu in enumerate(gpus))
    return Plan(bind=Bind.NODE, memory=Memory.NONE, ranks=ranks)


def gpu(number: int, *, uuid: bool = True) -> GpuRef:
    """Return a GPU's names."""
    return GpuRef(index=number, uuid=f"GPU-{number}" if uuid else None, pci=f"0000:0{number}:00.0")


def nvml(*numbers: int) -> NvmlReadings:
    """Return what NVML reports on a machine with these GPUs."""
    none = Pcie(gen=None, width=None, max_gen=None, max_width=None)
    readings = [
        NvmlReading(index=at, uuid=f"GPU-{n}", pci=f"0000:0{n}:00.0", name=None, pcie=none)
        for at, n in enumerate(numbers)
    ]
    return NvmlReadings(gpus=tuple(readings))


def test_a_gpu_that_is_gone() -> None:
    """The error names the lost GPU's rank, although the other GPUs have new indices, and quotes NVML's note."""
    now = nvml(1, 2)._replace(notes=("GPU 0 is left out: Timeout",))
    with pytest.raises(NumapinError, match="GPU 0 is left out: Timeout") as caught:
        require_gpus(plan([gpu(0), gpu(1), gpu(2)]), [now])
    assert "no longer shows GPU 0 (GPU-0, 0000:00:00.0) of local rank 0: this host leaves" in caught.value.message


def test_without_a_uuid_the_address_counts() -> None:
    """A GPU whose UUID was unknown at the start is known by its PCI address."""
    with pytest.raises(NumapinError, match=r"shows GPU 2 \(0000:02:00\.0\) of local rank 1: "):
        require_gpus(plan([gpu(1, uuid=False), gpu(2, uuid=False)]), [nvml(1)])


def test_a_gpu_that_is_there_again() -> None:
    """A GPU that misses one reading and is in the next is not lost, and no further reading is taken."""
    looks = iter([nvml(0), nvml(0, 1), nvml()])
    require_gpus(plan([gpu(0), gpu(1)]), looks)
    assert next(looks) == nvml()


def test_silence_is_no_loss() -> None:
    """A failed start of NVML is no loss; for ranks without a GPU, NVML is not asked."""
    require_gpus(plan([gpu(0)]), [NvmlReadings(gpus=None)])
    looks = iter([nvml()])
    require_gpus(plan([None]), looks)
    assert next(looks) == nvml()
