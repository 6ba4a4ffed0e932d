"""The functions that every GPU vendor has. Pure.

Comes in: nothing. Goes out: `Vendor`, the record that a vendor's module fills in and the rest of topology/ uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Mapping, Sequence

    from numapin.system.tree import Tree
    from numapin.topology.model import Gpu, GpuVendor
    from numapin.topology.readings import FabricLink, PciReading

    Environ: TypeAlias = Mapping[str, str]
    """Environment variables."""
    Seen: TypeAlias = tuple[tuple[Gpu, ...], tuple[str, ...]]
    """GPUs with `visible` and `cuda_index`, and notes."""


class Served(NamedTuple):
    """The GPUs of a vendor as its driver serves them: partitions are devices of their own."""

    gpus: tuple[PciReading, ...]
    fabric: tuple[FabricLink, ...] = ()


class Vendor(NamedTuple):
    """A vendor of GPUs.

    Attributes:
        kind: Its name.
        is_gpu: Return whether a device of this vendor is a GPU for computing, by its PCI class and address.
        read: Add to the PCI devices of a tree what the driver says about them.
        hwloc_name: The name of a GPU's device in hwloc XML, with its number.
        hwloc_uuid: The name of its UUID there.
        why_order_unknown: Return why the runtime may number several GPUs in another order than ours, or "".
        see: Return the GPUs as the runtime shows them to a process with these variables.
        show: Return the variables that show some of the visible GPUs, in this order, to a process. Raises UsageError
            for a GPU that they cannot name.
        variables: The variables that hide GPUs, the usual one first.
    """

    kind: GpuVendor
    is_gpu: Callable[[int, str], bool]
    read: Callable[[Tree, Sequence[PciReading]], Served]
    hwloc_name: re.Pattern[str]
    hwloc_uuid: str
    why_order_unknown: Callable[[Sequence[PciReading], Environ], str]
    see: Callable[[tuple[Gpu, ...], Environ], Seen]
    show: Callable[[Sequence[Gpu], Environ], dict[str, str]]
    variables: tuple[str, ...]
