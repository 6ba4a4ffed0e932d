"""The commands that undo a change, and what they do when a shell runs them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.needs import needs_two_cpus
from tests.unit.attach.seam import (
    Aim,
    AttachOptions,
    CpuSet,
    Target,
    ThreadId,
    attach,
    cpus_of,
    examine,
    set_cpus,
    threads_of,
    undo_commands,
)
from tests.unit.planned import PLANNED

if TYPE_CHECKING:
    from collections.abc import Iterator

needs_taskset = pytest.mark.skipif(not shutil.which("taskset"), reason="no taskset; type: apt-get install util-linux")
ALL = CpuSet(os.sched_getaffinity(0))
FIRST, LAST = CpuSet({min(ALL)}), CpuSet({max(ALL)})
WORK = """
import sys, threading
end = threading.Event()
def start():
    threading.Thread(target=end.wait, daemon=True).start()
def starting():
    for line in sys.stdin:
        start()
        print(flush=True)
    end.set()
threading.Thread(target=starting, daemon=True).start()
for _ in range(2):
    start()
print(flush=True)
end.wait()
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    """Give a process with four threads. The second one starts a thread for each line on stdin, and prints a line."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", WORK], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout
        process.stdout.readline()
        yield process
        process.kill()


def _start_thread(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    assert process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    process.stdout.readline()


def _attach(pid: int, cpus: CpuSet = LAST) -> tuple[str, ...]:
    """Bind a process, and return the commands that undo it."""
    target = Target(subject=examine(pid), plan=replace(PLANNED, cpus=cpus), gpu_source="")
    return attach(Aim((target,), ()), AttachOptions(), progress=lambda *_: None).undo


def _run(commands: tuple[str, ...]) -> None:
    for command in commands:
        subprocess.run(["sh", "-ec", command], check=True, stdout=subprocess.PIPE)


@needs_two_cpus
@needs_taskset
def test_each_thread_gets_its_former_cpus(process: subprocess.Popen[str]) -> None:
    """A thread that was not changed keeps its CPUs; one that starts later gets those of the main thread."""
    main, pinned, *others = threads_of(process.pid)
    set_cpus(pinned, LAST)
    commands = _attach(process.pid)
    assert {cpus_of(each) for each in threads_of(process.pid)} == {LAST}
    _start_thread(process)
    (new,) = set(threads_of(process.pid)) - {main, pinned, *others}
    assert cpus_of(new) == LAST
    _run(commands)
    assert [cpus_of(each) for each in (main, pinned, *others, new)] == [ALL, LAST, ALL, ALL, ALL]
    assert commands == (f"taskset -acp {ALL} {process.pid}", f"taskset -cp {LAST} {pinned.tid}")


@needs_two_cpus
@needs_taskset
def test_the_main_thread_was_not_changed(process: subprocess.Popen[str]) -> None:
    """A thread that starts later gets the former CPUs of a changed thread, and the main thread keeps its own."""
    main, *others = threads_of(process.pid)
    set_cpus(main, LAST)
    commands = _attach(process.pid)
    _start_thread(process)
    (new,) = set(threads_of(process.pid)) - {main, *others}
    _run(commands)
    assert [cpus_of(each) for each in (main, *others, new)] == [LAST, *[ALL] * 4]


@needs_two_cpus
def test_a_second_change_is_undone_by_itself(process: subprocess.Popen[str]) -> None:
    """Without a change there is nothing to undo; the next change is undone to the CPUs of the first."""
    _attach(process.pid)
    assert _attach(process.pid) == ()
    assert _attach(process.pid, FIRST) == (f"taskset -acp {LAST} {process.pid}",)


def test_processes_with_the_same_cpus_share_a_command() -> None:
    """Processes of which nothing was changed are left out, and so are threads that have the CPUs of their process."""
    both, one = CpuSet.parse("0-3,8"), CpuSet({3})
    former = {ThreadId(5, 5, 0): both, ThreadId(5, 6, 0): one, ThreadId(7, 7, 0): both, ThreadId(7, 8, 0): both}
    former |= {ThreadId(9, 9, 0): one, ThreadId(7, 4, 0): one}
    assert undo_commands(former, [ThreadId(5, 5, 0), ThreadId(7, 8, 0), ThreadId(7, 7, 0)]) == (
        "for pid in 5 7; do taskset -acp 0-3,8 $pid; done",
        "for tid in 6 4; do taskset -cp 3 $tid; done",
    )
