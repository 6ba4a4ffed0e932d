"""Intel's GPUs: their runtime's variables. Pure.

Comes in: GPUs and Level Zero's variables. Goes out: the GPUs that Level Zero shows a process.

A GPU of several tiles (Data Center GPU Max) is as many devices, unless ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE. Integrated
graphics, which is always on bus 0, is not read: ranks do not compute on it. Level Zero numbers other GPUs before it,
each group in the order of PCI addresses; with ZE_ENABLE_PCI_ID_DEVICE_ORDER=1, integrated graphics comes first, so that
numbers are unknown then. ZE_AFFINITY_MASK is a set: Level Zero numbers the devices in it in their own order.

No Intel machine was at hand: files, documentation and source code only.
Source: Level Zero's specification, "Environment Variables"; compute-runtime, execution_environment.cpp
(comparePciIdBusNumber, parseAffinityMask); DPC++, "ONEAPI_DEVICE_SELECTOR".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from numapin.base.not_none import not_none
from numapin.errors import UsageError
from numapin.topology.address import pci_order
from numapin.topology.model import GpuVendor
from numapin.topology.readings import DISPLAY
from numapin.topology.sources.vendors.lists import c_number
from numapin.topology.sources.vendors.seam import VendorSupport
from numapin.topology.visible import with_unknown_order, with_visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.topology.model import Gpu
    from numapin.topology.sources.vendors.seam import Device, Environ, Seen

_MASK: Final = "ZE_AFFINITY_MASK"
_SELECTOR: Final = "ONEAPI_DEVICE_SELECTOR"
_HIERARCHY: Final = "ZE_FLAT_DEVICE_HIERARCHY"
_BY_ADDRESS: Final = "ZE_ENABLE_PCI_ID_DEVICE_ORDER"
_ALL_GPUS: Final = re.compile(r"(?:level_zero|\*):(?:gpu|\*)", re.IGNORECASE)


def _is_gpu(device_class: int, address: str) -> bool:
    return device_class >> 8 == DISPLAY and pci_order(address)[:2] != (0, 0)


def _why_order_unknown(devices: Sequence[Device], environ: Environ) -> str:
    if environ.get(_BY_ADDRESS, "0") not in ("", "0"):
        why = "counts integrated graphics before other GPUs, so the GPU of each rank is assumed"
        return f"{_BY_ADDRESS}={environ[_BY_ADDRESS]} {why}; type: unset {_BY_ADDRESS}"
    unknown = ", ".join(gpu.label for gpu, pci in devices if not pci.tiles_known)
    if not unknown:
        return ""
    why = "and each tile is a device, so the GPU of each rank is assumed"
    return f"the number of tiles of {unknown} is unknown, {why}; list the devices with: xpu-smi discovery"


def _mark_visible(gpus: tuple[Gpu, ...], environ: Environ) -> Seen:
    why_unknown = _why_unknown(gpus, environ)
    if why_unknown:
        return with_unknown_order(gpus), (why_unknown,)
    in_order: list[Gpu] = sorted(gpus, key=lambda gpu: gpu.index)
    numbers = _masked(environ)
    if numbers is None:
        return with_visible(gpus, in_order), ()
    named = [in_order[number] for number in numbers if number < len(in_order)]
    return with_visible(gpus, named), _mask_notes(environ[_MASK], numbers, len(in_order))


def _masked(environ: Environ) -> list[int] | None:
    """Return the numbers in the mask in ascending order; None if every device is visible."""
    numbers = _mask_numbers(environ)
    return sorted(set(not_none(numbers))) if numbers else None


def _mask_notes(mask: str, numbers: Sequence[int], num_devices: int) -> tuple[str, ...]:
    missing = [number for number in numbers if number >= num_devices]
    if len(missing) == len(numbers):
        return (f"{_MASK}={mask} hides every GPU; to use them: unset {_MASK}",)
    if not missing:
        return ()
    return (f"{_MASK}={mask}: there is no device {missing[0]}; list the devices with: xpu-smi discovery",)


def _why_unknown(gpus: tuple[Gpu, ...], environ: Environ) -> str:
    """Return why the devices of a process are unknown, or ""."""
    selector = environ.get(_SELECTOR)
    if selector and not _ALL_GPUS.fullmatch(selector):
        return f"{_SELECTOR}={selector} is not understood, so the GPU of each rank is unknown; use {_MASK}"
    hierarchy = environ.get(_HIERARCHY, "FLAT").upper()
    if hierarchy != "FLAT" and any(gpu.partition is not None for gpu in gpus):
        return f"{_HIERARCHY}={hierarchy} is not supported on GPUs with several tiles; type: unset {_HIERARCHY}"
    return _mask_problem(environ)


def _mask_problem(environ: Environ) -> str:
    """Return why the mask does not tell which devices it names, or ""."""
    mask = environ.get(_MASK, "default")
    if "." in mask:
        return f"{_MASK}={mask} names tiles, which is not understood; name whole devices"
    if None in _mask_numbers(environ):
        return f"{_MASK}={mask} is not a list of numbers, so the GPU of each rank is unknown; type: unset {_MASK}"
    return ""


def _mask_numbers(environ: Environ) -> list[int | None]:
    """Return a number for each entry of the mask, None for other text; no entries: every device is visible."""
    mask = environ.get(_MASK, "default")
    return [] if mask in ("", "default") else list(map(c_number, mask.split(",")))


def _variables_for(gpus: Sequence[Gpu], environ: Environ) -> dict[str, str]:
    """Name the devices by their numbers without a mask."""
    masked = _masked(environ)
    numbers = map(_level_zero_number, gpus)
    return {_MASK: ",".join(str(masked[number] if masked else number) for number in numbers)}


def _level_zero_number(gpu: Gpu) -> int:
    if gpu.cuda_index is None:
        raise UsageError("--gpus: Level Zero's numbers of the GPUs are unknown", "see why with: numapin topo")
    return gpu.cuda_index


INTEL: Final = VendorSupport(
    vendor=GpuVendor.INTEL,
    is_gpu=_is_gpu,
    hwloc_name=re.compile(r"ze([0-9]{1,4})"),
    hwloc_uuid="LevelZeroUUID",
    why_order_unknown=_why_order_unknown,
    mark_visible=_mark_visible,
    variables_for=_variables_for,
    hiding_variables=(_MASK,),
    driver_remedy="load the driver, or give the container its devices: docker run --device /dev/dri",
    keeps_list_order=False,
)
