"""Binding a real process, its memory, and the commands that undo it; the rest is in tests/integration."""

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
    pages,
    set_cpus,
    threads_of,
    undo_commands,
)
from tests.unit.planned import PLANNED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


ALL = CpuSet(os.sched_getaffinity(0))
OPTIONS = AttachOptions()


@pytest.fixture
def target() -> Iterator[Target]:
    """Give a process that is to be bound to the last CPU."""
    with subprocess.Popen(["sleep", "600"]) as process:
        subject = examine(process.pid)
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
            subject = examine(process.pid)
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
        target = Target(subject=examine(process.pid), plan=plan, gpu_source="")
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


# --- the memory of a process, from the text of its numa_maps and maps files ------------------------------------------


NODE_1 = CpuSet({1})
MAPS = """10000-20000 rw-p 00000000 00:00 0
30000-50000 rw-p 00000000 00:00 0    [heap]
60000-61000 r-xp 00000000 08:01 7    /usr/lib/libc.so.6
7f0000000000-7f0000200000 rw-p 00000000 00:00 0
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0    [stack]
"""
LINES = (
    "00010000 {0} anon=16 dirty=16 N0=10 N1=6 kernelpagesize_kB=4",
    "00030000 {0} heap anon=2 dirty=2 N0=2 kernelpagesize_kB=4",
    "00060000 {0} file=/usr/lib/libc.so.6 mapped=1 N0=1 kernelpagesize_kB=4",
    "7f0000000000 bind:0 anon=1 N0=1 kernelpagesize_kB=2048",
    "7ffd00000000 {0} stack anon=3 N1=3 kernelpagesize_kB=4",
)


def _memory(root: Path, policy: str = "default") -> pages.ProcessMemory:
    """Return the memory of a process that is written below `root`."""
    folder = root / "proc/10"
    folder.mkdir(parents=True)
    (folder / "numa_maps").write_text("\n".join(LINES).format(policy))
    (folder / "maps").write_text(MAPS)
    memory = pages.memory_of(10, NODE_1, root=root)
    assert memory is not None
    return memory


def test_memory(tmp_path: Path) -> None:
    """Pages elsewhere are to be moved, but for files and for what has a policy of its own."""
    memory = _memory(tmp_path)
    assert memory.policy_name == "default"
    assert memory.by_node == {0: 12 * 4096 + (2 << 20), 1: 9 * 4096}
    assert memory.regions == (pages.Region(0x10000, 0x20000, 4096, 40960), pages.Region(0x30000, 0x50000, 4096, 8192))
    assert (memory.own_bytes, memory.far_bytes) == (2 << 20, (2 << 20) + 12 * 4096)


def test_policy_of_the_process(tmp_path: Path) -> None:
    """Memory under the policy of the process itself is to be moved, although the policy names nodes."""
    memory = _memory(tmp_path, "bind:0")
    assert memory.own_bytes == 0
    assert len(memory.regions) == 3
    (shortfall,) = pages.policy_shortfalls(memory, PLANNED)
    assert "its memory policy is bind:0, and no other process can change that" in shortfall


@pytest.mark.parametrize("policy", ["default", "local", "prefer:1", "bind:1"])
def test_policies_that_agree_with_the_plan(tmp_path: Path, policy: str) -> None:
    """With these policies, new pages go to the planned node."""
    assert pages.policy_shortfalls(_memory(tmp_path, policy), PLANNED) == ()


def test_pieces_cover_the_region() -> None:
    """Each page's address is in one piece, a huge page's too; a piece has at most 32 MiB of small pages."""
    region = pages.Region(0x10000, 0x10000 + (100 << 20), 4096, 0)
    found = list(region.pieces)
    assert [address for piece in found for address in piece] == list(range(region.start, region.end, 4096))
    assert max(map(len, found)) * 4096 == 32 << 20
    assert [piece.start % (2 << 20) for piece in found[1:]] == [0] * 3


def test_planned_nodes() -> None:
    """Pages belong on the nodes of the policy, or else on the GPU's node; without both, nowhere."""
    assert pages.planned_nodes(PLANNED) == NODE_1
    assert pages.planned_nodes(replace(PLANNED, nodes=CpuSet(), node=0)) == CpuSet({0})
    assert pages.planned_nodes(replace(PLANNED, nodes=CpuSet(), node=None)) == CpuSet()
