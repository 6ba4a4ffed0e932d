"""The processes of a run that another user may have prepared."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from numapin import Bind, Plan
from numapin.errors import MachineError, UsageError
from tests.needs import needs_root
from tests.unit.attach.seam import (
    AttachOptions,
    CpuSet,
    RunningJob,
    aim_at_processes,
    aim_at_run,
    find_run,
    handover,
    proc,
    run_folder,
    targets,
)
from tests.unit.attach.test_gpus import machine
from tests.unit.planned import PLANNED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NOBODY = 65534
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
    """Root follows another user's folder only with --other-users, and then only to processes of that user."""
    with _run(tmp_path, NOBODY) as path:
        with pytest.raises(MachineError, match=r"the folder of run-.* belongs to another user \(uid 65534\)") as caught:
            aim_at_run(path, {}, other_users=False)
        assert "--other-users" in caught.value.hint
        with pytest.raises(MachineError, match=rf"belongs to uid 65534, names process {PARENT}, which does not"):
            aim_at_run(path, {}, other_users=True)


def test_the_own_folder(tmp_path: Path) -> None:
    """The ranks of this user's own run are taken, with the plan of the run."""
    with _run(tmp_path, os.geteuid()) as path:
        (target,) = aim_at_run(path, {}, other_users=False).targets
        assert find_run(path, {}).owner == os.geteuid()
    assert (target.subject.pid, target.plan) == (PARENT, PLANNED)


def _job(bound: frozenset[int] = frozenset()) -> RunningJob:
    """Return a run of which this process's parent is rank 0; there are two GPUs, on two nodes."""
    assert PLANNED.gpu is not None
    other = replace(
        PLANNED, local_rank=1, gpu=replace(PLANNED.gpu, index=2), cpus=CpuSet({9}), node=2, nodes=CpuSet({2})
    )
    plan = Plan(bind=Bind.NODE, memory=PLANNED.memory, ranks=(PLANNED, other), warnings=())
    return RunningJob(name="run-x", plan=plan, pids={0: PARENT}, applied={}, owner=os.geteuid(), bound=bound)


def test_a_process_id_that_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has got the id of a rank since the files were read is not taken for the rank."""
    monkeypatch.setattr(targets, "find_run", lambda *_: replace(_job(), starts={0: _start(PARENT)}))
    assert [target.subject.pid for target in aim_at_run("run-x", {}, other_users=False).targets] == [PARENT]
    monkeypatch.setattr(targets, "find_run", lambda *_: replace(_job(), starts={0: 1}))
    with pytest.raises(UsageError, match="run-x: all of its ranks have ended"):
        aim_at_run("run-x", {}, other_users=False)


def test_processes_that_have_bound_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank gets its plan in the run again; processes of the run that have bound themselves follow no other."""
    monkeypatch.setattr(targets, "find_run", lambda *_: _job(frozenset({PARENT, 7})))
    aim = aim_at_run("run-x", {}, other_users=False)
    (target,) = aim.targets
    assert (target.plan, aim.apart) == (PLANNED, frozenset({PARENT, 7}))


def test_a_rank_that_ends_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks are taken, and a warning names it; if there is no other, the error says so."""
    with subprocess.Popen(["sleep", "600"]) as other:
        start = _start(other.pid)
        other.kill()
    job = replace(_job(), pids={0: PARENT, 1: other.pid}, starts={0: _start(PARENT), 1: start})
    monkeypatch.setattr(targets, "find_run", lambda *_: job)
    aim = aim_at_run("run-x", {}, other_users=False)
    assert [target.subject.pid for target in aim.targets] == [PARENT]
    assert aim.warnings == ("rank 1 of run-x has ended",)
    job = replace(job, pids={1: other.pid})
    with pytest.raises(UsageError, match="run-x: all of its ranks have ended"):
        aim_at_run("run-x", {}, other_users=False)


def test_more_gpus_than_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """--gpu names one GPU for all processes, or one for each."""
    monkeypatch.setattr(targets, "discover", lambda **_: machine(2))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        with pytest.raises(UsageError, match=r"^--gpu names 2 GPUs for 1 process\n") as caught:
            aim_at_processes([process.pid], AttachOptions(gpus=("0", "1")), {})
        process.communicate()
    assert caught.value.hint == "name one GPU, or one for each process"


@pytest.mark.parametrize("num_gpus", [0, 2])
def test_a_process_whose_gpu_is_unknown(num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint names --gpu only where there are GPUs, and how ranks are to be started; a rank needs no GPU then."""
    monkeypatch.setattr(targets, "discover", lambda **_: machine(num_gpus))
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
