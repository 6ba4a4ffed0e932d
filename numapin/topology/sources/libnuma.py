"""Nodes of the live host from libnuma.

py-libnuma 1.2 was found to do three things that are guarded here: without libnuma its import fails with AttributeError;
its node functions crash the interpreter on a node that does not exist; it does not free bitmasks.
"""

from __future__ import annotations

import ctypes

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.errors import LibnumaError
from numapin.system.calls import INSTALL_LIBNUMA
from numapin.topology.readings import NodeReading


def read_libnuma() -> tuple[tuple[NodeReading, ...], CpuSet] | None:
    """Read the nodes, and which of them this process may allocate from. Raises LibnumaError without the library.

    None if the kernel has no NUMA support or forbids asking (seccomp).
    """
    lib = load()
    # numa(3): if numa_available fails, no other function may be called. libnuma 2.0.16 takes seccomp's EPERM for
    # success, later versions do not: ask the kernel too.
    if lib.numa_available() == -1 or lib.get_mempolicy(None, None, 0, None, 0) != 0:
        return None
    existing = _members(ctypes.c_void_p.in_dll(lib, "numa_nodes_ptr").value)
    nodes: list[NodeReading] = []
    for node in sorted(existing):
        free = ctypes.c_longlong(-1)
        memory_bytes: int = lib.numa_node_size64(node, ctypes.byref(free))
        mask = lib.numa_allocate_cpumask()
        failed = lib.numa_node_to_cpus(node, mask) != 0
        cpus = _read_and_free(lib, mask)
        distances = {other: lib.numa_distance(node, other) for other in sorted(existing)}
        nodes.append(
            NodeReading(
                id=node,
                cpus=CpuSet() if failed else cpus,
                memory_bytes=None if memory_bytes < 0 else memory_bytes,
                free_bytes=None if memory_bytes < 0 or free.value < 0 else free.value,
                # libnuma returns 0 if the kernel has no distances (ENOENT of the distance file).
                distances=distances if all(distances.values()) else {},
            )
        )
    allowed_nodes = _read_and_free(lib, lib.numa_get_mems_allowed()) & existing
    return tuple(nodes), allowed_nodes


def load() -> ctypes.CDLL:
    """Return py-libnuma's handle of the loaded library. Raises LibnumaError if it cannot be loaded."""
    try:
        from numa import LIBNUMA
    except (AttributeError, OSError, ImportError) as error:
        raise LibnumaError(f"libnuma could not be loaded: {error}", INSTALL_LIBNUMA) from None
    library: ctypes.CDLL = LIBNUMA
    library.numa_bitmask_free.argtypes = [ctypes.c_void_p]
    library.numa_bitmask_free.restype = None
    return library


def _read_and_free(lib: ctypes.CDLL, mask: ctypes.c_void_p) -> CpuSet:
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
