"""The program that each rank becomes: torchrun's Python and what it runs."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from contextlib import suppress
from itertools import islice
from typing import Final

from numapin.base.formats import did_you_mean
from numapin.errors import UsageError

_OTHERWISE: Final = "run a module with -m, a program with --no-python"
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
    is_python = run_path or not no_python
    if program == "-" and not no_python and not run_path:
        raise UsageError("a script on stdin would reach one rank only", "write it to a file: numapin run train.py")
    if is_python and os.path.isdir(program) and not os.path.exists(os.path.join(program, "__main__.py")):
        raise UsageError(f"{program} is a folder without a __main__.py", f"name a script in it; {otherwise}")
    if os.path.exists(program) if is_python else shutil.which(program):
        return
    if not is_python and "/" not in program:
        raise UsageError(f"{program} is in no folder of PATH", "give its path, or add its folder to PATH")
    if os.path.exists(program):
        raise UsageError(
            f"{program} may not be executed", f"name a program; if it is one: chmod +x {shlex.quote(program)}"
        )
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
