"""All GPU vendors, and machines with GPUs of several. Pure.

Comes in: PCI devices, or GPUs and an environment. Goes out: what the vendor's module makes of them.

Ranks use the GPUs of one vendor, because a build of PyTorch does. GPUs of the others are listed and count as hidden.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from numapin.topology.model import Gpu, GpuVendor
from numapin.topology.sources.vendors.nvidia import NVIDIA
from numapin.topology.sources.vendors.seam import Served

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from numapin.system.tree import Tree
    from numapin.topology.readings import PciReading, Readings
    from numapin.topology.sources.vendors.seam import Environ, Seen, Vendor


def _nvidia() -> Vendor:
    return NVIDIA


def _amd() -> Vendor:
    from numapin.topology.sources.vendors.amd import AMD  # most machines have none of its GPUs

    return AMD


def _intel() -> Vendor:
    from numapin.topology.sources.vendors.intel import INTEL  # likewise

    return INTEL


_LOADERS: Final[Mapping[GpuVendor, Callable[[], Vendor]]] = {
    GpuVendor.NVIDIA: _nvidia,
    GpuVendor.AMD: _amd,
    GpuVendor.INTEL: _intel,
}
KINDS: Final = tuple(_LOADERS)
"""All vendors, in the order in which they are preferred if a machine has GPUs of several."""
PCI_ORDER: Final = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1"}
"""The variables by which runtimes number GPUs in the order of their PCI addresses; HIP has none."""
BY_PCI_ID: Final = {0x10DE: GpuVendor.NVIDIA, 0x1002: GpuVendor.AMD, 0x8086: GpuVendor.INTEL}


def vendor(kind: GpuVendor) -> Vendor:
    """Return a vendor."""
    return _LOADERS[kind]()


def hiding_variables() -> tuple[str, ...]:
    """Return the variables that hide GPUs from a process, of all vendors."""
    return tuple(dict.fromkeys(name for kind in KINDS for name in vendor(kind).variables))


def vendor_of(gpu: Gpu) -> Vendor:
    """Return the vendor of a GPU; a machine file without vendors is from when only NVIDIA's were read."""
    return vendor(gpu.vendor or GpuVendor.NVIDIA)


def read_drivers(tree: Tree, devices: Iterable[PciReading]) -> tuple[tuple[PciReading, ...], Served]:
    """Return the devices that are not GPUs, and the GPUs as their drivers serve them."""
    others: list[PciReading] = []
    gpus: defaultdict[GpuVendor | None, list[PciReading]] = defaultdict(list)
    for device in devices:
        (gpus[device.vendor] if device.is_gpu else others).append(device)
    served = [vendor(kind).read(tree, gpus[kind]) for kind in KINDS if gpus[kind]]
    fabric = tuple(link for part in served for link in part.fabric)
    return tuple(others), Served(tuple(gpu for part in served for gpu in part.gpus), fabric)


def preferred(readings: Readings) -> GpuVendor | None:
    """Return the vendor whose GPUs the ranks use: one whose driver answers, else the first that has GPUs here."""
    if readings.nvml.gpus:
        return GpuVendor.NVIDIA
    gpus = [reading for reading in readings.pci if reading.is_gpu]
    driven = {reading.vendor for reading in gpus if reading.is_driven}
    here = driven or {reading.vendor or GpuVendor.NVIDIA for reading in gpus}
    return next((kind for kind in KINDS if kind in here), None)


def seen_by_ranks(gpus: tuple[Gpu, ...], environ: Environ, *, unusable: Collection[int] = ()) -> Seen:
    """Return the GPUs, in the order given, with `visible` and `cuda_index` as the ranks' runtime sees them, and notes.

    `unusable` are the indices of GPUs that no process can use.
    """
    usable = tuple(gpu for gpu in gpus if gpu.index not in unusable)
    if not usable:
        return tuple(replace(gpu, visible=False) for gpu in gpus), ()
    seen, notes = vendor_of(usable[0]).see(usable, environ)
    by_index = {gpu.index: gpu for gpu in seen}
    hidden = (by_index.get(gpu.index) or replace(gpu, visible=False, cuda_index=None) for gpu in gpus)
    return tuple(hidden), notes


def first_visible(gpus: tuple[Gpu, ...], environ: Environ) -> int | None:
    """Return the index of a process's device 0; None if its runtime shows no GPU or the order is unknown."""
    kinds = {gpu.vendor for gpu in gpus if gpu.visible} or {gpu.vendor for gpu in gpus}
    seen, _ = seen_by_ranks(tuple(gpu for gpu in gpus if gpu.vendor in kinds), environ)
    return next((gpu.index for gpu in seen if gpu.cuda_index == 0), None)
