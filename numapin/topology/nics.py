"""Network adapters, each with all of its names, and the nearest ones of each GPU.

NCCL chooses NICs itself; UCX and NVSHMEM choose in each process alone, so that GPUs with equally near NICs may all take
the same one (https://github.com/deepseek-ai/DeepEP/pull/466, https://github.com/openucx/ucx/issues/11680).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from numapin.base.bounds import MAX_LINKS
from numapin.topology.address import pci_order
from numapin.topology.parts import LinkKind, NicInterface, NicKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numapin.topology.model import Topology
    from numapin.topology.parts import Gpu, Nic

Natural: TypeAlias = "tuple[str | tuple[int, str], ...]"
"""A key that sorts mlx5_9 before mlx5_17."""

_VERBS: Final = re.compile(r"[A-Za-z0-9_.-]{1,63}")  # the kernel's IB_DEVICE_NAME_MAX is 64, with the final NUL
_IP_OVER_INFINIBAND: Final = re.compile(r"ib[0-9]+(\.[0-9a-f]+)?")  # the kernel's own names for such interfaces
_NEAREST_FIRST: Final = tuple(LinkKind)
_UNKNOWN: Final = len(_NEAREST_FIRST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A network device with all of its names, such as mlx5_0 (verbs) and ib0 (network), or cxi0 and hsn0.

    The name for RDMA is first; state and rate are those of the first name.
    """

    names: tuple[str, ...]
    pci: str | None
    node: int | None
    kind: NicKind
    verbs_name: str | None
    """The name by which verbs libraries use it. None: it has no verbs device, or that name is unknown."""
    is_up: bool | None
    rate_gbit_s: float | None
    pci_parents: tuple[str, ...] | None

    @property
    def rdma_name(self) -> str | None:
        """Its verbs name, or its first name if it is Slingshot's: cxi0, or hsn0 if the source has no other."""
        return self.names[0] if self.kind is NicKind.SLINGSHOT else self.verbs_name

    @property
    def name(self) -> str:
        """All names in one, such as mlx5_0/ib0."""
        return "/".join(self.names)


@lru_cache(maxsize=1 << 14)  # a picture sorts the names of all NICs a dozen times
def natural(text: str) -> Natural:
    """Return a sort key by which numbers in a text count as numbers."""
    key: list[str | tuple[int, str]] = []
    for at, part in enumerate(re.split(r"([0-9]+)", text)):
        digits = part.lstrip("0")  # compared as text, because int() refuses thousands of digits
        key.append((len(digits), digits) if at % 2 else part)
    return tuple(key)


def adapters(nics: Iterable[Nic]) -> tuple[Adapter, ...]:
    """Return the devices in natural order; names with the same PCI address are one device, except verbs names.

    NCCL's files have all functions of a card at one address. Each of them has a verbs name.
    """
    by_place: dict[object, list[Nic]] = {}
    for place, nic in enumerate(nics):
        by_place.setdefault(place if nic.pci is None else nic.pci, []).append(nic)
    found: list[Adapter] = []
    for there in by_place.values():
        verbs: dict[str, list[Nic]] = {}
        for nic in there:
            if nic.interface is NicInterface.VERBS:
                verbs.setdefault(nic.name, []).append(nic)
        others = [nic for nic in there if nic.name not in verbs]
        devices = [there] if len(verbs) < 2 else [*verbs.values(), others]
        found += [_adapter(device) for device in devices if device]
    return tuple(sorted(found, key=lambda adapter: (tuple(map(natural, adapter.names)), adapter.pci or "")))


def _adapter(nics: Iterable[Nic]) -> Adapter:
    in_order = sorted(
        nics,
        key=lambda nic: (
            not _is_verbs(nic),
            nic.interface is not NicInterface.CXI,
            nic.kind is not NicKind.INFINIBAND,
            nic.name.startswith("ib"),
            natural(nic.name),
        ),
    )
    first = in_order[0]
    return Adapter(
        names=tuple(dict.fromkeys(nic.name for nic in in_order)),
        pci=first.pci,
        node=first.node,
        kind=first.kind,
        verbs_name=first.name if _is_verbs(first) and _VERBS.fullmatch(first.name) else None,
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


def rdma_adapters(topology: Topology) -> dict[str, Adapter]:
    """Return the devices with a verbs name by that name, in natural order."""
    named = ((adapter.verbs_name, adapter) for adapter in adapters(topology.nics))
    return {name: adapter for name, adapter in named if name is not None}


# --- the nearest NICs ------------------------------------------------------------------------------------------------


class NearestNics(NamedTuple):
    """The RDMA names of a GPU's nearest NICs, which are equally near, the GPU's own first; their link; and why.

    `has_verbs`: its own NIC has a verbs device, which UCX and NVSHMEM need.
    """

    names: tuple[str, ...]
    link: str
    reason: str
    has_verbs: bool


class _Nearness(NamedTuple):
    """The distance between a NIC and a GPU, for sorting: nearest first, unknown links and distances last."""

    link: int
    distance: float

    @property
    def link_word(self) -> str:
        return _NEAREST_FIRST[self.link].value if self.link < _UNKNOWN else "link unknown"

    def __str__(self) -> str:
        is_far = self.link >= _NEAREST_FIRST.index(LinkKind.SYSTEM)
        distance = f", node distance {self.distance:g}" if is_far and isfinite(self.distance) else ""
        return self.link_word + distance


class _Found(NamedTuple):
    """The nearest NICs of a GPU, which are equally near, how near they are, and nearer ones that are down."""

    names: tuple[str, ...]
    nearness: _Nearness
    down: tuple[str, ...]


def nearest_nics(topology: Topology) -> dict[int, NearestNics]:
    """Return the nearest NICs of each GPU by the GPU's index, without GPUs of which no NIC's place is known.

    1. A NIC counts if it has an RDMA name and is not known to be down; a device with several names counts once.
    2. The nearest NICs have the nearest link (`LinkKind`), and of those the smallest distance between nodes.
    3. Of NICs that are equally near, each GPU gets one as its own. The NICs are assigned as evenly as possible, to GPUs
       in the order of their PCI addresses.

    All GPUs of the host count, hidden ones included, so that every rank and every job on it gets the same answer.
    """
    nics = {name: nic for nic in adapters(topology.nics) if (name := nic.rdma_name) is not None}
    if len(topology.gpus) * len(nics) > MAX_LINKS:  # links to NICs are left out of the topology then
        return {}
    words = _link_words(topology)
    unknown = _Nearness(_UNKNOWN, inf)
    found: dict[int, _Found] = {}
    for gpu in sorted(topology.gpus, key=lambda gpu: (pci_order(gpu.pci), gpu.partition or 0, gpu.index)):
        home = next((node for node in topology.nodes if node.id == gpu.node), None)
        places: dict[str, _Nearness] = {}
        for name, nic in nics.items():
            distance = inf if home is None or nic.node is None else home.distance_to(nic.node)
            places[name] = _Nearness(_link_to(gpu, nic, words), distance)
        up = {name: place for name, place in places.items() if nics[name].is_up is not False}
        best = min(up.values(), default=unknown)
        if best < unknown:
            found[gpu.index] = _Found(
                names=tuple(name for name, place in up.items() if place == best),
                nearness=best,
                down=tuple(name for name, place in places.items() if name not in up and place < best),
            )

    own = _assigned({index: names for index, (names, _, _) in found.items()})
    num_sharers = Counter(own.values())
    nearest: dict[int, NearestNics] = {}
    for index, (names, nearness, down) in found.items():
        first = own[index]
        reason = f"nearest ({nearness})"
        if len(names) > 1:
            reason += f", one of {len(names)} equally near"
        if num_sharers[first] > 1:
            reason += f", shared by {num_sharers[first]} GPUs"
        if down:
            reason += f"; {', '.join(down)} {'is' if len(down) == 1 else 'are'} down"
        in_order = (first, *(name for name in names if name != first))
        has_verbs = nics[first].verbs_name is not None
        nearest[index] = NearestNics(in_order, link=nearness.link_word, reason=reason, has_verbs=has_verbs)
    return nearest


def nearest_by_link(topology: Topology) -> dict[int, tuple[str, ...]]:
    """Return the verbs NICs with the nearest link to each GPU, in natural order: what a process alone can know."""
    rdma = rdma_adapters(topology)
    if len(topology.gpus) * len(rdma) > MAX_LINKS:  # links to NICs are left out of the topology then
        return {}
    words = _link_words(topology)
    nics = {name: nic for name, nic in rdma.items() if nic.is_up is not False}
    nearest: dict[int, tuple[str, ...]] = {}
    for gpu in topology.gpus:
        places = {name: _link_to(gpu, nic, words) for name, nic in nics.items()}
        best = min(places.values(), default=_UNKNOWN)
        if best < _UNKNOWN:
            nearest[gpu.index] = tuple(name for name, place in places.items() if place == best)
    return nearest


def _link_words(topology: Topology) -> dict[tuple[str, str], str]:
    """Return the words of the links between GPUs and NICs, by both names, the GPU's first."""
    labels = {gpu.label for gpu in topology.gpus}
    ends = ((link.a, link.b, link.kind) if link.a in labels else (link.b, link.a, link.kind) for link in topology.links)
    return {(gpu, nic): word for gpu, nic, word in ends}


def _link_to(gpu: Gpu, nic: Adapter, words: Mapping[tuple[str, str], str]) -> int:
    """Return the place of a link in `_NEAREST_FIRST`; a link may use any of the device's names."""
    known = (words.get((gpu.label, name)) for name in nic.names)
    return min((_NEAREST_FIRST.index(LinkKind(word)) for word in known if word in _NEAREST_FIRST), default=_UNKNOWN)


def _assigned(choices: Mapping[int, Sequence[str]]) -> dict[int, str]:
    """Assign each GPU one of its NICs, so that the NICs are used as evenly as these choices allow.

    This is an optimal semi-matching (Harvey, Ladner, Lovász, Tamir: Semi-matchings for bipartite graphs and load
    balancing, 2003): each GPU in turn goes to the least used NIC that it can reach, for which others may move.
    """
    users: dict[str, list[int]] = {name: [] for names in choices.values() for name in names}
    for gpu in choices:
        reached = _reached(gpu, choices, users)
        free: str | None = min(reached, key=lambda name: len(users[name]))
        while free is not None:
            mover, left = reached[free]
            users[free].append(mover)
            if left is not None:
                users[left].remove(mover)
            free = left
    return {gpu: name for name, gpus in users.items() for gpu in gpus}


def _reached(
    gpu: int, choices: Mapping[int, Sequence[str]], users: Mapping[str, Sequence[int]]
) -> dict[str, tuple[int, str | None]]:
    """Return the NICs in reach of a GPU, each with the GPU that would come to it and the NIC that that one leaves."""
    reached: dict[str, tuple[int, str | None]] = {}
    movers: list[tuple[int, str | None]] = [(gpu, None)]
    for mover, left in movers:  # grows
        for name in choices[mover]:
            if name not in reached:
                reached[name] = mover, left
                movers += [(other, name) for other in users[name]]
    return reached
