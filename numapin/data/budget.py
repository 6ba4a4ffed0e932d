"""The amount of memory that a rank may page-lock.

Page-locked memory can be neither swapped nor reclaimed: too much of it costs the page cache and other processes their
memory, and in the end brings the OOM killer.

RLIMIT_MEMLOCK plays no part: NVIDIA's open driver pins memory without checking it (os-mlock.c).
Source: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst, proc_meminfo(5).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from numapin.base import formats
from numapin.system.cgroup import memory_cgroups
from numapin.system.tree import NODES, Tree

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numapin.base.cpu_set import CpuSet

SHARE: Final = 0.5
"""The share of the free memory. The rest is for the workers, the page cache, checkpoints and other processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockRoom:
    """The bytes that one rank may page-lock in addition to those page-locked now. None: no limit is known."""

    num_bytes: int | None
    reason: str


def read_room(root: Path, *, nodes: CpuSet, num_ranks: int) -> LockRoom:
    """Return a rank's part of the memory that may be page-locked: the tightest bound, times SHARE, by rank.

    The bounds are the memory limits of this process's cgroup and of those above it, MemAvailable, and the free memory
    of `nodes`, if any. Caches that the kernel can drop count as free.
    """
    tree = Tree(os.fspath(root).rstrip("/"))
    bounds = []
    for directory, files in memory_cgroups(tree):
        limit, usage = (tree.number(f"{directory}/{name}") for name in (files.limit, files.usage))
        if limit is not None and usage is not None:  # "max" is not a number; v1's is beyond any machine's memory
            used = usage - _value(tree, f"{directory}/memory.stat", files.cache)
            bounds.append((max(0, limit - used), f"left of the limit of {directory} ({formats.gib(limit)})"))
    available = _value(tree, "proc/meminfo", "MemAvailable")
    if available:
        bounds.append((available, "available on the host (MemAvailable)"))
    # One node: MemAvailable covers it, even in a virtual machine that gets its memory as it uses it.
    has_one_node = tree.text(f"{NODES}/online") == tree.text(f"{NODES}/has_memory") == "0"
    meminfos = [f"{NODES}/node{node}/meminfo" for node in nodes]
    if meminfos and not has_one_node and all(tree.text(file) is not None for file in meminfos):
        keys = ("MemFree", r"Active\(file\)", r"Inactive\(file\)", "SReclaimable")  # the kernel can drop file caches
        bounds.append((sum(_value(tree, file, key) for file in meminfos for key in keys), f"free on node {nodes}"))
    if not bounds:
        return LockRoom(num_bytes=None, reason="the machine shows neither a memory limit nor its free memory")
    free_bytes, bound = min(bounds)
    divided = f", divided among {num_ranks} ranks" if num_ranks > 1 else ""
    reason = f"{SHARE:.0%} of {formats.gib(free_bytes)} {bound}{divided}"
    return LockRoom(num_bytes=int(free_bytes * SHARE) // num_ranks, reason=reason)


def num_ranks_of(environ: Mapping[str, str]) -> int:
    """Return the number of ranks that share this host: LOCAL_WORLD_SIZE, or 1 if that is not set to a number."""
    text = environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isascii() and text.isdecimal() else 1


def _value(tree: Tree, path: str, key: str) -> int:
    """Return the bytes of a key in a file of keys and values; 0 if it is not there."""
    match = re.search(rf"(?:^|\s){key}:?\s+(\d{{1,18}})( kB)?", tree.text(path) or "", re.ASCII)
    return 0 if match is None else int(match[1]) * (1024 if match[2] else 1)
