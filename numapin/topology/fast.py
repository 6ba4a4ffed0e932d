"""Fast cores: cores that are faster than others of their node.

Two files rate a CPU: acpi_cppc/highest_perf (the firmware's scale of the highest frequency) and cpu_capacity (the
kernel's, from 0 to 1024). Mixed cores (Arm's X925 and A725) and priority cores (Xeon's Priority Core Turbo) differ by a
tenth and more. Small differences between equal cores, as in AMD's preferred cores, are ignored: to follow them would
cost more locality than they gain.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from numapin.base.cpu_set import CpuSet
from numapin.base.text import listed, not_none

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numapin.topology.model import Core, Topology

PERF: Final = "highest_perf"
CAPACITY: Final = "cpu_capacity"
FILES: Final = {PERF: f"acpi_cppc/{PERF}", CAPACITY: CAPACITY}
"""The name of each rating, and its file below /sys/devices/system/cpu/cpuN."""
_LEAST_GAIN: Final = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class FastCores:
    """The fast cores of a node with fast and slow ones.

    Attributes:
        node: The node.
        cpus: Their CPUs.
        rating: Why they count as fast: "highest_perf 255, others 200".
    """

    node: int
    cpus: CpuSet
    rating: str


def fast_cores(topology: Topology) -> tuple[FastCores, ...]:
    """Return the fast cores of each node that has fast and slow ones."""
    return tuple(not_none(fast for fast, _ in _nodes(topology)))


def speed_notes(topology: Topology) -> tuple[str, ...]:
    """Return a note for each node whose ratings contradict each other; no core counts as fast there."""
    return tuple(note for _, notes in _nodes(topology) for note in notes)


def _nodes(topology: Topology) -> list[tuple[FastCores | None, list[str]]]:
    """Return the fast cores and the notes of each node; nothing if all CPUs have the same speed."""
    if len(topology.speeds) < 2:
        return []
    by_cpu = {
        PERF: {cpu: speed.highest_perf for speed in topology.speeds for cpu in speed.cpus},
        CAPACITY: {cpu: speed.capacity for speed in topology.speeds for cpu in speed.cpus},
    }
    cores_of: defaultdict[int, list[Core]] = defaultdict(list)
    for core in topology.cores:
        if core.node is not None:
            cores_of[core.node].append(core)
    return [_of_node(node, cores, by_cpu) for node, cores in sorted(cores_of.items())]


def _of_node(
    node: int, cores: Sequence[Core], ratings_by_cpu: Mapping[str, Mapping[int, int | None]]
) -> tuple[FastCores | None, list[str]]:
    """Return the fast cores of a node, and notes on ratings that are ignored."""
    ratings: dict[str, list[int]] = {}  # those that are known, with a value for each core
    notes: list[str] = []
    for name, by_cpu in ratings_by_cpu.items():
        by_core = [(core, {by_cpu.get(cpu) for cpu in core.cpus}) for core in cores]
        mixed = [core for core, own in by_core if len(own) > 1]
        unknown = [core.id for core, own in by_core if None in own]
        problem = ""
        if mixed:
            problem = f"differs between the threads of a core ({listed('CPU', mixed[0].cpus)})"
        elif 0 < len(unknown) < len(cores):
            problem = f"is unknown for some cores ({listed('CPU', unknown)})"
        if problem:
            notes.append(f"node {node}: {name} {problem}, so it is ignored; {_look_at(name)}")
        elif not unknown:
            ratings[name] = not_none(value for _, own in by_core for value in own)

    differing = [name for name, values in ratings.items() if max(values) > _LEAST_GAIN * min(values)]
    if not differing:
        return None, notes
    if len(ratings) == 2 and _contradict(*ratings.values()):
        which = f"{PERF} and {CAPACITY} disagree on which cores are faster, so none is preferred"
        return None, [*notes, f"node {node}: {which}; {_look_at(PERF, CAPACITY)}"]

    # The fast cores are those in the upper half of the range.
    values = ratings[differing[0]]
    middle = (min(values) + max(values)) / 2
    fast = [value for value in values if value > middle]
    slow = [value for value in values if value <= middle]
    cpus = (core.cpus for core, value in zip(cores, values, strict=True) if value > middle)
    rating = f"{differing[0]} {_range(fast)}, others {_range(slow)}"
    return FastCores(node=node, cpus=CpuSet().union(*cpus), rating=rating), notes


def _contradict(first: Sequence[int], second: Sequence[int]) -> bool:
    """Return whether a core is faster than another by one rating, and slower by the other."""
    highest = -1  # by the second rating, of all cores that are slower by the first
    for _, group in groupby(sorted(zip(first, second, strict=True)), key=itemgetter(0)):
        others = [value for _, value in group]
        if min(others) < highest:
            return True
        highest = max(highest, *others)
    return False


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def _look_at(*names: str) -> str:
    return f"see: grep . {' '.join(f'/sys/devices/system/cpu/cpu*/{FILES[name]}' for name in names)}"
