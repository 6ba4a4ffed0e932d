"""The program that each rank becomes: torchrun's Python and what it runs; maybe a script on stdin."""

from __future__ import annotations

import os
import shlex
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
    is_python = run_path or not no_python
    if not is_python and shutil.which(program):
        return
    if not os.path.exists(program):
        if not is_python and "/" not in program:
            raise UsageError(f"{program} is in no folder of PATH", "give its path, or add its folder to PATH")
        where = ""
        if not os.path.isabs(program):
            with suppress(FileNotFoundError):  # the current folder may have been removed
                where = f" in {os.getcwd()}"
        folder, name = os.path.split(program)
        beside: list[str] = []
        with suppress(OSError), os.scandir(folder or ".") as entries:
            beside = [entry.name for entry in islice(entries, _MOST_NAMES)]
        hint = otherwise if is_python else "name a program that exists"
        raise UsageError(f"{program} does not exist{where}{did_you_mean(name, beside)}", hint)
    if os.path.isdir(program):
        if not is_python:
            raise UsageError(f"{program} is a folder", "name a program in it")
        if not os.path.exists(os.path.join(program, "__main__.py")):
            raise UsageError(f"{program} is a folder without a __main__.py", f"name a script in it; {otherwise}")
    elif not is_python and not os.access(program, os.X_OK):
        raise UsageError(f"{program} may not be executed", f"chmod +x {shlex.quote(program)}")
    elif not is_python:
        raise UsageError(f"{program} is in no folder of PATH", f"name it with its folder: ./{program}")


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
    try:
        os.fstat(_STDIN)  # if it is closed, the copy would be in its place, and empty
        with os.fdopen(os.memfd_create("numapin-script"), "wb") as copy:
            while block := os.read(_STDIN, 1 << 20):
                copy.write(block)
            copy.seek(0)
            os.dup2(copy.fileno(), _STDIN)
    except OSError as error:
        raise UsageError(f"the script - cannot be read from stdin: {error.strerror}", example) from None
