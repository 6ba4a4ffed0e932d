"""`numapin exec --children` on a machine with two nodes: the processes that a program starts are bound to their GPUs.

The tests check the kernel's reports that each process collected about itself: threads, policies, pages.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.vm import gpus
from tests.vm.machine import HERE, SHARE, TEST_LIMIT_S, Job, VmResult

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vm, pytest.mark.timeout(TEST_LIMIT_S)]

PROBE = HERE / "children_probe.py"
STAND_IN = HERE.parent / "children" / "stand_in"
EXEC = (sys.executable, "-m", "numapin", "exec", "--children", "--verbose")
CPUS = ("0-3", "4-7")
BEFORE_MIB = 24


def jobs(machine: str, nvml: Path) -> list[Job]:
    """Return the jobs for the two-node machine."""
    if machine != "two-nodes-again":
        return []
    environ = {
        **gpus.shown(machine, nvml),
        "PYTHONPATH": f"{STAND_IN}:{HERE.parents[1]}",
        "NUMAPIN_RUN_DIR": str(SHARE / "children"),
    }
    program = (sys.executable, PROBE)
    return [
        Job(name="children", argv=[*EXEC, "--", *program], env=environ),
        Job(name="children-strict", argv=[*EXEC, "--strict", "--", *program], env=environ, refuse_policy=True),
    ]


def _found(result: VmResult, name: str) -> Any:
    job = result.jobs["children"]
    assert job.status == 0, job.shown()
    return job.json(f"{name}.json")


def _assert_on(result: VmResult, name: str, node: int, *, policy: bool = True) -> Any:
    """Check that every thread has the node's CPUs, and that new memory is there."""
    found = _found(result, name)
    assert {thread["cpus"] for thread in found["threads"]} == {CPUS[node]}, name
    assert found["pages"] == {str(node): 8192}, name
    if policy:
        assert (found["policy"]["mode"], found["policy"]["nodes"]) == ("preferred", [node]), name
    return found


@pytest.mark.parametrize("way", ["spawn", "fork", "forkserver"])
@pytest.mark.parametrize("rank", [0, 1])
def test_workers_of_multiprocessing(two_nodes_again: VmResult, way: str, rank: int) -> None:
    """A worker is bound at set_device with all its threads; an older thread's memory is on the node, too."""
    found = _assert_on(two_nodes_again, f"{way}-{rank}", rank)
    assert len(found["threads"]) >= 4
    assert found["older_thread"] == {str(rank): 8192}


@pytest.mark.parametrize("rank", [0, 1])
def test_helpers_follow_their_rank(two_nodes_again: VmResult, rank: int) -> None:
    """A forked child and a new program of a bound process are where it is."""
    for name in ("spawn-{}-loader", "spawn-{}-helper", "fork-{}-loader", "forkserver-{}-loader"):
        _assert_on(two_nodes_again, name.format(rank), rank)


def test_driver_and_engine_are_not_bound(two_nodes_again: VmResult) -> None:
    """Processes that never take a GPU keep the CPUs that they had, and no policy."""
    for name in ("driver", "engine"):
        found = _found(two_nodes_again, name)
        assert {thread["cpus"] for thread in found["threads"]} == {"0"}
        assert found["policy"]["mode"] == "default"
        assert found["binding"] is None


def test_workers_of_an_engine(two_nodes_again: VmResult) -> None:
    """Workers below a process without a GPU are bound, also if another thread than the main one sets the device."""
    for rank in (0, 1):
        _assert_on(two_nodes_again, f"engine-{rank}", rank, policy=False)


@pytest.mark.parametrize("name", ["visible", "rank"])
def test_environment_binds_before_torch(two_nodes_again: VmResult, name: str) -> None:
    """A process that was started with one visible GPU, or with a local rank, is bound before its program starts."""
    found = _assert_on(two_nodes_again, name, 1)
    assert not found["at_start_of_torch"]


def test_own_plan_may_leave_the_node_of_the_command(two_nodes_again: VmResult) -> None:
    """`bind_this_process` with `bind` plans with all CPUs of the command, although the process was on node 1 only."""
    _assert_on(two_nodes_again, "asked", 0)


def test_second_gpu_widens(two_nodes_again: VmResult) -> None:
    """A process that takes a GPU of another node may run on both nodes, allocates locally, and is reported once."""
    found = _found(two_nodes_again, "both")
    assert {thread["cpus"] for thread in found["threads"]} == {"0-7"}
    assert found["policy"]["mode"] == "local"
    text = two_nodes_again.jobs["children"].stderr
    assert text.count("uses GPUs of several nodes (GPU 1, GPU 0)") == 1


def test_earlier_children_follow(two_nodes_again: VmResult) -> None:
    """A fork server and a program that were started before the device was set are moved with their process."""
    assert {thread["cpus"] for thread in _found(two_nodes_again, "early")["threads"]} == {"0"}
    for name in ("follower", "late", "waiting"):
        _assert_on(two_nodes_again, name, 1, policy=name == "follower")


def test_memory_from_before_is_reported(two_nodes_again: VmResult) -> None:
    """The line about a late binding has what was allocated before, all of it on node 0."""
    pid = _found(two_nodes_again, "spawn-1")["pid"]
    (line,) = [line for line in two_nodes_again.jobs["children"].stderr.splitlines() if f"process {pid} " in line]
    assert "is bound to GPU 1 (torch.cuda.set_device(1)): CPUs 4-7, memory preferred 1" in line
    amount = float(line.partition(" MiB were allocated before")[0].split()[-1])
    assert BEFORE_MIB < amount < 4 * BEFORE_MIB
    assert line.endswith("100% of it on other nodes")


def test_verify_sees_the_processes(two_nodes_again: VmResult) -> None:
    """`numapin verify` finds the run and compares each process with its GPU; memory from before is what it reports."""
    found = _found(two_nodes_again, "verify")
    assert found["report"] is not None, found["stderr"]
    ranks = found["report"]["ranks"]
    assert [rank["pid"] for rank in ranks] == [_found(two_nodes_again, f"spawn-{rank}")["pid"] for rank in (0, 1)]
    assert [rank["applied"]["cpus"] for rank in ranks] == list(CPUS)
    assert not ranks[0]["findings"]
    assert {finding["what"].split()[2] for finding in ranks[1]["findings"]} <= {
        "the"
    }  # "44.1% of the anonymous memory"


def test_strict_refuses_before_anything_starts(two_nodes_again: VmResult) -> None:
    """With --strict a policy that seccomp refuses gives status 5, and the command does not start."""
    job = two_nodes_again.jobs["children-strict"]
    assert job.status == 5, job.shown()
    assert not list(job.out.glob("*driver*"))
    assert "seccomp forbids it" in job.stderr
