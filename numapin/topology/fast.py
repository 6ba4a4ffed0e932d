"""Fast cores: cores that are faster than others of their node.

Two files rate a CPU: acpi_cppc/highest_perf (the firmware's scale of the highest frequency) and cpu_capacity (the
kernel's, from 0 to 1024). Mixed cores (Arm's X925 and A725) and priority cores (Xeon's Priority Core Turbo) differ by a
tenth and more. Small differences between equal cores, as in AMD's preferred cores, are ignored: to follow them would
cost more locality than they gain.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.cpu_set import CpuSet
from numapin.base.not_none import not_none
from numapin.base.plural import listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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


class _Rated(NamedTuple):
    """The cores of a node with one rating each."""

    name: str
    values: tuple[int, ...]

    @property
    def differs(self) -> bool:
        return max(self.values) > _LEAST_GAIN * min(self.values)


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
    by_cpu = _by_cpu(topology)
    return [_of_node(node, cores, by_cpu) for node, cores in _cores_by_node(topology)]


def _cores_by_node(topology: Topology) -> list[tuple[int, list[Core]]]:
    by_node: dict[int, list[Core]] = {}
    for core in topology.cores:
        if core.node is not None:
            by_node.setdefault(core.node, []).append(core)
    return sorted(by_node.items())


def _of_node(
    node: int, cores: Sequence[Core], ratings_by_cpu: Mapping[str, Mapping[int, int | None]]
) -> tuple[FastCores | None, list[str]]:
    ratings, notes = _usable_ratings(node, cores, ratings_by_cpu)
    different = [rated for rated in ratings if rated.differs]
    if not different:
        return None, notes
    if _contradict(ratings):
        which = f"{PERF} and {CAPACITY} disagree on which cores are faster, so none is preferred"
        return None, [*notes, f"node {node}: {which}; {_look_at(PERF, CAPACITY)}"]
    return _fast(node, cores, different[0]), notes


def _usable_ratings(
    node: int, cores: Sequence[Core], ratings_by_cpu: Mapping[str, Mapping[int, int | None]]
) -> tuple[list[_Rated], list[str]]:
    """Return the ratings that are known for all cores of a node, and notes on those that are ignored."""
    ratings, notes = [], []
    for name, by_cpu in ratings_by_cpu.items():
        values, problem = _values(cores, by_cpu)
        if problem:
            notes.append(f"node {node}: {name} {problem}, so it is ignored; {_look_at(name)}")
        elif values:
            ratings.append(_Rated(name, values))
    return ratings, notes


def _by_cpu(topology: Topology) -> Mapping[str, Mapping[int, int | None]]:
    return {
        PERF: {cpu: speed.highest_perf for speed in topology.speeds for cpu in speed.cpus},
        CAPACITY: {cpu: speed.capacity for speed in topology.speeds for cpu in speed.cpus},
    }


def _values(cores: Iterable[Core], by_cpu: Mapping[int, int | None]) -> tuple[tuple[int, ...], str]:
    """Return a value for each core, or none and perhaps the reason."""
    values, unknown = [], []
    for core in cores:
        own = {by_cpu.get(cpu) for cpu in core.cpus}
        if len(own) > 1:
            return (), f"differs between the threads of a core ({listed('CPU', core.cpus)})"
        (value,) = own
        if value is None:
            unknown.append(core.id)
        else:
            values.append(value)
    if values and unknown:
        return (), f"is unknown for some cores ({listed('CPU', unknown)})"
    return tuple(values), ""


def _contradict(ratings: Sequence[_Rated]) -> bool:
    """Return whether a core is faster than another by one rating, and slower by the other."""
    if len(ratings) < 2:
        return False
    first, second = (rated.values for rated in ratings)
    highest = -1  # by the second rating, of all cores that are slower by the first
    for _, group in groupby(sorted(zip(first, second, strict=True)), key=itemgetter(0)):
        others = [value for _, value in group]
        if min(others) < highest:
            return True
        highest = max(highest, *others)
    return False


def _fast(node: int, cores: Sequence[Core], rated: _Rated) -> FastCores:
    """Return the cores in the upper half of the range."""
    middle = (min(rated.values) + max(rated.values)) / 2
    cpus = (core.cpus for core, value in zip(cores, rated.values, strict=True) if value > middle)
    return FastCores(node=node, cpus=CpuSet().union(*cpus), rating=_rating(rated, middle))


def _rating(rated: _Rated, middle: float) -> str:
    fast = [value for value in rated.values if value > middle]
    slow = [value for value in rated.values if value <= middle]
    return f"{rated.name} {_range(fast)}, others {_range(slow)}"


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def _look_at(*names: str) -> str:
    return f"see: grep . {' '.join(f'/sys/devices/system/cpu/cpu*/{FILES[name]}' for name in names)}"
