"""Binding a real process, and the commands that undo it; the rest is in tests/integration."""

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
    undo_commands,
)
from tests.unit.planned import PLANNED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
@pytest.mark.parametrize("error", [KeyboardInterrupt(), PermissionError(errno.EPERM, os.strerror(errno.EPERM))])
def test_a_change_that_is_not_made(target: Target, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before the first change, or a kernel that refuses it, leaves the CPUs as they were, and is reported."""

    def fail(thread: ThreadId, cpus: CpuSet) -> CpuSet:
        del thread, cpus
        raise error

    monkeypatch.setattr(seam.affinity, "set_cpus", fail)
    binder = Binder(target, OPTIONS)
    (process,) = binder.run()
    assert (process.threads, process.changed, _cpus(target)) == (1, 0, [ALL])
    assert binder.interrupted == isinstance(error, KeyboardInterrupt)
    if not binder.interrupted:
        assert process.cpus == ALL
        assert process.shortfalls[0].startswith(f"1 thread did not get CPUs {max(ALL)} (Operation not permitted)")


@needs_two_cpus
def test_cpus_that_a_process_does_not_get(target: Target) -> None:
    """Planned CPUs that the kernel does not give are a shortfall, and so are those that the plan lacks."""
    lacking, of_plan = max(ALL) + 1000, "the plan leaves out CPUs 9"
    wide = replace(target, plan=replace(target.plan, cpus=CpuSet({max(ALL), lacking})), shortfalls=(of_plan,))
    (process,) = Binder(wide, OPTIONS).run()
    assert (process.changed, process.cpus, _cpus(target)) == (1, CpuSet({max(ALL)}), [CpuSet({max(ALL)})])
    shortfall, other = process.shortfalls
    assert shortfall.startswith(f"1 thread did not get CPUs {lacking}, which the cpuset excludes")
    assert other == of_plan


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


@needs_two_cpus
def test_another_process_with_the_same_id(target: Target) -> None:
    """A process that started at another time is not touched, and neither is its thread; no CPU is no binding."""
    other = replace(target, subject=target.subject._replace(start=target.subject.start + 1))
    assert Binder(other, OPTIONS).run() == ()
    (thread,) = threads_of(target.subject.pid)
    with pytest.raises(Gone):
        set_cpus(thread._replace(start=thread.start + 1), CpuSet({max(ALL)}))
    with pytest.raises(OSError, match="no CPU is given"):
        set_cpus(thread, CpuSet())
    assert _cpus(target) == [ALL]


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (PermissionError(errno.EPERM, ""), "refused"),
        (OSError(errno.ENOSYS, ""), "refused"),
    ],
    ids=["Ctrl-C", "EPERM", "ENOSYS"],
)
def test_a_move_that_ends_early(
    target: Target, error: BaseException, stays: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, seccomp or the kernel ends the move; the report has what stays, and why."""
    (main,) = threads_of(target.subject.pid)
    seen = ProcessMemory(None, {0: 8192}, (Region(0x10000, 0x12000, 4096, 8192),), 0)

    def fail(*_: object, **__: object) -> None:
        raise error

    progress: Callable[..., None] = fail  # Ctrl-C comes between two pieces, of which the first has no page
    if stays == "refused":
        monkeypatch.setattr(seam.pages, "move_pages", fail)
        progress = lambda *_: None  # noqa: E731 - nothing is told
    monkeypatch.setattr(seam.pages, "memory_of", lambda *_: seen)
    pages, interrupted = move(main, PLANNED, seen, progress)
    assert (pages.before, pages.moved_bytes, set(pages.stays)) == ({0: 8192}, 0, {stays})
    assert interrupted == (stays == "interrupted")


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


# --- the commands that undo a change; tests/integration/test_attach.py runs some -------------------------------------


def test_processes_with_the_same_cpus_share_a_command() -> None:
    """Processes of which nothing was changed are left out, and so are threads that have the CPUs of their process."""
    both, one = CpuSet.parse("0-3,8"), CpuSet({3})
    former = {ThreadId(5, 5, 0): both, ThreadId(5, 6, 0): one, ThreadId(7, 7, 0): both, ThreadId(7, 8, 0): both}
    former |= {ThreadId(9, 9, 0): one, ThreadId(7, 4, 0): one}
    assert undo_commands(former, [ThreadId(5, 5, 0), ThreadId(7, 8, 0), ThreadId(7, 7, 0)]) == (
        "for pid in 5 7; do taskset -acp 0-3,8 $pid; done",
        "for tid in 6 4; do taskset -cp 3 $tid; done",
    )


def test_the_main_thread_was_not_changed() -> None:
    """Threads that start later get the former CPUs of a changed thread, and the main thread keeps its own."""
    main, changed = ThreadId(5, 5, 0), ThreadId(5, 6, 0)
    former = {main: CpuSet({3}), changed: CpuSet({0, 3})}
    assert undo_commands(former, [changed]) == ("taskset -acp 0,3 5", "taskset -cp 3 5")
    assert undo_commands(former, []) == ()
