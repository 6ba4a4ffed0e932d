"""Command lines that start Python on this package. Pure.

Comes in: code, or a module of this package. Goes out: the words of a command. A benchmark may be started in any folder,
and `python -m` and `python -c` would import what lies there before the standard library: none of these do.
"""

from __future__ import annotations

import sys
from typing import Final

PYTHON: Final = (sys.executable, "-P")
"""An interpreter that does not look for modules in the working directory; its children by multiprocessing neither."""

# Appended, so that nothing beside this package can take the place of a standard module.
_FIND_NUMAPIN: Final = f"import sys; sys.path.append({__file__.rsplit('/', 3)[0]!r})"


def running(code: str) -> tuple[str, ...]:
    """Return the command that runs code, which may import this package, be it installed or not."""
    return *PYTHON, "-c", f"{_FIND_NUMAPIN}; {code}"


def running_module(name: str) -> tuple[str, ...]:
    """Return the command that runs a module of this package as `python -m` does."""
    return running(f"from runpy import run_module; run_module({name!r}, run_name='__main__', alter_sys=True)")
