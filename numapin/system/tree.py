"""A directory tree of small kernel files below any root.

A missing, unreadable or malformed file is unknown (None). Only a malformed CPU or node list is an error, which names
the file, because a plan made from half a list would be silently wrong.

A capture is untrusted. Its links are followed one by one, as if its root were "/": an absolute link starts there, and
".." does not lead above it. Only regular files and directories are opened in it. The steps that all of its files take
together are bounded, because a link of 4 KB may wind through 2000 folders, and each CPU has its own link. So are their
bytes, because links may name one large file many times.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

from numapin.base import cpu_set
from numapin.base.bounds import MAX_LIST_CHARS
from numapin.base.cpu_set import CpuSet
from numapin.errors import MachineFileError

if TYPE_CHECKING:
    from collections.abc import Iterator

CAPTURE: Final = "capture a machine with: hwloc-gather-topology --io capture && tar xf capture.tar.bz2"
_MAX_BYTES: Final = MAX_LIST_CHARS + 1
_MAX_PROC_BYTES: Final = 1 << 20  # of mounts: hosts of containers have thousands
_MAX_NAMES: Final = 1 << 16  # in a directory: PCI has 65536 functions in a domain, and /sys keeps them in few domains
_MAX_LINKS: Final = 40  # on the way to one file, as in the kernel
_MAX_STEPS: Final = 600_000  # 8192 CPUs without SMT and L3 take 460,000, 1000 network devices 250,000
_MAX_TOTAL_BYTES: Final = 64 << 20  # of all files: links may name one large file many times
_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_LIST: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LOOK: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_NUMBER: Final = re.compile(r"\d{1,18}", re.ASCII)


@dataclass(slots=True)
class Tree:
    """The files below `root`, "" for the live machine; every path is relative to it.

    All methods raise MachineFileError if a capture takes too many steps.
    """

    root: str
    _sets: cpu_set.Sets = field(default_factory=cpu_set.Sets, repr=False, compare=False)
    _steps_left: int = field(default=_MAX_STEPS, repr=False, compare=False)
    _bytes_left: int = field(default=_MAX_TOTAL_BYTES, repr=False, compare=False)

    def data(self, path: str) -> bytes | None:
        """Return a file's bytes, at most 1 MiB of them below proc/ and 64 KiB elsewhere, or None.

        The file is opened with O_NONBLOCK, because a link may lead to a pipe or a device.
        """
        fd = self._opened(path, _READ)
        if fd is None:
            return None
        left = _MAX_PROC_BYTES if path.startswith("proc/") else _MAX_BYTES
        chunks: list[bytes] = []
        try:
            while left > 0 and (chunk := os.read(fd, left)):  # /proc and /sys return a page at a time
                chunks.append(chunk)
                left -= len(chunk)
        except OSError:  # the driver refuses (EINVAL, EIO), or it is a directory
            return None
        finally:
            os.close(fd)
        data = b"".join(chunks)
        self._bytes_left -= len(data)
        if self.root and self._bytes_left < 0:
            most = f"{_MAX_TOTAL_BYTES >> 20} MiB together, the most that are accepted"
            raise self.error(path, f"its files have more than {most}")
        return data

    def text(self, path: str) -> str | None:
        """Return a file's text without the white space around it, or None; some captures end files with a NUL."""
        data = self.data(path)
        return None if data is None else data.decode(errors="replace").rstrip("\0").strip()

    def number(self, path: str) -> int | None:
        """Return a file's non-negative number; None if it holds anything else, such as the kernel's -1."""
        text = self.text(path)
        return int(text) if text is not None and _NUMBER.fullmatch(text) else None

    def numbers(self, path: str, *, mask: str = "", line: re.Pattern[str] | None = None) -> CpuSet | None:
        """Return the set in the list file `path`, else in the mask file `mask`, else None.

        Old kernels have masks only. With `line`, the list is the group of its first match in the file.
        Raises MachineFileError that names the file.
        """
        text, parse = self.text(path), CpuSet.parse
        if line is not None:
            match = line.search(text or "")
            text = match[1] if match else None
        if text is None and mask:
            path, text, parse = mask, self.text(mask), cpu_set.parse_mask
        if text is None:
            return None
        try:
            return self._sets.get(text, parse)
        except ValueError as error:
            raise self.error(path, str(error)) from None

    def error(self, path: str, problem: str) -> MachineFileError:
        """Return an error that names the file."""
        return MachineFileError(f"{self.root}/{path}: {problem}", CAPTURE)

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a directory, at most 65536; none if it does not exist."""
        fd = self._opened(path, _LIST)
        if fd is None:
            return []
        try:
            with os.scandir(fd) as entries:
                found = sorted(entry.name for entry in islice(entries, _MAX_NAMES))
        except OSError:
            return []
        finally:
            os.close(fd)
        self._take_steps(len(found), path)
        return found

    def link(self, path: str) -> str | None:
        """Return the target of a symbolic link as written, or None."""
        try:
            if not self.root:
                return os.readlink(f"/{path}")  # not with Path, which takes longer than the call, some 500 times
            with self._way_to(path, follow_last=False) as (way, _):
                return os.readlink("", dir_fd=way[-1])
        except (OSError, ValueError):
            return None

    def _opened(self, path: str, flags: int) -> int | None:
        """Open a file or directory, in a capture a regular file or a directory only; None if that fails."""
        try:
            if not self.root:
                return os.open(f"/{path}", flags)
            with self._way_to(path) as (way, name):
                mode = os.fstat(way[-1]).st_mode
                if stat.S_ISDIR(mode):
                    return os.open(".", flags, dir_fd=way[-1])
                if not stat.S_ISREG(mode):
                    return None
                try:
                    return os.open(f"/proc/self/fd/{way[-1]}", flags)
                except FileNotFoundError:  # /proc is not mounted
                    return _opened_by_name(way, name, flags)
        except (OSError, ValueError):  # ValueError: a cgroup path with a NUL in it
            return None

    @contextmanager
    def _way_to(self, path: str, *, follow_last: bool = True) -> Iterator[tuple[list[int], str]]:
        """Open the way from a capture's root to the target of a path in it; yield its descriptors and the last name.

        Each step opens a single name with O_PATH, so that a capture that changes meanwhile cannot lead out of its root.
        Raises OSError if the way ends early, goes in a circle, or passes more than 40 links.
        """
        way, name, num_links = [os.open(self.root, os.O_PATH | os.O_CLOEXEC)], "", 0
        try:
            todo = path.split("/")[::-1]
            self._take_steps(len(todo), path)
            while todo:
                step = todo.pop()
                if step == ".." and len(way) > 1:
                    os.close(way.pop())
                if step in ("", ".", ".."):
                    continue
                way.append(os.open(step, _LOOK, dir_fd=way[-1]))
                name = step
                if stat.S_ISLNK(os.fstat(way[-1]).st_mode) and (todo or follow_last):
                    num_links += 1
                    if num_links > _MAX_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                    target = os.readlink("", dir_fd=way[-1])
                    names = target.split("/")[::-1]
                    self._take_steps(len(names), path)
                    todo += names
                    start = 1 if target.startswith("/") else len(way) - 1
                    while len(way) > start:
                        os.close(way.pop())
            yield way, name
        finally:
            for fd in way:
                os.close(fd)

    def _take_steps(self, number: int, path: str) -> None:
        self._steps_left -= number
        if self.root and self._steps_left < 0:
            raise self.error(path, f"its files and links take more than {_MAX_STEPS} steps, the most that are accepted")


def _opened_by_name(way: list[int], name: str, flags: int) -> int:
    """Open the file at the end of a way by its name. Raises OSError if the name means another file by now."""
    fd = os.open(name, flags | os.O_NOFOLLOW, dir_fd=way[-2])
    if os.path.samestat(os.fstat(fd), os.fstat(way[-1])):
        return fd
    os.close(fd)
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
