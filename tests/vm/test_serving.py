"""Workers of serving and RL frameworks below `numapin exec --children`, on a machine with two nodes.

Each case is a worker that a framework bound wrongly or not at all, as its users reported. The tests check the kernel's
reports about threads, policy and pages.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.vm import gpus
from tests.vm.machine import HERE, SHARE, TEST_LIMIT_S, Job, VmResult
from tests.vm.test_children import EXEC, STAND_IN

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vm, pytest.mark.timeout(TEST_LIMIT_S)]

PROBE = HERE / "serving_probe.py"
BOUND = (
    pytest.param("ray-list", id="SkyRL#1936: the list that Ray sets while the process runs has one entry"),
    pytest.param("ray-full-list", id="NeMo-RL#2613: Ray leaves the list as it is, and the first entry is another GPU"),
    pytest.param("ray-unbound", id="sglang#22989: no wrapper of multiprocessing reaches a worker of Ray"),
    pytest.param("reordered", id="sglang#24901, TensorRT-LLM#12168: CUDA's index is not NVML's"),
    pytest.param("no-numactl", id="vllm#55416: without numactl nothing is bound, and nothing is said"),
    pytest.param("all-on-node-0", id="exemplar-performance#38: the launcher binds all ranks to node 0"),
    pytest.param("clears", id="srt-slurm#326, TensorRT-LLM#18848: the worker removes the binding"),
    pytest.param("late-threads", id="torchtitan#4038: no OMP_NUM_THREADS, so each process has threads for all CPUs"),
)


def jobs(machine: str, nvml: Path) -> list[Job]:
    """Return the jobs for the two-node machine."""
    if machine != "two-nodes-again":
        return []
    environ = {
        **gpus.shown(machine, nvml),
        "PYTHONPATH": f"{STAND_IN}:{HERE.parents[1]}",
        "NUMAPIN_RUN_DIR": str(SHARE / "serving"),
    }
    reordered = {**environ, "CUDA_VISIBLE_DEVICES": "1,0", "NUMAPIN_RUN_DIR": str(SHARE / "serving-reordered")}
    program = (*EXEC, "--", sys.executable, PROBE)
    return [
        Job(name="serving", argv=program, env=environ),
        Job(name="serving-reordered", argv=[*program, "reordered"], env=reordered),
    ]


def _found(result: VmResult, name: str, job: str = "serving") -> Any:
    done = result.jobs[job]
    assert done.status == 0, done.shown()
    return done.json(f"{name}.json")


def _assert_on_node_1(found: Any) -> None:
    """All threads may run on the CPUs of node 1 only, and new pages are there."""
    assert {thread["cpus"] for thread in found["threads"]} == {"4-7"}
    assert found["policy"] == {"mode": "preferred", "nodes": [1]}
    assert found["pages"] == {"1": 8192}
    assert found.get("torch_threads", 4) == 4  # as many as there are cores, one GPU has a node


@pytest.mark.parametrize("case", BOUND)
def test_a_worker_is_bound(two_nodes_again: VmResult, case: str) -> None:
    """The worker's threads, policy and new pages are on its GPU's node."""
    _assert_on_node_1(_found(two_nodes_again, case))


def test_the_order_of_the_commands_list(two_nodes_again: VmResult) -> None:
    """Device 0 of a command with CUDA_VISIBLE_DEVICES=1,0 is NVML's GPU 1."""
    _assert_on_node_1(_found(two_nodes_again, "reordered", "serving-reordered"))


def test_a_worker_that_removes_any_binding(two_nodes_again: VmResult) -> None:
    """`numapin verify` names the worker whose threads left the plan."""
    worker = _found(two_nodes_again, "clears-always")
    assert {thread["cpus"] for thread in worker["threads"]} == {"0-7"}
    (rank,) = _found(two_nodes_again, "verify")["report"]["ranks"]
    assert rank["pid"] == worker["pid"]
    assert any("CPUs" in finding["what"] for finding in rank["findings"]), rank["findings"]
