"""A second oracle: hwloc reads the trees of our machines and must see the nodes and packages that we see."""

from __future__ import annotations

import os
import shutil
import subprocess
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

import pytest

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.topology.build import build
from numapin.topology.sources import xmlfile
from numapin.topology.sources.hwloc import read_hwloc
from numapin.topology.sources.sysfs import read_sysfs
from tests.machines.described import describe
from tests.machines.roots import NAMES, load, write_root

if TYPE_CHECKING:
    from pathlib import Path

LSTOPO = shutil.which("lstopo-no-graphics")
pytestmark = pytest.mark.skipif(LSTOPO is None, reason="lstopo-no-graphics is missing; type: apt-get install hwloc-nox")

# hwloc refuses nodes that overlap and makes up one node; there is nothing to compare.
COMPARABLE = [name for name in NAMES if name != "2node-every-node-lists-all"]


def _seen_by_hwloc(root: Path) -> list[ET.Element]:
    environ = {"HWLOC_FSROOT": str(root), "HWLOC_COMPONENTS": "linux,stop", "HWLOC_KEEP_NVIDIA_GPU_NUMA_NODES": "1"}
    # --disallowed: CPUs outside the cpuset too, because a topology has all CPUs and a set of allowed ones.
    command = [LSTOPO or "", "--of", "xml", "--disallowed", "-"]
    done = subprocess.run(command, env={"PATH": os.environ["PATH"], **environ}, capture_output=True, check=True)
    return list(ET.fromstring(done.stdout).iter("object"))  # noqa: S314 - hwloc's own output


def _sets(objects: list[ET.Element], kind: str) -> dict[int, str]:
    found = (e for e in objects if e.get("type") == kind)
    return {int(e.get("os_index", "-1")): cpu_set.render(cpu_set.parse_mask(e.get("cpuset", ""))) for e in found}


@pytest.mark.parametrize("name", COMPARABLE)
def test_hwloc_sees_the_same_machine(name: str, tmp_path: Path) -> None:
    """Nodes with CPUs, packages and the number of cores are the same; so are nodes without CPUs."""
    root = write_root(load(name), tmp_path)
    topology, objects = build(read_sysfs(root, source=name)), _seen_by_hwloc(root)
    nodes = _sets(objects, "NUMANode")
    assert {node.id: cpu_set.render(node.cpus) for node in topology.cpu_nodes} == {
        node.id: nodes.get(node.id) for node in topology.cpu_nodes
    }
    assert {node.id for node in topology.nodes} == set(nodes)
    # Not by number: hwloc keeps the numbers of the firmware, which may be equal.
    assert sorted(
        cpu_set.render(cpu for core in topology.cores if core.package == package.id for cpu in core.cpus)
        for package in topology.packages
    ) == sorted(cpu_set.render(cpu_set.parse_mask(e.get("cpuset", ""))) for e in objects if e.get("type") == "Package")
    assert sorted(cpu_set.render(core.cpus) for core in topology.cores) == sorted(
        cpu_set.render(cpu_set.parse_mask(e.get("cpuset", ""))) for e in objects if e.get("type") == "Core"
    )
    l3 = {core.l3 for core in topology.cores if core.l3 is not None}
    assert l3 == {min(cpu_set.parse_mask(e.get("cpuset", ""))) for e in objects if e.get("type") == "L3Cache"}


@pytest.mark.parametrize("name", [name for name in NAMES if "hwloc" in load(name).described])
def test_hwloc_calc_places_the_gpus_of_its_file_where_we_do(name: str, tmp_path: Path) -> None:
    """hwloc-calc names the same nodes for each GPU of the hwloc file as our reader."""
    path = tmp_path / "machine.xml"
    path.write_text(describe(load(name), "hwloc"))
    prefix = {"nvidia": "nvml", "amd": "rsmi"}[load(name).vendor]
    topology = build(read_hwloc(xmlfile.parse(path.read_text(), source=name)))
    for gpu in topology.gpus:
        nodes = CpuSet.parse(_calculated(path, f"os={prefix}{gpu.index}"))
        assert gpu.node in nodes, gpu.label
        assert nodes <= {gpu.node} | topology.doubtful_nodes, gpu.label


def _calculated(path: Path, place: str) -> str:
    command = ["hwloc-calc", "-i", str(path), "--po", "-I", "NUMAnode", place]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
