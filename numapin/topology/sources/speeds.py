"""The speeds of CPUs, as the firmware and the kernel rate them, from sysfs below any root directory. Edge.

Comes in: a `Tree` and the CPUs of each core. Goes out: a `CpuSpeed` for each set of CPUs with the same ratings. A
rating is read for one CPU of each core; only if cores differ, for all of them. On a machine without the files, two are
tried.
Source: Documentation/ABI/testing/sysfs-devices-system-cpu; Documentation/admin-guide/acpi/cppc_sysfs.rst.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.base.cpu_set import CpuSet
from numapin.topology.fast import CAPACITY, FILES, PERF
from numapin.topology.parts import CpuSpeed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numapin.system.tree import Tree

_CPU: Final = "sys/devices/system/cpu"


def read_speeds(tree: Tree, cores: Sequence[CpuSet]) -> tuple[CpuSpeed, ...]:
    """Return the ratings of the CPUs of these cores, in the order of their lowest CPUs."""
    perf, capacity = _ratings(tree, cores, FILES[PERF]), _ratings(tree, cores, FILES[CAPACITY])
    alike: dict[tuple[int | None, int | None], list[int]] = {}
    for cpu in sorted({*perf, *capacity}):
        alike.setdefault((perf.get(cpu), capacity.get(cpu)), []).append(cpu)
    return tuple(
        CpuSpeed(cpus=CpuSet(cpus), highest_perf=highest_perf, capacity=number)
        for (highest_perf, number), cpus in alike.items()
    )


def _ratings(tree: Tree, cores: Sequence[CpuSet], name: str) -> Mapping[int, int]:
    """Return the number in a file of each CPU; none if the first CPU has no such file."""

    def read(cpu: int) -> int | None:
        return tree.number(f"{_CPU}/cpu{cpu}/{name}")

    first = [min(cpus) for cpus in cores]
    if not first or read(first[0]) is None:
        return {}
    of_core = {cpu: read(cpu) for cpu in first}
    is_alike = len(set(of_core.values())) == 1
    found = {
        cpu: of_core[one] if is_alike or cpu == one else read(cpu)
        for one, cpus in zip(first, cores, strict=True)
        for cpu in cpus
    }
    return {cpu: number for cpu, number in found.items() if number is not None}
