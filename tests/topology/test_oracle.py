"""A second oracle: hwloc's own programs read our machines, and must see what our readers see.

There are two kinds of files. lstopo reads the sysfs tree of every machine and writes XML. `describe` writes the XML of
some machines with what a tree does not have, such as a vendor's own devices. hwloc-calc answers questions about each
file. It knows no own CPUs of a node without CPUs, and no device in a PCI domain of 32 bits.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.machines.roots import NAMES, describe, load, write_root
from tests.topology.seam import PCI_ORDER, CpuSet, build, cpu_set, read_hwloc, read_sysfs, xmlfile

if TYPE_CHECKING:
    from numapin import Gpu, Nic, Topology

LSTOPO: Final = shutil.which("lstopo-no-graphics")
CALC: Final = shutil.which("hwloc-calc")
pytestmark = pytest.mark.skipif(
    not (LSTOPO and CALC), reason="lstopo-no-graphics or hwloc-calc is missing; type: apt-get install hwloc-nox"
)

# hwloc refuses nodes that overlap and makes up one node; there is nothing to compare.
COMPARABLE: Final = [name for name in NAMES if name != "2node-every-node-lists-all"]


def calc(xml: Path, *options: str, places: Iterable[str] = ("all",), of_all: bool = True) -> list[str]:
    command = [CALC or "", *(["--disallowed"] if of_all else []), "-i", str(xml), "--quiet", *options]
    lines = "".join(f"{place}\n" for place in places)
    done = subprocess.run(command, input=lines, capture_output=True, check=True, text=True)
    return [line for line in done.stdout.splitlines() if not line.startswith("Waiting for locations")]


def ask(xml: Path, places: Iterable[str], kind: str, *, numbers: str = "--pi") -> list[CpuSet | None]:
    """Return the numbers of the objects of a kind at each place, None if there is no such place.

    The numbers in places are the kernel's, or with --li hwloc's, which counts from 0.
    """
    lines = calc(xml, numbers, "--po", "-I", kind, places=places)
    return [CpuSet.parse(line) if line.strip() else None for line in lines]


def facts(ours: Topology, xml: Path, *, sees_cpuset: bool = True) -> Iterator[tuple[str, object, object]]:
    """Yield each fact with our answer and hwloc's."""
    # Cores, L3 caches and packages by their CPUs: hwloc's own numbers are those of the firmware, and there should be
    # none after as many as expected.
    for kind, field in (("core", "id"), ("l3cache", "l3"), ("package", "package")):
        sets: dict[int, CpuSet] = {}
        for core in ours.cores:
            if (number := getattr(core, field)) is not None:
                sets[number] = sets.get(number, CpuSet()) | core.cpus
        theirs = ask(xml, (f"{kind}:{number}" for number in range(len(sets) + 1)), "PU", numbers="--li")
        yield kind, sorted(map(str, sets.values())), sorted(str(cpus) for cpus in theirs if cpus is not None)

    for node, cpus in zip(ours.cpu_nodes, ask(xml, (f"numanode:{n.id}" for n in ours.cpu_nodes), "PU"), strict=True):
        yield f"CPUs of node {node.id}", node.cpus, cpus
    yield "nodes", CpuSet(node.id for node in ours.nodes), cpu_set.parse_mask(calc(xml, "--no")[0])
    if sees_cpuset:
        allowed = [cpu_set.parse_mask(calc(xml, *options, of_all=False)[0]) for options in ((), ("--no",))]
        yield "allowed", [ours.allowed.cpus, ours.allowed.nodes], allowed

    # The node of a device is that with CPUs of the nodes at its place; None if several have CPUs. Interfaces that are
    # not on PCI go by their own name.
    devices: tuple[Gpu | Nic, ...] = (*ours.gpus, *ours.nics)
    places = ask(xml, (f"pci={d.pci}" if d.pci else f"os={getattr(d, 'name', '')}" for d in devices), "NUMAnode")
    for device, nodes in zip(devices, places, strict=True):
        if nodes is None:
            yield f"why {device} is not listed", len(device.pci or ""), len("10000:01:00.0")
        else:
            near = nodes & (CpuSet(node.id for node in ours.cpu_nodes) | ours.doubtful_nodes)
            is_known = len(near) == 1 or device.node in ours.doubtful_nodes
            yield f"node of {device}", device.node, min(near) if is_known else None


@pytest.mark.parametrize("name", COMPARABLE)
def test_hwloc_reads_the_same(name: str, tmp_path: Path) -> None:
    """Nodes, their CPUs, cores, L3 caches, packages, the nodes of GPUs and NICs, and what is allowed are the same.

    Our readers read the tree, and hwloc's XML, whether lstopo wrote it or `describe`.
    """
    machine, root, xml = load(name), tmp_path / "root", tmp_path / "machine.xml"
    write_root(machine, root)
    environ = {"HWLOC_FSROOT": str(root), "HWLOC_COMPONENTS": "linux,stop", "HWLOC_KEEP_NVIDIA_GPU_NUMA_NODES": "1"}
    # --disallowed: CPUs outside the cpuset too, because a topology has all CPUs and a set of allowed ones.
    command = [LSTOPO or "", "--of", "xml", "--whole-io", "--disallowed", str(xml)]
    subprocess.run(command, env={"PATH": os.environ["PATH"], **environ}, capture_output=True, check=True)
    sees_cpuset = "cpuset" in machine.capture or not machine.allowed  # hwloc does not read the status of a process
    compared = [*facts(build(read_sysfs(root, source=name)), xml, sees_cpuset=sees_cpuset)]
    for text in (xml.read_text(), *([describe(machine, "hwloc")] if "hwloc" in machine.described else [])):
        xml.write_text(text)
        compared += facts(build(read_hwloc(xmlfile.parse(text, source=name)), environ=PCI_ORDER), xml)
    assert [fact for fact in compared if fact[1] != fact[2]] == []
