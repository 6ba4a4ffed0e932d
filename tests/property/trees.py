"""The trees of tests/machines, written once, with some of their files changed for one example."""

from __future__ import annotations

import atexit
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Final

from tests.machines.roots import load, write_root

IN_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - thousands of small files


@cache
def root_of(name: str) -> Path:
    folder = Path(mkdtemp(prefix="numapin-trees-", dir=IN_MEMORY if IN_MEMORY.is_dir() else None))
    atexit.register(shutil.rmtree, folder)
    return write_root(load(name), folder)


@cache
def all_files(name: str) -> tuple[str, ...]:
    """Return the files of a machine, relative to its root; older versions of Python follow links."""
    root = root_of(name)
    paths = (str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    return tuple(sorted(path for path in paths if not path.startswith(("sys/bus/pci/", "sys/class/net/"))))


@contextmanager
def changed(name: str, files: Mapping[str, bytes | None]) -> Iterator[Path]:
    """Give some files of a machine other content, or take them away, and put them back."""
    root = root_of(name)
    before = {path: (root / path).read_bytes() for path in files}
    try:
        for path, content in files.items():
            (root / path).unlink() if content is None else (root / path).write_bytes(content)
        yield root
    finally:
        for path, content in before.items():
            (root / path).write_bytes(content)
