"""The program that each rank becomes: torchrun's Python and what it runs; maybe a script on stdin."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Final

from numapin.base.formats import did_you_mean
from numapin.errors import UsageError
from numapin.rank.shim import is_stdin_script

if TYPE_CHECKING:
    from collections.abc import Sequence

_OTHERWISE: Final = "run a module with -m, a program with --no-python"
_STDIN: Final = 0
_MOST_NAMES: Final = 1000  # of a folder, to compare with a script that does not exist


def python() -> str:
    """Return the interpreter that torchrun runs scripts with."""
    return os.environ.get("PYTHON_EXEC", sys.executable)


def require_program(
    program: str, *, module: bool, no_python: bool, run_path: bool, otherwise: str = _OTHERWISE
) -> None:
    """Raise UsageError if the script or program does not exist; `otherwise` is its hint."""
    if module:
        return  # finding a module may run its package; the rank's own message names it
    if program == "-" and not no_python and not run_path:
        return  # the script is on stdin
    exists = shutil.which if no_python and not run_path else os.path.exists
    if not exists(program):
        where = "" if os.path.isabs(program) else f" in {os.getcwd()}"
        folder, name = os.path.split(program)
        beside: list[str] = []
        if not no_python:
            with suppress(OSError), os.scandir(folder or ".") as entries:
                beside = [entry.name for entry in islice(entries, _MOST_NAMES)]
        raise UsageError(f"{program} does not exist{where}{did_you_mean(name, beside)}", otherwise)
    if os.path.isdir(program) and not os.path.exists(os.path.join(program, "__main__.py")):
        raise UsageError(f"{program} is a folder without a __main__.py", f"name a script in it; {otherwise}")


def keep_script(command: Sequence[str]) -> None:
    """If the ranks run a script from stdin, read it to its end and make the copy this process's stdin.

    Under torchrun all ranks read the one stdin: one of them gets the script, the others and all restarted ones get
    nothing and succeed. Raises UsageError if stdin cannot have a script.
    """
    if not is_stdin_script(command[1:]):
        return
    example = "numapin run - < train.py"
    if os.isatty(_STDIN):
        raise UsageError("the script - is read from stdin, which is a terminal", example)
    copy = os.memfd_create("numapin-script")
    try:
        with os.fdopen(copy, "wb", closefd=False) as file:
            while block := os.read(_STDIN, 1 << 20):
                file.write(block)
        os.lseek(copy, 0, os.SEEK_SET)
        os.dup2(copy, _STDIN)
    except OSError as error:
        raise UsageError(f"the script - cannot be read from stdin: {error.strerror}", example) from None
    finally:
        os.close(copy)
