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
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

from numapin.base import cpu_set
from numapin.base.bounds import MAX_LIST_CHARS
from numapin.base.cpu_set import CpuSet
from numapin.errors import MachineFileError

if TYPE_CHECKING:
    from typing import Self

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
class _Steps:
    """The number of steps and bytes that are left for a capture."""

    left: int = _MAX_STEPS
    bytes_left: int = _MAX_TOTAL_BYTES

    def take(self, number: int, path: str) -> None:
        self.left -= number
        if self.left < 0:
            problem = f"its files and links take more than {_MAX_STEPS} steps, the most that are accepted"
            raise MachineFileError(f"{path}: {problem}", CAPTURE)

    def take_bytes(self, number: int, path: str) -> None:
        self.bytes_left -= number
        if self.bytes_left < 0:
            problem = f"its files have more than {_MAX_TOTAL_BYTES >> 20} MiB together, the most that are accepted"
            raise MachineFileError(f"{path}: {problem}", CAPTURE)


@dataclass(frozen=True, slots=True)
class Tree:
    """The files below `root`, "" for the live machine; every path is relative to it.

    All methods raise MachineFileError if a capture takes too many steps.
    """

    root: str
    _sets: cpu_set.Sets = field(default_factory=cpu_set.Sets, repr=False, compare=False)
    _steps: _Steps = field(default_factory=_Steps, repr=False, compare=False)

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
        if self.root:
            self._steps.take_bytes(len(data), f"{self.root}/{path}")
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
        if self.root:
            self._steps.take(len(found), f"{self.root}/{path}")
        return found

    def link(self, path: str) -> str | None:
        """Return the target of a symbolic link as written, or None."""
        try:
            if not self.root:
                return os.readlink(f"/{path}")  # not with Path, which takes longer than the call, some 500 times
            with _Walk(self.root, path, self._steps, follow_last=False) as walk:
                return os.readlink("", dir_fd=walk.top)
        except (OSError, ValueError):
            return None

    def _opened(self, path: str, flags: int) -> int | None:
        """Open a file or directory; None if that fails."""
        try:
            if not self.root:
                return os.open(f"/{path}", flags)
            with _Walk(self.root, path, self._steps) as walk:
                return walk.open(flags)
        except (OSError, ValueError):  # ValueError: a cgroup path with a NUL in it
            return None


class _Walk:
    """The way from a capture's root to the target of a path in it: an open descriptor for each step.

    Each step opens a single name, so that a capture that changes meanwhile cannot lead out of its root.
    Raises OSError if the way ends early, goes in a circle, or passes more than 40 links, MachineFileError if it takes
    more steps than are left.
    """

    def __init__(self, root: str, path: str, left: _Steps, *, follow_last: bool = True) -> None:
        self._path = f"{root}/{path}"
        self._left = left
        self._steps = [os.open(root, os.O_PATH | os.O_CLOEXEC)]
        self._name = ""  # by which the last step was opened
        try:
            self._go(path, follow_last=follow_last)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        while self._steps:
            os.close(self._steps.pop())

    @property
    def top(self) -> int:
        """The descriptor of the path's target, opened with O_PATH."""
        return self._steps[-1]

    def open(self, flags: int) -> int:
        """Open the path's target: a regular file or a directory."""
        mode = os.fstat(self.top).st_mode
        if stat.S_ISDIR(mode):
            return os.open(".", flags, dir_fd=self.top)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file")
        try:
            return os.open(f"/proc/self/fd/{self.top}", flags)
        except FileNotFoundError:  # /proc is not mounted
            return self._open_by_name(flags)

    def _open_by_name(self, flags: int) -> int:
        """Open the file by its name. Raises OSError if the name means another file by now."""
        fd = os.open(self._name, flags | os.O_NOFOLLOW, dir_fd=self._steps[-2])
        if os.path.samestat(os.fstat(fd), os.fstat(self.top)):
            return fd
        os.close(fd)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def _go(self, path: str, *, follow_last: bool) -> None:
        todo = self._names_in(path)
        num_links = 0
        while todo:
            name = todo.pop()
            if name == "..":
                self._back_to(max(1, len(self._steps) - 1))
            elif name not in ("", "."):
                self._steps.append(os.open(name, _LOOK, dir_fd=self.top))
                self._name = name
                if stat.S_ISLNK(os.fstat(self.top).st_mode) and (todo or follow_last):
                    num_links += 1
                    if num_links > _MAX_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                    todo += self._target()

    def _target(self) -> list[str]:
        """Step back from a link, to the root if it is absolute, and return the names in its target, the last first."""
        target = os.readlink("", dir_fd=self.top)
        self._back_to(1 if target.startswith("/") else len(self._steps) - 1)
        return self._names_in(target)

    def _names_in(self, path: str) -> list[str]:
        """Return the names in a path, the last first. Raises MachineFileError if these are too many steps."""
        names = path.split("/")[::-1]
        self._left.take(len(names), self._path)
        return names

    def _back_to(self, num_steps: int) -> None:
        while len(self._steps) > num_steps:
            os.close(self._steps.pop())
