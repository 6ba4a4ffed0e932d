"""The memory cgroups of this process, version 1 and 2. Edge.

Comes in: a tree of /proc and /sys/fs/cgroup. Goes out: directories, innermost first, and the names of their files.

Source: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numapin.system.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """The files of one version of the memory controller.

    The limit, the use, and the cache in it that can be freed; `events` counts the processes that were killed.
    """

    limit: str
    usage: str
    cache: str
    events: str


_V1: Final = Controller(
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    cache="total_inactive_file",
    events="memory.oom_control",
)


_V2: Final = Controller(limit="memory.max", usage="memory.current", cache="inactive_file", events="memory.events")


def memory_cgroups(tree: Tree) -> Iterator[tuple[str, Controller]]:
    """Yield the memory cgroups of this process and all above it, as far as this mount shows them."""
    own = [line.split(":", 2)[1:] for line in (tree.text("proc/self/cgroup") or "").splitlines() if line.count(":") > 1]
    paths = {
        _V1: [path for controllers, path in own if "memory" in controllers.split(",")],
        _V2: [path for controllers, path in own if not controllers],
    }
    for line in (tree.text("proc/mounts") or "").splitlines():
        _device, at, kind, options, *_rest = (*line.split(), "", "", "", "")
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            files = _V2 if kind == "cgroup2" else _V1
            yield from ((directory, files) for path in paths[files] for directory in _upwards(at, path))


def _upwards(at: str, path: str) -> Iterator[str]:
    """Yield the directory of a cgroup and those above it, up to where the hierarchy is mounted."""
    parts = [part for part in path.split("/") if part]
    yield from ("/".join((at.strip("/"), *parts[:end])) for end in range(len(parts), -1, -1))
