"""The processes that may be changed, and the GPU of each; binding a real one, its memory, and how that is undone.

The rest is in tests/integration.
"""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from numapin import Bind, Plan
from numapin.errors import MachineError, UsageError
from tests.machines.grids import grid
from tests.needs import needs_two_cpus
from tests.recorded.screens import compare_answers
from tests.unit.attach import seam
from tests.unit.attach.seam import Aim, AttachOptions, CpuSet, Target, affinity, bind, examine, proc, targets
from tests.unit.planned import PLANNED

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
    return [affinity.cpus_of(thread) for thread in affinity.threads_of(target.subject.pid)]


@needs_two_cpus
@pytest.mark.parametrize("error", [KeyboardInterrupt(), PermissionError(errno.EPERM, os.strerror(errno.EPERM))])
def test_a_change_that_is_not_made(target: Target, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before the first change, or a kernel that refuses it, leaves the CPUs as they were, and is reported."""

    def fail(thread: affinity.ThreadId, cpus: CpuSet) -> CpuSet:
        del thread, cpus
        raise error

    monkeypatch.setattr(affinity, "set_cpus", fail)
    binder = bind.Binder(target, OPTIONS)
    (process,) = binder.run()
    assert (process.threads, process.changed, _cpus(target)) == (1, 0, [ALL])
    assert binder.interrupted == isinstance(error, KeyboardInterrupt)
    if not binder.interrupted:
        assert process.cpus == ALL
        assert process.shortfalls[0].startswith(f"1 thread did not get CPUs {max(ALL)} (Operation not permitted)")


@needs_two_cpus
def test_ctrl_c_right_after_a_change(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has got its CPUs, but was not looked at again, is among those that are to be undone."""
    (thread,) = affinity.threads_of(target.subject.pid)
    looks = iter((ALL,))

    def look_once(_: affinity.ThreadId) -> CpuSet:
        for cpus in looks:
            return cpus
        raise KeyboardInterrupt

    monkeypatch.setattr(affinity, "cpus_of", look_once)
    binder = bind.Binder(target, OPTIONS)
    binder.run()
    assert CpuSet(os.sched_getaffinity(thread.tid)) == target.plan.cpus
    assert (binder.interrupted, seam.undo_commands(binder.former, binder.changed)) == (
        True,
        (f"taskset -acp {ALL} {thread.pid}",),
    )


@needs_two_cpus
def test_a_child_that_starts_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child is bound, too, if it starts after the first look, and before its parent is bound."""
    set_cpus, children = affinity.set_cpus, list[int]()
    line, pipe = "read line; sleep 600 & echo $!; read line; kill $!", subprocess.PIPE
    with subprocess.Popen(["sh", "-c", line], stdin=pipe, stdout=pipe, text=True) as process:

        def start_a_child_first(thread: affinity.ThreadId, cpus: CpuSet) -> CpuSet:
            assert process.stdin
            assert process.stdout
            if not children:
                process.stdin.write("\n")
                process.stdin.flush()
                children.append(int(process.stdout.readline()))
            return set_cpus(thread, cpus)

        monkeypatch.setattr(affinity, "set_cpus", start_a_child_first)
        plan = replace(PLANNED, cpus=CpuSet({max(ALL)}))
        found = bind.Binder(Target(subject=examine(process.pid), plan=plan, gpu_source=""), OPTIONS).run()
        assert [each.pid for each in found] == [process.pid, *children]
        assert [os.sched_getaffinity(pid) for pid in (process.pid, *children)] == [set(plan.cpus)] * 2
        process.communicate("\n")


@needs_two_cpus
def test_a_thread_that_has_the_cpus_already() -> None:
    """The commands that undo the rest give it its own CPUs back: the one for its process changes it, too.

    Threads that are on fewer CPUs than planned are left alone and counted, unless they are to be widened.
    """
    own = {max(ALL)}
    code = "import os, sys, threading; thread = threading.Thread(target=sys.stdin.read); thread.start(); "
    code += f"os.sched_setaffinity(thread.native_id, {own}); print(thread.native_id, flush=True)"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as process:
        assert process.stdout
        tid = int(process.stdout.readline())
        target = Target(subject=examine(process.pid), plan=replace(PLANNED, cpus=CpuSet(own)), gpu_source="")
        binder = bind.Binder(target, OPTIONS)
        (bound,) = binder.run()
        wide = replace(target, plan=replace(PLANNED, cpus=ALL))
        (left,), (widened,) = (bind.Binder(wide, AttachOptions(widen=widen)).run() for widen in (False, True))
        process.communicate(b"")
    found = [(each.threads, each.changed, each.narrower) for each in (bound, left, widened)]
    assert found == [(2, 1, 0), (2, 0, 2), (2, 2, 0)]
    undo = (f"taskset -acp {ALL} {process.pid}", f"taskset -cp {max(ALL)} {tid}")
    assert seam.undo_commands(binder.former, binder.changed) == undo


@needs_two_cpus
def test_cpus_that_a_process_does_not_get(target: Target) -> None:
    """Planned CPUs that the kernel does not give are a shortfall, and so are those that the plan lacks."""
    lacking, of_plan = max(ALL) + 1000, "the plan leaves out CPUs 9"
    wide = replace(target, plan=replace(target.plan, cpus=CpuSet({max(ALL), lacking})), shortfalls=(of_plan,))
    (process,) = bind.Binder(wide, OPTIONS).run()
    assert (process.changed, process.cpus, _cpus(target)) == (1, CpuSet({max(ALL)}), [CpuSet({max(ALL)})])
    shortfall, other = process.shortfalls
    assert shortfall.startswith(f"1 thread did not get CPUs {lacking}, which the cpuset excludes")
    assert other == of_plan


def test_targets_that_all_ended() -> None:
    """If no target is left to bind, the error names them all."""
    ended = []
    for words in ("process {} ended before it was bound", "processes {} ended before they were bound"):
        with subprocess.Popen(["sleep", "600"]) as process:
            ended.append(Target(subject=examine(process.pid), plan=PLANNED, gpu_source=""))
            process.kill()
        with pytest.raises(UsageError) as error:
            bind.attach(Aim(tuple(ended), ()), AttachOptions(dry_run=True), progress=lambda *_: None)
        pids = ", ".join(str(target.subject.pid) for target in ended)
        assert error.value.message == f"{words.format(pids)}; nothing was changed"
        assert "pgrep" in error.value.hint, "a process that was given by its id need not be one of a run"


@needs_two_cpus
def test_another_process_with_the_same_id(target: Target) -> None:
    """A process that started at another time is not touched, and neither is its thread; no CPU is no binding."""
    other = replace(target, subject=target.subject._replace(start=target.subject.start + 1))
    assert bind.Binder(other, OPTIONS).run() == ()
    (thread,) = affinity.threads_of(target.subject.pid)
    with pytest.raises(seam.Gone):
        affinity.set_cpus(thread._replace(start=thread.start + 1), CpuSet({max(ALL)}))
    with pytest.raises(OSError, match="no CPU is given"):
        affinity.set_cpus(thread, CpuSet())
    assert _cpus(target) == [ALL]


@needs_two_cpus
def test_another_process_with_the_id_of_a_bound_one(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of a process that has the id of a bound one by then are neither counted nor moved."""
    (bound,) = affinity.threads_of(target.subject.pid)
    monkeypatch.setattr(bind, "is_same", lambda thread: thread != bound)
    done = bind.attach(Aim((target,), ()), OPTIONS, progress=lambda *_: None)
    assert (done.ranks[0].processes[0].pages, done.interrupted) == (None, False)


@pytest.mark.parametrize(
    ("error", "migrate", "interrupted", "shortfalls"),
    [
        (seam.Gone(), False, False, ()),
        (KeyboardInterrupt(), False, True, ()),
        (PermissionError(errno.EPERM, "x"), False, False, ("its memory cannot be read: [Errno 1] x",)),
        (
            None,
            True,
            False,
            ("its memory cannot be read, so no page was moved; run this as the job's user, or as root",),
        ),
    ],
    ids=["ended", "Ctrl-C", "EPERM", "hidden, to be moved"],
)
def test_memory_that_cannot_be_read(
    error: BaseException | None,
    shortfalls: tuple[str, ...],
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    *,
    migrate: bool,
    interrupted: bool,
) -> None:
    """What was bound is reported all the same, with the reason, and only Ctrl-C ends the rest."""

    def fail(*_: object) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(bind, "memory_of", fail)
    done = bind.attach(Aim((target,), ()), AttachOptions(migrate=migrate), progress=lambda *_: None)
    (process,) = done.ranks[0].processes
    assert (process.pages, process.shortfalls, done.interrupted) == (None, shortfalls, interrupted)
    assert done.exact == (not shortfalls and not interrupted)


@pytest.mark.parametrize("options", [OPTIONS, AttachOptions(dry_run=True, migrate=True)], ids=["bind", "dry run"])
def test_memory_that_is_only_counted(target: Target, options: AttachOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --migrate, and in a dry run, no page moves."""
    monkeypatch.setattr(bind, "move", lambda *_: pytest.fail("pages move"))
    (process,) = bind.attach(Aim((target,), ()), options, progress=lambda *_: None).ranks[0].processes
    assert process.pages is None or (sum(process.pages.before.values()) > 0 and process.pages.after is None)


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
    (main,) = affinity.threads_of(target.subject.pid)
    seen = bind.ProcessMemory(None, {0: 8192}, (bind.Region(0x10000, 0x12000, 4096, 8192),), 0)

    def fail(*_: object, **__: object) -> None:
        raise error

    progress: Callable[..., None] = fail  # Ctrl-C comes between two pieces, of which the first has no page
    if stays == "refused":
        monkeypatch.setattr(bind, "move_pages", fail)
        progress = lambda *_: None  # noqa: E731 - nothing is told
    monkeypatch.setattr(bind, "memory_of", lambda *_: seen)
    pages, interrupted = bind.move(main, PLANNED, seen, progress)
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
        bind.attach(Aim((target,), (), frozenset({process.pid, child})), OPTIONS, progress=lambda *_: None)
        found = [affinity.cpus_of(thread) for pid in (process.pid, child) for thread in affinity.threads_of(pid)]
        process.communicate("\n")
    assert found == [plan.cpus, ALL]


def test_commands_that_undo_a_change() -> None:
    """Processes of which nothing was changed are left out, and so are threads that have the CPUs of their process.

    Processes with the same CPUs share a command. Threads that start later get the former CPUs of a changed thread, and
    a main thread that was not changed keeps its own. tests/integration/test_attach.py runs some.
    """
    both, one = CpuSet.parse("0-3,8"), CpuSet({3})
    of = {
        f"{pid} {tid}": affinity.ThreadId(pid, tid, 0) for pid, tid in ((5, 5), (5, 6), (7, 7), (7, 8), (9, 9), (7, 4))
    }
    former = dict(zip(of.values(), (both, one, both, both, one, one), strict=True))
    assert seam.undo_commands(former, [of["5 5"], of["7 8"], of["7 7"]]) == (
        "for pid in 5 7; do taskset -acp 0-3,8 $pid; done",
        "for tid in 6 4; do taskset -cp 3 $tid; done",
    )
    former = {of["5 5"]: one, of["5 6"]: CpuSet({0, 3})}
    assert seam.undo_commands(former, [of["5 6"]]) == ("taskset -acp 0,3 5", "taskset -cp 3 5")
    assert seam.undo_commands(former, []) == ()


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


def _memory(root: Path, policy: str = "default") -> bind.ProcessMemory:
    folder = root / "proc/10"
    folder.mkdir(parents=True)
    (folder / "numa_maps").write_text("\n".join(LINES).format(policy))
    (folder / "maps").write_text(MAPS)
    memory = bind.memory_of(10, NODE_1, root=root)
    assert memory is not None
    return memory


def test_memory(tmp_path: Path) -> None:
    """Pages elsewhere are to be moved, but for files and for what has a policy of its own."""
    memory = _memory(tmp_path)
    assert memory.policy_name == "default"
    assert memory.by_node == {0: 12 * 4096 + (2 << 20), 1: 9 * 4096}
    assert memory.regions == (bind.Region(0x10000, 0x20000, 4096, 40960), bind.Region(0x30000, 0x50000, 4096, 8192))
    assert (memory.own_bytes, memory.far_bytes) == (2 << 20, (2 << 20) + 12 * 4096)


def test_policy_of_the_process(tmp_path: Path) -> None:
    """Memory under the policy of the process itself is to be moved, although the policy names nodes.

    Under others, new pages go to the planned node.
    """
    memory = _memory(tmp_path, "bind:0")
    assert (memory.own_bytes, len(memory.regions)) == (0, 3)
    (shortfall,) = bind.policy_shortfalls(memory, PLANNED)
    assert "its memory policy is bind:0, and no other process can change that" in shortfall
    for policy in ("default", "local", "prefer:1", "bind:1"):
        assert bind.policy_shortfalls(_memory(tmp_path / policy, policy), PLANNED) == ()


@pytest.mark.parametrize("page_bytes", [4096, 2 << 20])
def test_pieces_cover_the_region(page_bytes: int) -> None:
    """Each page's address is in one piece, a huge page's too; a piece has at most 32 MiB, after which Ctrl-C counts."""
    begin = 4 * page_bytes
    region = bind.Region(begin, begin + (100 << 20), page_bytes, 0)
    found = list(region.pieces)
    assert [address for piece in found for address in piece] == list(range(region.start, region.end, page_bytes))
    assert max(map(len, found)) * page_bytes == 32 << 20
    assert [piece.start % (2 << 20) for piece in found[1:]] == [0] * 3


# --- the processes that may be changed --------------------------------------------------------------------------------


PID = 1 << 30  # above the highest process id, so that it has no threads
V1 = ("cgroup /sys/fs/cgroup cgroup rw,cpuset 0 0\n", "4:cpuset:/job/step\n", "cpuset.effective_cpus")
V2 = ("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n", "0::/job/step\n", "cpuset.cpus.effective")
BLANK = ("cgroup2 /sys/fs/cgroup/of\\040a\\040pod cgroup2 rw 0 0\n", "0::/step\n", "cpuset.cpus.effective")
PARENT = os.getppid()


def _start(pid: int) -> int:
    return proc.stat(proc.folder_of(pid)).start


def _job(bound: frozenset[int] = frozenset()) -> seam.RunningJob:
    """Return a run of which this process's parent is rank 0; there are two GPUs, on two nodes."""
    assert PLANNED.gpu is not None
    other = replace(
        PLANNED, local_rank=1, gpu=replace(PLANNED.gpu, index=2), cpus=CpuSet({9}), node=2, nodes=CpuSet({2})
    )
    plan = Plan(bind=Bind.NODE, memory=PLANNED.memory, ranks=(PLANNED, other), warnings=())
    return seam.RunningJob(name="run-x", plan=plan, pids={0: PARENT}, applied={}, owner=os.geteuid(), bound=bound)


def test_ranks_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank gets its plan in the run again; processes of the run that have bound themselves follow no other.

    A process that has got the id of a rank since the files were read is not the rank. A warning names a rank that ends
    meanwhile; if there is no other, the error says so.
    """
    with subprocess.Popen(["sleep", "600"]) as other:
        ended = {1: _start(other.pid)}
        other.kill()
    for job, warnings in (
        (_job(frozenset({PARENT, 7})), ()),
        (replace(_job(), starts={0: _start(PARENT)}), ()),
        (
            replace(_job(), pids={0: PARENT, 1: other.pid}, starts={0: _start(PARENT)} | ended),
            ("rank 1 of run-x has ended",),
        ),
    ):
        monkeypatch.setattr(targets, "find_run", lambda *_, job=job: job)
        aim = targets.aim_at_run("run-x", {})
        assert [(target.subject.pid, target.plan) for target in aim.targets] == [(PARENT, PLANNED)]
        assert (aim.warnings, aim.apart) == (warnings, job.bound)
    for job in (replace(_job(), starts={0: 1}), replace(_job(), pids={1: other.pid}, starts=ended)):
        monkeypatch.setattr(targets, "find_run", lambda *_, job=job: job)
        with pytest.raises(UsageError, match="run-x: all of its ranks have ended"):
            targets.aim_at_run("run-x", {})


def test_a_run_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even root follows another user's folder, which could name any process of root."""
    monkeypatch.setattr(targets, "find_run", lambda *_: replace(_job(), owner=os.geteuid() + 1))
    with pytest.raises(MachineError, match=rf"run-x belongs to another user \(uid {os.geteuid() + 1}\)") as caught:
        targets.aim_at_run("run-x", {})
    assert caught.value.hint == "run this as that user"
    assert targets.why_untouchable(None) == "several users"  # of a set-user-ID program


@pytest.mark.parametrize("num_gpus", [0, 2])
def test_a_process_whose_gpu_is_unknown(num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint names --gpu only where there are GPUs, and how ranks are to be started; a rank needs no GPU then.

    --gpu names one GPU for all processes, or one for each.
    """
    monkeypatch.setattr(targets, "discover", lambda **_: grid(gpus=range(num_gpus)))
    echo = "echo there; exec sleep 600"
    with subprocess.Popen(["sh", "-c", echo], env={"PATH": os.environ["PATH"]}, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()  # /proc shows an environment a little after exec
        with pytest.raises(UsageError, match=rf"the GPU of process {process.pid} \(.+\) is unknown") as caught:
            targets.aim_at_processes([process.pid], AttachOptions(), {})
        if num_gpus:
            with pytest.raises(UsageError, match=r"^--gpu names 2 GPUs for 1 process\n") as surplus:
                targets.aim_at_processes([process.pid], AttachOptions(gpus=("0", "1")), {})
            assert surplus.value.hint == "name one GPU, or one for each process"
        process.kill()
    assert (f"numapin attach --pid {process.pid} --gpu N" in caught.value.hint) == bool(num_gpus)
    assert "LOCAL_RANK" in caught.value.hint
    assert "numapin exec -- COMMAND" in caught.value.hint


def test_own_process() -> None:
    """This process itself is refused, and is not among the others: it is about to end."""
    with pytest.raises(UsageError, match="is numapin itself"):
        examine(os.getpid())
    assert os.getpid() not in targets.other_processes()


@pytest.mark.parametrize(
    ("mounts", "cgroup", "file", "place"),
    [(*V1, "job/step"), (*V1, "job"), (*V2, "job/step"), (*V2, "job"), (*BLANK, "of a pod/step"), (*BLANK, "of a pod")],
)
def test_cpuset_of_a_process(tmp_path: Path, mounts: str, cgroup: str, file: str, place: str) -> None:
    """The nearest cgroup that lists CPUs is the cpuset; one that is outside the namespace is unknown."""
    for path, text in (
        ("proc/mounts", mounts),
        (f"proc/{PID}/cgroup", cgroup),
        (f"proc/{PID + 1}/cgroup", cgroup.replace("::/", "::/../").replace("cpuset:/", "cpuset:/../")),
        (f"sys/fs/cgroup/{place}/{file}", "4-7\n"),
        (f"sys/fs/cgroup/{file}", "0-15\n"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert targets.cpus_of_cpuset(PID, seam.Tree(str(tmp_path))) == CpuSet(range(4, 8))
    assert targets.cpus_of_cpuset(PID + 1, seam.Tree(str(tmp_path))) == CpuSet()


def test_missing_cpus() -> None:
    """CPUs on which the process has threads, but which are not known, are a shortfall."""
    pid = os.getpid()
    (told,) = targets.shortfalls_of(pid, CpuSet())
    assert told.startswith(f"the plan leaves out CPUs {targets.cpus_of_cpuset(pid)}: ")
    assert targets.shortfalls_of(pid, targets.cpus_of_cpuset(pid)) == ()


# --- the GPU of a process, from its environment and from the driver --------------------------------------------------


MACHINE = grid(gpus=[0, 0, 1, 1])


def _answer(line: str) -> str:
    """Return the GPU of a process with these variables that computes on these GPUs, and the source.

    With "ranks", return the GPUs of so many ranks, some of which were given one.
    """
    words = dict(word.split("=", 1) for word in shlex.split(line))
    if "ranks" in words:
        visible = [int(index) for index in words["visible"].split(",") if index]
        given = {int(pair[0]): int(pair[-1]) for pair in words["given"].split(",") if pair}
        return str(seam.gpus_of_ranks(visible, given, int(words["ranks"])))
    computing = [MACHINE.gpus[int(index)].uuid or "" for index in words.pop("computing", "").split(",") if index]
    machine = grid() if words.pop("host", "") else MACHINE
    gpu, source = seam.gpu_of(machine, words, computing)
    return f"{gpu and gpu.label}: {source}"


def test_the_gpu_of_a_process() -> None:
    """The driver's word comes first, then LOCAL_RANK among the visible GPUs, then the only visible one."""
    compare_answers(Path(__file__).with_name("gpus.txt"), _answer)
