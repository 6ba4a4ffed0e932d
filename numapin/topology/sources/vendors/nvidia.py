"""NVIDIA's GPUs: their runtime's variables. Pure.

Comes in: GPUs and CUDA's variables. Goes out: the GPUs that CUDA shows.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from numapin.errors import UsageError
from numapin.topology.model import GpuVendor
from numapin.topology.readings import DISPLAY
from numapin.topology.sources.vendors.seam import VendorSupport
from numapin.topology.visible import apply_visibility

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.topology.model import Gpu
    from numapin.topology.sources.vendors.seam import Device, Environ, Seen


def _is_gpu(device_class: int, _address: str) -> bool:
    return device_class >> 8 == DISPLAY


def _why_order_unknown(_devices: Sequence[Device], _environ: Environ) -> str:
    """Return "": GPUs of unknown order have no `cuda_index`."""
    return ""


def _mark_visible(gpus: tuple[Gpu, ...], environ: Environ) -> Seen:
    visible_devices, device_order = environ.get("CUDA_VISIBLE_DEVICES"), environ.get("CUDA_DEVICE_ORDER")
    return apply_visibility(gpus, visible_devices=visible_devices, device_order=device_order)


def _variables_for(gpus: Sequence[Gpu], _environ: Environ) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(_uuid, gpus))}


def _uuid(gpu: Gpu) -> str:
    """Return the name by which CUDA_VISIBLE_DEVICES shows the whole GPU. Raises UsageError if it has none."""
    if gpu.uuid is None:
        raise UsageError(
            f"--gpus: the UUID of {gpu.label} is unknown; only NVML reports it", "see why with: numapin doctor"
        )
    if gpu.mig:
        raise UsageError(
            f"--gpus: {gpu.label} is cut into {len(gpu.mig)} MIG instances, which it cannot choose from",
            f"name one: CUDA_VISIBLE_DEVICES={gpu.mig[0].uuid}",
        )
    return gpu.uuid


NVIDIA: Final = VendorSupport(
    vendor=GpuVendor.NVIDIA,
    is_gpu=_is_gpu,
    hwloc_name=re.compile(r"nvml([0-9]{1,4})"),  # its CUDA and OpenCL devices are numbered in other orders
    hwloc_uuid="NVIDIAUUID",
    why_order_unknown=_why_order_unknown,
    mark_visible=_mark_visible,
    variables_for=_variables_for,
    hiding_variables=("CUDA_VISIBLE_DEVICES",),
    driver_remedy="load the driver, or give the container the GPUs: docker run --gpus all",
    order_remedy="CUDA_DEVICE_ORDER=PCI_BUS_ID gives CUDA a known order",
)
