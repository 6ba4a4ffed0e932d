"""The machines match their files: checked without numapin. Limits on jobs: test_run.py and test_loader.py."""

from __future__ import annotations

import pytest

from tests.vm.conftest import MACHINES
from tests.vm.machine import Job, VmResult
from tests.vm.seam import CpuSet

FACTS = (
    "cd /sys; for f in devices/system/node/node*/cpulist devices/system/node/node*/distance "
    "devices/system/cpu/cpu*/topology/thread_siblings_list bus/pci/devices/*/{numa_node,class,vendor}; "
    "do printf '%s\\t%s\\n' $f \"$(<$f)\"; done"
)
KINDS = [name for name in MACHINES if not name.endswith("-again")]
LOOKS = (Job(name="facts", argv=["bash", "-c", FACTS]), Job(name="numactl", argv=["numactl", "-H"]))
JOBS = dict.fromkeys(KINDS, LOOKS)


@pytest.mark.parametrize("name", [kind.replace("-", "_") for kind in KINDS])
def test_the_kernel_reports_the_machine_of_the_file(request: pytest.FixtureRequest, name: str) -> None:
    """Nodes, distances, cores and GPUs are those of the machine's file; numactl, a second oracle, lists the same CPUs.

    A device that plays a GPU has an entry in sysfs with its node, a GPU's class and NVIDIA's vendor number.
    """
    booted: VmResult = request.getfixturevalue(name)
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
