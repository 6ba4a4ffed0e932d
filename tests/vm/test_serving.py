"""Workers of serving and RL frameworks below `numapin exec --children`, on a machine with two nodes.

Each case is a worker that a framework bound wrongly or not at all, as its users reported. The tests check the kernel's
reports about threads, policy and pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vm.test_children import job_of

if TYPE_CHECKING:
    from tests.vm.machine import VmResult

BOUND = (
    pytest.param("ray-list", id="SkyRL#1936: the list that Ray sets while the process runs has one entry"),
    pytest.param("ray-full-list", id="NeMo-RL#2613: Ray leaves the list as it is, and the first entry is another GPU"),
    pytest.param("ray-unbound", id="sglang#22989: no wrapper of multiprocessing reaches a worker of Ray"),
    pytest.param("reordered", id="sglang#24901, TensorRT-LLM#12168: CUDA's index is not NVML's"),
    pytest.param("ray-unbound", id="vllm#55416: without numactl nothing is bound, and nothing is said"),
    pytest.param("all-on-node-0", id="exemplar-performance#38: the launcher binds all ranks to node 0"),
    pytest.param("clears", id="srt-slurm#326, TensorRT-LLM#18848: the worker removes the binding"),
    pytest.param("ray-unbound", id="torchtitan#4038: no OMP_NUM_THREADS, so each process has threads for all CPUs"),
)


JOBS = {
    "two-nodes-again": [
        job_of("serving", "serving_probe.py"),
        job_of("serving-reordered", "serving_probe.py", "reordered", env={"CUDA_VISIBLE_DEVICES": "1,0"}),
    ]
}


def _assert_on_node_1(found: Any) -> None:
    assert {thread["cpus"] for thread in found["threads"]} == {"4-7"}
    assert found["policy"] == {"mode": "preferred", "nodes": [1]}
    assert found["pages"] == {"1": 8192}
    assert found.get("torch_threads", 4) == 4  # as many as there are cores, one GPU has a node


@pytest.mark.parametrize("case", BOUND)
def test_a_worker_is_bound(two_nodes_again: VmResult, case: str) -> None:
    """The worker's threads, policy and new pages are on its GPU's node."""
    _assert_on_node_1(two_nodes_again.found("serving", f"{case}.json"))


def test_the_order_of_the_commands_list(two_nodes_again: VmResult) -> None:
    """Device 0 of a command with CUDA_VISIBLE_DEVICES=1,0 is NVML's GPU 1."""
    _assert_on_node_1(two_nodes_again.found("serving-reordered", "reordered.json"))


def test_a_worker_that_removes_any_binding(two_nodes_again: VmResult) -> None:
    """`numapin verify` names the worker whose threads left the plan."""
    worker = two_nodes_again.found("serving", "clears-always.json")
    assert {thread["cpus"] for thread in worker["threads"]} == {"0-7"}
    (rank,) = two_nodes_again.report("serving", "verify.json")["report"]["ranks"]
    assert rank["pid"] == worker["pid"]
    assert any("CPUs" in finding["what"] for finding in rank["findings"]), rank["findings"]
