"""`numapin.DataLoader` on a machine with two nodes: slots, workers and pin thread are on the rank's node.

The tests check the kernel's reports that the probe collected on each loader. The difficult conditions of containers are
tested too: policies refused by seccomp, a full node, a /dev/shm of 64 MiB, a small memory limit.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.vm.machine import GPUS, HERE, SHARE, Job
from tests.vm.seam import CpuSet

if TYPE_CHECKING:
    from tests.vm.machine import VmResult

NODE = 1
"""The node of GPU 1."""
PAGE_BYTES = 4096
BATCH_BYTES = 2 * 1024 * 1024
SYS_NICE = "--cap-add SYS_NICE"
RUN = (sys.executable, "-m", "numapin", "run", "--gpus", "1", str(HERE / "loader_probe.py"), "rank")


def _job(scenario: str, **limits: Any) -> Job:
    return Job(name=f"load-{scenario}", argv=(sys.executable, "-m", "tests.vm.loader_probe", scenario), **limits)


JOBS = {
    "two-nodes": [
        # One rank is enough: it is a new process, which takes longer to import torch than the others together.
        Job(name="load-rank", argv=RUN, env={**GPUS, "NUMAPIN_RUN_DIR": str(SHARE / "load-rank")}),
        *(_job(scenario) for scenario in ("placement", "shm", "limited")),
        _job("refused", refuse_policy=True),
        _job("full", spoils=True),  # the node stays full
    ]
}


def _found(result: VmResult, job: str) -> Any:
    return result.found(f"load-{job}", "0.json")


def _warnings(result: VmResult, job: str) -> list[str]:
    return [line for line in result.jobs[job].stderr.splitlines() if line.startswith("numapin: warning: ")]


@pytest.mark.parametrize("case", ["rank", "placement"])
def test_all_of_it_is_on_the_node(two_nodes: VmResult, case: str) -> None:
    """In a rank of `numapin run`, and alone, slots, workers and pin thread are on the node; its own binding stays.

    From the first batch on, all batches are in slots on the node, and the stats report that: move_pages says so
    for all batches, and numa_maps for the slot of the last one. Every thread of every worker is on the node's CPUs,
    with a policy for the node's memory. Binding the pin thread gives it the same; the process keeps its own.
    """
    found = _found(two_nodes, case)
    seen, pin = found["numapin"], found["pin_thread"]
    stats = seen["stats"]
    assert seen["num_batches"] == seen["num_in_slots"] == 10
    assert seen["slot_pages"] == {str(NODE): 10 * BATCH_BYTES // PAGE_BYTES}
    assert seen["slot_mapping"]["pages"] == {str(NODE): seen["slot_bytes"] // PAGE_BYTES}
    assert (stats["nodes"], stats["share_on_node"], stats["notes"]) == ([NODE], 1.0, [])
    assert [worker["cpus"] for worker in seen["workers"]] == [["4-7"]] * 2
    for worker in seen["workers"]:
        assert f"prefer:{NODE}" in worker["policies"]
        assert "default" not in worker["policies"]
    assert (pin["cpus"], pin["policy"]) == ("4-7", {"mode": "preferred", "nodes": [NODE]})
    own = "4-7" if case == "rank" else "0-7"
    assert {own} == {*seen["rank_cpus"], *seen["rank_threads"], pin["rank_cpus"]}
    assert pin["rank_policy"]["mode"] == ("preferred" if case == "rank" else "default")


def test_torch_has_the_planned_threads(two_nodes: VmResult) -> None:
    """In a rank, torch starts as many threads as its node has cores, and all are on the node."""
    torch = _found(two_nodes, "rank")["torch"]
    assert torch["num_threads"] == 4
    assert len(torch["cpus"]) >= 4
    assert {*torch["cpus"]} == {"4-7"}


def test_small_shared_memory_does_not_matter(two_nodes: VmResult) -> None:
    """With batches of 38 MiB and 64 MiB of /dev/shm torch's loader fails; ours works, even if all batches are kept."""
    found = _found(two_nodes, "shm")
    assert "No space left on device" in found["torch"]
    assert found["numapin"]["num_batches"] == found["numapin"]["num_in_slots"] == 8
    assert found["numapin"]["slot_pages"].keys() == {str(NODE)}


def test_refused_policy_leaves_first_touch_and_is_said_once(two_nodes: VmResult) -> None:
    """If seccomp refuses policies and move_pages, the slots are still on the node; the remedy is printed once.

    With strict=True the loader raises BindingRefused with the same remedy.
    """
    found = _found(two_nodes, "refused")["polite"]
    stats = found["stats"]
    assert found["num_in_slots"] == 10
    assert found["slot_pages"] == {}  # move_pages is refused
    assert found["slot_mapping"]["pages"] == {str(NODE): found["slot_bytes"] // PAGE_BYTES}
    assert stats["share_on_node"] == 1.0
    assert [CpuSet.parse(cpus) for w in found["workers"] for cpus in w["cpus"]] == [CpuSet(range(4, 8))] * 2
    policy_of_threads, policy_of_slots = stats["notes"]
    assert all(
        "pages go where they are first touched" in note and SYS_NICE in note
        for note in (policy_of_threads, policy_of_slots)
    )
    assert found["rank_cpus"] == ["0-7", "0-7"]
    # One by the default loader, one by the loader without numa_maps.
    assert sum(stats["notes"][0] in line for line in _warnings(two_nodes, "load-refused")) == 2
    error = _found(two_nodes, "refused")["strict"]
    assert error is not None
    assert SYS_NICE in error["message"]
    assert "strict=True" in error["hint"]


def test_what_cannot_be_verified_is_said(two_nodes: VmResult) -> None:
    """Without move_pages and numa_maps the share is unknown, and reported as unverified."""
    stats = _found(two_nodes, "refused")["blind"]
    assert stats["hits"] > 0
    assert stats["share_on_node"] is None
    assert any("unverified" in note for note in stats["notes"])


def test_full_node_is_said_with_shares(two_nodes: VmResult) -> None:
    """If the node is full, pages go elsewhere: loading continues, stats have the share, and it is reported once."""
    found = _found(two_nodes, "full")
    stats = found["stats"]
    assert found["num_in_slots"] == 10
    assert sum(found["slot_pages"].values()) == 10 * 8 * 1024 * 1024 // PAGE_BYTES
    assert found["slot_pages"]["0"] > 0
    assert 0 <= stats["share_on_node"] < 1
    said = [note for note in stats["notes"] if "% on node 0" in note and "numactl -H" in note]
    assert len(said) == 1, stats["notes"]
    assert len([line for line in _warnings(two_nodes, "load-full") if "% on node 0" in line]) == 1


def test_small_memory_limit_does_not_matter(two_nodes: VmResult) -> None:
    """In a cgroup that cannot hold the epoch's batches, all travel in slots, and nothing is reported."""
    found = _found(two_nodes, "limited")
    assert found["num_batches"] == found["num_in_slots"] == 30
    assert found["stats"]["notes"] == []
    assert found["stats"]["slots"] * found["stats"]["slot_bytes"] < 256 * 1024 * 1024
