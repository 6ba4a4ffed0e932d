"""A directory tree of small kernel files below any root. Edge.

Comes in: a root directory ("/" is the live machine) and paths below it. Goes out: text, numbers and sets. A file that
is missing, unreadable or garbled is unknown (None); only a garbled CPU or node list is an error that names the file,
because a plan made from half a list would be wrong without a word.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from numapin.base import cpu_set
from numapin.errors import MachineFileError

if TYPE_CHECKING:
    from collections.abc import Callable

CAPTURE: Final = "capture a machine with: hwloc-gather-topology --io capture && tar xf capture.tar.bz2"
_MAX_BYTES: Final = 1 << 20
_NUMBER: Final = re.compile(r"\d{1,18}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Tree:
    """What is below `root`; every path is relative to it."""

    root: str

    def data(self, path: str) -> bytes | None:
        """Return a file's bytes, at most 1 MiB of them, or None.

        O_NONBLOCK, because a capture may hold a pipe or a device where a file should be. Read until empty, because
        /proc and /sys hand out a page at a time.
        """
        try:
            fd = os.open(f"{self.root}/{path}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):  # ValueError: a cgroup path with a NUL in it
            return None
        chunks: list[bytes] = []
        try:
            while sum(map(len, chunks)) < _MAX_BYTES and (chunk := os.read(fd, _MAX_BYTES)):
                chunks.append(chunk)
        except OSError:  # the driver refuses (EINVAL, EIO), or it is a directory
            return None
        finally:
            os.close(fd)
        return b"".join(chunks)

    def text(self, path: str) -> str | None:
        """Return a file's text without the white space around it, or None."""
        data = self.data(path)
        return None if data is None else data.decode(errors="replace").strip()

    def number(self, path: str) -> int | None:
        """Return a file's non-negative number; None where it holds anything else, such as the kernel's -1."""
        text = self.text(path)
        return int(text) if text is not None and _NUMBER.fullmatch(text) else None

    def numbers(self, path: str = "", *, mask: str = "") -> frozenset[int] | None:
        """Return the set in the list file `path`, else in the mask file `mask`, else None.

        Old kernels have only the masks. Raises MachineFileError that names the file.
        """
        listed = self._set(path, cpu_set.parse) if path else None
        return self._set(mask, cpu_set.parse_mask) if listed is None and mask else listed

    def parsed(self, text: str, path: str, parse: Callable[[str], frozenset[int]] = cpu_set.parse) -> frozenset[int]:
        """Parse a set that stands in the file `path`. Raises MachineFileError that names the file."""
        try:
            return parse(text)
        except ValueError as error:
            raise MachineFileError(f"{self.root}/{path}: {error}", CAPTURE) from None

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a directory; none where it does not exist."""
        try:
            with os.scandir(f"{self.root}/{path}") as entries:
                return sorted(entry.name for entry in entries)
        except (OSError, ValueError):
            return []

    def link(self, path: str) -> str | None:
        """Return where a symbolic link points, as written, or None."""
        try:
            return os.readlink(f"{self.root}/{path}")  # Path costs more than the call, 500 times over
        except (OSError, ValueError):
            return None

    def _set(self, path: str, parse: Callable[[str], frozenset[int]]) -> frozenset[int] | None:
        text = self.text(path)
        return None if text is None else self.parsed(text, path, parse)
