"""Writer of what `numapin trace` makes: its folder and the report."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from numapin.base.files import make_own, unwritten, write_text_to
from numapin.base.stderr import say
from numapin.cli.output import emit, json_text, show
from numapin.errors import NumapinError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numapin.trace.report import TraceReport
    from numapin.trace.settings import Settings

REPORT: Final = "report.json"


def make_folders(outer: Path, folder: Path, settings: Settings) -> None:
    """Make the folder, which only this user may enter. Raises UsageError if it holds traces of an earlier run.

    Raises NumapinError if it, its parent or its contents belong to another user.
    """
    try:
        for made in (outer, folder, settings.loads):
            make_own(str(made))
        old = next(folder.glob("rank-*"), None)
    except OSError as error:
        raise NumapinError(f"{folder} cannot be used: {error.strerror}", "choose another with --output DIR") from None
    if old is not None:
        raise UsageError(f"--output {folder} holds {old.name} of an earlier run", "choose another folder")


@contextmanager
def stdout_to_stderr(*, wanted: bool) -> Iterator[int | None]:
    """Send the ranks' output to stderr during the block, which gets the descriptor for JSON."""
    if not wanted:
        yield None
        return
    try:
        kept = os.dup(1)
    except OSError as error:
        raise UsageError(
            f"--json: stdout cannot be written: {error.strerror}", "see report.json in --output DIR"
        ) from None
    try:
        os.dup2(2, 1)
        yield kept
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def write_report(report: TraceReport, folder: Path) -> None:
    """Write the report. Raises NumapinError, also if the folder belongs to another user."""
    try:
        make_own(str(folder.absolute()))
    except OSError as error:
        raise unwritten(str(folder), error, "choose another with --output DIR") from None
    text = json_text(report.to_json()).encode(errors="replace").decode()
    write_text_to(str(folder / REPORT), text, remedy=f"see the tables with: numapin trace --read {folder}")
    say(f"report and Chrome traces: {folder}")


def show_report(report: TraceReport, *, as_json: bool, to: int | None = None) -> None:
    """Print the report; JSON to the descriptor `to`, if there is one. Raises NumapinError."""
    if as_json and to is not None:
        with os.fdopen(os.dup(to), "w", encoding="utf-8", errors="replace") as file:
            file.write(json_text(report.to_json()))
    elif as_json:
        try:
            emit(json_text(report.to_json()))
        except OSError as error:
            hint = "write it elsewhere: numapin trace --read DIR --json > FILE"
            raise NumapinError(f"the report cannot be written to stdout: {error.strerror}", hint) from None
    else:
        from numapin.view.trace_table import trace_table

        show(trace_table(report))
