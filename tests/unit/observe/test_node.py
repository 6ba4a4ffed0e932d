"""Where a job comes from, the folders of runs that users may fill with anything, and ranks that end and restart."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from numapin import Bind, Memory, Plan
from numapin.errors import UsageError
from tests.unit.observe.seam import RunningJob, _follow, handover, node, proc
from tests.unit.planned import PLANNED


def _plan(num_ranks: int = 1) -> Plan:
    ranks = tuple(replace(PLANNED, local_rank=number) for number in range(num_ranks))
    return Plan(bind=Bind.NODE, memory=Memory.PREFERRED, ranks=ranks)


def _job(pids: dict[int, int], **more: Any) -> RunningJob:
    return RunningJob(name="run-x", plan=_plan(len(pids)), pids=pids, applied={}, **more)


@contextmanager
def _rank(environ: Mapping[str, str]) -> Iterator[int]:
    with subprocess.Popen(
        ["cat"], env=dict(environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"there?")
        process.stdout.read(1)  # its environment is that of the program by now
        yield process.pid
        process.communicate()


_IN_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "train-0-abcde"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (None, None, None, {})),
        ({"SLURM_JOB_ID": "4711", "RANK": "9"}, ("4711", None, None, {0: 9})),
        ({"PBS_JOBID": "12.head"}, ("12.head", None, None, {})),
        ({"LSB_JOBID": "7", "RANK": "many"}, ("7", None, None, {})),
        ({"FLUX_JOB_ID": "f1"}, ("f1", None, None, {})),
        ({"HOSTNAME": "node7"}, (None, None, None, {})),
        (_IN_POD, (None, "train-0-abcde", None, {})),
        ({**_IN_POD, "POD_NAME": "train-0", "POD_NAMESPACE": "ml"}, (None, "train-0", "ml", {})),
    ],
)
def test_the_batch_systems_job_and_the_pod(environ: Mapping[str, str], expected: tuple[object, ...]) -> None:
    """They are those of the environment with which the rank started."""
    with _rank(environ) as pid:
        origin = node.origin_of(_job({0: pid}, owner=os.getuid()), {})
    assert (origin.job_id, origin.pod, origin.namespace, origin.ranks) == expected
    assert origin.host == os.uname().nodename
    assert origin.user


def test_a_rank_that_is_gone_says_nothing() -> None:
    """Another process may have its id by now."""
    with _rank({"SLURM_JOB_ID": "4711"}) as pid:
        origin = node.origin_of(_job({0: pid}, gone=frozenset({0})), {})
    assert (origin.job_id, origin.user) == (None, None)


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
        (folder / handover.PLAN).write_text(json.dumps(_plan(num_ranks).to_json()))
        yield rank


@pytest.fixture
def follower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> node.NodeFollower:
    """Return a follower of the runs of this test; others on this host may have runs, too."""
    found = node.running_folders
    monkeypatch.setattr(
        node, "running_folders", lambda: {run: owner for run, owner in found().items() if run.startswith(str(tmp_path))}
    )
    return node.NodeFollower(dict, {})


def _runs_of(follower: node.NodeFollower) -> list[str]:
    follower.look()
    return [top.run for top, _ in follower.look()]


def test_a_thread_is_no_rank(tmp_path: Path, follower: node.NodeFollower) -> None:
    """Each rank lists its process's threads, so a record for each thread would cost their number squared."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with _live_run(tmp_path / "run-threads", pid=thread.native_id), _live_run(tmp_path / "run-process"):
            assert _runs_of(follower) == ["run-process"]
    finally:
        done.set()
        thread.join()


def test_too_many_ranks(tmp_path: Path, follower: node.NodeFollower, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of all runs of a user are bounded; a run that exceeds the bound is counted, also if it grows later."""
    monkeypatch.setattr(node, "_MOST_RANKS", 3)
    monkeypatch.setattr(node, "_SEARCH_EVERY_S", 0.0)
    small, large = tmp_path / "run-2", tmp_path / "run-1"
    with _live_run(small, num_ranks=2), _live_run(large, num_ranks=2):
        assert (_runs_of(follower), follower.unread) == (["run-2"], {str(large)})
        (small / handover.PLAN).write_text(json.dumps(_plan(4).to_json()))
        follower.look()
        assert _runs_of(follower) == ["run-1"]
        assert follower.unread == {str(small)}


def test_a_folder_that_is_spelled_in_several_ways(tmp_path: Path) -> None:
    """It is one run."""
    folder = tmp_path / "a" / "run-x"
    with _live_run(folder), _rank({"NUMAPIN_RUN_DIR": f"{tmp_path}/a/./run-x"}):
        assert [name for name in node.running_folders() if name.endswith("run-x")] == [str(folder)]


def test_another_process_with_the_id_of_a_rank() -> None:
    """A rank whose recorded process had another start time is gone, and stays so; nothing is read of its process."""
    with _rank({}) as pid:
        start = proc.stat(proc.folder_of(pid)).start
        same, other = (node.Sampler(_job({0: pid}, starts={0: s}), dict) for s in (start, start - 1))
        assert same.sample().gone == frozenset()
        assert [other.sample().gone for _ in range(2)] == [{0}, {0}]
        assert node.Sampler(_job({0: pid}, gone=frozenset({0})), dict).sample().ranks[0].processes == ()


def test_ranks_that_restart_or_start_later() -> None:
    """When one rank of two is gone, its new process is looked for; a run is read again until all ranks have started.

    Another launcher names no rank that it starts.
    """
    with _rank({}) as first, _rank({}) as second, subprocess.Popen(["true"]) as ended:
        ended.wait()
        both = _job({0: first, 1: second}, owner=os.getuid())
        follow = _follow(replace(both, pids={0: first, 1: ended.pid}), lambda: both, dict, lambda: None)
        assert [rank.is_gone for rank in next(follow).ranks] == [False, True]
        assert [(rank.pid, rank.is_gone) for rank in next(follow).ranks] == [(first, False), (second, False)]
        follow = _follow(replace(both, pids={0: first}), lambda: both, dict, lambda: None)
        assert [len(next(follow).ranks) for _ in range(2)] == [1, 2]
        foreign = _job({0: first, 1: ended.pid})
        follow = _follow(foreign, lambda: pytest.fail("it is looked for"), dict, lambda: None)
        assert [[rank.is_gone for rank in next(follow).ranks] for _ in range(2)] == [[False, True]] * 2


def test_a_launcher_that_was_killed() -> None:
    """A rank that outlives its run is shown; when all are gone, `top` ends."""

    def over() -> RunningJob:
        raise UsageError("the run is over", "")

    with subprocess.Popen(["true"]) as ended:
        ended.wait()
        with _rank({}) as first:
            follow = _follow(_job({0: first, 1: ended.pid}, owner=os.getuid()), over, dict, lambda: time.sleep(0.05))
            assert [rank.is_gone for _ in range(2) for rank in next(follow).ranks] == [False, True] * 2
        *_, last = follow
        assert last.has_ended
