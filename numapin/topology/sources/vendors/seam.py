"""The interface between GPU vendors and the rest of numapin. Pure.

Comes in: nothing. Goes out: `VendorSupport`, the record that a vendor's module fills in and the rest of numapin uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Mapping, Sequence

    from numapin.topology.model import Gpu, GpuVendor
    from numapin.topology.readings import PciReading

    Environ: TypeAlias = Mapping[str, str]
    """Environment variables."""
    Seen: TypeAlias = tuple[tuple[Gpu, ...], tuple[str, ...]]
    """GPUs with `visible` and `cuda_index`, and notes."""
    Device: TypeAlias = tuple[Gpu, PciReading]
    """A GPU, and what was read of it on PCI."""


class VendorSupport(NamedTuple):
    """What numapin knows of a vendor of GPUs.

    Attributes:
        vendor: The vendor.
        is_gpu: Return whether a device of this vendor is a GPU for computing, by its PCI class and address.
        hwloc_name: The name of a GPU's device in hwloc XML, with its number.
        hwloc_uuid: The name of its UUID there.
        why_order_unknown: Return why the runtime may number several GPUs in another order than ours, or "".
        mark_visible: Return the GPUs as the runtime shows them to a process with these variables.
        variables_for: Return the variables that show some of the visible GPUs, in this order, to a process. Raises
            UsageError for a GPU that they cannot name.
        hiding_variables: The variables that hide GPUs, the usual one first.
        keeps_list_order: Whether the runtime numbers GPUs in the order in which these variables name them.
        order_remedy: The end of a sentence on GPUs of unknown order, or "".
        driver_remedy: What to do if no driver serves a GPU.
    """

    vendor: GpuVendor
    is_gpu: Callable[[int, str], bool]
    hwloc_name: re.Pattern[str]
    hwloc_uuid: str
    why_order_unknown: Callable[[Sequence[Device], Environ], str]
    mark_visible: Callable[[tuple[Gpu, ...], Environ], Seen]
    variables_for: Callable[[Sequence[Gpu], Environ], dict[str, str]]
    hiding_variables: tuple[str, ...]
    driver_remedy: str
    keeps_list_order: bool = True
    order_remedy: str = ""
