"""Where text goes. Edge.

Comes in: rich renderables of `view`, and warnings. Goes out: text on stdout or stderr, coloured on a terminal only.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

import click

from numapin.errors import NumapinError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from rich.console import RenderableType

_FILE_WIDTH = 160  # columns where the output is no terminal: logs wrap at nothing


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
        say(f"{click.style('numapin: warning:', fg='yellow')} {text}")


def say(text: str) -> None:
    """Print a line on stderr, if that can be written."""
    with suppress(OSError):
        click.echo(text, err=True)


def write(text: str, path: Path, *, option: str) -> None:
    """Write a file, whole or not at all. Raises NumapinError that names the option."""
    try:
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except (OSError, ValueError) as error:  # with_name takes no path that ends in no name
        raise NumapinError(f"{path} cannot be written: {error}", f"choose another file for {option}") from None
