"""CPUs, caches, nodes and the cpuset from /sys and /proc below any root directory. Edge.

Comes in: a root; "/" is the live machine, anything else a capture (hwloc-gather-topology) with sys/ and proc/ in it.
Goes out: `Readings`. A machine with 256 CPUs takes some milliseconds: the files of a core, an L3 cache or a package are
read for one of its CPUs only.
Source: Documentation/ABI/stable/sysfs-devices-node, .../testing/sysfs-devices-system-cpu, admin-guide/cgroup-*/cpusets.
"""

from __future__ import annotations

import os
import re
from itertools import product
from typing import TYPE_CHECKING, Final

from numapin.base.cpu_set import CpuSet
from numapin.errors import MachineError
from numapin.system.cgroup import mounts, own_cgroups
from numapin.system.tree import CAPTURE, Tree
from numapin.topology.readings import CpuReading, NodeReading, Readings
from numapin.topology.sources.pci import read_gpu_memory_nodes, read_pci

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

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
    return Readings(
        host=tree.text("proc/sys/kernel/hostname") or tree.text("etc/hostname") or None,
        source=source,
        cpus=tuple(_read_cpus(tree, online)),
        nodes=tuple(_read_nodes(tree, online)),
        allowed_cpus=_allowed(tree, "cpus"),
        allowed_nodes=_allowed(tree, "mems"),
        pci=tuple(read_pci(tree, online)),
        gpu_memory_nodes=read_gpu_memory_nodes(tree),
    )


def _online_cpus(tree: Tree) -> CpuSet:
    if not tree.names(_SYSTEM):
        root = tree.root or "/"
        raise MachineError(f"{root} is not a captured machine: it has no {_SYSTEM}", CAPTURE)
    present = _numbered(tree, _CPU, "cpu")
    online = (tree.numbers(f"{_CPU}/online") or CpuSet()).intersection(present)
    if not online:
        raise MachineError(f"{tree.root}/{_CPU} shows no online CPU (cpu0, cpu1, … and the file online)", CAPTURE)
    return online


def _read_cpus(tree: Tree, online: CpuSet) -> Iterator[CpuReading]:
    cores = _groups(online, lambda cpu: _siblings(tree, cpu))
    packages = _groups(online, lambda cpu: _package_cpus(tree, cpu) or cores[cpu])
    ids = {cpus: tree.number(f"{_topology(min(cpus))}/physical_package_id") for cpus in packages.values()}
    caches = _groups(online, lambda cpu: _l3(tree, cpu))
    for cpu in sorted(online):
        yield CpuReading(cpu=cpu, siblings=cores[cpu], package=ids[packages[cpu]], l3=caches.get(cpu))


def _topology(cpu: int) -> str:
    return f"{_CPU}/cpu{cpu}/topology"


def _siblings(tree: Tree, cpu: int) -> CpuSet:
    at = _topology(cpu)
    return (
        tree.numbers(f"{at}/thread_siblings_list", mask=f"{at}/thread_siblings")
        or tree.numbers(f"{at}/core_cpus_list", mask=f"{at}/core_cpus")
        or CpuSet()
    )


def _package_cpus(tree: Tree, cpu: int) -> CpuSet | None:
    at = _topology(cpu)
    return tree.numbers(f"{at}/package_cpus_list", mask=f"{at}/core_siblings")


def _groups(cpus: Iterable[int], read: Callable[[int], CpuSet | None]) -> dict[int, CpuSet]:
    """Return each CPU's group; `read` is called for one CPU of each, and None leaves that CPU without a group."""
    left, groups = set(cpus), dict[int, CpuSet]()
    for cpu in sorted(left):
        members = read(cpu) if cpu in left else None
        if members is not None:
            group = (members & left) | {cpu}
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
    files = product(_cpuset_directories(tree), _CPUSET_FILES)
    sets = (tree.numbers(f"{directory}/{name.format(what)}") for directory, name in files)
    return next(filter(None, sets), None)  # an empty file of cgroup v2 means "as above"


def _cpuset_directories(tree: Tree) -> Iterator[str]:
    """Yield the directories that may have this process's cpuset: cgroup v1, cgroup v2 (nearest first), cpuset fs."""
    for mount in mounts(tree):
        if mount.kind == "cpuset" or mount.holds("cpuset"):
            yield from (f"{mount.at}/{path.strip('/')}" for path in _CPUSETS[mount.kind](tree))


def _in_cgroup1(tree: Tree) -> list[str]:
    return own_cgroups(tree, "cpuset")


def _in_cgroup2(tree: Tree) -> list[str]:
    parts = [path.split("/") for path in own_cgroups(tree, "")]
    return ["/".join(path[:end]) for path in parts for end in range(len(path), 0, -1)]


def _in_cpuset_file_system(tree: Tree) -> list[str]:
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
