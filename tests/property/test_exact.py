"""A plan is exact only if it stands on facts: take one out of a machine's description, and the plan is not exact.

A fact may also make no difference: then the plan is the same as with it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Final

from hypothesis import given
from hypothesis import strategies as st

from numapin import Bind, Memory, Request
from tests.machines.roots import NAMES, load, nvml_readings
from tests.property.seam import PCI_ORDER, build, read_sysfs
from tests.property.test_plan import plan_or_none
from tests.property.trees import all_files, changed, root_of

if TYPE_CHECKING:
    from numapin import Plan, Topology

CPU: Final = r"sys/devices/system/cpu/cpu\d+"
L3: Final = "L3 caches"
# Fact -> the files that have it. Those of one folder belong together, and a few folders or all of them are drawn.
OF_A_FOLDER: Final = {
    "threads of cores": rf"({CPU}/topology)/thread_siblings.*",
    "packages": rf"({CPU}/topology)/(?:core_siblings.*|physical_package_id)",
    L3: rf"({CPU}/cache/index3)/.*",
    "nodes of GPUs": r"(sys/devices/pci.*)/(?:numa_node|local_cpus|local_cpulist)",
    "sizes of nodes": r"(sys/devices/system/node/node\d+)/meminfo",
}
OF_THE_MACHINE: Final = {
    "order of HIP": r"(sys)/class/kfd/.*",
    "cpuset": r"(proc|dev/cpuset|sys/fs/cgroup)/(?:self|job)/.*",
    "content of the cpuset": r"(proc/self/status|dev/cpuset/job|sys/fs/cgroup/job).*",
}
FACTS: Final = OF_A_FOLDER | OF_THE_MACHINE
REQUESTS: Final = st.builds(
    Request,
    bind=st.sampled_from(Bind),
    memory=st.none() | st.sampled_from(Memory),
    num_ranks=st.none() | st.integers(1, 4),
)


def test_every_fact_is_somewhere() -> None:
    """Each pattern fits files of some machine; otherwise it would test nothing."""
    for fact, pattern in FACTS.items():
        assert any(files_of(name, pattern) for name in NAMES), fact


@given(st.data())
def test_without_a_fact_a_plan_is_not_exact_or_does_not_depend_on_it(data: st.DataObject) -> None:
    """Of the files that a machine shows, some are missing: what stood on them is not exact."""
    fact, name = data.draw(st.sampled_from(list(FACTS))), data.draw(st.sampled_from(NAMES))
    folders = sorted(files_of(name, FACTS[fact]))
    some = st.just(folders)
    if folders and fact in OF_A_FOLDER:
        some |= st.lists(st.sampled_from(folders), min_size=1, max_size=3)
    hidden = frozenset(data.draw(some))
    request = data.draw(REQUESTS)
    before = plan_or_none(read(name), request)
    paths = (path for folder in hidden for path in files_of(name, FACTS[fact])[folder])
    with changed(name, dict.fromkeys(paths)):
        after = plan_or_none(read(name, hidden=hidden), request)
    require_not_exact_or_same(before, after, request, fact)


def require_not_exact_or_same(before: Plan | None, after: Plan | None, request: Request, fact: str) -> None:
    """Fail if a plan claims to be exact and gives ranks something else."""
    # Exclusive cores are sorted by L3 if possible, which is not part of the request.
    sorts_only = fact == L3 and request.bind is not Bind.CORE_COMPLEX
    if before is None or after is None or sorts_only or not after.exact:
        return
    is_bound = request.bind is not Bind.NONE  # else a rank's GPU makes no difference
    first, second = (
        [(r.cpus, r.nodes, r.memory, r.num_threads, is_bound and r.gpu) for r in plan.ranks] for plan in (before, after)
    )
    assert first == second


# --- machines without some of their files ----------------------------------------------------------------------------


@cache
def files_of(name: str, pattern: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in all_files(name):
        match = re.fullmatch(pattern, path)
        if match:
            found.setdefault(match[1], []).append(path)
    return found


def read(name: str, *, hidden: Collection[str] = ()) -> Topology:
    """Read a machine. What NVML and NCCL's file say about the place of a hidden GPU is missing, too."""
    machine, lost = load(name), {folder.rpartition("/")[2] for folder in hidden}
    nvml = nvml_readings(machine)
    gpus = nvml.gpus and tuple(
        replace(gpu, memory_nodes=None, cpus=None) if gpu.pci in lost else gpu for gpu in nvml.gpus
    )
    readings = read_sysfs(root_of(name), source=name)._replace(
        nvml=nvml._replace(gpus=gpus),
        nccl_nodes={pci: node for pci, node in machine.nccl_nodes.items() if pci not in lost},
    )
    return build(readings, environ=PCI_ORDER)
