"""`numapin run` on machines with several nodes: ranks, threads and pages are where the plan puts them.

The tests check the kernel's reports that the probe collected in each rank. The local share of a rank's pages under
plain torchrun is recorded but not asserted, because it is random.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.vm import gpus
from tests.vm.machine import HERE, SHARE, TEST_LIMIT_S, Job, JobResult, VmResult, cache
from tests.vm.seam import CpuSet

pytestmark = [pytest.mark.vm, pytest.mark.timeout(TEST_LIMIT_S)]

PROBE = HERE / "probe.py"
NUMAPIN = (sys.executable, "-m", "numapin", "run")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
MODES = {"preferred": ("preferred", "preferred-many"), "bind": ("bind",), "interleave": ("interleave",)}


def jobs(machine: str, nvml: Path) -> list[Job]:
    """Return the jobs for a machine: with defaults, under torchrun, and with its special conditions."""
    if machine == "two-nodes-again":
        return []
    shown = gpus.shown(machine, nvml)
    as_it_is = _run("default", env=shown)
    of_each = {
        "two-nodes": [
            _torchrun(2),
            _run("bind", "--memory", "bind", "--bind", "exclusive", "--nproc-per-node", "4", env=shown),
            _run("refused", env=shown, refuse_policy=True),
            _run("strict", "--strict", env=shown, refuse_policy=True),
            _run("cpuset", env=shown, cpuset=("5-7", "1")),
        ],
        "four-nodes": [
            _torchrun(4),
            _run("socket", "--bind", "socket", "--no-smt", env=shown),
            _run("gpus", "--gpus", "0,3", env=shown),
            _run("no-nvml", "--nproc-per-node", "4", env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        ],
        "memory-only": [
            _torchrun(2),
            _run("no-gpus", "--nproc-per-node", "3", env={"CUDA_VISIBLE_DEVICES": ""}),
            _run("interleave", "--memory", "interleave", env=shown),
            _run("torch", "--nproc-per-node", "1", env=shown, probe=("--torch",)),
        ],
    }
    return [as_it_is, *of_each[machine]]


def _run(name: str, *options: str, probe: tuple[str, ...] = (), env: dict[str, str], **limits: Any) -> Job:
    """Return a job that runs the probe under numapin and keeps the run directory."""
    run_dir = {"NUMAPIN_RUN_DIR": str(SHARE / name)}
    return Job(name=name, argv=[*NUMAPIN, *options, PROBE, *probe], env={**env, **run_dir}, **limits)


def _torchrun(num_ranks: int) -> Job:
    return Job(name="torchrun", argv=[*TORCHRUN, "--nproc-per-node", str(num_ranks), PROBE])


def _plan(job: JobResult) -> dict[str, Any]:
    """Return plan.json of the job's only run."""
    found = list(job.out.glob("**/plan.json"))
    assert len(found) == 1, f"{len(found)} files plan.json; {job.shown()}"
    plan = json.loads(found[0].read_text())
    assert plan["schema"] == "numapin.plan/1"
    assert isinstance(plan, dict)
    return plan


def _ranks(job: JobResult) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each rank's slice of the plan and its probe's results; the job must have succeeded."""
    assert job.status == 0, job.shown()
    return [(rank, _probe(job, rank["local_rank"])) for rank in _plan(job)["ranks"]]


def _probe(job: JobResult, rank: int) -> dict[str, Any]:
    found = job.json(f"{rank}.json")
    assert isinstance(found, dict)
    return found


def _assert_as_planned(job: JobResult) -> None:
    """Compare every rank's threads, policy and pages, as the kernel reports them, with the plan."""
    for rank, found in _ranks(job):
        assert len(found["threads"]) >= 2
        assert {thread["cpus"] for thread in found["threads"]} == {rank["cpus"]}, rank["reason"]
        assert found["policy"]["mode"] in MODES[rank["memory"]]
        assert found["policy"]["nodes"] == sorted(CpuSet.parse(rank["nodes"]))
        assert found["env"]["OMP_NUM_THREADS"] == str(rank["num_threads"])
        _assert_pages_on(CpuSet.parse(rank["nodes"]), found)


def _assert_pages_on(nodes: frozenset[int], found: dict[str, Any]) -> None:
    """Check that all of the mapping is on these nodes, by numa_maps and, unless refused, by move_pages."""
    told = [found["numa_maps"]["mapping"]["pages"], *([found["pages"]] if "error" not in found["pages"] else [])]
    for pages in told:
        assert {int(node) for node in pages} <= nodes
        assert sum(pages.values()) == 8192


def _gpu_nodes(result: VmResult, job: str) -> list[int]:
    """Return the node of each rank's GPU, from the machine's file and not from the plan."""
    node_of = {gpu.address: gpu.node for gpu in result.machine.gpus}
    return [node_of[rank["gpu"]["pci"]] for rank in _plan(result.jobs[job])["ranks"]]


@pytest.mark.parametrize("job", ["default", "bind", "cpuset"])
def test_two_nodes_hold_the_plan(two_nodes: VmResult, job: str) -> None:
    """On two nodes every thread, policy and page of each rank matches the plan."""
    _assert_as_planned(two_nodes.jobs[job])


@pytest.mark.parametrize("job", ["default", "socket", "gpus", "no-nvml"])
def test_four_nodes_hold_the_plan(four_nodes: VmResult, job: str) -> None:
    """On four nodes every thread, policy and page of each rank matches the plan."""
    _assert_as_planned(four_nodes.jobs[job])


@pytest.mark.parametrize("job", ["default", "no-gpus", "interleave", "torch"])
def test_memory_only_node_holds_the_plan(memory_only: VmResult, job: str) -> None:
    """Next to a memory-only node every thread, policy and page of each rank matches the plan."""
    _assert_as_planned(memory_only.jobs[job])


def test_ranks_are_on_the_nodes_of_their_gpus(two_nodes: VmResult) -> None:
    """Rank n is on the node of GPU n in the machine's file."""
    ranks = _ranks(two_nodes.jobs["default"])
    assert _gpu_nodes(two_nodes, "default") == [0, 1]
    assert [(rank["cpus"], rank["nodes"]) for rank, _ in ranks] == [("0-3", "0"), ("4-7", "1")]


def test_ranks_follow_cuda_order_where_nvml_order_is_another(four_nodes: VmResult) -> None:
    """CUDA sorts equal GPUs by bus: rank 0 has NVML's GPU 1 on node 2, and so on, each with two threads of one core."""
    ranks = _ranks(four_nodes.jobs["default"])
    assert _gpu_nodes(four_nodes, "default") == [2, 0, 3, 1]
    assert [rank["gpu"]["index"] for rank, _ in ranks] == [1, 3, 0, 2]
    assert [rank["cpus"] for rank, _ in ranks] == ["4-5", "0-1", "6-7", "2-3"]
    assert [rank["num_threads"] for rank, _ in ranks] == [1] * 4


def test_chosen_gpus_are_nvml_indices_and_shown_to_cuda_by_uuid(four_nodes: VmResult) -> None:
    """With --gpus 0,3 the ranks are on nodes 3 and 0, and CUDA sees these two GPUs in that order."""
    ranks = _ranks(four_nodes.jobs["gpus"])
    assert _gpu_nodes(four_nodes, "gpus") == [3, 0]
    assert {found["env"]["CUDA_VISIBLE_DEVICES"] for _, found in ranks} == {f"{gpus.uuid(0)},{gpus.uuid(3)}"}


def test_gpus_are_found_in_sysfs_without_nvml(four_nodes: VmResult) -> None:
    """Without NVML the GPUs come from sysfs, in the order of their PCI addresses."""
    assert _gpu_nodes(four_nodes, "no-nvml") == [2, 0, 3, 1]
    assert [rank["nodes"] for rank, _ in _ranks(four_nodes.jobs["no-nvml"])] == ["2", "0", "3", "1"]


def test_socket_mode_prefers_all_nodes_of_the_package(four_nodes: VmResult) -> None:
    """With --bind socket --no-smt a rank gets one thread of each core of its package and prefers both its nodes."""
    for (rank, found), node in zip(_ranks(four_nodes.jobs["socket"]), _gpu_nodes(four_nodes, "socket"), strict=True):
        assert (rank["cpus"], rank["nodes"]) == (("0,2", "0-1") if node < 2 else ("4,6", "2-3"))
        assert found["policy"]["mode"] == "preferred-many"


def test_exclusive_ranks_share_no_cpu(two_nodes: VmResult) -> None:
    """Four exclusive ranks on two GPUs of two nodes have four disjoint pairs of CPUs."""
    cpus = [CpuSet.parse(found["threads"][0]["cpus"]) for _, found in _ranks(two_nodes.jobs["bind"])]
    assert [len(each) for each in cpus] == [2] * 4
    assert len(frozenset().union(*cpus)) == 8


def test_torch_starts_its_threads_inside_the_binding(memory_only: VmResult) -> None:
    """A rank that imports torch has as many threads as planned; another test checks that they are bound."""
    for rank, found in _ranks(memory_only.jobs["torch"]):
        assert found["torch_threads"] == rank["num_threads"] == 2
        assert len(found["threads"]) >= 3


def test_refused_policy_keeps_cpus_and_first_touch(two_nodes: VmResult) -> None:
    """If seccomp refuses memory policies, ranks keep their CPUs, pages are still local, and a warning is printed."""
    job = two_nodes.jobs["refused"]
    for (rank, found), node in zip(_ranks(job), _gpu_nodes(two_nodes, "refused"), strict=True):
        assert found["policy"] == {"error": "EPERM"}
        assert {thread["cpus"] for thread in found["threads"]} == {rank["cpus"]}
        _assert_pages_on(frozenset({node}), found)
        assert not rank["exact"]
    assert "SYS_NICE" in job.stderr, job.shown()


def test_refused_policy_is_an_error_under_strict(two_nodes: VmResult) -> None:
    """With --strict a refused policy gives exit status 5 before any rank starts."""
    job = two_nodes.jobs["strict"]
    assert job.status == 5, job.shown()
    assert not list(job.out.glob("[0-9].json"))


def test_cpuset_moves_a_rank_to_the_nearest_node_and_says_so(two_nodes: VmResult) -> None:
    """In a cpuset of node 1, the rank of the GPU on node 0 runs on node 1; its plan is not exact and has the reason."""
    (first, _), (second, _) = _ranks(two_nodes.jobs["cpuset"])
    assert (first["cpus"], first["nodes"], second["cpus"], second["nodes"]) == ("5-7", "1", "5-7", "1")
    assert (first["exact"], second["exact"]) == (False, True)
    assert "node 1" in first["reason"]


def test_ranks_without_gpus_are_spread_over_nodes_with_cpus(memory_only: VmResult) -> None:
    """Without GPUs three ranks are spread over the two nodes with CPUs, and the memory-only node gets none."""
    nodes = [rank["nodes"] for rank, _ in _ranks(memory_only.jobs["no-gpus"])]
    assert sorted(nodes) in (["0", "0", "1"], ["0", "1", "1"])


def test_interleave_leaves_the_memory_only_node_alone(memory_only: VmResult) -> None:
    """--memory interleave spreads pages evenly over the nodes with CPUs and puts none on the memory-only node."""
    for _, found in _ranks(memory_only.jobs["interleave"]):
        pages = found["pages"]
        assert set(pages) == {"0", "1"}
        assert abs(pages["0"] - pages["1"]) <= 1024  # huge pages are not split


@pytest.mark.parametrize("machine", ["two_nodes", "four_nodes", "memory_only"])
def test_local_share_with_and_without_numapin(request: pytest.FixtureRequest, machine: str) -> None:
    """With numapin all pages are on the GPU's node; torchrun's share is recorded if NUMAPIN_RESULTS names a folder."""
    result: VmResult = request.getfixturevalue(machine)
    assert result.jobs["torchrun"].status == 0, result.jobs["torchrun"].shown()
    nodes = _gpu_nodes(result, "default")
    rows = [
        {"command": job, "rank": rank, "gpu_node": node, "pages": pages, "local": pages.get(str(node), 0) / 8192}
        for job in ("torchrun", "default")
        for rank, node in enumerate(nodes)
        for pages in [_probe(result.jobs[job], rank)["pages"]]
    ]
    assert all(row["local"] == 1 for row in rows if row["command"] == "default"), rows
    if folder := os.environ.get("NUMAPIN_RESULTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        made = json.loads((cache() / "ready.json").read_text())
        content = {
            "machine": result.machine.name,
            "versions": {"torch": version("torch"), "kernel": made["kernel"], "qemu": made["qemu"]},
            "probe": "32 MiB touched once by one thread",
            "rows": rows,
        }
        (Path(folder) / f"vm-pages-{result.machine.name}.json").write_text(json.dumps(content, indent=1) + "\n")
