"""NVIDIA's GPUs. Pure.

Comes in: PCI devices and the files of /proc/driver/nvidia, or GPUs and CUDA's variables. Goes out: readings with model
and UUID; the GPUs that CUDA shows. NVML is read on the live host only, by sources/nvml.py.
Source: the driver's README, chapter on /proc.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from numapin.errors import UsageError
from numapin.topology.address import pci_address
from numapin.topology.model import GpuVendor
from numapin.topology.readings import DISPLAY
from numapin.topology.sources.vendors.seam import Served, Vendor
from numapin.topology.visible import apply_visibility

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numapin.system.tree import Tree
    from numapin.topology.model import Gpu
    from numapin.topology.readings import PciReading
    from numapin.topology.sources.vendors.seam import Environ, Seen

_MAX_CHARS: Final = 4096  # the driver writes some 500
DRIVER: Final = "proc/driver/nvidia/gpus"


def driver_names(tree: Tree) -> Mapping[str | None, str]:
    """Return the driver's name of each GPU, by PCI address."""
    return {pci_address(name): name for name in tree.names(DRIVER)}


def _is_gpu(device_class: int, _address: str) -> bool:
    return device_class >> 8 == DISPLAY


def _read(tree: Tree, gpus: Sequence[PciReading]) -> Served:
    names = driver_names(tree)
    return Served(tuple(_informed(tree, gpu, names.get(gpu.address)) for gpu in gpus))


def _informed(tree: Tree, gpu: PciReading, name: str | None) -> PciReading:
    text = tree.text(f"{DRIVER}/{name}/information") if name else None
    model, uuid = _information((text or "")[:_MAX_CHARS])
    return replace(gpu, name=model, uuid=uuid)


def _information(text: str) -> tuple[str | None, str | None]:
    """Return the driver's name and UUID of a GPU; until the GPU is initialized, the UUID is question marks."""
    lines = (line.partition(":") for line in text.splitlines())
    values = {key.strip(): value.strip() for key, _, value in lines}
    model, uuid = values.get("Model") or None, values.get("GPU UUID") or "?"
    return model, None if "?" in uuid else uuid


def _why_order_unknown(_gpus: Sequence[PciReading], _environ: Environ) -> str:
    """Return "": GPUs of unknown order have no `cuda_index`."""
    return ""


def _see(gpus: tuple[Gpu, ...], environ: Environ) -> Seen:
    visible_devices, device_order = environ.get("CUDA_VISIBLE_DEVICES"), environ.get("CUDA_DEVICE_ORDER")
    return apply_visibility(gpus, visible_devices=visible_devices, device_order=device_order)


def _show(gpus: Sequence[Gpu], _environ: Environ) -> dict[str, str]:
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


NVIDIA: Final = Vendor(
    kind=GpuVendor.NVIDIA,
    is_gpu=_is_gpu,
    read=_read,
    hwloc_name=re.compile(r"nvml([0-9]{1,4})"),  # its CUDA and OpenCL devices are numbered in other orders
    hwloc_uuid="NVIDIAUUID",
    why_order_unknown=_why_order_unknown,
    see=_see,
    show=_show,
    variables=("CUDA_VISIBLE_DEVICES",),
)
