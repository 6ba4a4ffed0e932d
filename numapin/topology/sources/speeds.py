"""The speeds of CPUs, as the firmware and the kernel rate them, from sysfs below any root directory.

A rating is read for one CPU of each core; only if cores differ, for all of them. On a machine without the files, two
are tried. Source: Documentation/ABI/testing/sysfs-devices-system-cpu; Documentation/admin-guide/acpi/cppc_sysfs.rst.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

from numapin.base.cpu_set import CpuSet
from numapin.base.not_none import without_none
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


def _rating(tree: Tree, cpu: int, name: str) -> int | None:
    return tree.number(f"{_CPU}/cpu{cpu}/{name}")


def _ratings(tree: Tree, cores: Sequence[CpuSet], name: str) -> Mapping[int, int]:
    """Return the number in a file of each CPU; none if the first CPU has no such file.

    If the first threads of all cores have one number, it is that of the other threads too, which are not read.
    """
    first = list(map(min, cores))
    if not first or _rating(tree, first[0], name) is None:
        return {}
    known = {cpu: _rating(tree, cpu, name) for cpu in first}
    all_cpus = set(chain.from_iterable(cores))
    if len(set(known.values())) == 1:
        return without_none(dict.fromkeys(all_cpus, known[first[0]]))
    return without_none(known | {cpu: _rating(tree, cpu, name) for cpu in all_cpus.difference(first)})
