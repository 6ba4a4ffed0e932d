"""Where the program `numapin` starts. Edge.

Comes in: sys.argv. Goes out: an exit status, or the command that `numapin exec` becomes. Importing click takes longer
than all else that `exec` does with a plan that is there already: such a line is read here, and any other by click.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING, Final

from numapin.base.bounds import MAX_RANKS
from numapin.tasks.identify import find_task, number

_LIMITS: Final = {"--local-rank": (0, MAX_RANKS - 1), "--local-size": (1, MAX_RANKS)}
_FLAGS: Final = ("--strict", "--verbose")
_PLAN: Final = "--plan"

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    Line: TypeAlias = tuple[dict[str, str], list[str]]
    """The options of a line that needs no click, with their values, and the command."""


def main() -> None:
    """Become the command of a plain `numapin exec`, or run the command line."""
    gc.disable()  # saves 7 ms of the imports; cli.main enables it before a command runs
    if sys.argv[1:2] == ["exec"]:
        _exec(sys.argv[2:])
    from numapin.cli.main import main as run_command_line

    run_command_line()


def read_line(arguments: Sequence[str]) -> Line | None:
    """Read the options of `exec` that come without binding options. None: click must read, or refuse, the line."""
    options: dict[str, str] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "--" or not word.startswith("-"):
            command = words if word == "--" else [word, *words]
            return (options, command) if command else None
        name, equals, value = word.partition("=")
        if name in _FLAGS and not equals:
            options[name] = ""
            continue
        if not equals and words:
            value = words.pop(0)
        if name in _LIMITS:
            least, most = _LIMITS[name]
            fits = (given := number(value)) is not None and least <= given <= most
        else:
            fits = name == _PLAN and value != "" and not value.startswith("-")
        if not fits:
            return None
        options[name] = value
    return None


def _exec(arguments: Sequence[str]) -> None:
    """Become the command where a plan is there; return where there is none, or where click must read the line."""
    line = read_line(arguments)
    if line is None:
        return
    from numapin.errors import NumapinError
    from numapin.tasks.enter import enter, find_slice

    options, command = line
    rank, size = (int(options[name]) if name in options else None for name in _LIMITS)
    try:
        task = find_task(os.environ, rank=rank, size=size)
        part = find_slice(task, os.environ, file=options.get(_PLAN))
        if part is not None:
            enter(part, task, command, strict="--strict" in options, verbose="--verbose" in options)
    except NumapinError as error:
        from numapin.cli.main import fail

        fail(error)
