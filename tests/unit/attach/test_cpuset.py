"""The CPUs that can be planned with."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.needs import needs_two_cpus
from tests.unit.attach.seam import CpuSet, Tree, cpus_of_cpuset, in_whole_cpuset, shortfalls_of

if TYPE_CHECKING:
    from pathlib import Path

ALL = CpuSet(os.sched_getaffinity(0))
PID = 1 << 30  # above the highest process id, so that it has no threads
V1 = ("cgroup /sys/fs/cgroup cgroup rw,cpuset 0 0\n", "4:cpuset:/job/step\n", "cpuset.effective_cpus")
V2 = ("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n", "0::/job/step\n", "cpuset.cpus.effective")
BLANK = ("cgroup2 /sys/fs/cgroup/of\\040a\\040pod cgroup2 rw 0 0\n", "0::/step\n", "cpuset.cpus.effective")


@needs_two_cpus
def test_whole_cpuset() -> None:
    """The thread has all CPUs of its cpuset inside the block and its own again after it."""
    os.sched_setaffinity(0, {min(ALL)})
    try:
        with in_whole_cpuset():
            assert os.sched_getaffinity(0) >= ALL
        assert os.sched_getaffinity(0) == {min(ALL)}
    finally:
        os.sched_setaffinity(0, ALL)


@pytest.mark.parametrize(
    ("mounts", "cgroup", "file", "place"),
    [(*V1, "job/step"), (*V1, "job"), (*V2, "job/step"), (*V2, "job"), (*BLANK, "of a pod/step"), (*BLANK, "of a pod")],
)
def test_cpuset_of_a_process(tmp_path: Path, mounts: str, cgroup: str, file: str, place: str) -> None:
    """The nearest cgroup that lists CPUs is the cpuset; one that is outside the namespace is unknown."""
    for path, text in (
        ("proc/mounts", mounts),
        (f"proc/{PID}/cgroup", cgroup),
        (f"proc/{PID + 1}/cgroup", cgroup.replace("::/", "::/../").replace("cpuset:/", "cpuset:/../")),
        (f"sys/fs/cgroup/{place}/{file}", "4-7\n"),
        (f"sys/fs/cgroup/{file}", "0-15\n"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert cpus_of_cpuset(PID, Tree(str(tmp_path))) == CpuSet(range(4, 8))
    assert cpus_of_cpuset(PID + 1, Tree(str(tmp_path))) == CpuSet()


def test_missing_cpus() -> None:
    """CPUs on which the process has threads, but which are not known, are a shortfall."""
    pid = os.getpid()
    (told,) = shortfalls_of(pid, CpuSet())
    assert told.startswith(f"the plan leaves out CPUs {cpus_of_cpuset(pid)}: ")
    assert shortfalls_of(pid, cpus_of_cpuset(pid)) == ()
