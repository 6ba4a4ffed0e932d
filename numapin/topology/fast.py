"""Fast cores: cores that are faster than others of their node.

Two files rate a CPU: acpi_cppc/highest_perf (the firmware's scale of the highest frequency) and cpu_capacity (the
kernel's, from 0 to 1024). Mixed cores (Arm's X925 and A725) and priority cores (Xeon's Priority Core Turbo) differ by a
tenth and more. Small differences between equal cores, as in AMD's preferred cores, are ignored: to follow them would
cost more locality than they gain.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final

from numapin.base.cpu_set import CpuSet
from numapin.base.text import not_none

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numapin.topology.model import Core, Topology

_LEAST_GAIN: Final = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class FastCores:
    """The fast cores of a node with fast and slow ones."""

    node: int
    cpus: CpuSet
    rating: str  # why they count as fast: "highest_perf 255, others 200"


def fast_cores(topology: Topology) -> list[FastCores]:
    """Return the fast cores of each node that has fast and slow ones."""
    found: list[FastCores] = []
    if len(topology.speeds) < 2:  # all CPUs have the same speed, or the kernel does not rate them
        return found
    by_cpu = {
        "highest_perf": {cpu: speed.highest_perf for speed in topology.speeds for cpu in speed.cpus},
        "cpu_capacity": {cpu: speed.capacity for speed in topology.speeds for cpu in speed.cpus},
    }
    cores_of: defaultdict[int, list[Core]] = defaultdict(list)
    for core in topology.cores:
        if core.node is not None:
            cores_of[core.node].append(core)

    for node, cores in sorted(cores_of.items()):
        for name, values_of in by_cpu.items():  # the first one that tells cores apart counts
            values = _values(cores, values_of)
            if values and max(values) > _LEAST_GAIN * min(values):
                # The fast cores are those in the upper half of the range.
                middle = (min(values) + max(values)) / 2
                fast, slow = ([value for value in values if (value > middle) == is_fast] for is_fast in (True, False))
                cpus = (core.cpus for core, value in zip(cores, values, strict=True) if value > middle)
                rating = f"{name} {_range(fast)}, others {_range(slow)}"
                found.append(FastCores(node=node, cpus=CpuSet().union(*cpus), rating=rating))
                break
    return found


def _values(cores: Sequence[Core], by_cpu: Mapping[int, int | None]) -> list[int]:
    """Return one value per core; none if a core's is unknown or differs between its threads."""
    by_core = [{by_cpu.get(cpu) for cpu in core.cpus} for core in cores]
    is_usable = all(len(values) == 1 for values in by_core)
    values = not_none(chain.from_iterable(by_core))
    return values if is_usable and len(values) == len(cores) else []


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"
