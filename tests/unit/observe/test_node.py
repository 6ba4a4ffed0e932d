"""Where a job comes from, and the folders of runs that users may fill with anything."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from numapin import Bind, Memory, Plan
from tests.unit.observe.seam import (
    NodeFollower,
    RunningJob,
    Sampler,
    handover,
    node,
    origin_of,
    proc,
    running_folders,
)
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


@contextmanager
def _live_run(folder: Path, *, pid: int | None = None, num_ranks: int = 1) -> Iterator[int]:
    """Make an active run whose first rank has a record; yield its process. `pid` is the id that the record names."""
    folder.mkdir(parents=True)
    ranks = tuple(replace(PLANNED, local_rank=number) for number in range(num_ranks))
    plan = Plan(bind=Bind.NODE, memory=Memory.PREFERRED, ranks=ranks)
    with _rank({"NUMAPIN_RUN_DIR": str(folder)}) as rank, (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record = {
            "schema": "numapin.observed/1",
            "local_rank": 0,
            "rank": 0,
            "restart": 0,
            "pid": pid or rank,
            "start": None if pid else proc.stat(proc.folder_of(rank)).start,
            "host": os.uname().nodename,
            "applied": {},
        }
        (folder / f"{handover.OBSERVED}0-0.json").write_text(json.dumps(record))
        (folder / handover.PLAN).write_text(json.dumps(plan.to_json()))
        yield rank


def _runs_of(follower: NodeFollower) -> list[str]:
    follower.look()
    return [top.run for top, _ in follower.look()]


def test_a_thread_is_no_rank(tmp_path: Path) -> None:
    """Each rank lists its process's threads, so a record for each thread would cost their number squared."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with _live_run(tmp_path / "run-threads", pid=thread.native_id), _live_run(tmp_path / "run-process"):
            assert {"run-threads", "run-process"} & {*_runs_of(NodeFollower(dict, {}))} == {"run-process"}
    finally:
        done.set()
        thread.join()


def test_too_many_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of all runs of a user are bounded; a run that exceeds the bound is counted, also if it grows later."""
    monkeypatch.setattr(node, "_MOST_RANKS", 3)
    monkeypatch.setattr(node, "_SEARCH_EVERY_S", 0.0)
    small, large = tmp_path / "run-2", tmp_path / "run-1"
    with _live_run(small, num_ranks=2), _live_run(large, num_ranks=2):
        follower = NodeFollower(dict, {})
        assert {"run-1", "run-2"} & {*_runs_of(follower)} == {"run-2"}
        assert {str(small), str(large)} & follower.unread == {str(large)}
        ranks = tuple(replace(PLANNED, local_rank=number) for number in range(4))
        plan = Plan(bind=Bind.NODE, memory=Memory.PREFERRED, ranks=ranks)
        (small / handover.PLAN).write_text(json.dumps(plan.to_json()))
        follower.look()
        assert "run-2" not in _runs_of(follower)
        assert str(small) in follower.unread


def test_a_folder_that_is_spelled_in_several_ways(tmp_path: Path) -> None:
    """It is one run."""
    folder = tmp_path / "a" / "run-x"
    with _live_run(folder), _rank({"NUMAPIN_RUN_DIR": f"{tmp_path}/a/./run-x"}):
        assert [name for name in running_folders() if name.endswith("run-x")] == [str(folder)]


def test_another_process_with_the_id_of_a_rank(plan: Plan) -> None:
    """A rank whose recorded process had another start time is gone, and stays so."""
    with _rank({}) as pid:
        start = proc.stat(proc.folder_of(pid)).start
        jobs = [RunningJob(name="x", plan=plan, pids={0: pid}, applied={}, starts={0: s}) for s in (start, start - 1)]
        same, other = (Sampler(job, dict) for job in jobs)
        assert same.sample().gone == frozenset()
        assert [other.sample().gone for _ in range(2)] == [{0}, {0}]
