"""Network adapters: the devices behind network interfaces, each with all of its names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeAlias

from numapin.topology.parts import NicInterface, NicKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numapin.topology.parts import Nic

Natural: TypeAlias = "tuple[str | tuple[int, str], ...]"
"""A key that sorts mlx5_9 before mlx5_17."""

_VERBS: Final = re.compile(r"[A-Za-z0-9_.-]{1,63}")  # the kernel's IB_DEVICE_NAME_MAX is 64, with the final NUL
_IP_OVER_INFINIBAND: Final = re.compile(r"ib[0-9]+(\.[0-9a-f]+)?")  # the kernel's own names for such interfaces


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A network device with all of its names, such as mlx5_0 (verbs) and ib0 (network).

    The verbs name is first; state and rate are those of the first name.
    """

    names: tuple[str, ...]
    pci: str | None
    node: int | None
    kind: NicKind
    verbs_name: str | None
    """The name by which RDMA libraries use it. None: it has no verbs device, or that name is unknown."""
    is_up: bool | None
    rate_gbit_s: float | None
    pci_parents: tuple[str, ...] | None

    @property
    def name(self) -> str:
        """All names in one, such as mlx5_0/ib0."""
        return "/".join(self.names)


@lru_cache(maxsize=1 << 14)  # a picture sorts the names of all NICs a dozen times
def natural(text: str) -> Natural:
    """Return a sort key by which numbers in a text count as numbers."""
    parts = re.split(r"([0-9]+)", text)
    return tuple(_number(part) if at % 2 else part for at, part in enumerate(parts))


def _number(digits: str) -> tuple[int, str]:
    """Return a key for digits; int() refuses thousands of them."""
    significant = digits.lstrip("0")
    return len(significant), significant


def adapters(nics: Iterable[Nic]) -> tuple[Adapter, ...]:
    """Return the devices in natural order; names with the same PCI address are one device, except verbs names.

    NCCL's files have all functions of a card at one address. Each of them has a verbs name.
    """
    devices: dict[object, list[Nic]] = {}
    for place, nic in enumerate(nics):
        devices.setdefault(place if nic.pci is None else nic.pci, []).append(nic)
    found = map(_adapter, chain.from_iterable(map(_by_verbs_name, devices.values())))
    return tuple(sorted(found, key=_adapter_order))


def _by_verbs_name(nics: list[Nic]) -> list[list[Nic]]:
    """Divide the names at one address, if several are known to be verbs names."""
    verbs: dict[str, list[Nic]] = {}
    for nic in nics:
        if nic.interface is NicInterface.VERBS:
            verbs.setdefault(nic.name, []).append(nic)
    if len(verbs) < 2:
        return [nics]
    others = [nic for nic in nics if nic.name not in verbs]
    return [*verbs.values(), *filter(None, [others])]


def _adapter_order(adapter: Adapter) -> tuple[tuple[Natural, ...], str]:
    return tuple(map(natural, adapter.names)), adapter.pci or ""


def _adapter(nics: list[Nic]) -> Adapter:
    in_order = sorted(nics, key=_verbs_first)
    first = in_order[0]
    names = dict.fromkeys(nic.name for nic in in_order)
    verbs_name = first.name if _is_verbs(first) and _VERBS.fullmatch(first.name) else None
    return Adapter(
        names=tuple(names),
        pci=first.pci,
        node=first.node,
        kind=first.kind,
        verbs_name=verbs_name,
        is_up=first.is_up,
        rate_gbit_s=first.rate_gbit_s,
        pci_parents=first.pci_parents,
    )


def _is_verbs(nic: Nic) -> bool:
    """Return whether a name is that of a verbs device.

    A source that does not say has InfiniBand devices whose name does not look like IP over InfiniBand (ib0).
    """
    if nic.interface is None:
        return nic.kind is NicKind.INFINIBAND and not _IP_OVER_INFINIBAND.fullmatch(nic.name)
    return nic.interface is NicInterface.VERBS


def _verbs_first(nic: Nic) -> tuple[bool, bool, bool, Natural]:
    return not _is_verbs(nic), nic.kind is not NicKind.INFINIBAND, nic.name.startswith("ib"), natural(nic.name)
