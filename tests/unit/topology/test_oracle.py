"""A second oracle: hwloc's own programs read our machines, and must see what our readers see.

There are two kinds of files. lstopo reads the sysfs tree of every machine and writes XML. `describe` writes the XML of
some machines with what a tree does not have, such as a vendor's own devices. hwloc-calc answers questions about each
file; what it cannot answer is skipped, and counted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import pytest

from tests.machines.roots import NAMES, describe, load, write_root
from tests.unit.topology.seam import PCI_ORDER, CpuSet, build, cpu_set, read_hwloc, read_sysfs, xmlfile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from numapin import Gpu, Nic, Topology

LSTOPO: Final = shutil.which("lstopo-no-graphics")
CALC: Final = shutil.which("hwloc-calc")
pytestmark = pytest.mark.skipif(
    not (LSTOPO and CALC), reason="lstopo-no-graphics or hwloc-calc is missing; type: apt-get install hwloc-nox"
)

# hwloc refuses nodes that overlap and makes up one node; there is nothing to compare.
COMPARABLE: Final = [name for name in NAMES if name != "2node-every-node-lists-all"]
DESCRIBED: Final = [name for name in NAMES if "hwloc" in load(name).described]
SKIPPED: Final = Counter(
    {
        "own CPUs of a node without CPUs": 143,
        "node of a device that it does not list": 1,  # a PCI domain of 32 bits
        "cpuset in the status of a process": 2,
    }
)
"""Facts that hwloc cannot answer, with their number: each more would be a fact that nothing is compared with."""


@dataclass(frozen=True)
class Calc:
    """Questions to hwloc-calc about a file."""

    path: Path

    def ask(self, places: Iterable[str], kind: str, *, counted: bool = False) -> list[CpuSet | None]:
        """Return the numbers of the objects of a kind at each place, None if there is no such place.

        `counted`: numbers in places are hwloc's, which counts from 0, and not the kernel's.
        """
        lines = self._run("--li" if counted else "--pi", "--po", "-I", kind, places=places)
        return [CpuSet.parse(line) if line.strip() else None for line in lines]

    def every(self, kind: str, expected: int) -> list[CpuSet | None]:
        """Return the CPUs of each object of a kind; there should be none after as many as expected."""
        return self.ask((f"{kind}:{number}" for number in range(expected + 1)), "PU", counted=True)

    def nodes(self) -> CpuSet:
        """Return all nodes, also those that are near no CPU."""
        return cpu_set.parse_mask(self._run("--no")[0])

    def allowed(self) -> tuple[CpuSet, CpuSet]:
        cpus, nodes = self._run(of_all=False), self._run("--no", of_all=False)
        return cpu_set.parse_mask(cpus[0]), cpu_set.parse_mask(nodes[0])

    def _run(self, *options: str, places: Iterable[str] = ("all",), of_all: bool = True) -> list[str]:
        command = [CALC or "", *(["--disallowed"] if of_all else []), "-i", str(self.path), "--quiet", *options]
        lines = "".join(f"{place}\n" for place in places)
        done = subprocess.run(command, input=lines, capture_output=True, check=True, text=True)
        return [line for line in done.stdout.splitlines() if not line.startswith("Waiting for locations")]


@dataclass(frozen=True)
class Compared:
    ours: Topology
    calc: Calc
    sees_cpuset: bool = True

    def differences(self) -> Iterator[str]:
        for fact, ours, theirs in self._facts():
            if ours != theirs:
                yield f"{fact}: {ours}, hwloc: {theirs}"

    def skipped(self) -> Counter[str]:
        """Return the number of facts of each kind that hwloc cannot answer."""
        return Counter(
            {
                "own CPUs of a node without CPUs": len(self.ours.nodes) - len(self.ours.cpu_nodes),
                "node of a device that it does not list": self._places.count(None),
                "cpuset in the status of a process": 0 if self.sees_cpuset else 1,
            }
        )

    def _facts(self) -> Iterator[tuple[str, object, object]]:
        yield from self._sets()
        yield from self._nodes()
        yield from self._devices()

    def _sets(self) -> Iterator[tuple[str, object, object]]:
        """Yield cores, L3 caches and packages by their CPUs; hwloc's own numbers are those of the firmware."""
        cores = self.ours.cores
        l3s = ({core.l3: None for core in cores if core.l3 is not None}, "l3cache", "l3")
        packages = ({core.package: None for core in cores if core.package is not None}, "package", "package")
        yield "cores", _in_order(core.cpus for core in cores), _in_order(self.calc.every("core", len(cores)))
        for ids, kind, field in (l3s, packages):
            sets = (CpuSet().union(*(c.cpus for c in cores if getattr(c, field) == number)) for number in ids)
            yield kind, _in_order(sets), _in_order(self.calc.every(kind, len(ids)))

    def _nodes(self) -> Iterator[tuple[str, object, object]]:
        nodes = self.ours.cpu_nodes
        answers = self.calc.ask((f"numanode:{node.id}" for node in nodes), "PU")
        for node, cpus in zip(nodes, answers, strict=True):
            yield f"CPUs of node {node.id}", node.cpus, cpus
        yield "nodes", CpuSet(node.id for node in self.ours.nodes), self.calc.nodes()
        if self.sees_cpuset:
            yield "allowed", (self.ours.allowed.cpus, self.ours.allowed.nodes), self.calc.allowed()

    @property
    def _all(self) -> tuple[Gpu | Nic, ...]:
        return (*self.ours.gpus, *self.ours.nics)

    @cached_property
    def _places(self) -> list[CpuSet | None]:
        return self.calc.ask(map(_place, self._all), "NUMAnode")

    def _devices(self) -> Iterator[tuple[str, object, object]]:
        """Yield the node of each device: that with CPUs of the nodes at its place; None if several have CPUs."""
        with_cpus = CpuSet(node.id for node in self.ours.cpu_nodes) | self.ours.doubtful_nodes
        for device, nodes in zip(self._all, self._places, strict=True):
            if nodes is not None:
                near = nodes & with_cpus
                theirs = min(near) if len(near) == 1 or device.node in self.ours.doubtful_nodes else None
                yield f"node of {device}", device.node, theirs


def _place(device: Gpu | Nic) -> str:
    """Return hwloc-calc's name of a device; interfaces that are not on PCI go by their own name."""
    return f"pci={device.pci}" if device.pci else f"os={getattr(device, 'name', '')}"


def _in_order(sets: Iterable[CpuSet | None]) -> list[str]:
    return sorted(str(cpus) for cpus in sets if cpus is not None)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("machines")
    for name in COMPARABLE:
        root = write_root(load(name), folder / name)
        environ = {"HWLOC_FSROOT": str(root), "HWLOC_COMPONENTS": "linux,stop", "HWLOC_KEEP_NVIDIA_GPU_NUMA_NODES": "1"}
        # --disallowed: CPUs outside the cpuset too, because a topology has all CPUs and a set of allowed ones.
        command = [LSTOPO or "", "--of", "xml", "--whole-io", "--disallowed", "-"]
        done = subprocess.run(command, env={"PATH": os.environ["PATH"], **environ}, capture_output=True, check=True)
        (folder / f"{name}.xml").write_bytes(done.stdout)
    for name in DESCRIBED:
        (folder / f"{name}.described.xml").write_text(describe(load(name), "hwloc"))
    return folder


def of_tree(folder: Path, name: str) -> Compared:
    machine = load(name)
    sees_cpuset = "cpuset" in machine.capture or not machine.allowed  # hwloc does not read the status of a process
    return Compared(build(read_sysfs(folder / name, source=name)), Calc(folder / f"{name}.xml"), sees_cpuset)


def of_file(path: Path) -> Compared:
    return Compared(build(read_hwloc(xmlfile.parse(path.read_text(), source=path.name)), environ=PCI_ORDER), Calc(path))


@pytest.mark.parametrize("name", COMPARABLE)
def test_hwloc_reads_the_same_from_the_tree(name: str, folder: Path) -> None:
    """Nodes, their CPUs, cores, L3 caches, packages, the nodes of GPUs and NICs, and what is allowed are the same."""
    assert list(of_tree(folder, name).differences()) == []


@pytest.mark.parametrize("name", [*COMPARABLE, *(f"{name}.described" for name in DESCRIBED)])
def test_hwloc_reads_the_same_from_its_file(name: str, folder: Path) -> None:
    """The same holds for hwloc's XML, whether lstopo wrote it or `describe`."""
    assert list(of_file(folder / f"{name}.xml").differences()) == []


def test_what_hwloc_cannot_answer_is_counted(folder: Path) -> None:
    """Nothing else is left out of the comparison."""
    skipped = sum((of_tree(folder, name).skipped() for name in COMPARABLE), Counter[str]())
    skipped += sum((of_file(path).skipped() for path in folder.glob("*.xml")), Counter[str]())
    assert skipped == SKIPPED
