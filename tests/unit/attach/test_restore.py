"""Which threads are set back after a real change."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from numapin.attach.bind import How
from numapin.attach.perform import Attach
from numapin.attach.processes import examine
from numapin.attach.record import place_to_name
from numapin.attach.restore import restore
from numapin.attach.targets import Aim, Target
from numapin.base.cpu_set import CpuSet
from numapin.errors import MachineError, UsageError
from numapin.launcher.run_places import DEFAULT_PLACES
from numapin.system.affinity import cpus_of, set_cpus, threads_of
from tests.needs import needs_two_cpus
from tests.unit.planned import PLANNED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ALL = CpuSet(os.sched_getaffinity(0))
FIRST, LAST = CpuSet({min(ALL)}), CpuSet({max(ALL)})
WORK = """
import sys, threading
for _ in range(3):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def pid() -> Iterator[int]:
    """Give a process with four threads."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", WORK], stdin=pipe, stdout=pipe) as process:
        assert process.stdout
        process.stdout.readline()
        yield process.pid
        process.kill()


def _attach(pid: int, environ: dict[str, str], cpus: CpuSet = LAST) -> None:
    target = Target(subject=examine(pid, other_users=False), plan=replace(PLANNED, cpus=cpus), gpu_source="")
    how = How(children=True, widen=False, other_users=False, dry_run=False)
    Attach(aim=Aim((target,), ()), how=how, migrate=False, environ=environ, progress=lambda *_: None).run()


@needs_two_cpus
def test_threads_that_were_not_changed(pid: int, tmp_path: Path) -> None:
    """Only changed threads are set back, and only if the program has not moved them since."""
    environ = {"TMPDIR": str(tmp_path)}
    main, pinned, moved, other = threads_of(pid)
    set_cpus(pinned, LAST)
    _attach(pid, environ)
    assert {cpus_of(each) for each in threads_of(pid)} == {LAST}
    set_cpus(pinned, FIRST)
    set_cpus(moved, FIRST)
    (done,) = restore([pid], environ, other_users=False, dry_run=False).processes
    assert [cpus_of(each) for each in (main, pinned, moved, other)] == [ALL, FIRST, FIRST, ALL]
    assert (done.threads, done.left, done.started_since, done.shortfalls) == (2, 1, 0, ())


@needs_two_cpus
@pytest.mark.parametrize("names_it", [True, False])
def test_malformed_record_of_another_process(pid: int, tmp_path: Path, *, names_it: bool) -> None:
    """It does not keep this process from being restored; if all are to be, a warning names the file."""
    environ = {"TMPDIR": str(tmp_path)}
    _attach(pid, environ)
    (path,) = tmp_path.glob("numapin-*/attached-*.json")
    other = path.with_name("attached-1-1.json")
    other.write_text("{")
    done = restore([pid] if names_it else None, environ, other_users=False, dry_run=False)
    assert {cpus_of(each) for each in threads_of(pid)} == {ALL}
    assert [str(other) in text for text in done.warnings] == ([] if names_it else [True])
    with pytest.raises(MachineError, match=other.name):
        restore([1], environ, other_users=False, dry_run=False)


def test_place_of_the_record() -> None:
    """A directory that the command would not find without TMPDIR is named, and an error names those it searched."""
    assert place_to_name(["/a/numapin-0/attached-2-3.json"]) == "/a"
    assert place_to_name([f"{DEFAULT_PLACES[1]}/numapin-0/attached-2-3.json"]) is None
    with pytest.raises(UsageError, match=r"nothing to restore for process 0; searched numapin-\d+ in /a, "):
        restore([0], {"TMPDIR": "/a"}, other_users=False, dry_run=True)


@needs_two_cpus
def test_changed_twice(pid: int, tmp_path: Path) -> None:
    """After two changes, a thread gets the CPUs that it had before its own first change."""
    environ = {"TMPDIR": str(tmp_path)}
    main, pinned, *_ = threads_of(pid)
    set_cpus(pinned, LAST)
    _attach(pid, environ)
    _attach(pid, environ, FIRST)
    assert {cpus_of(each) for each in threads_of(pid)} == {FIRST}
    restore([pid], environ, other_users=False, dry_run=False)
    assert (cpus_of(pinned), cpus_of(main)) == (LAST, ALL)
