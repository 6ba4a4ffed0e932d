"""The processes that may be changed: of another user's run, with the CPUs of a cpuset; and the GPU of each."""

from __future__ import annotations

import os
import shlex
import subprocess
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from numapin import Bind, Plan
from numapin.errors import MachineError, UsageError
from tests.machines.grids import grid
from tests.needs import needs_root
from tests.recorded.screens import compare_answers
from tests.unit.attach.seam import (
    AttachOptions,
    CpuSet,
    RunningJob,
    Tree,
    aim_at_processes,
    aim_at_run,
    cpus_of_cpuset,
    examine,
    gpu_of,
    gpus_of_ranks,
    handover,
    other_processes,
    proc,
    run_folder,
    shortfalls_of,
    targets,
    why_untouchable,
)
from tests.unit.planned import PLANNED

if TYPE_CHECKING:
    from collections.abc import Iterator


NOBODY = 65534
ALL = CpuSet(os.sched_getaffinity(0))
PID = 1 << 30  # above the highest process id, so that it has no threads
V1 = ("cgroup /sys/fs/cgroup cgroup rw,cpuset 0 0\n", "4:cpuset:/job/step\n", "cpuset.effective_cpus")
V2 = ("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n", "0::/job/step\n", "cpuset.cpus.effective")
BLANK = ("cgroup2 /sys/fs/cgroup/of\\040a\\040pod cgroup2 rw 0 0\n", "0::/step\n", "cpuset.cpus.effective")
PARENT = os.getppid()


def _start(pid: int) -> int:
    return proc.stat(proc.folder_of(pid)).start


@contextmanager
def _run(folder: Path, owner: int) -> Iterator[str]:
    """Make an active run of a user that names the parent of this process as its rank 0."""
    plan = Plan(bind=Bind.NODE, memory=PLANNED.memory, ranks=(PLANNED,), warnings=())
    with run_folder.run_directory({"NUMAPIN_RUN_DIR": str(folder)}) as path:
        record = {"schema": "numapin.observed/1", "local_rank": 0, "restart": 0, "pid": PARENT, "start": _start(PARENT)}
        handover.write_json(path, handover.PLAN, plan.to_json())
        handover.write_json(path, "observed-0-0.json", {**record, "host": os.uname().nodename, "applied": {}})
        os.chown(path, owner, -1)
        yield path


@needs_root
def test_a_folder_of_another_user(tmp_path: Path) -> None:
    """Not even root follows another user's folder, which could name any process of root."""
    with _run(tmp_path, NOBODY) as path:
        with pytest.raises(MachineError, match=r"the folder of run-.* belongs to another user \(uid 65534\)") as caught:
            aim_at_run(path, {})
        assert caught.value.hint == "run this as that user"


def _job(bound: frozenset[int] = frozenset()) -> RunningJob:
    """Return a run of which this process's parent is rank 0; there are two GPUs, on two nodes."""
    assert PLANNED.gpu is not None
    other = replace(
        PLANNED, local_rank=1, gpu=replace(PLANNED.gpu, index=2), cpus=CpuSet({9}), node=2, nodes=CpuSet({2})
    )
    plan = Plan(bind=Bind.NODE, memory=PLANNED.memory, ranks=(PLANNED, other), warnings=())
    return RunningJob(name="run-x", plan=plan, pids={0: PARENT}, applied={}, owner=os.geteuid(), bound=bound)


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
        aim = aim_at_run("run-x", {})
        assert [(target.subject.pid, target.plan) for target in aim.targets] == [(PARENT, PLANNED)]
        assert (aim.warnings, aim.apart) == (warnings, job.bound)
    for job in (replace(_job(), starts={0: 1}), replace(_job(), pids={1: other.pid}, starts=ended)):
        monkeypatch.setattr(targets, "find_run", lambda *_, job=job: job)
        with pytest.raises(UsageError, match="run-x: all of its ranks have ended"):
            aim_at_run("run-x", {})


def test_more_gpus_than_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """--gpu names one GPU for all processes, or one for each."""
    monkeypatch.setattr(targets, "discover", lambda **_: grid(gpus=[0, 1]))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        with pytest.raises(UsageError, match=r"^--gpu names 2 GPUs for 1 process\n") as caught:
            aim_at_processes([process.pid], AttachOptions(gpus=("0", "1")), {})
        process.communicate()
    assert caught.value.hint == "name one GPU, or one for each process"


@pytest.mark.parametrize("num_gpus", [0, 2])
def test_a_process_whose_gpu_is_unknown(num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint names --gpu only where there are GPUs, and how ranks are to be started; a rank needs no GPU then."""
    monkeypatch.setattr(targets, "discover", lambda **_: grid(gpus=range(num_gpus)))
    echo = "echo there; exec sleep 600"
    with subprocess.Popen(["sh", "-c", echo], env={"PATH": os.environ["PATH"]}, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()  # /proc shows an environment a little after exec
        with pytest.raises(UsageError, match=rf"the GPU of process {process.pid} \(.+\) is unknown") as caught:
            aim_at_processes([process.pid], AttachOptions(), {})
        process.kill()
    assert (f"numapin attach --pid {process.pid} --gpu N" in caught.value.hint) == bool(num_gpus)
    assert "LOCAL_RANK" in caught.value.hint
    assert "numapin exec -- COMMAND" in caught.value.hint


def test_own_process() -> None:
    """This process itself is refused, and is not among the others: it is about to end."""
    with pytest.raises(UsageError, match="is numapin itself"):
        examine(os.getpid())
    assert os.getpid() not in other_processes()


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
    assert cpus_of_cpuset(PID, Tree(str(tmp_path))) == CpuSet(range(4, 8))
    assert cpus_of_cpuset(PID + 1, Tree(str(tmp_path))) == CpuSet()


def test_missing_cpus() -> None:
    """CPUs on which the process has threads, but which are not known, are a shortfall."""
    pid = os.getpid()
    (told,) = shortfalls_of(pid, CpuSet())
    assert told.startswith(f"the plan leaves out CPUs {cpus_of_cpuset(pid)}: ")
    assert shortfalls_of(pid, cpus_of_cpuset(pid)) == ()


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
        return str(gpus_of_ranks(visible, given, int(words["ranks"])))
    computing = [MACHINE.gpus[int(index)].uuid or "" for index in words.pop("computing", "").split(",") if index]
    machine = grid() if words.pop("host", "") else MACHINE
    gpu, source = gpu_of(machine, words, computing)
    return f"{gpu and gpu.label}: {source}"


def test_the_gpu_of_a_process() -> None:
    """The driver's word comes first, then LOCAL_RANK among the visible GPUs, then the only visible one."""
    compare_answers(Path(__file__).with_name("gpus.txt"), _answer)


def test_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is this user's if its real and effective users are; root has no right to others'."""
    for own, uid, problem in (
        (1000, 1000, None),
        (1000, 1001, "another user (uid 1001)"),
        (0, 1001, "another user (uid 1001)"),
        (0, None, "several users"),
        (0, 0, None),
    ):
        monkeypatch.setattr(os, "geteuid", lambda own=own: own)
        assert why_untouchable(uid) == problem
