"""The nearest NICs of each GPU.

NCCL chooses NICs itself; UCX and NVSHMEM choose in each process alone, so that GPUs with equally near NICs may all take
the same one (https://github.com/deepseek-ai/DeepEP/pull/466, https://github.com/openucx/ucx/issues/11680).
"""

from __future__ import annotations

from collections import Counter
from math import inf, isfinite
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.bounds import MAX_LINKS
from numapin.topology.adapters import adapters
from numapin.topology.address import pci_order
from numapin.topology.parts import LinkKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numapin.topology.adapters import Adapter
    from numapin.topology.model import Topology
    from numapin.topology.parts import Gpu, Node

_NEAREST_FIRST: Final = tuple(LinkKind)
_UNKNOWN: Final = len(_NEAREST_FIRST)


class NearestNics(NamedTuple):
    """The verbs names of a GPU's nearest NICs, which are equally near, the GPU's own first; their link; and why."""

    names: tuple[str, ...]
    link: str
    reason: str


class _Nearness(NamedTuple):
    """The distance between a NIC and a GPU, for sorting: nearest first, unknown links and distances last."""

    link: int
    distance: float

    @property
    def is_known(self) -> bool:
        return self.link < _UNKNOWN or isfinite(self.distance)

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


def rdma_adapters(topology: Topology) -> dict[str, Adapter]:
    """Return the devices that can carry RDMA, by their verbs names, in natural order."""
    named = ((adapter.verbs_name, adapter) for adapter in adapters(topology.nics))
    return {name: adapter for name, adapter in named if name is not None}


def nearest_nics(topology: Topology) -> dict[int, NearestNics]:
    """Return the nearest NICs of each GPU by the GPU's index, without GPUs of which no NIC's place is known.

    1. A NIC counts if it has a verbs name and is not known to be down; a device with several names counts once.
    2. The nearest NICs have the nearest link (`LinkKind`), and of those the smallest distance between nodes.
    3. Of NICs that are equally near, each GPU gets one as its own. GPUs are dealt out as evenly as possible, in the
       order of their PCI addresses.

    All GPUs of the host count, hidden ones included, so that every rank and every job on it gets the same answer.
    """
    nics, words = _linked_adapters(topology), _link_words(topology)
    nearest = {gpu.index: _nearest(topology, gpu, nics, words) for gpu in sorted(topology.gpus, key=_gpu_order)}
    known = {index: found for index, found in nearest.items() if found.nearness.is_known}
    own = _dealt({index: found.names for index, found in known.items()})
    num_sharers = Counter(own.values())
    return {index: _own_first(own[index], found, num_sharers=num_sharers[own[index]]) for index, found in known.items()}


def _linked_adapters(topology: Topology) -> dict[str, Adapter]:
    """Return the RDMA devices; none if there are so many that links to NICs are left out of the topology."""
    nics = rdma_adapters(topology)
    return nics if len(topology.gpus) * len(nics) <= MAX_LINKS else {}


def _own_first(own: str, found: _Found, *, num_sharers: int) -> NearestNics:
    others = (name for name in found.names if name != own)
    reason = _reason(found, num_sharers=num_sharers)
    return NearestNics(names=(own, *others), link=found.nearness.link_word, reason=reason)


def nearest_by_link(topology: Topology) -> dict[int, tuple[str, ...]]:
    """Return the NICs with the nearest link to each GPU, in natural order: what a GPU's process alone can know."""
    words = _link_words(topology)
    nics = {name: nic for name, nic in _linked_adapters(topology).items() if nic.is_up is not False}
    nearest = {gpu.index: _linked_nearest(gpu, nics, words) for gpu in topology.gpus}
    return {index: names for index, names in nearest.items() if names}


def _linked_nearest(gpu: Gpu, nics: Mapping[str, Adapter], words: Mapping[tuple[str, str], str]) -> tuple[str, ...]:
    """Return the NICs with the nearest link to a GPU; none if all links are unknown."""
    places = {name: _link_to(gpu, nic, words) for name, nic in nics.items()}
    best = min(places.values(), default=_UNKNOWN)
    return () if best == _UNKNOWN else tuple(name for name, place in places.items() if place == best)


def _gpu_order(gpu: Gpu) -> tuple[tuple[int, ...], int, int]:
    return pci_order(gpu.pci), gpu.partition or 0, gpu.index


def _link_words(topology: Topology) -> dict[tuple[str, str], str]:
    """Return the words of the links between GPUs and NICs, by both names, the GPU's first."""
    labels = {gpu.label for gpu in topology.gpus}
    ends = ((link.a, link.b, link.kind) if link.a in labels else (link.b, link.a, link.kind) for link in topology.links)
    return {(gpu, nic): word for gpu, nic, word in ends}


def _nearest(topology: Topology, gpu: Gpu, nics: Mapping[str, Adapter], words: Mapping[tuple[str, str], str]) -> _Found:
    home = next((node for node in topology.nodes if node.id == gpu.node), None)
    places = {name: _Nearness(_link_to(gpu, nic, words), _distance(home, nic)) for name, nic in nics.items()}
    up = {name: place for name, place in places.items() if nics[name].is_up is not False}
    best = min(up.values(), default=_Nearness(_UNKNOWN, inf))
    return _Found(
        names=tuple(name for name, place in up.items() if place == best),
        nearness=best,
        down=tuple(name for name, place in places.items() if name not in up and place < best),
    )


def _distance(home: Node | None, nic: Adapter) -> float:
    return inf if home is None or nic.node is None else home.distance_to(nic.node)


def _link_to(gpu: Gpu, nic: Adapter, words: Mapping[tuple[str, str], str]) -> int:
    """Return the place of a link in `_NEAREST_FIRST`; a link may use any of the device's names."""
    known = (words.get((gpu.label, name)) for name in nic.names)
    return min((_NEAREST_FIRST.index(LinkKind(word)) for word in known if word in _NEAREST_FIRST), default=_UNKNOWN)


def _reason(found: _Found, *, num_sharers: int) -> str:
    equal = f", one of {len(found.names)} equally near" if len(found.names) > 1 else ""
    shared = f", shared by {num_sharers} GPUs" if num_sharers > 1 else ""
    down = f"; {', '.join(found.down)} {'is' if len(found.down) == 1 else 'are'} down" if found.down else ""
    return f"nearest ({found.nearness}){equal}{shared}{down}"


# --- one NIC for each GPU --------------------------------------------------------------------------------------------


def _dealt(choices: Mapping[int, Sequence[str]]) -> dict[int, str]:
    """Give each GPU one of its NICs, so that the NICs are used as evenly as these choices allow.

    This is an optimal semi-matching (Harvey, Ladner, Lovász, Tamir: Semi-matchings for bipartite graphs and load
    balancing, 2003): each GPU in turn goes to the least used NIC that it can reach, for which others may move.
    """
    users: dict[str, list[int]] = {name: [] for names in choices.values() for name in names}
    for gpu in choices:
        _add(gpu, choices, users)
    return {gpu: name for name, gpus in users.items() for gpu in gpus}


def _add(gpu: int, choices: Mapping[int, Sequence[str]], users: dict[str, list[int]]) -> None:
    """Add a GPU to the users of a NIC; others move to another of their own NICs where that makes room."""
    reached = _reached(gpu, choices, users)
    free: str | None = min(reached, key=lambda name: len(users[name]))
    while free is not None:
        mover, left = reached[free]
        users[free].append(mover)
        if left is not None:
            users[left].remove(mover)
        free = left


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
