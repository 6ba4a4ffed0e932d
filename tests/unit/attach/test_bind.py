"""Binding a real process: Ctrl-C, what the kernel refuses, roles; the rest is in tests/integration."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from numapin.errors import UsageError
from tests.needs import needs_two_cpus
from tests.unit.attach import seam
from tests.unit.attach.seam import (
    Aim,
    AttachOptions,
    Binder,
    CpuSet,
    Gone,
    ProcessMemory,
    Region,
    Target,
    ThreadId,
    attach,
    cpus_of,
    examine,
    move,
    set_cpus,
    threads_of,
)
from tests.unit.planned import PLANNED

if TYPE_CHECKING:
    from collections.abc import Iterator

ALL = CpuSet(os.sched_getaffinity(0))
OPTIONS = AttachOptions()


@pytest.fixture
def target() -> Iterator[Target]:
    """Give a process that is to be bound to the last CPU."""
    with subprocess.Popen(["sleep", "600"]) as process:
        subject = examine(process.pid, other_users=False)
        yield Target(subject=subject, plan=replace(PLANNED, cpus=CpuSet({max(ALL)})), gpu_source="")
        process.kill()


def _cpus(target: Target) -> list[CpuSet]:
    return [cpus_of(thread) for thread in threads_of(target.subject.pid)]


@needs_two_cpus
def test_interrupted(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before the first change leaves everything as it was, and is reported."""

    def interrupt(thread: ThreadId, cpus: CpuSet) -> CpuSet:
        del thread, cpus
        raise KeyboardInterrupt

    monkeypatch.setattr(seam.affinity, "set_cpus", interrupt)
    binder = Binder(target, OPTIONS)
    (process,) = binder.run()
    assert (binder.interrupted, process.threads, process.changed, _cpus(target)) == (True, 1, 0, [ALL])


@needs_two_cpus
def test_kernel_that_refuses(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread whose CPUs the kernel does not change is reported with the reason, and is not counted as changed."""

    def refuse(thread: ThreadId, cpus: CpuSet) -> CpuSet:
        del thread, cpus
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(seam.affinity, "set_cpus", refuse)
    (process,) = Binder(target, OPTIONS).run()
    (shortfall,) = process.shortfalls
    assert (process.threads, process.changed, process.cpus) == (1, 0, ALL)
    assert shortfall.startswith(f"1 thread did not get CPUs {max(ALL)} (Operation not permitted)")


@needs_two_cpus
def test_planned_cpus_that_the_kernel_does_not_give(target: Target) -> None:
    """They are a shortfall."""
    lacking = max(ALL) + 1000
    wide = replace(target, plan=replace(target.plan, cpus=CpuSet({max(ALL), lacking})))
    (process,) = Binder(wide, OPTIONS).run()
    (shortfall,) = process.shortfalls
    assert (process.changed, process.cpus, _cpus(target)) == (1, CpuSet({max(ALL)}), [CpuSet({max(ALL)})])
    assert shortfall.startswith(f"1 thread did not get CPUs {lacking}, which the cpuset excludes")


@pytest.mark.parametrize(
    ("number", "words"),
    [(1, "process {} ended before it was bound"), (2, "processes {} ended before they were bound")],
)
def test_targets_that_all_ended(number: int, words: str) -> None:
    """If no target is left to bind, the error names them all."""
    targets = []
    for _ in range(number):
        with subprocess.Popen(["sleep", "600"]) as process:
            subject = examine(process.pid, other_users=False)
            targets.append(Target(subject=subject, plan=PLANNED, gpu_source=""))
            process.kill()
    options = AttachOptions(dry_run=True)
    with pytest.raises(UsageError) as error:
        attach(Aim(tuple(targets), ()), options, progress=lambda *_: None)
    pids = ", ".join(str(target.subject.pid) for target in targets)
    assert error.value.message == f"{words.format(pids)}; nothing was changed"
    assert "pgrep" in error.value.hint, "a process that was given by its id need not be one of a run"


def test_plan_that_lacks_cpus(target: Target) -> None:
    """What the plan lacks is reported with the target, so that it does not count as exact."""
    binder = Binder(replace(target, shortfalls=("the plan leaves out CPUs 9",)), OPTIONS)
    (process,) = binder.run()
    assert process.shortfalls == ("the plan leaves out CPUs 9",)


@needs_two_cpus
def test_another_process_with_the_same_id(target: Target) -> None:
    """A process that started at another time is not touched, and neither is its thread."""
    other = replace(target, subject=target.subject._replace(start=target.subject.start + 1))
    assert Binder(other, OPTIONS).run() == ()
    (thread,) = threads_of(target.subject.pid)
    with pytest.raises(Gone):
        set_cpus(thread._replace(start=thread.start + 1), CpuSet({max(ALL)}))
    assert _cpus(target) == [ALL]


def test_no_cpu(target: Target) -> None:
    """An empty set is refused before the kernel is asked."""
    (thread,) = threads_of(target.subject.pid)
    with pytest.raises(OSError, match="no CPU is given"):
        set_cpus(thread, CpuSet())


def test_interrupted_move(target: Target) -> None:
    """Ctrl-C between two pieces ends the move; the report has what stays, as the kernel reports it then."""
    (main,) = threads_of(target.subject.pid)
    seen = ProcessMemory(None, {0: 8192}, (Region(0x10000, 0x12000, 4096, 8192),), 0)

    def interrupt(done: int, total: int) -> None:
        assert (done, total) == (0, 8192)
        raise KeyboardInterrupt

    pages, interrupted = move(main, replace(PLANNED, nodes=CpuSet({0}), node=0), seen, interrupt)
    assert interrupted
    assert (pages.before, pages.moved_bytes) == ({0: 8192}, 0)


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EPERM, ""), OSError(errno.ENOSYS, "")], ids=["EPERM", "ENOSYS"]
)
def test_refused_move(target: Target, error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    """If seccomp or the kernel refuses to move pages, all of them stay for this reason."""
    (main,) = threads_of(target.subject.pid)
    seen = ProcessMemory(None, {0: 8192}, (Region(0x10000, 0x12000, 4096, 8192),), 0)

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(seam.pages, "move_pages", refuse)
    monkeypatch.setattr(seam.pages, "memory_of", lambda *_: seen)
    moved, interrupted = move(main, PLANNED, seen, lambda *_: None)
    assert (moved.moved_bytes, moved.stays, interrupted) == (0, {"refused": 8192}, False)


@needs_two_cpus
def test_a_descendant_that_has_bound_itself() -> None:
    """A process that follows no target keeps its CPUs, and so do those below it."""
    code = "import subprocess; subprocess.run(['sh', '-c', 'echo $$; read line'])"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout
        child = int(process.stdout.readline())
        plan = replace(PLANNED, cpus=CpuSet({max(ALL)}))
        target = Target(subject=examine(process.pid, other_users=False), plan=plan, gpu_source="")
        attach(
            Aim((target,), (), frozenset({process.pid, child})),
            OPTIONS,
            progress=lambda *_: None,
        )
        found = [cpus_of(thread) for pid in (process.pid, child) for thread in threads_of(pid)]
        process.communicate("\n")
    assert found == [plan.cpus, ALL]
