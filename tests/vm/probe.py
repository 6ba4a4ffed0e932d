"""A stand-in for a training script: it writes the kernel's view of its rank to $PROBE_OUT/<RANK>.json.

    numapin run probe.py

It asks the kernel through libnuma's system-call wrappers and /proc, independently of numapin.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Final

MAPPING_BYTES: Final = 32 << 20
MODES: Final = ("default", "preferred", "bind", "interleave", "local", "preferred-many")
"""MPOL_*, by number: include/uapi/linux/mempolicy.h."""
MAX_NODES: Final = 1024
SHOWN: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "NUMAPIN_BINDING", "CUDA_VISIBLE_DEVICES")


def main() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    mapping = touched(MAPPING_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    answers = {
        "pid": os.getpid(),
        "threads": _threads(),
        "policy": _policy(),
        "pages": _pages(address),
        "numa_maps": {"mapping": _numa_maps(f"{address:x}"), "heap": _numa_maps("heap")},
        "env": {name: os.environ.get(name) for name in SHOWN},
    }
    done.set()
    thread.join()
    Path(os.environ["PROBE_OUT"], f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(answers, indent=1))


def touched(num_bytes: int) -> mmap.mmap:
    """Map private anonymous memory and write to each page, so that the kernel places them."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_DONTFORK)  # else the kernel may merge it with its neighbor into one line of numa_maps
    for offset in range(0, num_bytes, mmap.PAGESIZE):
        mapping[offset] = 1
    return mapping


def mapped_at(address: int) -> tuple[int, int, list[str]]:
    """Return start and end of the mapping that contains an address, and the other words of its line in /proc."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *words = line.split()
        start, end = (int(word, 16) for word in span.split("-"))
        if start <= address < end:
            return start, end, words
    raise LookupError(hex(address))


def _threads() -> list[dict[str, str]]:
    threads = []
    for task in sorted(Path("/proc/self/task").iterdir()):
        fields = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
        threads.append(
            {"name": fields["Name"], "cpus": fields["Cpus_allowed_list"], "nodes": fields["Mems_allowed_list"]}
        )
    return threads


def _policy() -> dict[str, object]:
    """Return the mode and nodes of this thread's memory policy, or the error's name."""
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * (MAX_NODES // 64))()
    libnuma = ctypes.CDLL("libnuma.so.1", use_errno=True)
    if libnuma.get_mempolicy(ctypes.byref(mode), mask, ctypes.c_ulong(MAX_NODES + 1), None, 0):
        return {"error": errno.errorcode[ctypes.get_errno()]}
    nodes = [node for node in range(MAX_NODES) if mask[node // 64] >> node % 64 & 1]
    return {"mode": MODES[mode.value & 0xFF], "nodes": nodes}


def _pages(address: int) -> dict[str, object]:
    """Return the mapping's pages by node, as move_pages reports them, or the error's name."""
    count = MAPPING_BYTES // mmap.PAGESIZE
    pages = (ctypes.c_void_p * count)(*range(address, address + MAPPING_BYTES, mmap.PAGESIZE))
    status = (ctypes.c_int * count)()
    libnuma = ctypes.CDLL("libnuma.so.1", use_errno=True)
    if libnuma.move_pages(0, ctypes.c_ulong(count), pages, None, status, 0):
        return {"error": errno.errorcode[ctypes.get_errno()]}
    return {str(node): num for node, num in sorted(Counter(status).items())}


def _numa_maps(which: str) -> dict[str, object] | None:
    """Return policy and pages by node of the numa_maps line with this start address or name."""
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        start, policy, *words = line.split()
        if which == start or which in words:
            found = (re.fullmatch(r"N(\d+)=(\d+)", word) for word in words)
            return {"policy": policy, "pages": {match[1]: int(match[2]) for match in found if match}}
    return None


if __name__ == "__main__":
    main()
