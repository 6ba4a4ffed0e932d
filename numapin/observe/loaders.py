"""The loaders of a job that has ended: which took numapin's data path, and why others did not."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from numapin.base.files import is_writable
from numapin.base.records import read_record
from numapin.base.strict_json import decode
from numapin.data.usage import SCHEMA, JobUsage, LoaderUsage
from numapin.errors import BindingRefused, MachineFileError
from numapin.rank import handover

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_REMEDY: Final = "to accept torch's own data path, run without --strict"


@contextmanager
def reporting_loaders(run_dir: str, *, strict: bool, report: Callable[[str], None]) -> Iterator[None]:
    """Report the loaders of a run when the body, which runs it, has ended in any way.

    Nothing is reported if no rank has started, or if the body raised before any loader was recorded.

    Raises BindingRefused under `strict` if the body succeeded and a loader did not take numapin's path, or if that is
    unknown.
    """
    try:
        yield
    except BaseException:
        _report(run_dir, report, succeeded=False)
        raise
    shortfall = _report(run_dir, report, succeeded=True)
    if strict and shortfall:
        raise BindingRefused(f"--strict: {shortfall}", _REMEDY)


def _report(run_dir: str, report: Callable[[str], None], *, succeeded: bool) -> str:
    """Report the loaders of a run; return what `--strict` does not accept, or an empty text."""
    try:
        usage = read_loaders(run_dir)
    except OSError as error:
        unknown = f"which loaders used numapin's data path is unknown: {run_dir}: {error.strerror}"
        report(unknown)
        return unknown
    if not usage.ranks or not (succeeded or usage.usages or usage.unread):
        return ""
    report(usage.line())
    return "" if usage.all_took_it else f"--dataloader numapin did not reach every batch: {usage.line()}"


def read_loaders(run_dir: str) -> JobUsage:
    """Read the records of a run. Raises OSError if its folder cannot be read."""
    usages, unread = [], []
    for path in sorted(handover.records(run_dir, handover.LOADERS)):
        try:
            text = handover.read_text(path)
            usages.append(read_record(LoaderUsage, text, source=path, hint="", schema=SCHEMA))
        except (OSError, MachineFileError) as error:
            unread.append(f"{Path(path).name} cannot be read: {error}")
    if not is_writable(str(Path(run_dir) / handover.LOADERS)):
        unread.append(f"records are missing: {run_dir} cannot be written")
    ranks = []  # that have started
    for path in handover.records(run_dir):
        with suppress(OSError, ValueError):
            record = decode(handover.read_text(path))
            rank = record.get("rank") if isinstance(record, dict) else None
            ranks += [rank] if isinstance(rank, int) else []
    return JobUsage(usages=tuple(usages), ranks=frozenset(ranks), unread=tuple(unread))
