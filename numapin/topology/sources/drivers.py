"""The files of the GPU drivers, of all vendors. Edge.

Comes in: a `Tree` and the PCI devices in it. Goes out: the GPUs as their drivers serve them.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING, Final, Protocol

from numapin.topology.model import GpuVendor
from numapin.topology.readings import DriverReading
from numapin.topology.sources import nvidia_driver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numapin.system.tree import Tree
    from numapin.topology.readings import PciReading


class _ReadDriver(Protocol):
    """The function of each driver's module."""

    def __call__(self, tree: Tree, gpus: Sequence[PciReading], *, is_live: bool) -> DriverReading: ...


def _nvidia() -> _ReadDriver:
    return nvidia_driver.read


def _amd() -> _ReadDriver:
    from numapin.topology.sources import amd_driver  # most machines have none of its GPUs

    return amd_driver.read


def _intel() -> _ReadDriver:
    from numapin.topology.sources import intel_driver  # likewise

    return intel_driver.read


_LOADERS: Final[Mapping[GpuVendor, Callable[[], _ReadDriver]]] = {
    GpuVendor.NVIDIA: _nvidia,
    GpuVendor.AMD: _amd,
    GpuVendor.INTEL: _intel,
}


def read_drivers(tree: Tree, devices: Iterable[PciReading]) -> tuple[tuple[PciReading, ...], DriverReading]:
    """Return the devices that are not GPUs, and the GPUs as their drivers serve them."""
    others: list[PciReading] = []
    gpus: defaultdict[GpuVendor | None, list[PciReading]] = defaultdict(list)
    for device in devices:
        (gpus[device.vendor] if device.is_gpu else others).append(device)
    is_live = not tree.root
    read = [load()(tree, gpus[vendor], is_live=is_live) for vendor, load in _LOADERS.items() if gpus[vendor]]
    return tuple(others), _joined(read)


def _joined(readings: Sequence[DriverReading]) -> DriverReading:
    gpus = chain.from_iterable(reading.gpus for reading in readings)
    fabric = chain.from_iterable(reading.fabric for reading in readings)
    return DriverReading(tuple(gpus), tuple(fabric))
