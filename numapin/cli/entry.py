"""The entry point of the program `numapin`.

Importing click takes longer than everything else that `exec` does with an existing plan. So a plain `exec` line is
parsed here, and all others by click. What a launcher must do before anything else is done here, too, so this module
imports almost nothing by itself.
"""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False  # importing typing takes longer than everything that `main` does first
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final

_RANKS: Final = ("--local-rank", "--local-size")
_FLAGS: Final = ("--strict", "--verbose")
_PLAN: Final = "--plan"
_MIN_FILES: Final = 32  # a launcher has some 16 open, and two for each rank that connects


def main() -> None:
    """Become the command of a plain `numapin exec` line, or let click run the command line."""
    gc.disable()  # makes the imports 7 ms faster; cli.main enables it before a command runs
    if sys.argv[1:2] in (["run"], ["trace"]):  # the commands that start ranks
        import resource

        from numapin.rank.become import hold

        # Too few open files would make a launcher fail anywhere, and seldom with a clear message.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if 0 <= most < _MIN_FILES:
            from numapin.cli.main import fail
            from numapin.errors import NumapinError

            problem = f"a launcher needs at least {_MIN_FILES} open files; {most} are allowed"
            fail(NumapinError(problem, "ulimit -n 1024"))
        hold()  # signals for ranks, until the launcher handles them
        if os.getpid() == 1:  # of a container
            from numapin.launcher.init import supervise_if_init

            supervise_if_init()
    if sys.argv[1:2] == ["exec"]:
        _exec(sys.argv[2:])
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the program without a traceback
    from numapin.cli.main import main as run_command_line

    run_command_line()


def read_line(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]] | None:
    """Return the options and the command of a plain `exec` line. None: leave the line, and its errors, to click."""
    options: dict[str, str] = {}
    words = list(arguments)
    while words and words[0].startswith("-") and words[0] != "--":
        name, equals, value = words.pop(0).partition("=")
        if name in _FLAGS and not equals:
            options[name] = ""
            continue
        if not equals and words:
            value = words.pop(0)
        # Only what click would accept: it has the messages about everything else.
        if name == _PLAN:
            is_valid = value != "" and not value.startswith("-")
        else:
            from numapin.base.bounds import MAX_RANKS
            from numapin.tasks.identify import parse_count

            ranges = dict(zip(_RANKS, (range(MAX_RANKS), range(1, MAX_RANKS + 1)), strict=True))
            given = parse_count(value)
            is_valid = given is not None and given in ranges.get(name, ())
        if not is_valid:
            return None
        options[name] = value
    command = words[1:] if words[:1] == ["--"] else words
    return (options, command) if command else None


def _exec(arguments: Sequence[str]) -> None:
    """Become the command if a plan exists; return if there is none, or if click has to parse the line."""
    line = read_line(arguments)
    if line is None:
        return
    from numapin.errors import NumapinError
    from numapin.tasks.enter import enter, find_slice
    from numapin.tasks.identify import find_task

    options, command = line
    rank, size = (int(options[name]) if name in options else None for name in _RANKS)
    try:
        task = find_task(os.environ, rank=rank, size=size)
        part = find_slice(task, os.environ, file=options.get(_PLAN))
        if part is not None:
            enter(part, task, command, strict="--strict" in options, verbose="--verbose" in options)
    except NumapinError as error:
        from numapin.cli.main import fail

        fail(error)
