"""Where text goes. Edge.

Comes in: rich renderables of `view`, warnings, errors, data. Goes out: text on stdout or stderr, coloured on a terminal
only. Nothing that comes in gets to a terminal as one of its commands: this is where that is taken out.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

import click

from numapin.base.files import is_writable, write_text_to
from numapin.base.printable import ascii_escapes, printable, printable_lines
from numapin.base.strict_json import encode
from numapin.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from rich.console import RenderableType

_FILE_WIDTH = 160  # columns where the output is no terminal: logs wrap at nothing
_ITEM = "\n    "


def json_text(content: object) -> str:
    """Return JSON as all commands print and write it; characters that cannot be seen are escaped."""
    return ascii_escapes(encode(content, ascii_only=False)) + "\n"


def emit(text: str) -> None:
    """Print data on stdout: exact in a file or pipe, while a terminal gets its visible characters only."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    click.echo(printable_lines(text) if is_terminal else text, nl=False, color=True)  # else click takes escapes out


def show(renderable: RenderableType, *, err: bool = False) -> None:
    """Print a table or tree, as wide as the terminal. What cannot be written to stderr is dropped: it stops no job."""
    from rich.console import Console

    from numapin.view.visible import visible

    stream = sys.stderr if err else sys.stdout
    if stream is None:
        return  # closed by whoever started us
    width = None if stream.isatty() else _FILE_WIDTH
    console = Console(file=stream, width=width, highlight=False, soft_wrap=False, emoji=False, markup=False)
    with suppress(OSError) if err else nullcontext():
        console.print(visible(renderable))


def warn(texts: Iterable[str]) -> None:
    """Print warnings on stderr, a line each."""
    for text in texts:
        _say(f"{click.style('numapin: warning:', fg='yellow')} {printable(text)}")


def say_error(text: str, hint: str = "") -> None:
    """Print what went wrong on stderr, with the hint on a line of its own.

    Of newlines in the text those of lists are kept: such a line is indented, and cannot pass for a message of ours.
    """
    shown = _ITEM.join(map(printable, text.split(_ITEM)))
    remedy = f"\n  hint: {printable(hint)}" if hint else ""
    _say(f"{click.style('numapin: error:', fg='red', bold=True)} {shown}{remedy}")


def _say(text: str) -> None:
    """Print what has visible characters and our own colours only on stderr, if that can be written."""
    with suppress(OSError):
        click.echo(text, err=True)


def write(text: str, path: Path, *, option: str) -> None:
    """Write a file, whole or not at all; a device or pipe as it is. Raises NumapinError that names the option."""
    write_text_to(str(path), text, remedy=f"choose another file for {option}")


def require_writable(path: Path | None, *, option: str) -> None:
    """Raise UsageError where `write` could not write a file later on, before time is spent on what it is to hold."""
    if path is not None and (not is_writable(str(path)) or _is_too_long(path)):
        raise UsageError(f"{path} cannot be written", f"choose another file for {option}")


def _is_too_long(path: Path) -> bool:
    """Return whether no file system takes the name."""
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG
    return False
