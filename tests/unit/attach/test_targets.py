"""The processes of a run that another user may have prepared."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from numapin.attach import targets
from numapin.attach.targets import Wish, aim_at_run
from numapin.errors import MachineError, UsageError
from numapin.launcher import run_folder
from numapin.observe.find_job import RunningJob, find_run
from numapin.plan.model import Plan
from numapin.plan.request import Bind, Request
from numapin.rank import handover
from numapin.system import proc
from tests.needs import needs_root
from tests.unit.planned import PLANNED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WISH = Wish(request=Request(), is_default=True, gpus=None, gpu_nodes=(), other_users=False)
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
            aim_at_run(path, WISH, {})
        assert "--other-users" in caught.value.hint
        with pytest.raises(MachineError, match=rf"belongs to uid 65534, names process {PARENT}, which does not"):
            aim_at_run(path, replace(WISH, other_users=True), {})


def test_the_own_folder(tmp_path: Path) -> None:
    """The ranks of this user's own run are taken, with the plan of the run."""
    with _run(tmp_path, os.geteuid()) as path:
        (target,) = aim_at_run(path, WISH, {}).targets
        assert find_run(path, {}).owner == os.geteuid()
    assert (target.subject.pid, target.plan) == (PARENT, PLANNED)


def test_a_process_id_that_is_used_again() -> None:
    """A process that has got the id of a rank since the files were read is not taken for the rank."""
    plan = Plan(bind=Bind.NODE, memory=PLANNED.memory, ranks=(PLANNED,), warnings=())
    job = RunningJob(name="run-x", plan=plan, pids={0: PARENT}, applied={}, owner=os.geteuid())
    assert targets._subject(replace(job, starts={0: _start(PARENT)}), 0, PARENT, WISH).pid == PARENT
    with pytest.raises(UsageError, match="rank 0 of run-x has ended"):
        targets._subject(replace(job, starts={0: 1}), 0, PARENT, WISH)
