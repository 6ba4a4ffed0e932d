"""Which threads are set back after a real change."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from numapin.attach import undo
from numapin.attach.bind import How, attach
from numapin.attach.targets import Aim, Target, examine
from numapin.attach.undo import Attachment, FormerThread, place_to_name, restore
from numapin.base.cpu_set import CpuSet
from numapin.errors import MachineError, NumapinError, UsageError
from numapin.launcher.run_places import DEFAULT_PLACES
from numapin.system.affinity import ThreadId, cpus_of, set_cpus, threads_of
from tests.needs import needs_two_cpus
from tests.unit.planned import PLANNED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numapin.attach.targets import Subject

pytestmark = pytest.mark.usefixtures("only_places_of_the_test")

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


@pytest.fixture
def pid(process: subprocess.Popen[str]) -> int:
    """Give the process's id."""
    return process.pid


def _start_thread(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    assert process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    process.stdout.readline()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _attach(pid: int, environ: dict[str, str], cpus: CpuSet = LAST) -> None:
    target = Target(subject=examine(pid, other_users=False), plan=replace(PLANNED, cpus=cpus), gpu_source="")
    how = How(children=True, widen=False, other_users=False, dry_run=False)
    attach(Aim((target,), ()), how, migrate=False, environ=environ, progress=lambda *_: None)


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
@pytest.mark.parametrize("when", ["before it is examined", "after it was examined"])
def test_a_process_that_ends_meanwhile(
    when: str, process: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are restored, and the report names it."""
    environ = {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(["sleep", "600"]) as other:
        _attach(other.pid, environ)
        _attach(process.pid, environ)

        def ending(pid: int, *, other_users: bool) -> Subject:
            if pid == other.pid and when.startswith("before"):
                _end(other)
            subject = examine(pid, other_users=other_users)
            if pid == other.pid:
                _end(other)
            return subject

        monkeypatch.setattr(undo, "examine", ending)
        done = restore(None, environ, other_users=False, dry_run=False)
    assert {cpus_of(each) for each in threads_of(process.pid)} == {ALL}
    assert [each.pid for each in done.processes] == [process.pid]
    (warning,) = done.warnings
    assert re.fullmatch(rf"process {other.pid} \(.+\) has ended", warning)
    assert not [*tmp_path.glob("numapin-*/attached-*.json")]


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
    with pytest.raises(UsageError, match=r"nothing to restore for processes 0, -2; "):
        restore([0, -2], {"TMPDIR": "/a"}, other_users=False, dry_run=True)


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


@needs_two_cpus
@pytest.mark.parametrize("has_second_attach", [False, True])
def test_the_main_thread_was_not_changed(
    process: subprocess.Popen[str], tmp_path: Path, *, has_second_attach: bool
) -> None:
    """A thread that started since gets the former CPUs of the changed threads, one of which started it."""
    environ, pid = {"TMPDIR": str(tmp_path)}, process.pid
    main, *others = threads_of(pid)
    set_cpus(main, LAST)
    _attach(pid, environ)
    _start_thread(process)
    (new,) = set(threads_of(pid)) - {main, *others}
    assert cpus_of(new) == LAST
    if has_second_attach:
        _attach(pid, environ)
    restore([pid], environ, other_users=False, dry_run=False)
    assert [cpus_of(each) for each in (main, *others, new)] == [LAST, *[ALL] * 4]


def test_place_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory whose file system has no locks is passed over; if all are like that, nothing is changed."""
    flock, places, with_locks = fcntl.flock, [tmp_path / "nfs", tmp_path / "disk"], list[Path]()
    for place in places:
        place.mkdir()

    def on_some(folder: int, operation: int) -> None:
        if Path(f"/proc/self/fd/{folder}").readlink().parent not in with_locks:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        flock(folder, operation)

    monkeypatch.setattr(fcntl, "flock", on_some)
    monkeypatch.setattr(undo, "temporary_directories", lambda _: [str(place) for place in places])
    with (
        pytest.raises(NumapinError, match=r"nothing was changed: .*nfs cannot be locked: No locks available; "),
        undo.open_records({}, tidy=False),
    ):
        pass
    with_locks.append(places[1])
    with (
        undo.open_records({}, tidy=False),
        pytest.raises(NumapinError, match="another numapin attach of this user is running"),
        undo.open_records({}, tidy=False),
    ):
        pass


def test_former_cpus_of_a_new_thread() -> None:
    """They are those of its own process if that is recorded, and of the bound one if it started since."""
    cpus = {(1, 1): "0-1", (1, 9): "2-3", (2, 2): "4-5", (4, 4): "0-1", (4, 5): "6", (4, 6): "7"}
    unchanged = [(1, 9), (2, 2), (4, 4)]
    threads = tuple(
        FormerThread(pid=pid, tid=tid, start=0, cpus=CpuSet.parse(text), changed=(pid, tid) not in unchanged)
        for (pid, tid), text in cpus.items()
    )
    made = Attachment(host="", boot="", namespace=0, pid=1, start=0, name="", given=(), threads=threads)
    found = {pid: made.former_of(ThreadId(pid, 99, 0)) for pid in (1, 2, 3, 4)}
    assert {pid: None if each is None else str(each) for pid, each in found.items()} == {
        1: "0-1",
        2: None,
        3: "0-1",
        4: "6-7",
    }
