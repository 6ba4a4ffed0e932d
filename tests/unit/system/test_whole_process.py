"""All threads of a process: bound until none is left out; and a process's memory by node."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.needs import needs_two_cpus
from tests.unit.system.seam import numa_maps, proc, threads

if TYPE_CHECKING:
    from collections.abc import Iterator

CPUS = frozenset(os.sched_getaffinity(0))
LAST = {max(CPUS)}
NARROW = {min(CPUS)}

# Starts threads that start threads, as fast as it can, until a line comes; says so when the first ones are there.
BREEDING = """
import os, sys, threading, time
done = threading.Event()
def breed():
    if not done.is_set():
        time.sleep(0.001)
        threading.Thread(target=breed).start()
for _ in range(8):
    threading.Thread(target=breed).start()
print("ready", flush=True)
sys.stdin.readline()
done.set()
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


@pytest.fixture
def program(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """Start a program with several threads, and end it."""
    command = [sys.executable, "-c", request.param, str(min(CPUS))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        yield started
        started.kill()


@needs_two_cpus
@pytest.mark.parametrize("program", [BREEDING], indirect=True, ids=["program"])
def test_threads_that_start_meanwhile(program: subprocess.Popen[str]) -> None:
    """Threads that are started while others are bound are bound, too."""
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    assert threads.bind_threads(program.pid, frozenset(LAST)) == ()
    for _ in range(3):
        assert set(proc.thread_cpus(program.pid)) == {frozenset(LAST)}
    program.communicate("go\n", timeout=60)


@needs_two_cpus
@pytest.mark.parametrize("program", [NARROWED], indirect=True, ids=["program"])
def test_threads_that_the_program_placed(program: subprocess.Popen[str]) -> None:
    """A thread that the program has placed on some of the new CPUs stays there, unless `before` is not given."""
    assert program.stdout is not None
    thread = int(program.stdout.readline())
    for cpus, before, of_thread in (
        (CPUS, [CPUS], NARROW),
        (frozenset(LAST), [CPUS], LAST),
        (CPUS, None, set(CPUS)),
    ):
        assert threads.bind_threads(program.pid, cpus, before=before) == ()
        assert (os.sched_getaffinity(program.pid), os.sched_getaffinity(thread)) == (set(cpus), of_thread)


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


def test_private_bytes() -> None:
    """Memory that is touched is counted on some node; files are not."""
    before = sum((numa_maps.private_bytes(os.getpid()) or {0: 0}).values())
    block = mmap.mmap(
        -1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )  # not from the heap, which may have that much to spare
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
        starts = dict(proc.descendants_of(os.getpid()))
        found = list(starts)
        assert starts[shell.pid] == proc.stat(proc.folder_of(shell.pid)).start
        assert shell.pid in found
        below = found[found.index(shell.pid) + 1 :]
        assert below
        rest = dict(proc.descendants_of(os.getpid(), without={shell.pid})).keys()
        assert rest.isdisjoint({shell.pid, *proc.children_in(shell.pid)})
