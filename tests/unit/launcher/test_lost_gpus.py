"""Lost GPUs: found by UUID, or by PCI address if there is no UUID; never guessed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from numapin import Bind, Memory, Plan
from numapin.errors import NumapinError
from tests.unit.launcher.seam import GpuRef, NvmlReading, NvmlReadings, Pcie, require_gpus
from tests.unit.planned import PLANNED

GPUS = [GpuRef(index=n, uuid=f"GPU-{n}", pci=f"0000:0{n}:00.0") for n in range(3)]
WITHOUT_UUID = [replace(gpu, uuid=None) for gpu in GPUS]


def nvml(*numbers: int) -> NvmlReadings:
    none = Pcie(gen=None, width=None, max_gen=None, max_width=None)
    readings = (
        NvmlReading(index=at, uuid=f"GPU-{n}", pci=f"0000:0{n}:00.0", name=None, pcie=none)
        for at, n in enumerate(numbers)
    )
    return NvmlReadings(gpus=tuple(readings), notes=("GPU 0 is left out: Timeout",))


@pytest.mark.parametrize(
    ("gpus", "looks", "lost"),
    [
        (GPUS, [nvml(1, 2)], "GPU 0 (GPU-0, 0000:00:00.0) of local rank 0"),  # the others have new indices
        (WITHOUT_UUID[1:], [nvml(1)], "GPU 2 (0000:02:00.0) of local rank 1"),
        (GPUS[:2], [nvml(0), nvml(0, 1), nvml()], ""),  # it misses one reading and is in the next
        (GPUS[:1], [NvmlReadings(gpus=None), nvml()], ""),  # NVML did not start
        ([None], [nvml()], ""),  # it is not asked
    ],
)
def test_lost_gpus(gpus: list[GpuRef | None], looks: list[NvmlReadings], lost: str) -> None:
    """The error names the GPU, its rank and NVML's note; no more readings are taken than necessary."""
    ranks = tuple(replace(PLANNED, local_rank=n, gpu=gpu) for n, gpu in enumerate(gpus))
    plan, left = Plan(bind=Bind.NODE, memory=Memory.NONE, ranks=ranks), iter(looks)
    if lost:
        with pytest.raises(NumapinError, match="GPU 0 is left out: Timeout") as caught:
            require_gpus(plan, left)
        assert f"no longer shows {lost}: this host leaves" in caught.value.message
    else:
        require_gpus(plan, left)
        assert next(left) == nvml()
