"""Stage 3: the program that each rank becomes.

torch itself is not needed for that.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import Final

from numapin.errors import UsageError

_OTHERWISE: Final = "run a module with -m, a program with --no-python"


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
        raise UsageError(f"{program} does not exist{where}", otherwise)
    if os.path.isdir(program) and not os.path.exists(os.path.join(program, "__main__.py")):
        raise UsageError(f"{program} is a folder without a __main__.py", f"name a script in it; {otherwise}")
