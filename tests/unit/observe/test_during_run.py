"""Verification of an active run: what is reported when, and that it never ends the run; its loaders."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

from numapin.errors import BindingRefused, NumapinError
from tests.unit.observe.seam import (
    SCHEMA,
    during_run,
    handover,
    observe,
    read,
    read_loaders,
    read_run,
    reporting_loaders,
    run_folder,
)
from tests.unit.observe.test_find_job import _plan, _record
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.unit.observe.seam import Observed, RunningJob, VerifyReport


class Told:
    """The reports and warnings so far."""

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
    """Wait for this many entries of a list."""
    assert wait_until(lambda: len(calls) >= number, limit_s=300), f"{len(calls)} instead of {number}"


def _fail(folder: str, pid: int, what: during_run.Watching, *, after: Sequence[object]) -> None:
    with during_run.watching(folder, 1, what):
        _record(folder, 0, pid)
        _wait_for(after)
        raise LookupError("the run's own")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Let the watch look at once and again and again; give a list that grows with each time it reads the run."""
    found: list[object] = []
    monkeypatch.setattr(during_run, "_RETRY_S", 0.01)

    def reading(folder: Path) -> RunningJob:
        found.append(folder)
        return read_run(folder)

    monkeypatch.setattr(during_run, "read_run", reading)
    return found


def test_last_look_is_told_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[object]) -> None:
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
    tmp_path: Path, num_ranks: int, num_reads: int, warning: str, reads: list[object], *, is_recorded: bool
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


@pytest.mark.parametrize("what", ["report", "plan"])
def test_what_goes_wrong_is_a_warning(tmp_path: Path, what: str, reads: list[object]) -> None:
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
    """A read that never returns does not keep the run from ending, and gives a warning."""
    blocked, release = threading.Event(), threading.Event()

    def block(*_: object, **__: object) -> None:
        blocked.set()
        release.wait()
        raise NumapinError("released")

    monkeypatch.setattr(read, "observe", block)
    monkeypatch.setattr(during_run, "_JOIN_S", 0.2, raising=False)
    told = Told()
    with _run(tmp_path) as (folder, pid):
        with during_run.watching(folder, 1, told.what()):
            _record(folder, 0, pid)
            blocked.wait()
        release.set()
    (warning,) = told.warnings
    assert "did not end within 0.2 s" in warning


def test_a_look_after_the_end_keeps_how_the_run_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that outlasts the run writes its report with the failure that the end has added."""
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
        assert json.loads(path.read_text())["ranks"] == []
        release.set()
        assert wait_until(lambda: json.loads(path.read_text())["ranks"] != [], limit_s=60)
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
    """A rank that is gone for long is in the report, and the other ranks' pages are read only once."""
    looks: list[frozenset[int]] = []

    def look(pids: Mapping[int, int], *, gone: frozenset[int]) -> Observed:
        looks.append(gone)
        return observe(pids, gone=gone)

    monkeypatch.setattr(read, "observe", look)
    told, path = Told(), tmp_path / "report.json"
    with _run(tmp_path) as (folder, pid):
        handover.write_json(folder, handover.PLAN, _plan(2))
        _record(folder, 0, pid)
        _record(folder, 1, 4194305)  # above the largest pid
        watch = during_run._RunWatch(Path(folder), 2, told.what(report=path))
        assert [watch._look_if_settled() for _ in range(2)] == [during_run._RETRY_S] * 2
        monkeypatch.setattr(during_run, "_GONE_S", 0)
        assert watch._look_if_settled() == during_run._AGAIN_S
    ((report, _),) = told.reports
    assert [rank.holds for rank in report.ranks] == [True, False]
    assert report.ranks[1].findings[0].what == "the process is gone"
    assert len(looks) == 1
    assert json.loads(path.read_text())["holds"] is False


# --- the report on a job's loaders: which records are read, when it is given, and what --strict makes of it ----------


def write_start(folder: Path, rank: int, restart: int = 0) -> None:
    """Write what a rank records at its start."""
    handover.write_json(str(folder), f"observed-{rank}-{restart}.json", {"rank": rank})


def write_usage(folder: Path, rank: int, *, num_others: int = 0) -> None:
    """Write what a rank with a loader on the path, and others, records."""
    other = {"number": num_others, "reason": "num_workers=0 (train.py:12)"}
    content = {"rank": rank, "restart": 0, "is_complete": True, "num_loaders": 1, "num_batches": 2, "outside": []}
    record = {"schema": SCHEMA, **content, "others": [other] if num_others else []}
    handover.write_json(str(folder), f"loaders-{rank}-0-77.json", record)


def report(folder: Path, error: BaseException | None = None, *, strict: bool = False) -> list[str]:
    """Return what is told about a run that ends with this error."""
    told: list[str] = []
    try:
        with reporting_loaders(str(folder), strict=strict, report=told.append):
            if error is not None:
                raise error  # noqa: TRY301 - the run's
    except BaseException as raised:
        if raised is not error:
            raise
    return told


def test_a_folder_that_cannot_be_written() -> None:
    """Ranks may have left no records in it, so --strict is not content; as root, another user runs this."""
    with TemporaryDirectory() as folder:
        write_start(Path(folder), 0)
        write_usage(Path(folder), 0)
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
    usage = read_loaders(folder)
    is_found = usage.line().endswith(f"records are missing: {folder} cannot be written")
    os._exit(0 if is_found and not usage.all_took_it else 1)


def test_a_failed_run(tmp_path: Path) -> None:
    """The line comes if there is a record, e.g. not after Ctrl-C during imports; the error stays the run's own."""
    write_start(tmp_path, 0)
    assert report(tmp_path, KeyboardInterrupt(), strict=True) == []
    write_usage(tmp_path, 0)
    assert report(tmp_path, KeyboardInterrupt(), strict=True) == ["1 loader, 2 batches by numapin"]


def test_without_a_rank(tmp_path: Path) -> None:
    """Nothing is reported of a run in which no rank started."""
    assert report(tmp_path, strict=True) == []


def test_records_that_cannot_be_read(tmp_path: Path) -> None:
    """A record that a rank did not write, and a folder that is gone, are named instead of raising."""
    write_start(tmp_path, 0)
    (tmp_path / "loaders-0-0-1.json").write_text('{"schema": "other/1"}')
    (tmp_path / "observed-1-0.json").write_text("[")
    (line,) = report(tmp_path)
    assert "no process recorded a DataLoader; loaders-0-0-1.json cannot be read: " in line
    write_usage(tmp_path, 0)
    with pytest.raises(BindingRefused, match="cannot be read"):  # what is unknown is not as asked for
        report(tmp_path, strict=True)
    (line,) = report(tmp_path / "gone")
    assert line == f"which loaders used numapin's data path is unknown: {tmp_path / 'gone'}: No such file or directory"
    with pytest.raises(BindingRefused, match=f"--strict: {line}"):
        report(tmp_path / "gone", strict=True)
