"""The machines match their files, and limits on jobs are enforced: checked without numapin."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.vm.conftest import MACHINES
from tests.vm.machine import HERE, TEST_LIMIT_S, Job, VmResult
from tests.vm.seam import CpuSet

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vm, pytest.mark.timeout(TEST_LIMIT_S)]

PROBE = (sys.executable, HERE / "probe.py")
FACTS = (
    "cd /sys; for f in devices/system/node/node*/cpulist devices/system/node/node*/distance "
    "devices/system/cpu/cpu*/topology/thread_siblings_list bus/pci/devices/*/{numa_node,class,vendor}; "
    "do printf '%s\\t%s\\n' $f \"$(<$f)\"; done"
)


def jobs(machine: str, nvml: Path) -> list[Job]:
    """Return the jobs for each machine."""
    del nvml
    if machine == "two-nodes-again":
        return []
    facts = [Job(name="facts", argv=["bash", "-c", FACTS]), Job(name="numactl", argv=["numactl", "-H"])]
    if machine != "memory-only":  # the limits are the same on each machine
        return facts
    return [
        *facts,
        Job(name="probe-bound", argv=["numactl", "--cpunodebind=1", "--membind=1", *PROBE]),
        Job(name="probe-refused", argv=PROBE, refuse_policy=True),
        Job(name="probe-cpuset", argv=PROBE, cpuset=("1-2", "1")),
        Job(name="impossible", argv=["echo", "ran"], cpuset=("1-2", "63")),
        Job(name="df", argv=["df", "-k", "--output=size", "/dev/shm"]),  # noqa: S108 - the mount itself
    ]


@pytest.fixture(scope="module", params=[name for name in MACHINES if not name.endswith("_again")])
def booted(request: pytest.FixtureRequest) -> VmResult:
    """Return the results of the jobs on each machine."""
    result: VmResult = request.getfixturevalue(request.param)
    return result


def test_the_kernel_reports_the_machine_of_the_file(booted: VmResult) -> None:
    """Nodes, distances, cores and GPUs are those of the machine's file; numactl, a second oracle, lists the same CPUs.

    A device that plays a GPU has an entry in sysfs with its node, a GPU's class and NVIDIA's vendor number.
    """
    job, machine = booted.jobs["facts"], booted.machine
    assert job.status == 0, job.shown()
    facts = dict(line.split("\t", 1) for line in job.stdout.splitlines())
    for number, (node, row) in enumerate(zip(machine.nodes, machine.distances, strict=True)):
        assert CpuSet.parse(facts[f"devices/system/node/node{number}/cpulist"]) == node.cpus
        assert facts[f"devices/system/node/node{number}/distance"].split() == [str(distance) for distance in row]
    assert f"devices/system/node/node{len(machine.nodes)}/cpulist" not in facts
    siblings = {v for file, v in facts.items() if file.endswith("thread_siblings_list")}
    assert {len(CpuSet.parse(group)) for group in siblings} == {machine.threads}
    assert len(siblings) == machine.sockets * machine.cores
    for gpu in machine.gpus:
        shown = [facts[f"bus/pci/devices/{gpu.address}/{file}"] for file in ("numa_node", "class", "vendor")]
        assert shown == [str(gpu.node), "0x030200", "0x10de"]
    assert list(facts.values()).count("0x10de") == len(machine.gpus)
    numactl = booted.jobs["numactl"]
    lines = [line.split("cpus:")[1].split() for line in numactl.stdout.splitlines() if "cpus:" in line]
    assert [{int(cpu) for cpu in line} for line in lines] == [node.cpus for node in machine.nodes], numactl.shown()


def test_the_probe_reports_the_limits_it_was_started_with(memory_only: VmResult) -> None:
    """Under numactl --cpunodebind=1 --membind=1 threads, policy and pages are on node 1; a cpuset limits both.

    Under refuse_policy.py the policy calls fail with EPERM; the program continues, and numa_maps can be read.
    """
    found: Any = {name: memory_only.jobs[f"probe-{name}"].json("0.json") for name in ("bound", "refused", "cpuset")}
    bound, refused, cpuset = found.values()
    assert [CpuSet.parse(thread["cpus"]) for thread in bound["threads"]] == [memory_only.machine.nodes[1].cpus] * 2
    assert (bound["policy"], bound["pages"]) == ({"mode": "bind", "nodes": [1]}, {"1": 8192})
    assert bound["numa_maps"]["mapping"] == {"policy": "bind:1", "pages": {"1": 8192}}
    assert refused["policy"] == refused["pages"] == {"error": "EPERM"}
    assert sum(refused["numa_maps"]["mapping"]["pages"].values()) == 8192
    assert [(thread["cpus"], thread["nodes"]) for thread in cpuset["threads"]] == [("1-2", "1")] * 2
    assert cpuset["pages"] == {"1": 8192}


def test_a_job_outside_of_its_limits_does_not_run(memory_only: VmResult) -> None:
    """A cpuset that the kernel rejects ends the job before its command; shared memory has 64 MiB, as in Docker."""
    job = memory_only.jobs["impossible"]
    assert (job.status, job.stdout) == (1, "")
    assert "cpuset.mems does not take '63'" in job.stderr
    assert memory_only.jobs["probe-refused"].status == 0
    assert memory_only.jobs["df"].stdout.split() == ["1K-blocks", "65536"]
