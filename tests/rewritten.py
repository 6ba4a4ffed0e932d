"""Compile the tests as pytest does, once, for all processes of `pytest --numprocesses`.

    python -m tests.rewritten

Comes in: the test files. Goes out: their bytecode, with assertions that explain themselves, in `__pycache__`. Otherwise
each of pytest's processes spends 7 s on it: they start together, and with PYTHONDONTWRITEBYTECODE they write nothing.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from _pytest.assertion import rewrite

_TESTS: Final = Path(__file__).parent
_FEW: Final = 8


def main() -> None:
    """Compile all files that are not compiled yet, in as many processes as there are CPUs."""
    paths = [*_TESTS.rglob("test_*.py"), *_TESTS.rglob("conftest.py")]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(_compile, paths, chunksize=_FEW))


def _compile(path: Path) -> None:
    """Write a file's bytecode where pytest looks for it."""
    inner: Any = rewrite  # pytest has no other way to do this without importing the file
    folder = inner.get_cache_dir(path)
    target = folder / f"{path.stem}{inner.PYC_TAIL}"
    if inner._read_pyc(path, target) is None:
        folder.mkdir(parents=True, exist_ok=True)
        status, code = inner._rewrite_test(path, None)
        inner._write_pyc(SimpleNamespace(trace=print), code, status, target)


if __name__ == "__main__":
    main()
