"""The cgroups of this process and their mounts, versions 1 and 2; the ranks that the out-of-memory killer ended.

Source: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.bounds import MAX_CGROUP_DEPTH, MAX_CGROUPS
from numapin.base.formats import render_size
from numapin.system.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numapin.base.cpu_set import CpuSet


class Controller(NamedTuple):
    """The file names of one version of the memory controller.

    `usage` includes `cache`, which can be freed; `events` counts the processes that were killed.
    """

    limit: str
    usage: str
    cache: str
    events: str


REMEDY: Final = (
    "give the job more memory, or have it use less: fewer DataLoader workers, less prefetching, less caching"
)
_LIVE: Final = Path("/")
_KILLS: Final = re.compile(r"^oom_kill (\d{1,18})$", re.ASCII | re.MULTILINE)
_NO_LIMIT_BYTES: Final = 1 << 60  # v1 writes "no limit" as the largest multiple of a page
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")  # /proc/mounts has a blank in a directory's name as \040
# cgroup version 2, version 1, and a cpuset file system of its own, which has no prefix.
_CPUSET_FILES: Final = ("cpuset.{}.effective", "cpuset.{}", "cpuset.effective_{}", "{}")
_V1: Final = Controller(
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    cache="total_inactive_file",
    events="memory.oom_control",
)
_V2: Final = Controller(limit="memory.max", usage="memory.current", cache="inactive_file", events="memory.events")


class Mount(NamedTuple):
    """A mounted file system: its directory, its kind, and its options."""

    at: str
    kind: str
    options: list[str]

    def holds(self, controller: str) -> bool:
        """Return whether this is cgroup version 2, or version 1 with a controller."""
        return self.kind == "cgroup2" or (self.kind == "cgroup" and controller in self.options)


def memory_cgroups(tree: Tree) -> Iterator[tuple[str, Controller]]:
    """Yield the memory cgroups of this process and all above them, as far as the mounts show them."""
    for mount in mounts(tree):
        if mount.holds("memory"):
            files, controller = (_V2, "") if mount.kind == "cgroup2" else (_V1, "memory")
            for path in own_cgroups(tree, controller):
                yield from ((directory, files) for directory in upwards(mount.at, path))


def own_cgroups(tree: Tree, controller: str, process: int | str = "self") -> list[str]:
    """Return the paths of a process's cgroups with a controller of version 1; "" selects version 2."""
    text = tree.text(f"proc/{process}/cgroup") or ""
    lines = (line.split(":", 2) for line in text.splitlines()[:MAX_CGROUPS])
    return [
        line[2]
        for line in lines
        if len(line) == 3 and controller in line[1].split(",") and line[2].count("/") <= MAX_CGROUP_DEPTH
    ]


def cpuset_of(tree: Tree, process: int | str = "self", *, what: str = "cpus") -> CpuSet | None:
    """Return the "cpus" or "mems" of a process's cpuset, as far as the mounts show it. None: unknown."""
    text = tree.text(f"proc/{process}/cpuset")  # whichever kind of file system it is in
    named = [text] if text and text.count("/") <= MAX_CGROUP_DEPTH else []
    for mount in mounts(tree):
        if mount.kind == "cpuset":
            paths = named
        elif mount.holds("cpuset"):
            paths = own_cgroups(tree, "" if mount.kind == "cgroup2" else "cpuset", process) or named
        else:
            continue
        for path in paths:
            if ".." in path.split("/"):  # it is outside this cgroup namespace
                continue
            # One after the other: a capture may name millions of directories. An empty file means "as above".
            for directory in upwards(mount.at, path):
                for name in _CPUSET_FILES:
                    if found := tree.numbers(f"{directory}/{name.format(what)}"):
                        return found
    return None


def mounts(tree: Tree) -> Iterator[Mount]:
    """Yield the mounted file systems."""
    lines = (line.split(" ") for line in (tree.text("proc/mounts") or "").split("\n"))
    for line in lines:
        if len(line) > 3:
            at = _ESCAPED.sub(lambda code: chr(int(code[1], 8)), line[1])
            yield Mount(at=at, kind=line[2], options=line[3].split(","))


def upwards(at: str, path: str) -> Iterator[str]:
    """Yield the directory of a cgroup and all directories above it, up to the mount point."""
    parts = [part for part in path.split("/") if part]
    yield from ("/".join((at.strip("/"), *parts[:end])) for end in range(len(parts), -1, -1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kills:
    """The number of killed processes of a memory cgroup so far, and the tightest limit on it, if there is one.

    The count includes all cgroups below, so it includes the ranks even if a job manager put them into cgroups of their
    own below it. `limit_at` is the file with the limit, in the cgroup itself or in one above it.
    """

    cgroup: str
    count: int
    limit_bytes: int | None
    limit_at: str


def read_kills(root: Path = _LIVE) -> Kills | None:
    """Return the count of this process's memory cgroup; None if the kernel shows none, as in v2's root."""
    tree = Tree(os.fspath(root).rstrip("/"))
    groups = list(memory_cgroups(tree))
    for directory, files in groups:
        counted = _KILLS.search(tree.text(f"{directory}/{files.events}") or "")
        if counted is not None:
            limits = [
                (limit, f"/{each}/{names.limit}")
                for each, names in groups
                if (limit := tree.number(f"{each}/{names.limit}")) is not None and limit < _NO_LIMIT_BYTES
            ]
            limit_bytes, limit_at = min(limits, default=(None, ""))
            return Kills(cgroup=f"/{directory}", count=int(counted[1]), limit_bytes=limit_bytes, limit_at=limit_at)
    return None


def explain(before: Kills | None, root: Path = _LIVE) -> str | None:
    """Describe the out-of-memory kill since `before`, with its cgroup; None if there was none."""
    now = read_kills(root)
    if before is None or now is None or now.cgroup != before.cgroup or now.count <= before.count:
        return None
    limit = "which has no memory limit: the host ran out of memory"
    if now.limit_bytes is not None:
        limit = f"{now.limit_at} is {render_size(now.limit_bytes)}"
    return f"killed by the kernel's out-of-memory killer: cgroup {now.cgroup}, {limit}"
