"""Network devices, the links between devices, and the nearest NICs of each GPU.

NCCL chooses NICs itself; UCX and NVSHMEM choose in each process alone, so that GPUs with equally near NICs may all take
the same one (https://github.com/deepseek-ai/DeepEP/pull/466, https://github.com/openucx/ucx/issues/11680).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import lru_cache
from math import inf, isfinite
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from numapin.base.bounds import MAX_LINKS, MAX_PARENTS
from numapin.base.records import AtMost
from numapin.topology.address import pci_order

if TYPE_CHECKING:
    from numapin.topology.model import Topology


class LinkKind(StrEnum):
    """The path between two PCI devices, nearest first, in the words of `nvidia-smi topo -m`.

    Links that GPUs have of their own are not in this list. Their words are "NV<count>" (NVLink), "XGMI<count>" and
    "XELINK"; without a count, their number is unknown.
    """

    SAME_BOARD = "PSB"
    ONE_SWITCH = "PIX"
    SWITCHES = "PXB"
    HOST_BRIDGE = "PHB"
    SAME_NODE = "NODE"
    SYSTEM = "SYS"


class NicKind(StrEnum):
    """The protocol of a network device; RoCE and EFA devices with a verbs interface count as InfiniBand."""

    ETHERNET = "ethernet"
    INFINIBAND = "infiniband"
    SLINGSHOT = "slingshot"  # HPE Slingshot (Cassini): Ethernet, and RDMA of its own without a verbs device


class NicInterface(StrEnum):
    """The interface of the kernel that a network device's name belongs to."""

    VERBS = "verbs"  # RDMA (/sys/class/infiniband): mlx5_0
    NETWORK = "net"  # Sockets (/sys/class/net): eth0, ib0, hsn0
    CXI = "cxi"  # RDMA of Slingshot, through libfabric (/sys/class/cxi): cxi0


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A network device.

    Attributes:
        name: Its name.
        pci: Its PCI address.
        node: Its node.
        kind: Its protocol.
        interface: The interface that the name belongs to. None: the source does not say.
        is_up: Whether it has a link: of a verbs device, whether its first port is active. None: unknown.
        rate_gbit_s: The rate of the link in 1e9 bits/s.
        pci_parents: The addresses of the PCI bridges above it, nearest first. None: unknown.
    """

    name: str
    pci: str | None = None
    node: int | None = None
    kind: NicKind = NicKind.ETHERNET
    interface: NicInterface | None = None
    is_up: bool | None = None
    rate_gbit_s: float | None = None
    pci_parents: Annotated[tuple[str, ...], AtMost(MAX_PARENTS)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The path between two devices.

    Attributes:
        a: `gpu0`, or the name of a network device.
        b: The other device.
        kind: A word of `nvidia-smi topo -m`, or `NV` and the number of NVLinks.
    """

    a: str
    b: str
    kind: str


# --- devices with all of their names ---------------------------------------------------------------------------------

_VERBS: Final = re.compile(r"[A-Za-z0-9_.-]{1,63}")  # the kernel's IB_DEVICE_NAME_MAX is 64, with the final NUL
_IP_OVER_INFINIBAND: Final = re.compile(r"ib[0-9]+(\.[0-9a-f]+)?")  # the kernel's own names for such interfaces


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter(Nic):
    """A network device with all of its names, such as mlx5_0 (verbs) and ib0 (network), or cxi0 and hsn0.

    The name for RDMA is first; state and rate are those of the first name. `name` is all names in one: mlx5_0/ib0.
    """

    names: tuple[str, ...]
    verbs_name: str | None
    """The name by which verbs libraries use it. None: it has no verbs device, or that name is unknown."""

    @property
    def rdma_name(self) -> str | None:
        """Its verbs name, or its first name if it is Slingshot's: cxi0, or hsn0 if the source has no other."""
        return self.names[0] if self.kind is NicKind.SLINGSHOT else self.verbs_name


@lru_cache(maxsize=1 << 14)  # a picture sorts the names of all NICs a dozen times
def natural(text: str) -> tuple[str | tuple[int, str], ...]:
    """Return a sort key by which numbers in a text count as numbers: mlx5_9 comes before mlx5_17."""
    key: list[str | tuple[int, str]] = []
    for at, part in enumerate(re.split(r"([0-9]+)", text)):
        digits = part.lstrip("0")  # compared as text, because int() refuses thousands of digits
        key.append((len(digits), digits) if at % 2 else part)
    return tuple(key)


def adapters(nics: Sequence[Nic]) -> tuple[Adapter, ...]:
    """Return the devices in natural order; names with the same PCI address are one device, except verbs names.

    NCCL's files have all functions of a card at one address. Each of them has a verbs name.
    """
    verbs_at: defaultdict[str | None, set[str]] = defaultdict(set)
    for nic in nics:
        if nic.interface is NicInterface.VERBS:
            verbs_at[nic.pci].add(nic.name)
    devices: defaultdict[object, list[Nic]] = defaultdict(list)
    for place, nic in enumerate(nics):
        verbs = verbs_at[nic.pci]
        own_name = nic.name if len(verbs) > 1 and nic.name in verbs else ""
        devices[place if nic.pci is None else (nic.pci, own_name)].append(nic)

    found: list[Adapter] = []
    for device in devices.values():
        device.sort(
            key=lambda nic: (
                not _is_verbs(nic),
                nic.interface is not NicInterface.CXI,
                nic.kind is not NicKind.INFINIBAND,
                nic.name.startswith("ib"),
                natural(nic.name),
            )
        )
        first, names = device[0], tuple(dict.fromkeys(nic.name for nic in device))
        verbs_name = first.name if _is_verbs(first) and _VERBS.fullmatch(first.name) else None
        of_first = {field.name: getattr(first, field.name) for field in fields(Nic)}
        found.append(Adapter(**{**of_first, "name": "/".join(names)}, names=names, verbs_name=verbs_name))
    return tuple(sorted(found, key=lambda adapter: (tuple(map(natural, adapter.names)), adapter.pci or "")))


def rdma_adapters(topology: "Topology") -> dict[str, Adapter]:
    """Return the devices with a name for RDMA by that name, in natural order."""
    named = ((adapter.rdma_name, adapter) for adapter in topology.nic_devices)
    return {name: adapter for name, adapter in named if name is not None}


def _is_verbs(nic: Nic) -> bool:
    """Return whether a name is that of a verbs device.

    A source that does not say has InfiniBand devices whose name does not look like IP over InfiniBand (ib0).
    """
    if nic.interface is None:
        return nic.kind is NicKind.INFINIBAND and not _IP_OVER_INFINIBAND.fullmatch(nic.name)
    return nic.interface is NicInterface.VERBS


# --- the nearest NICs ------------------------------------------------------------------------------------------------

_NEAREST_FIRST: Final = tuple(LinkKind)
_UNKNOWN: Final = len(_NEAREST_FIRST)


class NearestNics(NamedTuple):
    """The RDMA names of a GPU's nearest NICs, which are equally near, the GPU's own first; their link; and why."""

    names: tuple[str, ...]
    link: str
    reason: str
    has_verbs: bool  # its own NIC has a verbs device, which UCX and NVSHMEM need


def nearest_nics(topology: "Topology") -> dict[int, NearestNics]:
    """Return the nearest NICs of each GPU by the GPU's index, without GPUs of which no NIC's place is known.

    1. A NIC counts if it has an RDMA name and is not known to be down; a device with several names counts once.
    2. The nearest NICs have the nearest link (`LinkKind`), and of those the smallest distance between nodes.
    3. Of NICs that are equally near, each GPU gets one as its own. The NICs are assigned as evenly as possible, to GPUs
       in the order of their PCI addresses.

    All GPUs of the host count, hidden ones included, so that every rank and every job on it gets the same answer.
    """
    nics = rdma_adapters(topology)
    links = _link_places(topology, nics)
    homes = {node.id: node for node in topology.nodes}
    choices: dict[int, tuple[str, ...]] = {}
    nearness: dict[int, tuple[int, float]] = {}  # by the GPU's index: the place of the link and the nodes' distance
    nearer_but_down: dict[int, list[str]] = {}
    for gpu in sorted(topology.gpus, key=lambda gpu: (pci_order(gpu.pci), gpu.partition or 0, gpu.index)):
        home = homes.get(gpu.node) if gpu.node is not None else None
        places: dict[str, tuple[int, float]] = {}
        for name, link in links.get(gpu.index, {}).items():
            node = nics[name].node
            places[name] = link, inf if home is None or node is None else home.distance_to(node)
        up = {name: place for name, place in places.items() if nics[name].is_up is not False}
        best = min(up.values(), default=(_UNKNOWN, inf))
        if best < (_UNKNOWN, inf):
            choices[gpu.index] = tuple(name for name, place in up.items() if place == best)
            nearness[gpu.index] = best
            nearer_but_down[gpu.index] = [name for name, place in places.items() if name not in up and place < best]

    own = _assigned(choices)
    num_sharers = Counter(own.values())
    nearest: dict[int, NearestNics] = {}
    for index, names in choices.items():
        first, down = own[index], nearer_but_down[index]
        link, distance = nearness[index]
        word = _NEAREST_FIRST[link].value if link < _UNKNOWN else "link unknown"
        is_far = link >= _NEAREST_FIRST.index(LinkKind.SYSTEM)
        apart = f", node distance {distance:g}" if is_far and isfinite(distance) else ""
        reason = f"nearest ({word}{apart})"
        if len(names) > 1:
            reason += f", one of {len(names)} equally near"
        if num_sharers[first] > 1:
            reason += f", shared by {num_sharers[first]} GPUs"
        if down:
            reason += f"; {', '.join(down)} {'is' if len(down) == 1 else 'are'} down"
        in_order = (first, *(name for name in names if name != first))
        nearest[index] = NearestNics(in_order, word, reason, has_verbs=nics[first].verbs_name is not None)
    return nearest


def _link_places(topology: "Topology", nics: Mapping[str, Adapter]) -> dict[int, dict[str, int]]:
    """Return the place in `_NEAREST_FIRST` of the link between each GPU and NIC, by the GPU's index and the NIC's name.

    A link may use any of the device's names.
    """
    if len(topology.gpus) * len(nics) > MAX_LINKS:  # links to NICs are left out of the topology then
        return {}
    known = {word.value: place for place, word in enumerate(_NEAREST_FIRST)}
    labels = {gpu.label for gpu in topology.gpus}
    links = {
        (link.a, link.b) if link.a in labels else (link.b, link.a): known.get(link.kind, _UNKNOWN)
        for link in topology.links
    }
    return {
        gpu.index: {
            name: min(links.get((gpu.label, each), _UNKNOWN) for each in nic.names) for name, nic in nics.items()
        }
        for gpu in topology.gpus
    }


def _assigned(choices: Mapping[int, Sequence[str]]) -> dict[int, str]:
    """Assign each GPU one of its NICs, so that the NICs are used as evenly as these choices allow.

    This is an optimal semi-matching (Harvey, Ladner, Lovász, Tamir: Semi-matchings for bipartite graphs and load
    balancing, 2003): each GPU in turn goes to the least used NIC that it can reach, for which others may move.
    """
    users: dict[str, list[int]] = {name: [] for names in choices.values() for name in names}
    for gpu in choices:
        # The NICs in reach, each with the GPU that would come to it and the NIC that that GPU leaves.
        reached: dict[str, tuple[int, str | None]] = {}
        movers: list[tuple[int, str | None]] = [(gpu, None)]
        for mover, left in movers:  # grows
            for name in [name for name in choices[mover] if name not in reached]:
                reached[name] = mover, left
                movers += [(other, name) for other in users[name]]
        free: str | None = min(reached, key=lambda name: len(users[name]))
        while free is not None:
            mover, left = reached[free]
            users[free].append(mover)
            if left is not None:
                users[left].remove(mover)
            free = left
    return {gpu: name for name, gpus in users.items() for gpu in gpus}
