"""Where text goes. Edge.

Comes in: rich renderables of `view`, warnings, errors. Goes out: text on stdout or stderr, coloured on a terminal only.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from numapin.errors import UsageError
from numapin.strictjson import encode
from numapin.writing import is_special, write_text_to

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

_FILE_WIDTH = 160  # columns where the output is no terminal: logs wrap at nothing


def json_text(content: object) -> str:
    """Return JSON as all commands print and write it."""
    return encode(content, ascii_only=False) + "\n"


def show(renderable: RenderableType, *, err: bool = False) -> None:
    """Print a table or tree, as wide as the terminal. What cannot be written to stderr is dropped: it stops no job."""
    from rich.console import Console

    stream = sys.stderr if err else sys.stdout
    if stream is None:
        return  # closed by whoever started us
    width = None if stream.isatty() else _FILE_WIDTH
    console = Console(file=stream, width=width, highlight=False, soft_wrap=False, emoji=False, markup=False)
    with suppress(OSError) if err else nullcontext():
        console.print(renderable)


def warn(texts: Iterable[str]) -> None:
    """Print warnings on stderr, a line each."""
    for text in texts:
        _say(f"{click.style('numapin: warning:', fg='yellow')} {text}")


def say_error(text: str) -> None:
    """Print what went wrong on stderr."""
    _say(f"{click.style('numapin: error:', fg='red', bold=True)} {text}")


def _say(text: str) -> None:
    """Print a line on stderr, coloured on a terminal, if that can be written."""
    with suppress(OSError):
        click.echo(text, err=True)


def write(text: str, path: Path, *, option: str) -> None:
    """Write a file, whole or not at all; a device or pipe as it is. Raises NumapinError that names the option."""
    write_text_to(str(path), text, remedy=f"choose another file for {option}")


def require_writable(path: Path | None, *, option: str) -> None:
    """Raise UsageError where `write` could not write a file later on, before time is spent on what it is to hold."""
    if path is None:
        return
    # Path.resolve raises RuntimeError where links lead in a circle.
    place = path if is_special(str(path)) else Path(os.path.realpath(path)).parent
    is_folder = os.path.isdir(path)  # noqa: PTH112 - Path.is_dir raises for a name that is too long
    if is_folder or not os.access(place, os.W_OK) or _is_too_long(path):
        raise UsageError(f"{path} cannot be written", f"choose another file for {option}")


def _is_too_long(path: Path) -> bool:
    """Return whether no file system takes the name."""
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG
    return False
