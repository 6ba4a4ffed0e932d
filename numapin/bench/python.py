"""Command lines that run code of this package in Python.

A benchmark may be started in any folder, and `python -m` and `python -c` would prefer modules there to the standard
library; these commands do not.
"""

from __future__ import annotations

import sys
from typing import Final

PYTHON: Final = (sys.executable, "-P")
"""An interpreter that does not import from the working directory; nor do its multiprocessing children."""

# Appended, so that no module beside this package can replace a standard one.
_FIND_NUMAPIN: Final = f"import sys; sys.path.append({__file__.rsplit('/', 3)[0]!r})"


def running(code: str) -> tuple[str, ...]:
    """Return a command that runs code, which can import this package even if it is not installed."""
    return *PYTHON, "-c", f"{_FIND_NUMAPIN}; {code}"


def running_module(name: str) -> tuple[str, ...]:
    """Return a command that runs a module of this package as `python -m` does."""
    return running(f"from runpy import run_module; run_module({name!r}, run_name='__main__', alter_sys=True)")
