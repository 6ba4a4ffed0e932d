"""What only the running machine tells the doctor. Edge.

Comes in: this process, its environment and its kernel. Goes out: `Live`. Memory policies are tried in a forked child,
so that nothing here changes; NVML is asked and shut down again; torch is not imported. Nothing needs root.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from numapin.doctor.files import read_confinement, read_module_version
from numapin.doctor.model import Live
from numapin.errors import LibnumaError, NumapinError
from numapin.launcher.rehearse import in_child
from numapin.system import memory, numa
from numapin.topology.sources.libnuma import load
from numapin.topology.sources.nvml import read_nvml

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numapin.topology.model import Topology

NCCL_PACKAGES: Final = ("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_NOT_KEPT: Final = "accepted, but not kept"


def read_live(topology: Topology, environ: Mapping[str, str], *, shm: str = "/dev/shm") -> Live:  # noqa: S108 - it is asked how large it is
    """Ask the running machine; memory policies are tried on a node that this process may use."""
    libnuma = _libnuma()
    allowed = [node.id for node in topology.cpu_nodes if node.id in topology.allowed.nodes]
    (seccomp, capabilities), (shm_bytes, shm_free_bytes) = read_confinement(Path("/")), _size(shm)
    return Live(
        environ=environ,
        refused=_try_policies(min(allowed, default=0)) if libnuma is None else None,
        seccomp=seccomp,
        capabilities=capabilities,
        nvml=read_nvml(),
        module_version=read_module_version(Path("/")),
        libnuma=libnuma,
        streaming_stores=memory.can_pass_caches() if os.uname().machine == "x86_64" else None,
        python=sys.version_info[:3],
        nccl=_nccl_versions(),
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free_bytes,
    )


def _libnuma() -> str | None:
    """Return what is wrong with libnuma, None where it can be used."""
    try:
        load()
    except LibnumaError as error:
        return error.message
    return None


def _try_policies(node: int) -> Mapping[str, str | None]:
    """Make each call once in a child, which a strict seccomp filter kills; that is then what is told of every call."""
    calls: dict[str, Callable[[int], str | None]] = {
        "get_mempolicy": _try_get,
        "set_mempolicy": _try_set,
        "mbind": _try_mbind,
        "move_pages": _try_move_pages,
    }
    try:
        found = in_child(lambda: [[name, _refusal(call, node)] for name, call in calls.items()])
    except NumapinError as error:
        return dict.fromkeys(calls, error.message)
    return {name: word or None for name, word in found}


def _refusal(call: Callable[[int], str | None], node: int) -> str:
    try:
        return call(node) or ""
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))


def _try_get(_node: int) -> str | None:
    numa.get_memory_policy()
    return None


def _try_set(node: int) -> str | None:
    """Prefer a node, and look whether that is what holds: gVisor takes a policy and forgets it."""
    numa.set_memory_policy(numa.MPOL_PREFERRED, (node,))
    try:
        kept = numa.get_memory_policy() == (numa.MPOL_PREFERRED, frozenset({node}))
    except OSError:  # another call that is refused, which is told by its own name
        return None
    return None if kept else _NOT_KEPT


def _try_mbind(node: int) -> str | None:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        numa.bind_pages(memory.address_of(page), mmap.PAGESIZE, numa.MPOL_PREFERRED, (node,))
    return None


def _try_move_pages(_node: int) -> str | None:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        page[0] = 1
        (node,) = numa.nodes_of_pages([memory.address_of(page)])
    return None if node >= 0 else errno.errorcode.get(-node, str(node))


def _nccl_versions() -> Mapping[str, str]:
    """Return the NCCL that is installed beside torch, from the packages' own metadata."""
    found: dict[str, str] = {}
    for package in NCCL_PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package) or "unknown"  # None where the metadata are broken
    return found


def _size(path: str) -> tuple[int | None, int | None]:
    try:
        size = os.statvfs(path)
    except OSError:
        return None, None
    return size.f_blocks * size.f_frsize, size.f_bavail * size.f_frsize
