"""Intel's GPUs. Pure.

Comes in: PCI devices and the files of their drivers (i915, xe), or GPUs and Level Zero's variables. Goes out: a reading
for each device that Level Zero shows; the GPUs that it shows a process.

A GPU of several tiles (Data Center GPU Max) is as many devices, unless ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE. Integrated
graphics, which is always on bus 0, does not count: ranks do not compute on it.

No Intel machine was at hand: files and documentation only.
Source: Level Zero's specification, "Environment Variables"; the kernel's sysfs files of the driver xe.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from numapin.topology.address import pci_order
from numapin.topology.model import GpuVendor
from numapin.topology.readings import DISPLAY
from numapin.topology.sources.vendors.lists import Variable, chosen
from numapin.topology.sources.vendors.seam import Served, Vendor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.system.tree import Tree
    from numapin.topology.model import Gpu
    from numapin.topology.readings import PciReading
    from numapin.topology.sources.vendors.seam import Environ, Seen

_MASK: Final = "ZE_AFFINITY_MASK"
_SELECTOR: Final = "ONEAPI_DEVICE_SELECTOR"
_HIERARCHY: Final = "ZE_FLAT_DEVICE_HIERARCHY"
_BY_ADDRESS: Final = "ZE_ENABLE_PCI_ID_DEVICE_ORDER"
_SEE: Final = "xpu-smi discovery"
_TILE: Final = re.compile(r"tile[0-9]")
_MAX_TILES: Final = 16


def _is_gpu(device_class: int, address: str) -> bool:
    return device_class >> 8 == DISPLAY and pci_order(address)[:2] != (0, 0)


def _read(tree: Tree, gpus: Sequence[PciReading]) -> Served:
    """Make tiles devices of their own. A GPU without a render node is not served by a driver."""
    return Served(tuple(device for gpu in gpus for device in _tiles(tree, gpu)))


def _tiles(tree: Tree, gpu: PciReading) -> list[PciReading]:
    at = f"sys/bus/pci/devices/{gpu.address}"
    tiles = [int(name[-1]) for name in tree.names(at) if _TILE.fullmatch(name)][:_MAX_TILES]
    nodes = [name for name in tree.names(f"{at}/drm") if name.startswith("renderD")]
    gpu = replace(gpu, is_driven=None if tree.root else bool(nodes))
    return [replace(gpu, partition=tile) for tile in tiles] if len(tiles) > 1 else [gpu]


def _why_order_unknown(_gpus: Sequence[PciReading], environ: Environ) -> str:
    if environ.get(_BY_ADDRESS) == "1":
        return ""
    text = "Level Zero's driver chooses the order of the GPUs, so the GPU of each rank is assumed"
    return f"{text}; type: export {_BY_ADDRESS}=1"


def _see(gpus: tuple[Gpu, ...], environ: Environ) -> Seen:
    why_unknown = _why_unknown(gpus, environ)
    if why_unknown:
        return tuple(replace(gpu, visible=True, cuda_index=None) for gpu in gpus), (why_unknown,)
    in_order: list[Gpu] = sorted(gpus, key=lambda gpu: gpu.index)
    notes: tuple[str, ...] = ()
    if environ.get(_MASK):
        in_order, notes = chosen(Variable(_MASK, environ[_MASK]), in_order, see=_SEE)
    numbers = {gpu.index: number for number, gpu in enumerate(in_order)}
    seen = (replace(gpu, visible=gpu.index in numbers, cuda_index=numbers.get(gpu.index)) for gpu in gpus)
    return tuple(seen), notes


def _why_unknown(gpus: tuple[Gpu, ...], environ: Environ) -> str:
    """Return why the devices of a process are unknown, or ""."""
    if environ.get(_SELECTOR):
        return f"{_SELECTOR}={environ[_SELECTOR]} is not understood, so the GPU of each rank is unknown; use {_MASK}"
    hierarchy = environ.get(_HIERARCHY, "FLAT").upper()
    if hierarchy != "FLAT" and any(gpu.partition is not None for gpu in gpus):
        return f"{_HIERARCHY}={hierarchy} is not supported on GPUs with several tiles; type: unset {_HIERARCHY}"
    if "." in environ.get(_MASK, ""):
        return f"{_MASK}={environ[_MASK]} names tiles, which is not understood; name whole devices"
    return ""


def _show(gpus: Sequence[Gpu], _environ: Environ) -> dict[str, str]:
    """Name the devices by their numbers in the order of PCI addresses, which has to be asked for."""
    return {_MASK: ",".join(str(gpu.index) for gpu in gpus), _BY_ADDRESS: "1"}


INTEL: Final = Vendor(
    kind=GpuVendor.INTEL,
    is_gpu=_is_gpu,
    read=_read,
    hwloc_name=re.compile(r"ze([0-9]{1,4})"),
    hwloc_uuid="LevelZeroUUID",
    why_order_unknown=_why_order_unknown,
    see=_see,
    show=_show,
    variables=(_MASK,),
)
