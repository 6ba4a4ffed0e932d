"""Detection of ranks that the kernel's out-of-memory killer ended.

The count includes all cgroups below, so it includes the ranks even if a job manager put them into cgroups of their own
below it.

Source: Documentation/admin-guide/cgroup-v2.rst (memory.events), cgroup-v1/memory.rst (memory.oom_control).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from numapin.base import sizes
from numapin.system.cgroup import memory_cgroups
from numapin.system.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numapin.system.cgroup import Controller

REMEDY: Final = (
    "give the job more memory, or have it use less: fewer DataLoader workers, less prefetching, less caching"
)
_LIVE: Final = Path("/")
_KILLS: Final = re.compile(r"^oom_kill (\d{1,18})$", re.ASCII | re.MULTILINE)
_NO_LIMIT_BYTES: Final = 1 << 60  # v1 writes "no limit" as the largest multiple of a page


@dataclass(frozen=True, slots=True, kw_only=True)
class Kills:
    """The number of killed processes of a memory cgroup so far, and the tightest limit on it, if there is one.

    `limit_at` is the file with this limit, in the cgroup itself or in one above it.
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
            limit, at = min(_limits(tree, groups), default=(None, ""))
            return Kills(cgroup=f"/{directory}", count=int(counted[1]), limit_bytes=limit, limit_at=at)
    return None


def _limits(tree: Tree, groups: Iterable[tuple[str, Controller]]) -> Iterator[tuple[int, str]]:
    """Yield each limit of these cgroups with its file."""
    for directory, files in groups:
        limit = tree.number(f"{directory}/{files.limit}")
        if limit is not None and limit < _NO_LIMIT_BYTES:
            yield limit, f"/{directory}/{files.limit}"


def explain(before: Kills | None, root: Path = _LIVE) -> str | None:
    """Describe the out-of-memory kill since `before`, with its cgroup; None if there was none."""
    now = read_kills(root)
    if before is None or now is None or now.cgroup != before.cgroup or now.count <= before.count:
        return None
    limit = "which has no memory limit: the host ran out of memory"
    if now.limit_bytes is not None:
        limit = f"{now.limit_at} is {sizes.render(now.limit_bytes)}"
    return f"killed by the kernel's out-of-memory killer: cgroup {now.cgroup}, {limit}"
