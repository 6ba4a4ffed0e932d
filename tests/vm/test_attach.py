"""`numapin attach` on a machine with two nodes: threads and pages as the kernel reports them, before and after.

One probe starts processes on node 0 whose GPU is on node 1, and attaches to them (attach_probe.py).
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.vm.machine import GPUS, HERE, Job, compare, publish

if TYPE_CHECKING:
    from tests.vm.machine import VmResult

PAGES = {"private": 16384, "huge": 2048, "mlocked": 2048, "shared": 2048, "placed": 2048, "pinned": 1024}
MIB = 1 << 20
LASTING_THREADS = 5  # the main thread, three that wait, and one that starts short ones
LOOKS = ("dry", "bound", "moved", "computing", "refused", "part", "outside")
JOBS = {"two-nodes-again": [Job(name="attach", argv=[sys.executable, HERE / "attach_probe.py"], env=GPUS)]}


def _look(result: VmResult, name: str) -> dict[str, Any]:
    found = result.report("attach", f"{name}.json")
    return {**found, "process": found["report"]["ranks"][0]["processes"][0]}


@pytest.mark.parametrize("name", LOOKS)
def test_threads_and_pages_as_the_kernel_reports_them(two_nodes_again: VmResult, name: str) -> None:
    """After each command, the CPUs of the process and its child, and the node of every page, are the recorded ones.

    dry: nothing changes; bound: all threads, those that started meanwhile too; moved: private memory in small and huge
    pages and mlocked memory, but not what a child shares, a driver holds or the program placed; computing: the driver
    names the GPU; refused: Docker's seccomp profile; part, outside: a cpuset with some or none of the CPUs.
    """
    look = _look(two_nodes_again, name)
    (rank,) = look["report"]["ranks"]
    pages = {region: found for region, found in look["pages"].items() if name != "part" or region == "private"}
    assert all(sum(found.values()) == PAGES[region] for region, found in pages.items())
    reported = {
        "status": look["status"],
        "exact": look["report"]["exact"],
        "gpu": f"{rank['requested']['gpu']['index']}: {rank['gpu_source']}",
        "planned": rank["requested"]["cpus"],
        "shown": " and ".join(process["cpus"] for process in rank["processes"]),
        # Threads that start and end meanwhile may leave pages that no look explains.
        "stays": " ".join(sorted(look["process"]["pages"]["stays"].keys() - {"unseen"})),
    }
    assert look["report"]["dry_run"] == (name == "dry")
    (own,), (child,) = look["cpus"].values()  # all threads of a process have the same
    compare("attach", name, {**reported, "seen": f"{own} and {child}", "pages": pages})


def test_bytes_and_reasons(two_nodes_again: VmResult) -> None:
    """The report has the bytes that were elsewhere, moved and left, with the reason, and the commands that undo it."""
    dry, moved, refused, part, outside = (
        _look(two_nodes_again, name) for name in ("dry", "moved", "refused", "part", "outside")
    )
    assert LASTING_THREADS <= dry["process"]["changed"] <= dry["process"]["threads"]  # short threads end meanwhile
    assert dry["process"]["cpus_before"] == "0"
    assert dry["report"]["undo"] == []
    assert dry["process"]["pages"]["far_bytes"] >= sum(PAGES.values()) * 4096

    pages = moved["process"]["pages"]
    assert pages["moved_bytes"] >= (PAGES["private"] + PAGES["huge"] + PAGES["mlocked"]) * 4096
    assert pages["stays"]["shared"] >= 8 * MIB
    assert 4 * MIB <= pages["stays"]["locked"] < 8 * MIB
    assert pages["stays"]["policy"] == 8 * MIB
    assert pages["after"]["0"] == sum(pages["stays"].values())
    assert "--strict: not everything could be done exactly" in moved["stderr"]

    assert refused["process"]["pages"]["stays"]["refused"] >= 90 * MIB
    assert any("did not get CPUs 6-7, which the cpuset excludes" in text for text in part["process"]["shortfalls"])
    assert part["process"]["pages"]["stays"]["forbidden"] >= 80 * MIB
    (shortfall,) = {text.partition(" did ")[2] for text in outside["process"]["shortfalls"]}
    assert shortfall.startswith("not get CPUs 4-7 (Invalid argument) and stay where they were")

    looks = {name: two_nodes_again.found("attach", f"{name}.json") for name in LOOKS if name != "computing"}
    publish("vm-attach-two-nodes.json", json.dumps(looks, indent=1) + "\n")
