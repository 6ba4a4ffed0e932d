"""`numapin attach` on a machine with two nodes: threads and pages as the kernel reports them, before and after.

One probe starts processes on node 0 whose GPU is on node 1, and attaches to them (attach_probe.py).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vm import gpus
from tests.vm.machine import HERE, TEST_LIMIT_S, Job, VmResult

pytestmark = [pytest.mark.vm, pytest.mark.timeout(TEST_LIMIT_S)]

PROBE = HERE / "attach_probe.py"
PAGES = {"private": 16384, "huge": 2048, "mlocked": 2048, "shared": 2048, "placed": 2048, "pinned": 1024}
MIB = 1 << 20


def jobs(machine: str, nvml: Path) -> list[Job]:
    """Return the job for the two-node machine."""
    if machine != "two-nodes-again":
        return []
    return [Job(name="attach", argv=[sys.executable, PROBE], env=gpus.shown(machine, nvml), timeout_s=900)]


def _look(result: VmResult, name: str) -> dict[str, Any]:
    """Return the status and report of one command, and what the kernel then reported."""
    job = result.jobs["attach"]
    assert job.status == 0, job.shown()
    found = job.json(f"{name}.json")
    assert isinstance(found, dict)
    assert found["report"] is not None, found["stderr"]
    return found


def _own(look: dict[str, Any]) -> dict[str, Any]:
    """Return the report on the bound process itself."""
    process: dict[str, Any] = look["report"]["ranks"][0]["processes"][0]
    return process


def test_dry_run_changes_nothing(two_nodes_again: VmResult) -> None:
    """Both processes stay on CPU 0 and all pages on node 0; the plan, and the bytes elsewhere, are reported."""
    look = _look(two_nodes_again, "dry")
    assert (look["status"], look["report"]["dry_run"], look["report"]["undo"]) == (0, True, [])
    assert list(look["cpus"].values()) == [["0"], ["0"]]
    assert look["pages"] == {name: {"0": count} for name, count in PAGES.items()}
    (rank,) = look["report"]["ranks"]
    assert (rank["requested"]["cpus"], rank["requested"]["gpu"]["index"]) == ("4-7", 1)
    assert rank["gpu_source"] == "LOCAL_RANK=1"
    process = _own(look)
    assert (process["changed"], process["cpus_before"], process["cpus"]) == (process["threads"], "0", "4-7")
    assert process["pages"]["far_bytes"] >= sum(PAGES.values()) * 4096


def test_all_threads_are_bound(two_nodes_again: VmResult) -> None:
    """Every thread of the process and of its child is on node 1's CPUs, also those that started meanwhile."""
    look = _look(two_nodes_again, "bound")
    assert look["status"] == 0
    assert list(look["cpus"].values()) == [["4-7"], ["4-7"]]
    assert look["pages"] == {name: {"0": count} for name, count in PAGES.items()}, "pages move on request only"
    assert [process["cpus"] for process in look["report"]["ranks"][0]["processes"]] == ["4-7", "4-7"]
    assert look["report"]["exact"] is True


def test_pages_move(two_nodes_again: VmResult) -> None:
    """Private memory, in small and huge pages, and mlocked memory moves to node 1: the kernel says so of every page."""
    look = _look(two_nodes_again, "moved")
    for region in ("private", "huge", "mlocked"):
        assert look["pages"][region] == {"1": PAGES[region]}, region
    moved = _own(look)["pages"]["moved_bytes"]
    assert moved >= (PAGES["private"] + PAGES["huge"] + PAGES["mlocked"]) * 4096


def test_pages_that_cannot_move(two_nodes_again: VmResult) -> None:
    """Memory that a child shares, that a driver holds, or that the program placed stays; the report has the bytes."""
    look = _look(two_nodes_again, "moved")
    for region in ("shared", "pinned", "placed"):
        assert look["pages"][region] == {"0": PAGES[region]}, region
    stays = _own(look)["pages"]["stays"]
    assert stays["shared"] >= 8 * MIB
    assert 4 * MIB <= stays["locked"] < 8 * MIB
    assert stays["policy"] == 8 * MIB
    pages = _own(look)["pages"]
    assert pages["after"]["0"] == sum(stays.values())


def test_strict(two_nodes_again: VmResult) -> None:
    """With --strict, pages that stay are status 5, after the report."""
    look = _look(two_nodes_again, "moved")
    assert (look["status"], look["report"]["exact"]) == (5, False)
    assert "--strict: not everything could be done exactly" in look["stderr"]


def test_gpu_that_the_driver_reports(two_nodes_again: VmResult) -> None:
    """A process without a rank is bound to the node of the GPU on which the driver sees it compute."""
    look = _look(two_nodes_again, "computing")
    (rank,) = look["report"]["ranks"]
    assert (look["status"], rank["requested"]["gpu"]["index"]) == (0, 1)
    assert rank["gpu_source"] == "the driver sees it compute there"
    assert list(look["cpus"].values()) == [["4-7"], ["4-7"]]


def test_seccomp(two_nodes_again: VmResult) -> None:
    """Under Docker's profile threads are bound, and pages stay with the reason; with --strict the status is 5."""
    look = _look(two_nodes_again, "refused")
    assert list(look["cpus"].values()) == [["4-7"], ["4-7"]]
    assert look["pages"] == {name: {"0": count} for name, count in PAGES.items()}
    stays = _own(look)["pages"]["stays"]
    assert (look["status"], set(stays)) == (5, {"refused", "policy"})
    assert stays["refused"] >= 90 * MIB


def test_cpuset_with_a_part_of_the_cpus(two_nodes_again: VmResult) -> None:
    """The kernel drops CPUs outside the cpuset of the process; that is reported, and so is a forbidden node."""
    look = _look(two_nodes_again, "part")
    assert next(iter(look["cpus"].values())) == ["4-5"]
    process = _own(look)
    assert process["cpus"] == "4-5"
    assert any("did not get CPUs 6-7, which the cpuset excludes" in text for text in process["shortfalls"])
    assert process["pages"]["stays"]["forbidden"] >= 80 * MIB
    assert look["pages"]["private"] == {"0": PAGES["private"]}


def test_cpuset_without_the_cpus(two_nodes_again: VmResult) -> None:
    """If the cpuset has none of the planned CPUs, the threads stay where they are, and the status is 5."""
    look = _look(two_nodes_again, "outside")
    assert (look["status"], next(iter(look["cpus"].values()))) == (5, ["0-3"])
    (shortfall,) = {text.partition(" did ")[2] for text in _own(look)["shortfalls"]}
    assert shortfall.startswith("not get CPUs 4-7 (Invalid argument) and stay where they were")


def test_results(two_nodes_again: VmResult) -> None:
    """Write the raw reports for docs/results if that was requested."""
    _look(two_nodes_again, "moved")
    if folder := os.environ.get("NUMAPIN_RESULTS"):
        names = ("dry", "bound", "moved", "refused", "part", "outside")
        looks = {name: _look(two_nodes_again, name) for name in names}
        Path(folder, "vm-attach-two-nodes.json").write_text(json.dumps(looks, indent=1) + "\n")
