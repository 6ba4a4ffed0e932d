"""The report on a job's loaders: which records are read, when it is given, and what --strict makes of it."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from numapin.errors import BindingRefused
from tests.unit.observe.seam import SCHEMA, handover, read_loaders, reporting_loaders


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
