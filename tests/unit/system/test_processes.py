"""Processes: all of their threads are bound, their memory by node, and what /proc says of them."""

from __future__ import annotations

import mmap
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.needs import needs_two_cpus
from tests.unit.system.seam import descendants, numa_maps, proc, state_of, threads, waits_forever
from tests.waiting import wait_until

CPUS = frozenset(os.sched_getaffinity(0))
LAST = {max(CPUS)}
NARROW = {min(CPUS)}

# Starts threads that start threads, as fast as it can, until a line comes; has a child, and tells its number then.
BREEDING = """
import os, subprocess, sys, threading, time
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # ends with this program
done = threading.Event()
def breed():
    if not done.is_set():
        time.sleep(0.001)
        threading.Thread(target=breed).start()
for _ in range(8):
    threading.Thread(target=breed).start()
print(child.pid, flush=True)
sys.stdin.readline()
done.set()
child.communicate()
"""
NARROWED = """
import os, sys, threading
end = threading.Event()
def narrow():
    os.sched_setaffinity(0, {int(sys.argv[1])})
    print(threading.get_native_id(), flush=True)
    end.wait()
threading.Thread(target=narrow).start()
sys.stdin.readline()
end.set()
"""


@contextmanager
def running(code: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a program with several threads, yield it with its first line, and end it."""
    command = [sys.executable, "-c", code, str(min(CPUS))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        yield started, started.stdout.readline()
        started.kill()


@needs_two_cpus
def test_threads_that_start_meanwhile() -> None:
    """Threads that are started while others are bound are bound, too."""
    with running(BREEDING) as (program, _):
        assert threads.bind_threads(program.pid, frozenset(LAST)) == ()
        for _ in range(3):
            assert set(proc.thread_cpus(program.pid)) == {frozenset(LAST)}
        program.communicate("go\n", timeout=300)


def test_children_of_a_process_whose_threads_end() -> None:
    """A thread that ends while the children are read hides none of the other threads' children."""
    with running(BREEDING) as (program, child):
        assert all(int(child) in proc.children_in(program.pid) for _ in range(2000))


@needs_two_cpus
def test_threads_that_the_program_placed() -> None:
    """A thread that the program has placed on some of the new CPUs stays there, unless `before` is not given."""
    with running(NARROWED) as (program, thread):
        for cpus, before, of_thread in (
            (CPUS, [CPUS], NARROW),
            (frozenset(LAST), [CPUS], LAST),
            (CPUS, None, set(CPUS)),
        ):
            assert threads.bind_threads(program.pid, cpus, before=before) == ()
            assert (os.sched_getaffinity(program.pid), os.sched_getaffinity(int(thread))) == (set(cpus), of_thread)


@needs_two_cpus
def test_another_process_with_the_id() -> None:
    """A process whose start time differs from the recorded one is left alone."""
    with subprocess.Popen(["sleep", "600"]) as other:
        start = proc.stat(proc.folder_of(other.pid)).start
        threads.bind_threads(other.pid, frozenset(LAST), start=start + 1)
        assert os.sched_getaffinity(other.pid) == set(CPUS)
        threads.bind_threads(other.pid, frozenset(LAST), start=start)
        assert os.sched_getaffinity(other.pid) == LAST
        other.kill()


def test_refusals_and_ended_processes() -> None:
    """CPUs that do not exist are refused with a reason; a process that has ended has no threads."""
    assert "CPUs 8190 were refused (Invalid argument)" in threads.bind_threads(os.getpid(), frozenset({8190}))[0]
    assert os.sched_getaffinity(0) == CPUS
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert threads.bind_threads(ended.pid, CPUS) == ()
    assert numa_maps.private_bytes(ended.pid) is None
    assert proc.is_dying(ended.pid)


def test_private_bytes() -> None:
    """Memory that is touched is counted on some node; files are not."""
    before = sum((numa_maps.private_bytes(os.getpid()) or {0: 0}).values())
    # Not from the heap, which may have that much to spare.
    block = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for _ in range(32):
        block.write(b"1" * (1 << 20))  # in pieces: Python without the GIL keeps the memory of what it has freed
    after = numa_maps.private_bytes(os.getpid())
    if after is None:
        pytest.skip("this kernel has no numa_maps")
    assert 24 << 20 < sum(after.values()) - before < 64 << 20
    assert len(block) == 32 << 20


def test_descendants() -> None:
    """Children and their children are found, nearest first; whoever is left out is left out with its children."""
    with subprocess.Popen(["sh", "-c", "cat; true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        assert shell.stdin is not None
        assert shell.stdout is not None
        shell.stdin.write(b"x\n")
        shell.stdin.flush()
        assert shell.stdout.readline() == b"x\n"
        starts = dict(proc.descendants_of(os.getpid(), is_apart=lambda _: False))
        assert starts[shell.pid] == proc.stat(proc.folder_of(shell.pid)).start
        assert list(starts)[-1] != shell.pid
        rest = dict(proc.descendants_of(os.getpid(), is_apart=shell.pid.__eq__)).keys()
        assert rest.isdisjoint({shell.pid, *proc.children_in(shell.pid)})


# --- readers of /proc, tried on processes that sleep -----------------------------------------------------------------


_STAT = "7 (a child) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 {} 0 99 1 1" + " 0" * 30
_LOCK_WAIT = "202 0x5621150eb360 0x189 0x0 0x0 0x0 0xffffffff 0x7fff5d19f560 0x7f10e2ca3e96"


def test_descendants_in_order() -> None:
    """Descendants come nearest first, without those that are left out and theirs; a chain may be long.

    Processes are not read at once and ids are used again, so each may be below the other: each is listed once.
    """
    children = {1: [2, 3], 2: [4], 3: [5], 5: [6]}
    assert descendants(1, children) == [2, 3, 4, 5, 6]
    assert descendants(1, children, without={3}) == [2, 4]
    assert descendants(1, {pid: [pid + 1] for pid in range(1, 5000)}) == list(range(2, 5001))
    assert descendants(1, {1: [2], 2: [3], 3: [1, 2]}) == [2, 3]


@pytest.mark.parametrize(("limit_s", "verdict"), [(-1, True), (600, False)], ids=["forever", "for a while"])
def test_who_waits_forever(limit_s: float, *, verdict: bool) -> None:
    """A process waits forever if its only thread waits for a lock of its own without a time-out."""
    pid, machine = os.fork(), platform.machine()
    if pid == 0:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire(timeout=limit_s)
        os._exit(0)
    try:
        assert wait_until(lambda: state_of(pid) == "S", limit_s=300)
        if waits_forever(pid, machine) is None:
            pytest.skip("the kernel does not show the system calls of other processes")
        assert wait_until(lambda: waits_forever(pid, machine) is verdict, limit_s=300)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("call", "num_threads", "machine", "verdict"),
    [
        (_LOCK_WAIT, 1, "x86_64", True),
        (_LOCK_WAIT.replace("202", "98"), 1, "aarch64", True),
        (_LOCK_WAIT, 2, "x86_64", False),
        (_LOCK_WAIT.replace("0x189 0x0 0x0", "0x189 0x0 0x7fff5d19f520"), 1, "x86_64", False),  # with a time-out
        ("230 0x0 0x0 0x7fff5d19f560 0x0 0x0 0x0 0x7fff5d19f520 0x7f10e2ca3e96", 1, "x86_64", False),  # another call
        (_LOCK_WAIT.replace("0x189", "0x109"), 1, "x86_64", False),  # shared: another process may release it
        (_LOCK_WAIT.replace("0x189", "0x81"), 1, "x86_64", False),  # FUTEX_WAKE
        ("running", 1, "x86_64", False),
        ("", 1, "x86_64", None),
        (None, 1, "x86_64", None),
        (_LOCK_WAIT, 1, "riscv64", None),
    ],
)
def test_reading(tmp_path: Path, call: str | None, num_threads: int, machine: str, verdict: object) -> None:
    """The verdict follows from the system call and the number of threads; None if they cannot be read."""
    folder = tmp_path / "proc" / "7"
    folder.mkdir(parents=True)
    (folder / "stat").write_text(_STAT.format(num_threads))
    if call is not None:
        (folder / "syscall").write_text(call)
    assert waits_forever(7, machine, tmp_path) is verdict


_FIELDS = (
    "4711 (python) {state} 1 4711 4711 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 1 0 123 0 0 0 0 0 0 0 0 0 0 0 0 0 0 17 3 0"
)


@pytest.mark.parametrize(
    ("state", "flags", "is_dying"),
    [
        ("S", 0x400000, False),
        ("D", 0x400004, True),
        ("D", 0x400200, True),
        ("S", 0x400400, True),
        ("Z", 0x400000, True),
    ],
    ids=["running", "exiting", "core dump", "signalled", "zombie"],
)
def test_dying_by_flags(state: str, flags: int, *, is_dying: bool) -> None:
    """A process that exits, writes a core dump, was killed, or is a zombie is dying; a running one is not."""
    assert proc.Stat(_FIELDS.format(state=state, flags=flags)).is_dying == is_dying
