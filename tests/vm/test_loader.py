"""`numapin.DataLoader` on a machine with two nodes: slots, workers and pin thread are on the rank's node.

The tests check the kernel's reports that the probe collected on each loader. The difficult conditions of containers are
tested too: policies refused by seccomp, a full node, a /dev/shm of 64 MiB, a small memory limit.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.vm import gpus
from tests.vm.machine import HERE, SHARE, TEST_LIMIT_S, Job, JobResult, VmResult
from tests.vm.seam import CpuSet

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vm, pytest.mark.timeout(TEST_LIMIT_S)]

RUN = (sys.executable, "-m", "numapin", "run", "--gpus", "1", HERE / "loader_probe.py", "placement")
ALONE = (sys.executable, "-m", "tests.vm.loader_probe")
NODE = 1
"""The node of GPU 1, which a loader outside `numapin run` requests: not the one that a process probably starts on."""
PAGE_BYTES = 4096
BATCH_BYTES = 2 * 1024 * 1024
SYS_NICE = "--cap-add SYS_NICE"


def jobs(machine: str, nvml: Path) -> list[Job]:
    """Return the jobs for the two-node machine: under `numapin run`, alone, and under each difficult condition.

    One rank is enough, because a new process takes longest to import torch; test_run.py has several ranks.
    """
    if machine != "two-nodes":
        return []
    environ = {**gpus.shown(machine, nvml), "NUMAPIN_RUN_DIR": str(SHARE / "load-rank")}
    return [
        Job(name="load-rank", argv=RUN, env=environ),
        *(_alone(scenario) for scenario in ("placement", "shm", "limited")),
        _alone("refused", refuse_policy=True),
        _alone("full", spoils=True),  # the node stays full
    ]


def _alone(scenario: str, **limits: Any) -> Job:
    return Job(name=f"load-{scenario}", argv=[*ALONE, scenario, str(NODE)], **limits)


def _found(result: VmResult, job: str) -> dict[str, Any]:
    """Return the probe's observations; the job must have succeeded."""
    job = f"load-{job}"
    assert result.jobs[job].status == 0, result.jobs[job].shown()
    found = result.jobs[job].json("0.json")
    assert isinstance(found, dict)
    return found


CASES = pytest.mark.parametrize("case", ["rank", "placement"])
"""The jobs that load near the node: a rank, and a process alone."""


def _warnings(job: JobResult) -> list[str]:
    return [line for line in job.stderr.splitlines() if line.startswith("numapin: warning: ")]


@CASES
def test_slots_are_on_the_node(two_nodes: VmResult, case: str) -> None:
    """From the first batch on, all batches are in slots on the rank's node, and the stats report that.

    move_pages says so for all batches, and numa_maps for the slot of the last one.
    """
    seen = _found(two_nodes, case)["numapin"]
    stats = seen["stats"]
    assert seen["num_batches"] == seen["num_in_slots"] == 10
    assert seen["slot_pages"] == {str(NODE): 10 * BATCH_BYTES // PAGE_BYTES}
    assert seen["slot_mapping"]["pages"] == {str(NODE): seen["slot_bytes"] // PAGE_BYTES}
    assert (stats["nodes"], stats["share_on_node"], stats["notes"]) == ([NODE], 1.0, [])


@CASES
def test_workers_have_the_cpus_and_the_policy(two_nodes: VmResult, case: str) -> None:
    """Every thread of every worker is on the node's CPUs, with a policy for the node's memory."""
    workers = _found(two_nodes, case)["numapin"]["workers"]
    assert [worker["cpus"] for worker in workers] == [["4-7"]] * 2
    for worker in workers:
        assert f"prefer:{NODE}" in worker["policies"]
        assert "default" not in worker["policies"]


@CASES
def test_pin_thread_is_bound_and_the_rank_is_not_touched(two_nodes: VmResult, case: str) -> None:
    """Binding the pin thread gives it the node's CPUs and policy; the process keeps its own."""
    found = _found(two_nodes, case)
    pin, seen = found["pin_thread"], found["numapin"]
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
    """If seccomp refuses policies and move_pages, the slots are still on the node; the remedy is printed once."""
    job, found = two_nodes.jobs["load-refused"], _found(two_nodes, "refused")["polite"]
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
    assert sum(stats["notes"][0] in line for line in _warnings(job)) == 2, (
        job.shown()
    )  # one by the default loader, one by the loader without numa_maps


def test_refused_policy_is_an_error_when_strict(two_nodes: VmResult) -> None:
    """With strict=True the loader raises BindingRefused with the same remedy."""
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
    assert len([line for line in _warnings(two_nodes.jobs["load-full"]) if "% on node 0" in line]) == 1


def test_small_memory_limit_does_not_matter(two_nodes: VmResult) -> None:
    """In a cgroup that cannot hold the epoch's batches, all travel in slots, and nothing is reported."""
    found = _found(two_nodes, "limited")
    assert found["num_batches"] == found["num_in_slots"] == 30
    assert found["stats"]["notes"] == []
    assert found["stats"]["slots"] * found["stats"]["slot_bytes"] < 256 * 1024 * 1024
