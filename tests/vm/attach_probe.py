"""Processes for `numapin attach` on a machine with two nodes, and the kernel's report on them before and after.

    python attach_probe.py            runs the looks below, one after the other
    python attach_probe.py work       is a process to attach to: memory of all kinds, and threads that start others

Every process begins on CPU 0, so that all of its memory is on node 0. Automatic NUMA balancing is off: it would move
pages, and Linux 6.1 hides the pages that it watches from move_pages. Writes $PROBE_OUT/NAME.json for each command: its
status, its output, and what the kernel then reports: the CPUs of every thread, and the node of every page of a region.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.vm.agent import numapin
from tests.vm.seam import address_of, numa, proc

MIB: Final = 1 << 20
SIZES_MIB: Final = {"private": 64, "huge": 8, "mlocked": 8, "shared": 8, "placed": 8, "pinned": 4}
BALANCING: Final = Path("/proc/sys/kernel/numa_balancing")
OUT: Final = Path(os.environ["PROBE_OUT"])
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_URING_SETUP, _URING_REGISTER = 425, 427  # system calls, the same on all machines
_MADV_HUGEPAGE: Final = 14


# --- the process to attach to ----------------------------------------------------------------------------------------


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def work() -> None:
    """Make memory of each kind on node 0, report where it is, and start threads until stdin is closed."""
    kinds = {name: mmap.MAP_SHARED if name == "shared" else mmap.MAP_PRIVATE for name in SIZES_MIB}
    regions = {name: mmap.mmap(-1, size * MIB, mmap.MAP_ANONYMOUS | kinds[name]) for name, size in SIZES_MIB.items()}
    places = {name: address_of(region) for name, region in regions.items()}
    child = _child(regions["shared"])
    numa.bind_pages(places["placed"], SIZES_MIB["placed"] * MIB, numa.MPOL_BIND, (0,))  # a policy of its own
    size = ctypes.c_size_t(SIZES_MIB["huge"] * MIB)
    _check(_LIBC.madvise(ctypes.c_void_p(places["huge"]), size, _MADV_HUGEPAGE))
    for region in regions.values():
        for offset in range(0, len(region), mmap.PAGESIZE):
            region[offset] = 1
    _check(_LIBC.mlock(ctypes.c_void_p(places["mlocked"]), ctypes.c_size_t(SIZES_MIB["mlocked"] * MIB)))
    ring = _pin(places["pinned"], SIZES_MIB["pinned"] * MIB)
    end = threading.Event()
    threads = [threading.Thread(target=end.wait) for _ in range(3)]
    threads.append(threading.Thread(target=_start_others, args=(end,)))
    for thread in threads:
        thread.start()
    sys.stdout.write(json.dumps({"places": places, "child": child}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    end.set()
    os.close(ring)


def _child(shared: mmap.mmap) -> int:
    """Fork a process that has touched the shared memory and lives as long as its parent."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        for offset in range(0, len(shared), mmap.PAGESIZE):
            shared[offset] = 1
        os.write(writer, b"1")
        os.close(writer)
        sys.stdin.read()
        os._exit(0)
    os.read(reader, 1)
    return pid


def _pin(address: int, size: int) -> int:
    """Register memory with io_uring, which holds its pages as a driver does for direct memory access."""
    parameters = ctypes.create_string_buffer(120)
    ring = int(_check(_LIBC.syscall(_URING_SETUP, 4, parameters)))
    span = _Span(address, size)
    _check(_LIBC.syscall(_URING_REGISTER, ring, 0, ctypes.byref(span), 1))
    return ring


def _start_others(end: threading.Event) -> None:
    while not end.wait(0.5):
        threading.Thread(target=end.wait, args=(1.0,)).start()


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


# --- the looks -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Attach to a rank, to a process that only the driver knows, in cpusets, and without permission."""
    balancing = BALANCING.read_text()
    BALANCING.write_text("0")
    with _worker("rank", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2") as look:
        look("dry", "--dry-run", "--migrate")
        look("bound")
        look("moved", "--migrate", "--strict")
    with _worker("computing") as look:
        driver = OUT / "computing.nvml"  # which says that the process computes on the second GPU
        driver.write_text(f"{Path(os.environ['FAKE_NVML_DATA']).read_text()}process {look.pid}\n")
        os.environ["FAKE_NVML_DATA"] = str(driver)
        look("refused", "--migrate", "--strict", refuse_policy=True)
        look("computing")
    with _worker("part", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2") as look:
        _enter_cpuset("attach-part", look.pid, cpus="0-5", nodes="0")
        look("part", "--migrate")
    with _worker("outside", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2") as look:
        _enter_cpuset("attach-outside", look.pid, cpus="0-3", nodes="0")
        look("outside", "--strict")
    BALANCING.write_text(balancing)  # for the jobs that follow


@contextmanager
def _worker(name: str, **variables: str) -> Iterator[_Look]:
    pipe = subprocess.PIPE
    command = ["taskset", "-c", "0", sys.executable, __file__, "work"]
    environ = {**os.environ, **variables}
    with (
        (OUT / f"{name}.stderr").open("w") as errors,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, env=environ) as process,
    ):
        assert process.stdout
        told = json.loads(process.stdout.readline())
        yield _Look(process.pid, **told)
        assert process.stdin
        process.stdin.close()


@dataclass(frozen=True)
class _Look:
    """Runs `numapin attach` on a process, and writes NAME.json with its output and the kernel's report."""

    pid: int
    places: dict[str, int]
    child: int

    def __call__(self, name: str, *options: str, refuse_policy: bool = False) -> None:
        done = numapin("attach", "--pid", str(self.pid), "--json", *options, refuse_policy=refuse_policy)
        pages = {}  # of each region, the number of pages on each node, as move_pages reports them
        for region, start in self.places.items():
            found = numa.nodes_of_pages(range(start, start + SIZES_MIB[region] * MIB, mmap.PAGESIZE), pid=self.pid)
            pages[region] = {str(node): found.count(node) for node in sorted(set(found))}
        report = {
            "status": done["status"],
            "report": json.loads(done["stdout"]) if done["stdout"] else None,
            "stderr": done["stderr"],
            "cpus": {pid: sorted({str(cpus) for cpus in proc.thread_cpus(pid)}) for pid in (self.pid, self.child)},
            "pages": pages,
        }
        (OUT / f"{name}.json").write_text(json.dumps(report))


def _enter_cpuset(name: str, pid: int, *, cpus: str, nodes: str) -> None:
    group = Path("/sys/fs/cgroup", name)
    group.mkdir()
    for file, value in (("cpuset.cpus", cpus), ("cpuset.mems", nodes), ("cgroup.procs", str(pid))):
        (group / file).write_text(value)


if __name__ == "__main__":
    if sys.argv[1:] == ["work"]:
        work()
    else:
        main()
