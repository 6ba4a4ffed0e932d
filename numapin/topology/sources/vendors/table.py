"""All GPU vendors, and machines with GPUs of several. Pure.

Comes in: GPUs and an environment. Goes out: what the vendor's module makes of them.

Ranks use the GPUs of one vendor, because a build of PyTorch does. GPUs of the others are listed and count as hidden.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from numapin.topology.model import Gpu, GpuVendor
from numapin.topology.sources.vendors.nvidia import NVIDIA

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from numapin.topology.readings import PciReading, Readings
    from numapin.topology.sources.vendors.seam import Environ, Seen, VendorSupport


def _nvidia() -> VendorSupport:
    return NVIDIA


def _amd() -> VendorSupport:
    from numapin.topology.sources.vendors.amd import AMD  # most machines have none of its GPUs

    return AMD


def _intel() -> VendorSupport:
    from numapin.topology.sources.vendors.intel import INTEL  # likewise

    return INTEL


_LOADERS: Final[Mapping[GpuVendor, Callable[[], VendorSupport]]] = {
    GpuVendor.NVIDIA: _nvidia,
    GpuVendor.AMD: _amd,
    GpuVendor.INTEL: _intel,
}
VENDORS: Final = tuple(_LOADERS)
"""All vendors, in the order in which they are preferred if a machine has GPUs of several."""
PCI_ORDER: Final = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""The variable by which CUDA numbers GPUs in the order of their PCI addresses; HIP has none, Level Zero needs none."""
BY_PCI_ID: Final = {0x10DE: GpuVendor.NVIDIA, 0x1002: GpuVendor.AMD, 0x8086: GpuVendor.INTEL}


def support_of(vendor: GpuVendor | None) -> VendorSupport:
    """Return what is known of a vendor; a machine file without vendors is from when only NVIDIA's GPUs were read."""
    return _LOADERS[vendor or GpuVendor.NVIDIA]()


def is_gpu(vendor: GpuVendor | None, device_class: int, address: str) -> bool:
    """Return whether a PCI device is a GPU for computing; one of an unknown vendor is not."""
    return vendor is not None and support_of(vendor).is_gpu(device_class, address)


def hiding_variables() -> tuple[str, ...]:
    """Return the variables that hide GPUs from a process, of all vendors."""
    return tuple(dict.fromkeys(name for vendor in VENDORS for name in support_of(vendor).hiding_variables))


def preferred(readings: Readings) -> GpuVendor | None:
    """Return the vendor whose GPUs the ranks use.

    It is NVIDIA if its driver lists a GPU. Vendors whose drivers serve no GPU here come last. Of the others, a GPU that
    is more than a screen counts as much as one that a driver serves.
    """
    gpus = {vendor: readings.gpus_on_pci(vendor) for vendor in VENDORS}
    if readings.nvml.gpus or _has_driver(gpus[GpuVendor.NVIDIA]):
        return GpuVendor.NVIDIA
    here = [vendor for vendor in VENDORS if gpus[vendor]]
    return max(here, key=lambda vendor: _rank(gpus[vendor]), default=None)


def _rank(gpus: Sequence[PciReading]) -> tuple[bool, int]:
    is_more_than_a_screen = any(not gpu.is_vga for gpu in gpus)
    may_be_driven = any(gpu.is_driven is not False for gpu in gpus)
    return may_be_driven, is_more_than_a_screen + _has_driver(gpus)


def _has_driver(gpus: Sequence[PciReading]) -> bool:
    return any(gpu.is_driven for gpu in gpus)


def seen_by_ranks(gpus: tuple[Gpu, ...], environ: Environ, *, unusable: Collection[int] = ()) -> Seen:
    """Return the GPUs, in the order given, with `visible` and `cuda_index` as the ranks' runtime sees them, and notes.

    `unusable` are the indices of GPUs that no process can use.
    """
    usable = tuple(gpu for gpu in gpus if gpu.index not in unusable)
    if not usable:
        return tuple(map(_hidden, gpus)), ()
    seen, notes = support_of(usable[0].vendor).mark_visible(usable, environ)
    by_index = {gpu.index: gpu for gpu in seen}
    return tuple(by_index.get(gpu.index) or _hidden(gpu) for gpu in gpus), notes


def _hidden(gpu: Gpu) -> Gpu:
    return replace(gpu, visible=False, cuda_index=None)


def first_visible(gpus: tuple[Gpu, ...], environ: Environ) -> int | None:
    """Return the index of a process's device 0; None if its runtime shows no GPU or the order is unknown."""
    seen, _ = seen_by_ranks(_of_used_vendors(gpus), environ)
    return next((gpu.index for gpu in seen if gpu.cuda_index == 0), None)


def _of_used_vendors(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Return the GPUs of the vendors that have visible ones; all if no GPU is visible."""
    vendors = {gpu.vendor for gpu in gpus if gpu.visible}
    return tuple(gpu for gpu in gpus if gpu.vendor in vendors) or gpus
