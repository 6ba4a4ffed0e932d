"""The time that loops wait for batches, published by one process and read by another."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

import numapin
from tests.unit.steps.seam import Totals, Waited, find_waited, read_waited, totals, totals_of

_LOOP = """
import os, sys
from numapin.steps.totals import totals_of
if sys.argv[1:] == ["forked"]:
    totals_of(os.getpid()).add(waited_s=7, stepped_s=7)
    if pid := os.fork():
        os.waitpid(pid, 0)
        os._exit(0)
for _ in range(2):
    totals_of(os.getpid()).add(waited_s=0.25, stepped_s=1.5)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["alone", "forked"])
def loop(request: pytest.FixtureRequest) -> Iterator[int]:
    """Give the process id of a loop that made two steps: a program, or a forked child of another loop."""
    command = [sys.executable, "-c", _LOOP, request.param]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.communicate("")


def test_another_process_reads_the_totals(monkeypatch: pytest.MonkeyPatch, loop: int) -> None:
    """The totals of a process, without its parent's, can be read while it runs.

    A process of another user can have any number of descriptors: only the first ones are looked at.
    """
    descriptor = find_waited(loop)
    assert descriptor is not None
    assert read_waited(loop, descriptor) == Waited(waited_s=0.5, stepped_s=3.0, num_steps=2)
    before = sum(int(name) < descriptor for name in os.listdir(f"/proc/{loop}/fd"))  # noqa: PTH208
    monkeypatch.setattr(totals, "_MOST_DESCRIPTORS", before)
    assert find_waited(loop) is None
    monkeypatch.setattr(totals, "_MOST_DESCRIPTORS", before + 1)
    assert find_waited(loop) == descriptor


def test_process_without_loader() -> None:
    """There are no totals for a process without any, for a process that is gone, and in any other descriptor."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert find_waited(process.pid) is None
        assert read_waited(process.pid, 0) is None
        process.communicate(b"\n")
    assert find_waited(process.pid) is None
    assert read_waited(process.pid, 3) is None


@pytest.mark.parametrize("limit", [resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE])
def test_without_descriptors_or_files(limit: int) -> None:
    """Without a free descriptor, or where no file may grow, steps are not published, and nothing fails."""
    limits, former = resource.getrlimit(limit), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(limit, (0, limits[1]))
    try:
        totals = Totals()
    finally:
        resource.setrlimit(limit, limits)
        signal.signal(signal.SIGXFSZ, former)
    totals.add(waited_s=1, stepped_s=1)
    totals.close()


_QUICK = """
import os
from numapin.steps.totals import totals_of
totals = totals_of(os.getpid())
print(flush=True)
while True: totals.add(waited_s=1, stepped_s=1, num_bytes=1)
"""


def test_no_read_sees_half_a_step() -> None:
    """A loop that steps as quickly as it can, read 10,000 times."""
    with subprocess.Popen([sys.executable, "-c", _QUICK], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        descriptor = find_waited(process.pid)
        assert descriptor is not None
        found = [read_waited(process.pid, descriptor) for _ in range(10_000)]
        process.kill()
    assert not [each for each in found if each is None or each.waited_s != each.num_bytes]
    assert found == sorted(found, key=lambda each: each.num_steps if each else 0)


_INTERRUPTED = """
import os, signal
from numapin.steps.totals import totals_of
num_calls = 0
def add(*_):
    global num_calls
    totals_of(os.getpid()).add(waited_s=0, stepped_s=0)
    num_calls += 1
signal.signal(signal.SIGALRM, add)
for _ in range(1000):
    before = num_calls
    signal.setitimer(signal.ITIMER_REAL, 0.0002)
    while num_calls == before: totals_of(os.getpid()).add(waited_s=0, stepped_s=0)
"""


def test_a_signal_handler_may_take_batches() -> None:
    """A handler that runs in the middle of a step, and steps itself, does not wait for the step that it interrupts."""
    subprocess.run([sys.executable, "-c", _INTERRUPTED], timeout=100, check=True)


def test_the_last_steps_of_an_epoch_are_published() -> None:
    """None is missing after the last batch of an epoch, or after `break`."""

    def num_published() -> int:
        totals_of(os.getpid())
        published = read_waited(os.getpid(), find_waited(os.getpid()) or -1)
        assert published is not None
        return published.num_steps

    before = num_published()
    loader: Any = numapin.DataLoader(list(range(20)), num_workers=1)  # type: ignore[arg-type]
    assert len(list(loader)) == 20
    assert num_published() - before == 19  # the first batch ends no step
    assert len(list(islice(loader, 5))) == 5
    assert num_published() - before == 19 + 4


_CONSTRUCTED = """
import torch.utils.data.dataloader as module
from numapin.steps import recorder
before = module._BaseDataLoaderIter.__init__
recorder.attach(module)
assert list(module.DataLoader(range(3), batch_size=None)) == [0, 1, 2]
assert module._BaseDataLoaderIter.__init__ is before
class OfTwo(module._SingleProcessDataLoaderIter, dict): pass  # only dict.__new__ can make it
batches = OfTwo(module.DataLoader(range(3), batch_size=None))
assert list(batches) == [0, 1, 2]
assert type(batches.__new__(OfTwo)) is OfTwo
"""


def test_iterators_are_made_as_without_the_recorder() -> None:
    """The constructor, which warns with a stack level, stays torch's; an iterator's other base may have `__new__`."""
    subprocess.run([sys.executable, "-c", _CONSTRUCTED], timeout=100, check=True)


_SIGNALLED = """
import itertools, os, signal
import torch.utils.data.dataloader
from numapin.steps import recorder
from numapin.steps.totals import find_waited, read_waited

class Stop(Exception): pass
def stop(*_):
    global came
    came = True
    raise Stop

recorder.attach(torch.utils.data.dataloader)
signal.signal(signal.SIGALRM, stop)
loader, num_stops = torch.utils.data.DataLoader(range(1 << 30), batch_size=None), 0
while num_stops < 300:
    batches, came = iter(loader), True
    try:
        for _ in batches:
            if came:  # none is under way: the first one, or Python ignored it, as in a destructor
                came = False
                signal.setitimer(signal.ITIMER_REAL, 0.0004)
    except Stop:
        num_stops += 1
def published(): return read_waited(os.getpid(), find_waited(os.getpid())).num_steps
for _ in itertools.islice(loader, 3): pass  # also publishes a step in whose middle it was stopped
before = published()
for _ in itertools.islice(loader, 101): pass
print(num_stops, published() - before)
"""


def test_a_signal_handler_that_raises_does_not_end_the_recording() -> None:
    """Ctrl-C, a timer or torch's handler for a dead worker may raise at any point of the recorder."""
    done = subprocess.run([sys.executable, "-c", _SIGNALLED], capture_output=True, text=True, check=True)
    assert done.stdout == "300 100\n"


_THREADS = """
import os, subprocess, sys, threading
from numapin.steps import totals
sys.setswitchinterval(1e-6)
for pid in range(1, 301):
    barrier, found = threading.Barrier(4), []
    def first():
        barrier.wait()
        found.append(totals.totals_of(pid))
    threads = [threading.Thread(target=first) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert len(set(map(id, found))) == 1, pid
    found[0].add(waited_s=0, stepped_s=1)
open_files = subprocess.run(["ls", "-l", f"/proc/{os.getpid()}/fd"], capture_output=True, text=True).stdout
print(open_files.count("numapin-steps"))
"""


def test_threads_that_start_at_once_share_the_totals() -> None:
    """Loops in several threads have one file, also if their first steps meet."""
    done = subprocess.run([sys.executable, "-c", _THREADS], capture_output=True, text=True, check=True)
    assert done.stdout == "2\n"  # Python's mmap keeps a duplicate of the descriptor


def test_a_pipe_in_their_place_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that swaps its totals for an empty pipe while they are read does not hold up the reader."""
    monkeypatch.setattr(totals, "_is_totals", lambda _path: True)
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w"):
        assert read_waited(os.getpid(), reader) is None


_OWN_TERMINAL = """
import os, pty
from numapin.steps import totals
os.setsid()
_, terminal = pty.openpty()
totals._is_totals = lambda _path: True
totals.read_waited(os.getpid(), terminal)
try:
    os.open("/dev/tty", os.O_RDONLY)
    print("has a terminal")
except OSError as error:
    print(error.strerror)
"""


def test_a_terminal_in_their_place_does_not_become_the_readers() -> None:
    """A service without a terminal of its own would get the signals of that one."""
    command = [sys.executable, "-c", f"import os\nif os.fork(): os.wait(); os._exit(0)\n{_OWN_TERMINAL}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "No such device or address\n"
