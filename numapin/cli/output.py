"""Writers to stdout, stderr and the files that options name.

Control characters in names and messages are removed here before they reach a terminal.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

import click

from numapin.base import formats
from numapin.base.files import OpenPlace, is_writable, write_text_to
from numapin.base.strict_json import encode
from numapin.base.text import ascii_escapes, printable, printable_lines
from numapin.errors import BindingRefused, NumapinError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path
    from typing import Any, TextIO

    from _typeshed import ReadableBuffer
    from rich.console import Console, RenderableType

    from numapin.bench.model import BenchReport
    from numapin.compare.report import CompareReport

_FILE_WIDTH = 160  # columns in files and pipes, which do not wrap
_ITEM = "\n    "
_TRAILING = re.compile(r"(?: |\x1b\[[0-9;]*m)+$", re.MULTILINE)  # with the escapes of colors between the blanks


def json_text(content: object) -> str:
    """Return JSON as all commands print and write it, with invisible characters escaped."""
    return ascii_escapes(encode(content, ascii_only=False)) + "\n"


def prepare_streams() -> None:
    """Make stdout and stderr write everything, and replace the characters that their encoding lacks."""
    formats.register_stand_ins()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # what is behind the stream was replaced since Python opened it
                stream.reconfigure(errors=formats.STAND_INS)
                if isinstance(stream.buffer, io.RawIOBase):  # PYTHONUNBUFFERED
                    # The first stream stays open for those that know it, such as logging.
                    raw = io.FileIO(stream.fileno(), "w", closefd=False)
                    whole = io.TextIOWrapper(_WriteAll(raw), stream.encoding, stream.errors, write_through=True)
                    setattr(sys, name, whole)


class _WriteAll(io.BufferedWriter):
    """Writes all bytes before it returns. A raw file drops what follows when a signal interrupts a write."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Write, and flush."""
        written = super().write(data)
        self.flush()
        return written


def emit(text: str, *, encoding: str = "utf-8") -> None:
    """Print data on stdout: exact to a file or pipe, visible characters only to a terminal.

    JSON, pictures and scripts are UTF-8 by definition, in any locale. Lines with file names have the names' encoding.
    """
    if sys.stdout is None:
        return  # closed by the parent process
    formats.register_stand_ins()
    exact = text.encode(encoding, formats.STAND_INS)
    shown = printable_lines(text) if sys.stdout.isatty() else exact
    click.echo(shown, file=sys.stdout, nl=False, color=True)  # else click removes escapes


def show(renderable: RenderableType, *, err: bool = False) -> None:
    """Print a table or tree, as wide as the terminal. Write errors are ignored on stderr: they must not stop a job."""
    stream = sys.stderr if err else sys.stdout
    if stream is None:
        return  # closed by the parent process
    console = _console(stream)
    with suppress(OSError) if err else nullcontext():
        with console.capture() as capture:
            console.print(visible(renderable))
        # rich fills the cells of a table with blanks, which would be copied with the text
        stream.write(_TRAILING.sub(lambda end: end[0].replace(" ", ""), capture.get()))
        stream.flush()


def visible(renderable: RenderableType) -> RenderableType:
    """Return the renderable with every invisible character replaced, so that names cannot control a terminal.

    A string is copied; others change in place. A string or `Text` is one line, and several lines are a `Group`, so that
    no name can start a new line. Raises TypeError for a kind that no view uses so far: it must be added here.
    """
    from rich.console import Group
    from rich.text import Text
    from rich.tree import Tree

    match renderable:
        case str():
            return printable(renderable)
        case Text():
            renderable.plain = printable(renderable.plain)  # of the same length, so styles stay in place
        case Group():
            renderable.renderables[:] = map(visible, renderable.renderables)
        case Tree():
            renderable.label = visible(renderable.label)
            for child in renderable.children:
                visible(child)
        case _:
            # A table, or what is constrained in width: importing these costs `numapin topo` a few milliseconds.
            from rich.constrain import Constrain
            from rich.table import Table

            if isinstance(renderable, Constrain):
                renderable.renderable = visible(renderable.renderable)
            elif isinstance(renderable, Table):
                for column in renderable.columns:
                    column.header = visible(column.header)
                    column._cells[:] = map(visible, column.cells)  # noqa: SLF001 - rich has no other way
            else:
                raise TypeError(f"{type(renderable).__name__} may have text that is not cleaned")
    return renderable


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream of sys is a terminal; one that the parent process closed is None."""
    return stream is not None and stream.isatty()


def width_of_stdout() -> int:
    """Return the number of columns that `show` has."""
    return _FILE_WIDTH if sys.stdout is None else _console(sys.stdout).width


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    width = None if stream.isatty() else _FILE_WIDTH
    console = Console(file=stream, width=width, highlight=False, soft_wrap=False, emoji=False, markup=False)
    console.width = console.width or _FILE_WIDTH  # rich believes COLUMNS=0, and would show nothing
    return console


def warn(texts: Iterable[str]) -> None:
    """Print warnings on stderr, one line each; a terminal gets whole words, and lines after the first are indented."""
    for text in texts:
        shown = f"numapin: warning: {printable(text)}"
        if is_terminal(sys.stderr):
            from textwrap import wrap

            width = _console(sys.stderr).width
            shown = "\n".join(wrap(shown, width, subsequent_indent="  ", break_on_hyphens=False))
        _print_line(shown.replace("numapin: warning:", click.style("numapin: warning:", fg="yellow"), 1))


def warn_or_refuse(problem: str, remedy: str, *, strict: bool) -> None:
    """Warn of something that makes a binding less than requested. Raises BindingRefused instead if `strict`."""
    if strict:
        raise BindingRefused(f"--strict: {problem}", remedy)
    warn([f"{problem}; {remedy}"])


def say_error(text: str, hint: str = "", *, usage: str = "") -> None:
    """Print an error on stderr, with the usage and the hint on lines of their own.

    Only newlines before indented list items are kept, because an indented line cannot pass for a message of numapin's.
    """
    shown = _ITEM.join(map(printable, text.split(_ITEM)))
    remarks = "".join(f"\n  {name}: {printable(text)}" for name, text in (("usage", usage), ("hint", hint)) if text)
    _print_line(f"{_error_label()} {shown}{remarks}")


def say_block(lines: Sequence[str]) -> None:
    """Print an error of several lines on stderr. Lines after the first are indented, so none passes for another one."""
    first, *rest = map(printable, lines)
    _print_line("\n".join([f"{_error_label()} {first}", *rest]))


def show_frames(text: str) -> None:
    """Print a traceback on stderr; ignore write errors."""
    _print_line(printable_lines(text))


def _error_label() -> str:
    return click.style("numapin: error:", fg="red", bold=True)


def _print_line(text: str) -> None:
    """Print a line of visible characters and our own colors on stderr; ignore write errors."""
    if sys.stderr is not None:
        is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")  # as rich for tables
        with suppress(OSError):
            click.echo(text, file=sys.stderr, color=False if is_plain else None)


def show_status(text: str) -> None:
    """Show the current activity in one line of a terminal, which the next call or `clear_status` overwrites."""
    if is_terminal(sys.stderr):
        with suppress(OSError):
            width = os.get_terminal_size(sys.stderr.fileno()).columns or _FILE_WIDTH
            shown = printable(text)[: width - 1]  # only the last row of a longer one could be overwritten
            click.echo(f"\r\033[K{shown}", err=True, nl=False)


def clear_status() -> None:
    """Remove the line of `show_status`."""
    show_status("")


def write(text: str, path: Path | None, *, option: str) -> None:
    """Print the text, or write it to a file completely or not at all. Raises NumapinError with the option."""
    if path is None:
        emit(text)
    else:
        write_text_to(str(path), text, remedy=f"choose another file for {option}")


class ReportWriter:
    """Writes a measurement's report as --json and --output ask; `table` makes what is shown without --json."""

    def __init__(self, *, as_json: bool, output: Path | None, table: Callable[[Any], RenderableType]) -> None:
        self._as_json, self._output, self._table = as_json, output, table

    def show(self, report: BenchReport | CompareReport) -> None:
        """Print the report on stdout."""
        if self._as_json:
            emit(json_text(report.to_json()))
        else:
            show(self._table(report))

    def write(self, report: BenchReport | CompareReport) -> None:
        """Write the report to the file, if there is one. Raises NumapinError."""
        if self._output is not None:
            write(json_text(report.to_json()), self._output, option="--output")

    def keep(self, report: BenchReport | CompareReport) -> None:
        """Write and show what was measured until a signal or error; the file first: the terminal may be gone."""
        try:
            self.write(report)
        except NumapinError as error:
            say_error(error.message, error.hint)
        with suppress(OSError):
            self.show(report)


def require_writable(path: Path | None, *, option: str) -> None:
    """Raise UsageError if `write` could not write this file, before time is spent on its contents."""
    if path is None or is_writable(str(path)):
        return
    try:
        with OpenPlace(str(path)):
            why = os.strerror(errno.EISDIR) if path.is_dir() else "no write access"
    except OSError as error:
        why = error.strerror or str(error)
    raise UsageError(f"{path} cannot be written: {why}", f"choose another file for {option}")
