"""Where a job comes from, and the folders of runs that users may fill with anything."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from numapin import Bind, Memory, Plan
from tests.unit.observe.seam import RunningJob, handover, origin_of
from tests.unit.planned import PLANNED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


@contextmanager
def _rank(environ: Mapping[str, str]) -> Iterator[int]:
    """Start a process with these variables; yield its id."""
    command = [sys.executable, "-S", "-c", "print(flush=True); input()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=dict(environ), stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()  # its environment is that of the program by now
        yield process.pid
        process.communicate(b"\n")


_IN_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "train-0-abcde"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (None, None, None, {})),
        ({"SLURM_JOB_ID": "4711", "RANK": "9"}, ("4711", None, None, {0: 9})),
        ({"PBS_JOBID": "12.head"}, ("12.head", None, None, {})),
        ({"LSB_JOBID": "7", "RANK": "many"}, ("7", None, None, {})),
        ({"FLUX_JOB_ID": "f" * 200}, ("f" * 128, None, None, {})),
        ({"HOSTNAME": "node7"}, (None, None, None, {})),
        (_IN_POD, (None, "train-0-abcde", None, {})),
        ({**_IN_POD, "POD_NAME": "train-0", "POD_NAMESPACE": "ml"}, (None, "train-0", "ml", {})),
    ],
)
def test_the_batch_systems_job_and_the_pod(
    environ: Mapping[str, str], expected: tuple[object, ...], plan: Plan
) -> None:
    """They are those of the environment with which the rank started."""
    with _rank(environ) as pid:
        origin = origin_of(RunningJob(name="run-x", plan=plan, pids={0: pid}, applied={}, owner=os.getuid()), {})
    assert (origin.job_id, origin.pod, origin.namespace, origin.ranks) == expected
    assert origin.host == os.uname().nodename
    assert origin.user


def test_a_rank_that_is_gone_says_nothing(plan: Plan) -> None:
    """Another process may have its id by now."""
    with _rank({"SLURM_JOB_ID": "4711"}) as pid:
        job = RunningJob(name="x", plan=plan, pids={0: pid}, applied={}, gone=frozenset({0}))
        origin = origin_of(job, {})
    assert (origin.job_id, origin.user) == (None, None)


@pytest.fixture
def plan() -> Plan:
    """Return the plan of one rank."""
    return Plan(bind=Bind.NODE, memory=Memory.PREFERRED, ranks=(PLANNED,))


def test_a_folder_with_more_files_than_a_run_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its names are not all read."""
    monkeypatch.setattr(handover, "_MOST_FILES", 3)
    for number in range(3):
        (tmp_path / f"observed-{number}.json").touch()
    assert len(handover.records(str(tmp_path))) == 3
    (tmp_path / "one-more").touch()
    with pytest.raises(OSError, match="more than 3 files"):
        handover.records(str(tmp_path))
