"""The machines match their files, and limits on jobs are enforced: checked without numapin."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.vm.conftest import MACHINES
from tests.vm.machine import (
    HERE,
    TEST_LIMIT_S,
    Job,
    VmResult,
)
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
    return [
        Job(name="facts", argv=["bash", "-c", FACTS]),
        Job(name="numactl", argv=["numactl", "-H"]),
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


def _facts(result: VmResult) -> dict[str, str]:
    """Return file -> content below /sys."""
    job = result.jobs["facts"]
    assert job.status == 0, job.shown()
    return dict(line.split("\t", 1) for line in job.stdout.splitlines())


def _probe(result: VmResult, job: str) -> dict[str, Any]:
    answers = result.jobs[job].json("0.json")
    assert isinstance(answers, dict)
    return answers


def test_nodes_have_the_cpus_and_distances_of_the_file(booted: VmResult) -> None:
    """The kernel reports the nodes, CPUs and distances of the machine's file."""
    facts = _facts(booted)
    for number, (node, row) in enumerate(zip(booted.machine.nodes, booted.machine.distances, strict=True)):
        assert CpuSet.parse(facts[f"devices/system/node/node{number}/cpulist"]) == node.cpus
        assert facts[f"devices/system/node/node{number}/distance"].split() == [str(distance) for distance in row]
    assert f"devices/system/node/node{len(booted.machine.nodes)}/cpulist" not in facts


def test_cores_have_the_threads_of_the_file(booted: VmResult) -> None:
    """The kernel groups CPUs into cores with the file's number of threads."""
    siblings = {v for file, v in _facts(booted).items() if file.endswith("thread_siblings_list")}
    assert {len(CpuSet.parse(group)) for group in siblings} == {booted.machine.threads}
    assert len(siblings) == booted.machine.sockets * booted.machine.cores


def test_devices_that_play_gpus_are_on_their_nodes(booted: VmResult) -> None:
    """Each GPU has an entry in sysfs with its node, a GPU's class and NVIDIA's vendor number."""
    facts = _facts(booted)
    for gpu in booted.machine.gpus:
        shown = [facts[f"bus/pci/devices/{gpu.address}/{file}"] for file in ("numa_node", "class", "vendor")]
        assert shown == [str(gpu.node), "0x030200", "0x10de"]
    assert list(facts.values()).count("0x10de") == len(booted.machine.gpus)


def test_numactl_agrees_on_the_nodes(booted: VmResult) -> None:
    """numactl, a second oracle, lists the same CPUs for each node."""
    job = booted.jobs["numactl"]
    lines = [line.split("cpus:")[1].split() for line in job.stdout.splitlines() if "cpus:" in line]
    assert [{int(cpu) for cpu in line} for line in lines] == [node.cpus for node in booted.machine.nodes], job.shown()


def test_probe_reports_the_binding_it_was_started_with(booted: VmResult) -> None:
    """Under numactl --cpunodebind=1 --membind=1 every thread, the policy and every page are on node 1."""
    answers = _probe(booted, "probe-bound")
    assert [CpuSet.parse(thread["cpus"]) for thread in answers["threads"]] == [booted.machine.nodes[1].cpus] * 2
    assert answers["policy"] == {"mode": "bind", "nodes": [1]}
    assert answers["pages"] == {"1": 8192}
    assert set(answers["numa_maps"]["mapping"]["pages"]) == {"1"}
    assert answers["numa_maps"]["mapping"]["policy"] == "bind:1"


def test_seccomp_refuses_policy_calls_and_nothing_else(booted: VmResult) -> None:
    """Under refuse_policy.py the policy calls fail with EPERM; the program continues, and numa_maps can be read."""
    answers = _probe(booted, "probe-refused")
    assert answers["policy"] == answers["pages"] == {"error": "EPERM"}
    assert sum(answers["numa_maps"]["mapping"]["pages"].values()) == 8192
    assert booted.jobs["probe-refused"].status == 0


def test_cpuset_limits_cpus_and_memory(booted: VmResult) -> None:
    """In a cpuset of CPUs 1-2 and node 1, threads are limited to those, and pages are on node 1."""
    answers = _probe(booted, "probe-cpuset")
    assert [(thread["cpus"], thread["nodes"]) for thread in answers["threads"]] == [("1-2", "1")] * 2
    assert answers["pages"] == {"1": 8192}


def test_job_that_cannot_enter_its_cpuset_does_not_run(booted: VmResult) -> None:
    """A cpuset that the kernel rejects ends the job before its command, with the reason on stderr."""
    job = booted.jobs["impossible"]
    assert (job.status, job.stdout) == (1, "")
    assert "cpuset.mems does not take '63'" in job.stderr


def test_shared_memory_is_as_small_as_in_docker(booted: VmResult) -> None:
    """Shared memory has 64 MiB."""
    assert booted.jobs["df"].stdout.split() == ["1K-blocks", "65536"]
