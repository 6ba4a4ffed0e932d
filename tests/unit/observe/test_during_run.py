"""Verification of an active run: what is reported when, and that it never ends the run; its loaders."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import DEFAULT, Mock

import pytest

from numapin.errors import BindingRefused, NumapinError, Stopped
from tests.unit.observe.seam import (
    SCHEMA,
    Observed,
    VerifyReport,
    during_run,
    find_job,
    handover,
    observe,
    read,
    run_folder,
)
from tests.unit.observe.test_find_job import _plan, _record
from tests.waiting import wait_until


class Told:
    def __init__(self) -> None:
        self.reports: list[tuple[VerifyReport, float]] = []
        self.warnings: list[str] = []

    def what(self, *, after_s: float = 0, report: Path | None = None) -> during_run.Watching:
        """Return settings that report to this object."""
        return during_run.Watching(
            after_s=after_s, report=report, tell=lambda *told: self.reports.append(told), warn=self.warnings.append
        )


@contextmanager
def _run(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """Make an active run, and the process of a rank; yield the folder and the process id."""
    with (
        run_folder.run_directory({"TMPDIR": str(tmp_path)}) as folder,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as rank,
    ):
        handover.write_json(folder, handover.PLAN, _plan(1))
        yield folder, rank.pid
        rank.communicate(b"")


def _wait_for(calls: Sequence[object], number: int = 1) -> None:
    assert wait_until(lambda: len(calls) >= number, limit_s=300), f"{len(calls)} instead of {number}"


def _fail(folder: str, pid: int, what: during_run.Watching, *, after: Sequence[object]) -> None:
    with during_run.watching(folder, 1, what):
        _record(folder, 0, pid)
        _wait_for(after)
        raise LookupError("the run's own")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Sequence[object]:
    """Let the watch look at once and again and again; give a list that grows with each time it reads the run."""
    reading = Mock(wraps=find_job.read_run)
    monkeypatch.setattr(during_run, "_RETRY_S", 0.01)
    monkeypatch.setattr(during_run, "read_run", reading)
    return reading.mock_calls


def test_last_look_is_told_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: Sequence[object]) -> None:
    """Later looks are silent; the last one is reported at the end, with its age."""
    monkeypatch.setattr(during_run, "_AGAIN_S", 0.01)
    told = Told()
    with _run(tmp_path) as (folder, pid), during_run.watching(folder, 1, told.what()):
        _record(folder, 0, pid)
        _wait_for(told.reports)
        _wait_for(reads, len(reads) + 3)
        assert len(told.reports) == 1
    assert [age_s > 0 for _, age_s in told.reports] == [False, True]


@pytest.mark.parametrize(
    ("num_ranks", "is_recorded", "num_reads", "warning"),
    [
        (1, True, 0, "it ended within 60 s, before it was looked at; look earlier: --verify-after"),
        (1, True, 1, "it ended within 60 s, before it was looked at; look earlier: --verify-after"),
        (1, False, 0, "not all of its ranks had started"),
        (2, True, 1, "not all of its ranks had started"),
    ],
)
def test_run_that_ends_before_the_first_look(
    tmp_path: Path, num_ranks: int, num_reads: int, warning: str, reads: Sequence[object], *, is_recorded: bool
) -> None:
    """It gets a warning and no verdict; its report, not an earlier run's, has what was requested and applied."""
    told, path = Told(), tmp_path / "report.json"
    path.write_text('{"holds": true}')
    with _run(tmp_path) as (folder, pid), during_run.watching(folder, num_ranks, told.what(after_s=60, report=path)):
        if is_recorded:
            _record(folder, 0, pid)
        _wait_for(reads, len(reads) + num_reads)  # it has seen that the rank is there
    assert (told.reports, told.warnings) == ([], [f"the run was not verified: {warning}"])
    report = json.loads(path.read_text())
    assert (report["schema"], report["holds"]) == ("numapin.report/1", None)
    (rank,) = report["ranks"]
    assert (rank["requested"]["local_rank"], rank["requested"]["cpus"]) == (0, _plan(1)["ranks"][0]["cpus"])
    seen = (pid, {"n": pid}) if is_recorded else (None, None)
    assert (rank["pid"], rank["applied"], rank["observed"], rank["findings"]) == (*seen, {"processes": []}, [])


def test_run_that_is_stopped_before_the_first_look(tmp_path: Path) -> None:
    """The user knows that it ended early; the report has the ranks and no verdict."""
    told, path = Told(), tmp_path / "report.json"
    with _run(tmp_path) as (folder, pid):
        _record(folder, 0, pid)
        with pytest.raises(Stopped), during_run.watching(folder, 1, told.what(after_s=60, report=path)):
            raise Stopped(signal.SIGINT, "")
    report = json.loads(path.read_text())
    assert (told.warnings, report["holds"], report["ranks"][0]["pid"]) == ([], None, pid)


@pytest.mark.parametrize("what", ["report", "plan"])
def test_what_goes_wrong_is_a_warning(tmp_path: Path, what: str, reads: Sequence[object]) -> None:
    """An unwritable report and a broken run directory do not disturb the run; they are warnings at its end.

    If the run itself failed, its own error is raised.
    """
    told = Told()
    with _run(tmp_path) as (folder, pid):
        if what == "plan":
            (tmp_path / folder / "plan.json").write_text("{")
        report = tmp_path / ("is-a-folder" if what == "report" else "report.json")
        (tmp_path / "is-a-folder").mkdir()
        with pytest.raises(LookupError, match="the run's own"):
            _fail(folder, pid, told.what(report=report), after=told.reports if what == "report" else reads)
    (warning,) = told.warnings
    assert what == "plan" or "--report" in warning
    assert ("is-a-folder cannot be written" if what == "report" else "plan.json: not JSON") in warning


def test_a_look_that_blocks_does_not_hold_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a warning; its report, which it writes after the run, keeps the failure that the end has added."""
    looks, release = list[object](), threading.Event()

    def look(pids: Mapping[int, int], *, gone: frozenset[int]) -> Observed:
        looks.append(pids)
        release.wait()
        return observe(pids, gone=gone)

    monkeypatch.setattr(read, "observe", look)
    monkeypatch.setattr(during_run, "_JOIN_S", 0.2)
    told, path = Told(), tmp_path / "report.json"
    what = replace(told.what(report=path), outcome_of=lambda error: {"failure": str(error)})
    with _run(tmp_path) as (folder, pid):
        with pytest.raises(LookupError, match="the run's own"):
            _fail(folder, pid, what, after=looks)
        (warning,) = told.warnings
        assert "did not end within 0.2 s" in warning
        assert json.loads(path.read_text())["ranks"] == []
        release.set()
        assert wait_until(lambda: json.loads(path.read_text())["ranks"] != [], limit_s=300)
    assert json.loads(path.read_text())["failure"] == "the run's own"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU here: it cannot be narrowed")
@pytest.mark.parametrize("for_good", [False, True])
def test_a_moment_on_one_cpu_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, for_good: bool) -> None:
    """CUDA and NCCL narrow a main thread while they start: it is read once more before it is reported."""
    allowed = os.sched_getaffinity(0)

    def look(pids: Mapping[int, int], *, gone: frozenset[int]) -> Observed:
        observed = observe(pids, gone=gone)
        if not for_good:
            os.sched_setaffinity(pids[0], allowed)
        return observed

    monkeypatch.setattr(read, "observe", look)
    told = Told()
    with _run(tmp_path) as (folder, pid):
        os.sched_setaffinity(pid, {min(allowed)})
        with during_run.watching(folder, 1, told.what()):
            _record(folder, 0, pid)
            _wait_for(told.reports)
    ((report, _),) = told.reports
    assert report.holds is not for_good


def test_a_rank_that_ends_early_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is gone for long is in the report. The others' pages are read once, and again if that fails."""
    look = Mock(wraps=observe, side_effect=[NumapinError("it cannot be read"), DEFAULT])
    monkeypatch.setattr(read, "observe", look)
    told, path = Told(), tmp_path / "report.json"
    with _run(tmp_path) as (folder, pid):
        handover.write_json(folder, handover.PLAN, _plan(2))
        _record(folder, 0, pid)
        _record(folder, 1, 4194305)  # above the largest pid
        watch = during_run._RunWatch(Path(folder), 2, told.what(report=path))
        assert [watch._look_if_settled() for _ in range(2)] == [during_run._RETRY_S] * 2
        monkeypatch.setattr(during_run, "_GONE_S", 0)
        assert [watch._look_if_settled() for _ in range(2)] == [during_run._AGAIN_S] * 2
    ((report, _),) = told.reports
    assert [rank.holds for rank in report.ranks] == [True, False]
    assert report.ranks[1].findings[0].what == "the process is gone"
    assert look.call_count == 2
    assert json.loads(path.read_text())["holds"] is False


# --- the report on a job's loaders: which records are read, when it is given, and what --strict makes of it ----------


def write_start(folder: Path) -> None:
    handover.write_json(str(folder), "observed-0-0.json", {"rank": 0})


def write_usage(folder: Path) -> None:
    """Write what a rank with a loader on the path, and none beside it, records."""
    content = {"rank": 0, "restart": 0, "is_complete": True, "num_loaders": 1, "num_batches": 2, "outside": []}
    handover.write_json(str(folder), "loaders-0-0-77.json", {"schema": SCHEMA, **content, "others": []})


def report(folder: Path, *, strict: bool = False) -> list[str]:
    told: list[str] = []
    with during_run.reporting_loaders(str(folder), strict=strict, report=told.append):
        pass
    return told


def test_a_folder_that_cannot_be_written() -> None:
    """Ranks may have left no records in it, so --strict is not content; as root, another user runs this."""
    with TemporaryDirectory() as folder:
        write_start(Path(folder))
        write_usage(Path(folder))
        Path(folder).chmod(0o500)
        child = os.fork()
        if not child:
            try:
                _exit_as_read(folder)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        Path(folder).chmod(0o700)


def _exit_as_read(folder: str) -> None:
    """End this process with 0 if the folder is found not to be writable, by a user who is not root."""
    if not os.geteuid():
        os.chown(folder, 65534, 65534)
        os.setuid(65534)
    usage = during_run.read_loaders(folder)
    is_found = usage.line().endswith(f"records are missing: {folder} cannot be written")
    os._exit(0 if is_found and not usage.all_took_it else 1)


def test_a_failed_run(tmp_path: Path) -> None:
    """The line comes if there is a record, e.g. not after Ctrl-C during imports; the error stays the run's own."""
    assert report(tmp_path, strict=True) == []
    write_start(tmp_path)
    for lines in ([], ["1 loader, 2 batches by numapin"]):
        told: list[str] = []
        with (
            pytest.raises(KeyboardInterrupt),
            during_run.reporting_loaders(str(tmp_path), strict=True, report=told.append),
        ):
            raise KeyboardInterrupt
        assert told == lines
        write_usage(tmp_path)


def test_records_that_cannot_be_read(tmp_path: Path) -> None:
    """A record that a rank did not write, and a folder that is gone, are named instead of raising."""
    write_start(tmp_path)
    (tmp_path / "loaders-0-0-1.json").write_text('{"schema": "other/1"}')
    (tmp_path / "observed-1-0.json").write_text("[")
    (line,) = report(tmp_path)
    assert "no record of a DataLoader can be read; loaders-0-0-1.json cannot be read: " in line
    write_usage(tmp_path)
    with pytest.raises(BindingRefused, match="cannot be read"):  # what is unknown is not as asked for
        report(tmp_path, strict=True)
    (line,) = report(tmp_path / "gone")
    assert line == f"which loaders used numapin's data path is unknown: {tmp_path / 'gone'}: No such file or directory"
    with pytest.raises(BindingRefused, match=f"--strict: {line}"):
        report(tmp_path / "gone", strict=True)
