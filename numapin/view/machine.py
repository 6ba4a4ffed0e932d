"""A machine as views show it: its PCIe tree, GPU links, empty nodes, and the places of a plan's ranks.

Below that, facts about a machine and a plan as short texts, the same in every view.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, combinations
from typing import TYPE_CHECKING, Final, TypeAlias

from numapin.base.cpu_set import CpuSet
from numapin.base.formats import gib
from numapin.base.text import counted, listed
from numapin.errors import UsageError
from numapin.topology.fast import fast_cores
from numapin.topology.model import Gpu, NodeKind
from numapin.topology.nics import LinkKind
from numapin.topology.vendors import GpuVendor, support_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from numapin.plan.model import Plan
    from numapin.topology.model import Core, Node, Pcie, Topology
    from numapin.topology.nics import Adapter, NearestNics, Nic

Ranks = tuple[int, ...]
Device: TypeAlias = "Gpu | Adapter"

GPU_LINKS: Final = {"NV": "NVLinks", "XGMI": "xGMI links", "XELINK": "Xe Links"}
"""The words of links between GPUs, most with their number after them."""
UNKNOWN_LINK: Final = "?"
LINK_MEANINGS: Final[Mapping[str, str]] = {  # the words of all links, the nearest first; "#" is a number
    **{f"{family}#": f"bonded set of # {links}" for family, links in GPU_LINKS.items()},
    **{family: f"{links}, their number unknown" for family, links in GPU_LINKS.items()},
    LinkKind.SAME_BOARD: "on one board",
    LinkKind.ONE_SWITCH: "at most one PCIe switch",
    LinkKind.SWITCHES: "several PCIe switches, but no host bridge",
    LinkKind.HOST_BRIDGE: "a PCIe host bridge",
    LinkKind.SAME_NODE: "between PCIe host bridges of one NUMA node",
    LinkKind.SYSTEM: "between NUMA nodes",
    UNKNOWN_LINK: "unknown on this machine",
}


def gpu_link(word: str) -> str:
    """Return the family of a link that GPUs have of their own: "NV" of "NV12"; "" for a path over PCIe."""
    return next((family for family in GPU_LINKS if re.fullmatch(f"{family}[0-9]{{0,4}}", word)), "")


def link_words(topology: Topology, devices: Sequence[Collection[str]]) -> dict[frozenset[int], str]:
    """Return the known links between devices, by the places of both; a link may use any of a device's names."""
    place_of = {name: place for place, names in enumerate(devices) for name in names}
    places = sorted({place for name in place_of for place in topology.links_of.get(name, ())})
    links = (topology.links[place] for place in places)
    words = {
        frozenset((place_of[link.a], place_of[link.b])): link.kind
        for link in links
        if link.a in place_of and link.b in place_of
    }
    return {pair: word for pair, word in words.items() if len(pair) == 2}  # the names of one device have a link, too


def link_meanings(words: Collection[str]) -> list[tuple[str, str]]:
    """Return the words of a legend for these links, each with its meaning."""
    used: set[str] = set()
    for word in words:
        family = gpu_link(word)
        used.add(f"{family}#" if family and family != word else word)  # "NV#" of "NV12"; "XGMI" has no number
    return [(word, meaning) for word, meaning in LINK_MEANINGS.items() if word in used]


def empty_nodes(topology: Topology) -> CpuSet:
    """Return the nodes without memory, cores and devices, such as a Grace host keeps for MIG instances.

    Views show them together. One alone is shown as any other node, and is not returned.
    """
    parts: tuple[Core | Gpu | Nic, ...] = (*topology.cores, *topology.gpus, *topology.nics)
    used = {part.node for part in parts}
    without_memory = (node.id for node in topology.nodes if node.memory_bytes == 0 and not node.cpus)
    empty = CpuSet(without_memory) - used
    return empty if len(empty) > 1 else CpuSet()


def gpu_of_memory(topology: Topology, node: Node) -> Gpu | None:
    """Return the GPU whose memory a node is. None: unknown, or the node is not GPU memory."""
    if node.kind is not NodeKind.GPU:
        return None
    owners = [gpu for gpu in topology.gpus if gpu.memory_node == node.id]
    return owners[0] if len(owners) == 1 else None


_SWITCHES: Final = {  # shared by devices whose link has this word, nearest first: each class contains those before it
    LinkKind.SAME_BOARD: "one board",
    LinkKind.ONE_SWITCH: "PCIe switch",
    LinkKind.SWITCHES: "PCIe switches",
    LinkKind.HOST_BRIDGE: "PCIe host bridge",
}
_LANE_GBPS: Final = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # GB/s each way, by generation (PCI-SIG)
_LINK_NAMES: Final = {"NV": "NVLink", "XGMI": "xGMI", "XELINK": "Xe Link"}
_MOST_NAMES: Final = 16  # GPUs of a hybrid mesh that a line names
_NVLINK_GBPS: Final = (  # GB/s of one NVLink each way, by the GPU's model (NVIDIA's data sheets); others are left out
    (r"\b(V100|[AH][18]00|G?H200|GH100|H20)(?!\d)", 25),  # NVLink 2 to 4
    (r"\bG?B[123]00(?!\d)", 50),  # NVLink 5
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieGroup:
    """Devices below one PCIe switch, several switches, or a host bridge; groups may be nested."""

    name: str
    parts: tuple[PcieGroup | Device, ...]

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices inside."""
        return tuple(
            chain.from_iterable(part.devices if isinstance(part, PcieGroup) else (part,) for part in self.parts)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bus:
    """GPUs of which each pair has the same link of its own, such as NV12."""

    word: str
    gpus: tuple[Gpu, ...]
    covers_all: bool

    def __str__(self) -> str:
        """Return "NVLink: 12 links between any two GPUs, 300 GB/s each way"; what is unknown is left out."""
        family = gpu_link(self.word)
        number = self.word.removeprefix(family)
        links = counted(int(number), "link") if number else "links"
        names = [gpu.label for gpu in self.gpus[:_MOST_NAMES]] + ["…"] * (len(self.gpus) > _MOST_NAMES)
        several = "any two GPUs" if self.covers_all else f"any two of {', '.join(names)}"
        which = " and ".join(names) if len(self.gpus) == 2 else several
        models = {gpu.name or "" for gpu in self.gpus}
        rates = {gbps for pattern, gbps in _NVLINK_GBPS for model in models if re.search(pattern, model)}
        is_known = family == "NV" and number and len(models) == len(rates) == 1
        rate = f", {int(number) * rates.pop()} GB/s each way" if is_known else ""
        return f"{_LINK_NAMES[family]}: {links} between {which}{rate}"


def pcie_tree(topology: Topology, devices: Sequence[Device]) -> tuple[PcieGroup | Device, ...]:
    """Return the devices of a node in groups of those that share a switch.

    They share one if a PCI bridge is above both, or if the word of their link says so. GPUs with NVLink have no such
    word among them: without known bridges, only their links to NICs show what they share.
    """
    together: defaultdict[str, list[Collection[int]]] = defaultdict(list)  # devices that share what the word names
    below: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)  # each bridge's devices, and how near
    for place, device in enumerate(devices):
        for distance, bridge in enumerate(device.pci_parents or ()):
            below[bridge].append((place, distance))
    for users in below.values():
        together[LinkKind.ONE_SWITCH].append([place for place, distance in users if distance <= 1])
        together[LinkKind.SWITCHES].append([place for place, _ in users])
    names = [(device.label,) if isinstance(device, Gpu) else device.names for device in devices]
    for pair, word in link_words(topology, names).items():
        one, other = (devices[place].pci_parents or () for place in pair)
        if not set(one) & set(other):
            together[word].append(pair)

    groups: dict[int, PcieGroup | Device] = dict(enumerate(devices))  # by the first place in each
    group_of = list(groups)
    for word, name in _SWITCHES.items():
        joined = {first: first for first in groups}  # each group to an earlier one that it joins, or to itself
        for places in together[word]:
            firsts = {_last_of(joined, group_of[place]) for place in places}
            joined |= dict.fromkeys(firsts, min(firsts, default=0))
        parts: dict[int, list[PcieGroup | Device]] = {}
        for first, part in groups.items():
            parts.setdefault(_last_of(joined, first), []).append(part)
        group_of = [_last_of(joined, first) for first in group_of]
        groups = {
            first: inner[0] if len(inner) == 1 else PcieGroup(name=name, parts=tuple(inner))
            for first, inner in parts.items()
        }
    return tuple(groups.values())


def _last_of(joined: dict[int, int], place: int) -> int:
    """Follow the groups that have joined others to the last one; shorten the way for the next time."""
    way = []
    while joined[place] != place:
        way.append(place)
        place = joined[place]
    joined |= dict.fromkeys(way, place)
    return place


def devices_on(topology: Topology, node: int | None) -> tuple[Device, ...]:
    """Return the GPUs and then the NICs of a node; None: of unknown node."""
    devices: list[Device] = [*topology.gpus, *topology.nic_devices]
    return tuple(device for device in devices if device.node == node)


def buses(topology: Topology) -> tuple[Bus, ...]:
    """Return the sets of GPUs that are linked alike: one for NVSwitch and full meshes, several for hybrid meshes.

    Each GPU is in one set at most, so links between sets are only in the matrix.
    """
    words = {frozenset((link.a, link.b)): link.kind for link in topology.links if gpu_link(link.kind)}
    left, found = list(topology.gpus), list[tuple[str, list[Gpu]]]()
    while left:
        first, *others = left
        meshes: dict[str, list[Gpu]] = {}
        for other in others:
            word = words.get(frozenset((first.label, other.label)), "")
            mesh = meshes.setdefault(word, [first])
            if all(words.get(frozenset((gpu.label, other.label))) == word for gpu in mesh):
                mesh.append(other)
        meshes.pop("", None)
        word, largest = max(meshes.items(), key=lambda item: len(item[1]), default=("", [first]))
        if word:
            found.append((word, largest))
        left = [gpu for gpu in left if gpu not in largest]
    num_gpus = len(topology.gpus)
    return tuple(Bus(word=word, gpus=tuple(gpus), covers_all=len(gpus) == num_gpus) for word, gpus in found)


def pcie_rate(pcie: Pcie) -> float | None:
    """Return the GB/s of a link in each direction at its best; None: unknown."""
    gen, width = pcie.max_gen or pcie.gen, pcie.max_width or pcie.width
    per_lane = _LANE_GBPS.get(gen or 0)
    return None if per_lane is None or width is None else per_lane * width


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlaces:
    """The ranks on each CPU (by number), in each node's memory (by number), and on each GPU (by index)."""

    cpus: Mapping[int, Ranks] = field(default_factory=dict)
    memory: Mapping[int, Ranks] = field(default_factory=dict)
    gpus: Mapping[int, Ranks] = field(default_factory=dict)
    _known: dict[CpuSet, Ranks] = field(default_factory=dict, repr=False, compare=False)

    def on(self, cpus: CpuSet) -> Ranks:
        """Return the ranks that use any of these CPUs."""
        if cpus not in self._known:
            each = (self.cpus.get(cpu, ()) for cpu in cpus)
            distinct = {id(ranks): ranks for ranks in each}  # many CPUs share one tuple, whose hash would be slow
            self._known[cpus] = tuple(sorted(set().union(*distinct.values())))
        return self._known[cpus]


def rank_places(topology: Topology, plan: Plan | None) -> RankPlaces:
    """Return the places of the plan's ranks. Raises UsageError for a plan of another machine."""
    ranks = plan.ranks if plan else ()
    cpus, nodes = topology.cpus, CpuSet(node.id for node in topology.nodes)
    absent = cache(lambda places, present: str(places - present))  # ranks share sets
    for rank in ranks:
        ref = rank.gpu
        # The PCI addresses are compared too if both are known, because an index alone fits any machine.
        has_gpu = ref is None or any(
            gpu.index == ref.index and (None in (gpu.pci, ref.pci) or gpu.pci == ref.pci) for gpu in topology.gpus
        )
        missing = {
            "CPUs": absent(rank.cpus, cpus),
            "nodes": absent(rank.nodes, nodes),
            "GPU": "" if ref is None or has_gpu else f"{ref.index} ({ref.pci})",
        }
        for what, names in missing.items():
            if names:
                raise UsageError(
                    f"the plan is of another machine: rank {rank.local_rank} has {what} {names}, "
                    "which this machine does not have",
                    "name the plan's machine with --machine FILE, or plan for this one: numapin plan --json",
                )
    return RankPlaces(
        cpus=_by_place((rank.cpus, rank.local_rank) for rank in ranks),
        memory=_by_place((rank.nodes, rank.local_rank) for rank in ranks),
        gpus=_by_place((frozenset({rank.gpu.index}), rank.local_rank) for rank in ranks if rank.gpu is not None),
    )


def _by_place(pairs: Iterable[tuple[frozenset[int], int]]) -> dict[int, Ranks]:
    """Return the ranks of each place; places with the same ranks share one tuple, because ranks share sets of CPUs."""
    sharers: dict[frozenset[int], list[int]] = {}
    for places, rank in pairs:
        sharers.setdefault(places, []).append(rank)
    sets_around: dict[int, tuple[frozenset[int], ...]] = {}
    for places in sharers:
        for place in places:
            sets_around[place] = (*sets_around.get(place, ()), places)
    merged = cache(lambda sets: tuple(sorted(chain.from_iterable(map(sharers.__getitem__, sets)))))
    return {place: merged(sets) for place, sets in sets_around.items()}


def distances(topology: Topology) -> list[str]:
    """Return a line with the kernel's distances within and between sockets, and to memory without CPUs."""
    nodes = topology.cpu_nodes
    far = [node for node in topology.nodes if node.kind is NodeKind.MEMORY and node.memory_bytes]
    pairs = list(combinations(nodes, 2))
    groups = {
        "within a socket": [(a, b) for a, b in pairs if a.package == b.package is not None],
        "between sockets": [(a, b) for a, b in pairs if a.package != b.package and None not in (a.package, b.package)],
        "between nodes": [(a, b) for a, b in pairs if None in (a.package, b.package)],
        "to memory without CPUs": [(a, b) for a in nodes for b in far],
    }
    found = []
    for where, of in groups.items():
        known = {a.distances[b.id] for a, b in of if b.id in a.distances}
        if known:
            found.append(f"{min(known)} {where}" if len(known) == 1 else f"{min(known)}-{max(known)} {where}")
    return [f"node distances (10 is local): {', '.join(found)}"] if found else []


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineView:
    """A machine, the places of ranks, and what several parts of a tree or picture need of it."""

    topology: Topology
    places: RankPlaces
    nearest_nics: Mapping[int, NearestNics]
    empty: CpuSet  # the nodes that are shown together
    fast: Mapping[int, str]  # the fast CPUs of each node that has fast and slow ones
    model: str  # the model of several GPUs if all have the same one
    pcie: str  # the PCIe link of several GPUs if all have the same one
    is_one_source: bool  # whether the nodes of several GPUs are from one source


def machine_view(topology: Topology, plan: Plan | None) -> MachineView:
    """Return a machine with its derived parts. Raises UsageError for a plan of another machine."""
    models, links = ({fact(gpu) for gpu in topology.gpus} for fact in (model_name, pcie_link))
    has_several = len(topology.gpus) > 1
    return MachineView(
        topology=topology,
        places=rank_places(topology, plan),
        nearest_nics=topology.nearest_nics if topology.gpus else {},
        empty=empty_nodes(topology),
        fast={fast.node: f"fast CPUs {fast.cpus}" for fast in fast_cores(topology)},
        model=models.pop() if has_several and len(models) == 1 else "",
        pcie=links.pop() if has_several and len(links) == 1 else "",
        is_one_source=has_several and len({gpu.node_source for gpu in topology.gpus}) == 1,
    )


# --- facts as short texts --------------------------------------------------------------------------------------------

_LONGEST: Final = 2000  # characters
_NODE_KINDS: Final = {NodeKind.CPU: "", NodeKind.MEMORY: "memory only", NodeKind.GPU: "GPU memory"}


def known(value: float | str | None, form: str = "", *, unknown: str = "") -> str:
    """Return a value in the format `form`, or the text for an unknown value if it is None."""
    return unknown if value is None else format(value, form)


def joined(*facts: str, separator: str = ", ") -> str:
    """Join the facts that are known."""
    return separator.join(filter(None, facts))


def kind_of(topology: Topology, node: Node) -> str:
    """Return the kind of a node without CPUs, and the GPU whose memory it is; "" for a node with CPUs."""
    owner = gpu_of_memory(topology, node)
    return f"memory of {owner.label}" if owner else _NODE_KINDS[node.kind]


def memory(node: Node) -> str:
    """Return the size of a node's memory and of its free part."""
    if node.memory_bytes is None:
        return ""
    free = "" if node.free_bytes is None else f" ({gib(node.free_bytes)} free)"
    return f"{gib(node.memory_bytes)}{free}"


def pcie_link(gpu: Gpu) -> str:
    """Return the generation and lanes of a GPU's link, and its maximum if that is more."""
    pcie = gpu.pcie
    if pcie.gen is None or pcie.width is None:
        return ""
    best_gen, best_width = pcie.max_gen or pcie.gen, pcie.max_width or pcie.width
    reduced = (pcie.gen, pcie.width) != (best_gen, best_width)
    return f"PCIe {pcie.gen} x{pcie.width}" + (f" of {best_gen} x{best_width}" if reduced else "")


def torch_name(gpu: Gpu) -> str:
    """Return the name of a GPU in torch, or that its runtime does not see it."""
    support = support_of(gpu.vendor)
    if gpu.cuda_index is not None:
        return f"{support.torch_word}:{gpu.cuda_index}"
    return "" if gpu.visible else f"hidden from {support.runtime}"


def model_name(gpu: Gpu) -> str:
    """Return a GPU's model with its vendor, which most models' names begin with."""
    vendor = support_of(gpu.vendor).name if gpu.vendor else ""
    model = gpu.name or ""
    return model if vendor.lower() in model.lower() else joined(vendor, model, separator=" ")


def address(gpu: Gpu) -> str:
    """Return a GPU's short PCI address, and the number of the partition if several devices have that address."""
    pci = short_pci(known(gpu.pci))
    if gpu.partition is None:
        return pci
    word = "tile" if gpu.vendor is GpuVendor.INTEL else "partition"
    return joined(f"{word} {gpu.partition}", pci, separator=" of ")


def short_pci(pci: str) -> str:
    """Return a PCI address without domain 0000, the only one on most machines."""
    return pci.removeprefix("0000:")


def node_source(gpu: Gpu) -> str:
    """Return the source of a GPU's node."""
    return f"node from {gpu.node_source}" if gpu.node_source else "node unknown"


def own_nic(nearest: NearestNics | None) -> str:
    """Return the NIC that a GPU gets of those nearest to it, and the link between them."""
    return f"NIC {nearest.names[0]} ({nearest.link})" if nearest else ""


def nic_state(nic: Adapter) -> str:
    """Return the rate of a network device, or that it is down."""
    if nic.is_up is False:
        return "down"
    return f"{nic.rate_gbit_s:g} Gbit/s" if nic.rate_gbit_s else ""


def rank_names(ranks: Collection[int]) -> str:
    """Return "rank 0" or "ranks 0-3,7"; "" for no rank."""
    return listed("rank", ranks) if ranks else ""


def shortened(text: str) -> str:
    """Return a text, cut at a length that no machine or program needs."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
