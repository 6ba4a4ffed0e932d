"""CPUs, caches, nodes and the cpuset from /sys and /proc below any root directory.

A machine with 256 CPUs takes some milliseconds: the files of a core, an L3 cache or a package are read for one of its
CPUs only. Source: Documentation/ABI/stable/sysfs-devices-node, .../testing/sysfs-devices-system-cpu,
admin-guide/cgroup-*/cpusets.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from numapin.base.bounds import MAX_CGROUP_DEPTH, MAX_NICS
from numapin.base.cpu_set import CpuSet
from numapin.errors import MachineError
from numapin.system.cgroup import mounts, own_cgroups
from numapin.system.tree import CAPTURE, Tree
from numapin.topology.readings import CpuReading, NodeReading, Readings, core_notes, distinct_packages
from numapin.topology.sources.gpu_drivers import gpu_memory_nodes, read_drivers
from numapin.topology.sources.pci import read_other_nics, read_pci
from numapin.topology.sources.speeds import read_speeds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from numapin.topology.readings import NicReading, PciReading

_SYSTEM: Final = "sys/devices/system"
_CPU: Final = f"{_SYSTEM}/cpu"
_NODE: Final = f"{_SYSTEM}/node"
_ALLOWED: Final = {
    "cpus": re.compile(r"^Cpus_allowed_list:\s*(\S*)", re.MULTILINE),
    "mems": re.compile(r"^Mems_allowed_list:\s*(\S*)", re.MULTILINE),
}
_DISTANCE: Final = re.compile(r"[0-9]{1,9}")
# cgroup v2, cgroup v1, and a cpuset file system of its own, which has no prefix.
_CPUSET_FILES: Final = ("cpuset.{}.effective", "cpuset.{}", "{}")


def read_sysfs(root: Path, *, source: str) -> Readings:
    """Read /sys and /proc below `root`.

    Raises MachineError if `root` is not a captured machine, MachineFileError if a CPU or node list is garbled.
    """
    tree = Tree(os.fspath(root).rstrip("/"))
    online = _online_cpus(tree)
    cpus, package_notes = _read_cpus(tree, online)
    others, driven = read_drivers(tree, read_pci(tree, online))
    allowed_cpus, allowed_nodes = _allowed(tree, "cpus"), _allowed(tree, "mems")
    return Readings(
        host=_host(tree),
        source=source,
        cpus=cpus,
        nodes=tuple(_read_nodes(tree, online)),
        allowed_cpus=allowed_cpus,
        allowed_nodes=allowed_nodes,
        pci=(*driven.gpus, *others),
        nics=_other_nics(tree, others),
        fabric=driven.fabric,
        gpu_memory_nodes=gpu_memory_nodes(tree),
        memory_bytes=_kilobytes(tree.text("proc/meminfo") or "", "MemTotal"),
        notes=(*package_notes, *core_notes(cpus)),
        speeds=read_speeds(tree, _cores(cpus)),
        allowed_known=None not in (allowed_cpus, allowed_nodes) or _is_in_root_cpuset(tree),
    )


def _host(tree: Tree) -> str | None:
    return tree.text("proc/sys/kernel/hostname") or tree.text("etc/hostname") or None


def _cores(cpus: Iterable[CpuReading]) -> list[CpuSet]:
    """Return the CPUs of each core that is known."""
    return sorted({reading.siblings for reading in cpus if reading.siblings}, key=min)


def _other_nics(tree: Tree, on_pci: Iterable[PciReading]) -> tuple[NicReading, ...]:
    """Return the interfaces of devices that are not on PCI; `build` refuses more than the most that are accepted."""
    names = {nic.name for device in on_pci for nic in device.interfaces}
    return tuple(islice(read_other_nics(tree, names), MAX_NICS + 1))


def _online_cpus(tree: Tree) -> CpuSet:
    if not tree.names(_SYSTEM):
        root = tree.root or "/"
        raise MachineError(f"{root} is not a captured machine: it has no {_SYSTEM}", CAPTURE)
    present = _numbered(tree, _CPU, "cpu")
    listed = tree.numbers(f"{_CPU}/online")
    online = CpuSet(filter(partial(_is_online, tree), present) if listed is None else listed & CpuSet(present))
    if not online:
        raise MachineError(f"{tree.root}/{_CPU} shows no online CPU (cpu0, cpu1, … and the file online)", CAPTURE)
    return online


def _is_online(tree: Tree, cpu: int) -> bool:
    """Return whether a CPU is online, for captures without the list; a CPU that cannot go offline has no file."""
    return tree.number(f"{_CPU}/cpu{cpu}/online") != 0


def _read_cpus(tree: Tree, online: CpuSet) -> tuple[tuple[CpuReading, ...], tuple[str, ...]]:
    """Return the CPUs, and notes on their packages."""
    siblings = _groups(online, lambda cpu: _siblings(tree, cpu))
    packages = _groups(online, lambda cpu: _package_cpus(tree, cpu))
    around = _around(online, packages, siblings)
    numbers = {cpus: _package_id(tree, cpus) for cpus in dict.fromkeys(around.values())}
    distinct, notes = distinct_packages(dict(_whole_packages(tree, numbers, frozenset(packages.values()))))
    numbers |= distinct
    caches = _groups(online, lambda cpu: _l3(tree, cpu))
    in_order = sorted(online)
    return tuple(CpuReading(cpu, siblings.get(cpu), numbers[around[cpu]], caches.get(cpu)) for cpu in in_order), notes


def _around(online: CpuSet, packages: Mapping[int, CpuSet], siblings: Mapping[int, CpuSet]) -> dict[int, CpuSet]:
    """Return the CPUs of each CPU's package as far as known: at least those of its core, or the CPU itself."""
    return {cpu: packages.get(cpu) or siblings.get(cpu) or CpuSet({cpu}) for cpu in online}


def _whole_packages(
    tree: Tree, numbers: Mapping[CpuSet, int | None], packages: frozenset[CpuSet]
) -> Iterator[tuple[CpuSet, int | None]]:
    """Yield the packages with their numbers.

    If several have one number, leave out those that the kernel lists differently.
    """
    num_with = Counter(numbers[cpus] for cpus in packages)
    for cpus in packages:
        number = numbers[cpus]
        if num_with[number] == 1 or _package_cpus(tree, min(cpus)) == cpus:
            yield cpus, number


def _package_id(tree: Tree, cpus: CpuSet) -> int | None:
    return tree.number(f"{_topology(min(cpus))}/physical_package_id")


def _topology(cpu: int) -> str:
    return f"{_CPU}/cpu{cpu}/topology"


def _siblings(tree: Tree, cpu: int) -> CpuSet | None:
    """Return the CPUs of a CPU's core; None if they are unknown."""
    at = _topology(cpu)
    return (
        tree.numbers(f"{at}/thread_siblings_list", mask=f"{at}/thread_siblings")
        or tree.numbers(f"{at}/core_cpus_list", mask=f"{at}/core_cpus")
        or None
    )


def _package_cpus(tree: Tree, cpu: int) -> CpuSet | None:
    at = _topology(cpu)
    return tree.numbers(f"{at}/package_cpus_list", mask=f"{at}/core_siblings")


def _groups(cpus: Iterable[int], read: Callable[[int], CpuSet | None]) -> dict[int, CpuSet]:
    """Return each CPU's group; `read` is called for one CPU of each.

    A CPU without a list, or with a list that lacks it, has no group.
    """
    left, groups = set(cpus), dict[int, CpuSet]()
    for cpu in sorted(left):
        members = read(cpu) if cpu in left else None
        if members is not None and cpu in members:
            group = members & left
            left -= group
            groups.update(dict.fromkeys(group, group))
    return groups


def _l3(tree: Tree, cpu: int) -> CpuSet | None:
    at = f"{_CPU}/cpu{cpu}/cache"
    for index in _cache_indices(tree, at):
        if tree.number(f"{at}/{index}/level") == 3:
            return tree.numbers(f"{at}/{index}/shared_cpu_list", mask=f"{at}/{index}/shared_cpu_map")
    return None


def _cache_indices(tree: Tree, at: str) -> Iterator[str]:
    """Yield the names of the caches, index3 first because it is nearly always the L3."""
    yield "index3"
    yield from (name for name in tree.names(at) if name.startswith("index") and name != "index3")


def _read_nodes(tree: Tree, online: CpuSet) -> Iterator[NodeReading]:
    present = _numbered(tree, _NODE, "node")
    listed = tree.numbers(f"{_NODE}/online")
    ids = present if listed is None else sorted(listed)
    for node in sorted(set(present).intersection(ids)):
        yield _read_node(tree, node, online, ids)


def _read_node(tree: Tree, node: int, online: CpuSet, ids: list[int]) -> NodeReading:
    at = f"{_NODE}/node{node}"
    cpus = tree.numbers(f"{at}/cpulist", mask=f"{at}/cpumap") or CpuSet()
    meminfo = tree.text(f"{at}/meminfo") or ""
    return NodeReading(
        id=node,
        cpus=cpus & online,
        memory_bytes=_kilobytes(meminfo, "MemTotal"),
        free_bytes=_kilobytes(meminfo, "MemFree"),
        distances=_distances(tree.text(f"{at}/distance") or "", ids),
    )


def _kilobytes(meminfo: str, key: str) -> int | None:
    match = re.search(rf"\b{key}:\s*([0-9]{{1,15}}) kB", meminfo)
    return int(match[1]) * 1024 if match else None


def _distances(row: str, ids: list[int]) -> dict[int, int]:
    """Return the distances by node: the kernel writes a column for each online node, in ascending order."""
    words = row.split()
    if len(words) != len(ids) or not all(map(_DISTANCE.fullmatch, words)):
        return {}
    return dict(zip(ids, map(int, words), strict=True))


def _allowed(tree: Tree, what: str) -> CpuSet | None:
    """Return the allowed "cpus" or "mems" of the reading process, or of the process that captured the machine."""
    match = _ALLOWED[what].search(tree.text("proc/self/status") or "")
    if match:
        return tree.parsed(match[1], "proc/self/status")
    # One after the other: a capture may name millions of directories.
    files = (f"{directory}/{name.format(what)}" for directory in _cpuset_directories(tree) for name in _CPUSET_FILES)
    sets = map(tree.numbers, files)
    return next(filter(None, sets), None)  # an empty file of cgroup v2 means "as above"


def _is_in_root_cpuset(tree: Tree) -> bool:
    """Return whether the process is in the cpuset of the whole machine, which needs no file of its own."""
    own = _in_cpuset_file_system(tree) or own_cgroups(tree, "cpuset") or own_cgroups(tree, "")
    return own == ["/"]


def _cpuset_directories(tree: Tree) -> Iterator[str]:
    """Yield the directories that may have this process's cpuset: cgroup v1, cgroup v2 (nearest first), cpuset fs."""
    for mount in mounts(tree):
        if mount.kind == "cpuset" or mount.holds("cpuset"):
            yield from (f"{mount.at}/{path.strip('/')}" for path in _CPUSETS[mount.kind](tree))


def _in_cgroup1(tree: Tree) -> list[str]:
    return own_cgroups(tree, "cpuset") or _in_cpuset_file_system(tree)


def _in_cgroup2(tree: Tree) -> list[str]:
    paths = own_cgroups(tree, "") or _in_cpuset_file_system(tree)
    return [parent for path in paths if path.count("/") <= MAX_CGROUP_DEPTH for parent in _upwards(path)]


def _upwards(path: str) -> list[str]:
    """Return a path and the paths above it, nearest first."""
    names = path.split("/")
    return ["/".join(names[:end]) for end in range(len(names), 0, -1)]


def _in_cpuset_file_system(tree: Tree) -> list[str]:
    """Return the path of the cpuset, whichever kind of file system it is in."""
    own = tree.text("proc/self/cpuset")
    return [own] if own else []


_CPUSETS: Final[Mapping[str, Callable[[Tree], list[str]]]] = {
    "cgroup": _in_cgroup1,
    "cgroup2": _in_cgroup2,
    "cpuset": _in_cpuset_file_system,
}
"""Kind of file system -> the paths of this process's cpuset below its mount, nearest first."""


def _numbered(tree: Tree, path: str, word: str) -> list[int]:
    matches = (re.fullmatch(rf"{word}([0-9]{{1,6}})", name) for name in tree.names(path))
    return sorted(int(match[1]) for match in matches if match)
