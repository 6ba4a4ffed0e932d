"""Nodes of the live host, as libnuma sees them. Edge.

Comes in: the live kernel, through py-libnuma. Goes out: node readings and the nodes this process may allocate from.

py-libnuma 1.2, as tried: without libnuma its import dies with AttributeError; its node functions crash the interpreter
on a node that does not exist; it frees no bitmask. All three are guarded here.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.errors import LibnumaError
from numapin.system.calls import INSTALL_LIBNUMA
from numapin.topology.readings import NodeReading


class LibnumaReadings(NamedTuple):
    """The nodes that exist, and those that this process may allocate from."""

    nodes: tuple[NodeReading, ...]
    allowed_nodes: CpuSet


def read_libnuma() -> LibnumaReadings | None:
    """Read the nodes; None where the kernel has no NUMA support or forbids asking (seccomp).

    Raises LibnumaError where the library is not installed.
    """
    lib = load()
    # numa(3): no other function may be called where the first one fails. libnuma 2.0.16 takes EPERM, which is seccomp's
    # answer, for success; later ones do not: ask again.
    if lib.numa_available() == -1 or lib.get_mempolicy(None, None, 0, None, 0) != 0:
        return None
    existing = _members(ctypes.c_void_p.in_dll(lib, "numa_nodes_ptr").value)
    return LibnumaReadings(
        nodes=tuple(_node(lib, node, existing) for node in sorted(existing)),
        allowed_nodes=_take(lib, lib.numa_get_mems_allowed()) & existing,
    )


def load() -> Any:  # noqa: ANN401 - a ctypes.CDLL, whose attributes are untyped functions
    """Return py-libnuma's handle of the loaded library. Raises LibnumaError where there is none."""
    try:
        from numa import LIBNUMA
    except (AttributeError, OSError, ImportError) as error:
        raise LibnumaError(f"libnuma could not be loaded: {error}", INSTALL_LIBNUMA) from None
    LIBNUMA.numa_bitmask_free.argtypes = [ctypes.c_void_p]
    LIBNUMA.numa_bitmask_free.restype = None
    return LIBNUMA


def _node(lib: Any, node: int, existing: CpuSet) -> NodeReading:  # noqa: ANN401
    free = ctypes.c_longlong(-1)
    size = lib.numa_node_size64(node, ctypes.byref(free))
    distances = {other: lib.numa_distance(node, other) for other in sorted(existing)}
    return NodeReading(
        id=node,
        cpus=_node_cpus(lib, node),
        memory_bytes=None if size < 0 else size,
        free_bytes=None if size < 0 or free.value < 0 else free.value,
        # libnuma returns 0 where the kernel shows no distances (ENOENT of the distance file).
        distances=distances if all(distances.values()) else {},
    )


def _node_cpus(lib: Any, node: int) -> CpuSet:  # noqa: ANN401
    mask = lib.numa_allocate_cpumask()
    failed = lib.numa_node_to_cpus(node, mask) != 0
    cpus = _take(lib, mask)
    return CpuSet() if failed else cpus


def _take(lib: Any, mask: Any) -> CpuSet:  # noqa: ANN401
    """Return a bitmask's members and free it."""
    address = ctypes.cast(mask, ctypes.c_void_p).value
    members = _members(address)
    lib.numa_bitmask_free(address)
    return members


def _members(address: int | None) -> CpuSet:
    from numa import bitmask_t

    if not address:
        raise LibnumaError("libnuma returned no bitmask", "check the library with: numactl -H")
    mask = bitmask_t.from_address(address)
    bits = ctypes.sizeof(ctypes.c_ulong) * 8
    words = (mask.maskp[i] for i in range((mask.size + bits - 1) // bits))
    return cpu_set.from_words(words, word_bits=bits)
