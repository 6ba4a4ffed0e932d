"""The ratings of CPUs in sysfs, and which cores of a node count as fast."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from numapin.base.cpu_set import CpuSet
from numapin.system.tree import Tree
from numapin.topology.build import build
from numapin.topology.fast import fast_cores, speed_notes
from numapin.topology.model import CpuSpeed
from numapin.topology.sources.speeds import read_speeds
from numapin.topology.sources.sysfs import read_sysfs
from numapin.view.picture.layout import lay_out
from numapin.view.topo_tree import topo_tree
from tests.machines.grids import grid
from tests.machines.roots import load, write_root
from tests.pictures import golden_machine

if TYPE_CHECKING:
    from pathlib import Path

    from numapin.topology.model import Topology
    from numapin.view.picture.boxes import Box

CORES = [CpuSet({0, 4}), CpuSet({1, 5}), CpuSet({2, 6}), CpuSet({3, 7})]


class CountingTree(Tree):
    """A tree that notes which files are read."""

    __slots__ = ()
    asked: list[str] = []  # noqa: RUF012 - a frozen class; emptied by each test

    def number(self, path: str) -> int | None:
        """Return the file's number, and note its path."""
        self.asked.append(path.removeprefix("sys/devices/system/cpu/"))
        return super().number(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the folder of a machine without CPUs."""
    CountingTree.asked.clear()
    return tmp_path


def _write(root: Path, name: str, values: dict[int, str]) -> None:
    for cpu, value in values.items():
        path = root / f"sys/devices/system/cpu/cpu{cpu}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")


class TestReading:
    """Files below /sys/devices/system/cpu."""

    def test_without_the_files_two_are_tried(self, root: Path) -> None:
        """A machine without ratings costs two attempts, whatever its number of CPUs."""
        assert read_speeds(CountingTree(str(root)), CORES) == ()
        assert CountingTree.asked == ["cpu0/acpi_cppc/highest_perf", "cpu0/cpu_capacity"]
        assert read_speeds(CountingTree(str(root)), []) == ()

    def test_equal_cores_are_read_once_each(self, root: Path) -> None:
        """One thread of each core is read; all CPUs have one entry."""
        _write(root, "cpu_capacity", dict.fromkeys(range(8), "1024"))
        assert read_speeds(CountingTree(str(root)), CORES) == (CpuSpeed(cpus=CpuSet(range(8)), capacity=1024),)
        read = [path for path in CountingTree.asked if path.endswith("cpu_capacity")]
        assert sorted(set(read)) == [f"cpu{cpu}/cpu_capacity" for cpu in range(4)]

    def test_all_threads_are_read_where_cores_differ(self, root: Path) -> None:
        """CPUs with the same ratings share an entry, by their lowest CPU."""
        _write(
            root, "acpi_cppc/highest_perf", {**dict.fromkeys((0, 4, 2, 6), "200"), **dict.fromkeys((1, 5, 3), "255")}
        )
        _write(root, "cpu_capacity", dict.fromkeys(range(8), "1024"))
        assert read_speeds(Tree(str(root)), CORES) == (
            CpuSpeed(cpus=CpuSet({0, 2, 4, 6}), highest_perf=200, capacity=1024),
            CpuSpeed(cpus=CpuSet({1, 3, 5}), highest_perf=255, capacity=1024),
            CpuSpeed(cpus=CpuSet({7}), capacity=1024),
        )

    @pytest.mark.parametrize("text", ["", "-1", "fast", "1024 1024", "9" * 40])
    def test_garbage_is_unknown(self, root: Path, text: str) -> None:
        """A file without a number counts as absent."""
        _write(root, "cpu_capacity", {0: text})
        assert read_speeds(Tree(str(root)), [CpuSet({0})]) == ()

    def test_a_kernel_that_refuses(self, root: Path) -> None:
        """A core whose file is unreadable is unknown, and the others are kept."""
        _write(root, "cpu_capacity", {0: "1024", 1: "512"})
        (root / "sys/devices/system/cpu/cpu2/cpu_capacity").mkdir(parents=True)
        found = read_speeds(Tree(str(root)), [CpuSet({cpu}) for cpu in range(3)])
        assert [(str(speed.cpus), speed.capacity) for speed in found] == [("0", 1024), ("1", 512)]


def _rated(*speeds: tuple[str, int | None, int | None]) -> Topology:
    """Return a node of four cores of two threads (0,4 to 3,7) with these CPUs, highest_perf and cpu_capacity."""
    rated = tuple(CpuSpeed(cpus=CpuSet.parse(cpus), highest_perf=perf, capacity=c) for cpus, perf, c in speeds)
    return replace(grid(nodes=1), speeds=rated)


class TestFast:
    """The fast cores of a node."""

    @pytest.mark.parametrize(
        ("speeds", "fast", "rating"),
        [
            ([("0-1,4-5", 255, None), ("2-3,6-7", 200, None)], "0-1,4-5", "highest_perf 255, others 200"),
            ([("0-1,4-5", None, 1024), ("2-3,6-7", None, 718)], "0-1,4-5", "cpu_capacity 1024, others 718"),
            # One rating that does not differ is no contradiction.
            ([("0,4", 255, 1024), ("1-3,5-7", 200, 1024)], "0,4", "highest_perf 255, others 200"),
            ([("0,4", 255, 1024), ("1-3,5-7", 255, 512)], "0,4", "cpu_capacity 1024, others 512"),
            (
                [("0,4", 231, None), ("1,5", 201, None), ("2-3,6-7", 166, None)],
                "0-1,4-5",
                "highest_perf 201-231, others 166",
            ),
        ],
    )
    def test_they_are_in_the_upper_half(
        self, speeds: list[tuple[str, int | None, int | None]], fast: str, rating: str
    ) -> None:
        """Cores above the middle of the range are fast, by the first rating that differs."""
        topology = _rated(*speeds)
        (found,) = fast_cores(topology)
        assert (found.node, str(found.cpus), found.rating) == (0, fast, rating)
        assert speed_notes(topology) == ()

    @pytest.mark.parametrize(
        "speeds",
        [
            [],
            [("0-7", 255, 1024)],
            [("0-1,4-5", 105, None), ("2-3,6-7", 100, None)],  # 5 percent
            [("0-1,4-5", 0, None), ("2-3,6-7", None, 0)],
        ],
    )
    def test_alike_cores_are_not(self, speeds: list[tuple[str, int | None, int | None]]) -> None:
        """Cores that differ by 5 percent or less are alike."""
        assert fast_cores(_rated(*speeds)) == ()

    @pytest.mark.parametrize(
        ("speeds", "problem"),
        [
            (
                [("0,4", 255, 512), ("1-3,5-7", 200, 1024)],
                "node 0: highest_perf and cpu_capacity disagree on which cores are faster, so none is preferred; see: "
                "grep . /sys/devices/system/cpu/cpu*/acpi_cppc/highest_perf /sys/devices/system/cpu/cpu*/cpu_capacity",
            ),
            (
                [("0-3", None, 1024), ("4-7", None, 512)],
                "node 0: cpu_capacity differs between the threads of a core (CPUs 0,4), so it is ignored; see: "
                "grep . /sys/devices/system/cpu/cpu*/cpu_capacity",
            ),
            (
                [("0,4", 255, None), ("1,5", 200, None)],
                "node 0: highest_perf is unknown for some cores (CPUs 2-3), so it is ignored; see: "
                "grep . /sys/devices/system/cpu/cpu*/acpi_cppc/highest_perf",
            ),
        ],
    )
    def test_contradictions_are_noted(self, speeds: list[tuple[str, int | None, int | None]], problem: str) -> None:
        """Where ratings contradict each other or are incomplete, no core is fast, and a note has the remedy."""
        topology = _rated(*speeds)
        assert fast_cores(topology) == ()
        assert speed_notes(topology) == (problem,)

    def test_one_bad_rating_leaves_the_other(self) -> None:
        """A rating that is ignored does not hide the other one."""
        topology = _rated(("0,4", 255, 1024), ("1-3", 200, 1024), ("5-7", 200, 512))
        assert [str(fast.cpus) for fast in fast_cores(topology)] == ["0,4"]
        assert len(speed_notes(topology)) == 1

    def test_nodes_are_judged_apart(self) -> None:
        """A node of equal cores has no fast ones, even if another node is slower."""
        speeds = (
            CpuSpeed(cpus=CpuSet.parse("0-3,8-11"), capacity=1024),
            CpuSpeed(cpus=CpuSet.parse("4-7,12-15"), capacity=512),
        )
        assert fast_cores(replace(grid(), speeds=speeds)) == ()

    def test_the_machine_has_notes(self, tmp_path: Path) -> None:
        """The notes are among those of the machine, and so of every plan."""
        readings = read_sysfs(write_root(load("3node-smt2-speeds-contradict-3gpu"), tmp_path), source="test")
        topology = build(readings)
        assert topology.notes == speed_notes(topology)
        assert len(topology.notes) == 2


def _texts(box: Box) -> list[str]:
    own = [label.text for label in box.labels]
    return [*own, *(text for child in box.children for text in _texts(child))]


def test_the_tree_and_the_picture_name_them() -> None:
    """A node with fast and slow cores names the CPUs of the fast ones."""
    hybrid = golden_machine("1pkg-1node-20core-hybrid-1gpu")
    alike = golden_machine("2pkg-2node-smt2-8gpu-h100")
    assert "CPUs 0-19, fast CPUs 5-9,15-19" in str(topo_tree(hybrid).children[0].children[0].label)
    assert "fast" not in str(topo_tree(alike).children[0].children[0].label)
    assert any("fast CPUs 5-9,15-19" in text for text in _texts(lay_out(hybrid).box))
