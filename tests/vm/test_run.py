"""`numapin run` on machines with several nodes: ranks, threads and pages are where the plan puts them.

The tests check the kernel's reports that the probe collected in each rank; recorded/run.json has them. The local share
of a rank's pages under plain torchrun is random: it is only measured for docs/results.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.vm.machine import GPUS, HERE, SHARE, Job, compare, publish
from tests.vm.seam import CpuSet

if TYPE_CHECKING:
    from tests.vm.machine import VmResult

PROBE = str(HERE / "probe.py")
NUMAPIN = (sys.executable, "-m", "numapin", "run")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
MODES = {"preferred": ("preferred", "preferred-many"), "bind": ("bind",), "interleave": ("interleave",)}
NUM_PAGES = 8192


def _run(name: str, *options: str, env: dict[str, str] = GPUS, **limits: Any) -> Job:
    run_dir = {"NUMAPIN_RUN_DIR": str(SHARE / name)}
    return Job(name=name, argv=(*NUMAPIN, *options, PROBE), env={**env, **run_dir}, **limits)


def _torchruns(num_ranks: int) -> list[Job]:
    """Return plain torchrun's jobs, whose pages docs/results has beside ours."""
    argv = [*TORCHRUN, str(num_ranks), PROBE]
    return [Job(name=f"torchrun-{run}", argv=argv) for run in range(5 if os.environ.get("NUMAPIN_RESULTS") else 0)]


JOBS = {
    "two-nodes": [
        *(_run("default"), *_torchruns(2)),
        _run("bind", "--memory", "bind", "--bind", "exclusive", "--nproc-per-node", "4"),
        _run("refused", refuse_policy=True),
        _run("strict", "--strict", refuse_policy=True),
        _run("cpuset", cpuset=("5-7", "1")),
    ],
    "four-nodes": [
        *(_run("default"), *_torchruns(4)),
        _run("socket", "--bind", "socket", "--no-smt"),
        _run("gpus", "--gpus", "0,3"),
        _run("no-nvml", "--nproc-per-node", "4", env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
    ],
    "memory-only": [
        *(_run("default"), *_torchruns(2)),
        _run("no-gpus", "--nproc-per-node", "3", env={"CUDA_VISIBLE_DEVICES": ""}),
        _run("interleave", "--memory", "interleave"),
    ],
}


def _ranks(result: VmResult, job: str) -> list[tuple[dict[str, Any], Any]]:
    """Return each rank's slice of the plan of the job's only run, and its probe's results; the job has succeeded."""
    assert result.jobs[job].status == 0, result.jobs[job].shown()
    (path,) = result.jobs[job].out.glob("**/plan.json")
    plan = json.loads(path.read_text())
    assert plan["schema"] == "numapin.plan/1"
    return [(rank, result.found(job, f"{rank['local_rank']}.json")) for rank in plan["ranks"]]


@pytest.mark.parametrize(
    ("machine", "job"),
    [
        *(("two_nodes", job) for job in ("default", "bind", "cpuset", "refused")),
        *(("four_nodes", job) for job in ("default", "socket", "gpus", "no-nvml")),
        *(("memory_only", job) for job in ("default", "no-gpus", "interleave")),
    ],
)
def test_every_rank_is_where_the_plan_has_it(request: pytest.FixtureRequest, machine: str, job: str) -> None:
    """All threads, the policy and all pages are as planned, and the plan is the recorded one.

    Its GPUs' nodes are those of the machine's file. CUDA sorts GPUs by bus, so ranks of the four-node machine do not
    follow NVML's order. The kernel refuses policies in the job "refused": its pages are local by first touch.
    """
    result: VmResult = request.getfixturevalue(machine)
    node_of = {gpu.address: gpu.node for gpu in result.machine.gpus}
    ranks = []
    for rank, found in _ranks(result, job):
        nodes: frozenset[int] = CpuSet.parse(rank["nodes"])
        assert len(found["threads"]) >= 2
        assert {thread["cpus"] for thread in found["threads"]} == {rank["cpus"]}, rank["reason"]
        assert found["env"]["OMP_NUM_THREADS"] == str(rank["num_threads"])
        if job == "refused":
            assert found["policy"] == {"error": "EPERM"}
            nodes = frozenset({node_of[rank["gpu"]["pci"]]})
        else:
            assert found["policy"]["mode"] in MODES[rank["memory"]]
            assert found["policy"]["nodes"] == sorted(nodes)
        for pages in (found["numa_maps"]["mapping"]["pages"], found["pages"]):
            if "error" not in pages:
                assert {int(node) for node in pages} <= nodes
                assert sum(pages.values()) == NUM_PAGES
        assert rank["exact"] or job == "refused" or "node 1 is the nearest" in rank["reason"]
        ranks.append(
            {
                **{name: rank[name] for name in ("cpus", "nodes", "num_threads", "exact")},
                "policy": found["policy"].get("mode"),
                "gpu": rank["gpu"] and f"{rank['gpu']['index']} on node {node_of[rank['gpu']['pci']]}",
                "visible": found["env"]["CUDA_VISIBLE_DEVICES"],
            }
        )
    compare("run", f"{machine} {job}", ranks)
    if job == "default":
        _publish(result)


def test_refused_policies_are_told(two_nodes: VmResult) -> None:
    """If seccomp refuses memory policies, a warning is printed; with --strict it is status 5 before a rank starts."""
    job, strict = two_nodes.jobs["refused"], two_nodes.jobs["strict"]
    assert "SYS_NICE" in job.stderr, job.shown()
    assert strict.status == 5, strict.shown()
    assert not list(strict.out.glob("[0-9].json"))


def test_interleaved_pages_are_spread_evenly(memory_only: VmResult) -> None:
    """--memory interleave puts as many pages on each node with CPUs, and none on the memory-only node."""
    for _, found in _ranks(memory_only, "interleave"):
        assert set(found["pages"]) == {"0", "1"}
        assert abs(found["pages"]["0"] - found["pages"]["1"]) <= 1024  # huge pages are not split


def _publish(result: VmResult) -> None:
    nodes = [int(rank["node"]) for rank, _ in _ranks(result, "default")]
    rows = []
    for job in [job for job in result.jobs if job.startswith("torchrun") or job == "default"]:
        command, _, run = job.partition("-")
        for rank, node in enumerate(nodes):
            # Linux 6.1 hides those that it may migrate from move_pages
            pages = result.found(job, f"{rank}.json")["numa_maps"]["mapping"]["pages"]
            place = {"rank": rank, "gpu_node": node, "pages": pages, "local": pages.get(str(node), 0) / NUM_PAGES}
            rows.append({"command": command, "run": int(run or 0), **place})
    content = {"machine": result.machine.name, "probe": "32 MiB touched once by one thread", "rows": rows}
    publish(f"vm-pages-{result.machine.name}.json", content)
