"""The cgroups of a process, read from a capture, and reports on ranks that the out-of-memory killer ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.system.seam import Tree, cgroup, own_cgroups

V2 = {
    "proc/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n",
    "proc/self/cgroup": "0::/slice/job\n",
    "sys/fs/cgroup/slice/job/memory.events": "low 0\nhigh 0\nmax 7\noom 2\noom_kill 2\noom_group_kill 0\n",
    "sys/fs/cgroup/slice/job/memory.max": "max\n",
    "sys/fs/cgroup/slice/memory.events": "oom_kill 9\n",
    "sys/fs/cgroup/slice/memory.max": f"{4 << 30}\n",
}
V1 = {
    "proc/mounts": "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n",
    "proc/self/cgroup": "4:memory:/job\n0::/\n",
    "sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{512 << 20}\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/memory.oom_control": "oom_kill 5\n",
}
EVENTS = {"v2": "sys/fs/cgroup/slice/job/memory.events", "v1": "sys/fs/cgroup/memory/job/memory.oom_control"}


def _put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("version", "files", "said"),
    [
        ("v2", V2, "cgroup /sys/fs/cgroup/slice/job, /sys/fs/cgroup/slice/memory.max is 4.0 GiB"),
        ("v1", V1, "cgroup /sys/fs/cgroup/memory/job, /sys/fs/cgroup/memory/job/memory.limit_in_bytes is 512.0 MiB"),
        (
            "v2",
            {**V2, "sys/fs/cgroup/slice/memory.max": "max\n"},
            "cgroup /sys/fs/cgroup/slice/job, which has no memory limit: the host ran out of memory",
        ),
    ],
    ids=["v2", "v1", "v2 without a limit"],
)
def test_a_rise_of_the_count_is_told(tmp_path: Path, version: str, files: dict[str, str], said: str) -> None:
    """The report names the cgroup of this process and the tightest limit, which may be set above it."""
    _put(tmp_path, files)
    before = cgroup.read_kills(tmp_path)
    assert before is not None
    assert before.count == 2
    assert cgroup.explain(before, tmp_path) is None
    counts = tmp_path / EVENTS[version]
    counts.write_text(counts.read_text().replace("oom_kill 2", "oom_kill 3"))
    assert cgroup.explain(before, tmp_path) == f"killed by the kernel's out-of-memory killer: {said}"


@pytest.mark.parametrize(
    ("files", "later"),
    [
        ({}, V2),
        ({"proc/mounts": V2["proc/mounts"], "proc/self/cgroup": "0::/\n"}, V2),  # v2's root has no memory.events
        ({**V2, EVENTS["v2"]: "low 0\n", "sys/fs/cgroup/slice/memory.events": "oom_kill many\n"}, V2),
        (V2, {"proc/self/cgroup": "0::/slice\n"}),
    ],
    ids=["no cgroups", "the root of v2", "no count", "another cgroup"],
)
def test_where_nothing_is_counted(tmp_path: Path, files: dict[str, str], later: dict[str, str]) -> None:
    """Without a count nothing is reported, even if one appears later, nor if this process was moved meanwhile."""
    _put(tmp_path, files)
    before = cgroup.read_kills(tmp_path)
    assert (before is None) == (later is V2)
    _put(tmp_path, later)
    assert cgroup.explain(before, tmp_path) is None


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("12:memory:/a\n0::/user.slice/a:b\n", ["/user.slice/a:b"]),
        (f"0::{'/a' * 20_000}\n0::/b\n", ["/b"]),
        ("0::/a\n" * 10_000, ["/a"] * 64),
    ],
    ids=["colons", "too deep", "too many"],
)
def test_cgroups_of_a_capture(tmp_path: Path, text: str, paths: list[str]) -> None:
    """The path is all that follows the second colon; paths that are too deep, and too many lines, are left out."""
    _put(tmp_path, {"proc/self/cgroup": text})
    assert own_cgroups(Tree(str(tmp_path)), "") == paths
