"""A directory tree of small kernel files below any root.

A missing, unreadable or malformed file is unknown (None). Only a malformed CPU or node list is an error, which names
the file, because a plan made from half a list would be silently wrong.

A capture is untrusted. The kernel follows its links as if its root were "/": an absolute link starts there, and ".."
does not lead above it. Only regular files and directories are opened in it. Their number is bounded, and the time that
they take, because a link of 4 KB may wind through 2000 folders, and each CPU has its own link. So are the bytes of all
files together, because links may name one large file many times.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from numapin.base import cpu_set
from numapin.base.bounds import MAX_LIST_CHARS
from numapin.base.cpu_set import CpuSet
from numapin.errors import MachineFileError
from numapin.system import calls

CAPTURE: Final = "capture a machine with: hwloc-gather-topology --io capture && tar xf capture.tar.bz2"
NODES: Final = "sys/devices/system/node"
_NEEDS_OPENAT2: Final = "use Linux 5.6 or later; in a container, a runtime that allows openat2, such as Docker 20.10"
_MAX_BYTES: Final = MAX_LIST_CHARS + 1
_MAX_PROC_BYTES: Final = 1 << 20  # of mounts: hosts of containers have thousands
_MAX_NAMES: Final = 1 << 16  # in a directory: PCI has 65536 functions in a domain, and /sys keeps them in few domains
_MAX_STEPS: Final = 150_000  # files that are opened, and names in directories; 8192 CPUs without caches take 50,000
_FREE_S: Final = 1.0
_MAX_S_PER_FILE: Final = 0.001  # 25 us on an ordinary machine; 40 links that wind through 800 folders each take 3 ms
_MAX_TOTAL_BYTES: Final = 64 << 20  # of all files: links may name one large file many times
_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_LIST: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LINK: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_NUMBER: Final = re.compile(r"\d{1,18}", re.ASCII)


@dataclass(slots=True)
class _Taken:
    """The resources that reading a capture has used: CPU seconds, because a file system may be slow, and counts."""

    seconds: float = 0.0
    num_files: int = 0
    num_names: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Tree:
    """The files below `root`, "" for the live machine; every path is relative to it.

    All methods raise MachineFileError if a capture takes too long, or if the kernel cannot open files inside of it.
    """

    root: str
    _sets: cpu_set.Sets = field(default_factory=cpu_set.Sets, repr=False, compare=False)
    _taken: _Taken = field(default_factory=_Taken, repr=False, compare=False)

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
        self._taken.num_bytes += len(data)
        if self.root and self._taken.num_bytes > _MAX_TOTAL_BYTES:
            problem = f"its files have more than {_MAX_TOTAL_BYTES >> 20} MiB together, the most that are accepted"
            raise self.error(path, problem)
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

    def node_cpus(self, node: int) -> CpuSet | None:
        """Return the CPUs of a NUMA node; None if it does not exist. Raises MachineFileError."""
        at = f"{NODES}/node{node}"
        return self.numbers(f"{at}/cpulist", mask=f"{at}/cpumap")

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
        self._taken.num_names += len(found)
        return found

    def link(self, path: str) -> str | None:
        """Return the target of a symbolic link as written, or None."""
        if not self.root:
            try:
                return os.readlink(f"/{path}")  # not with Path, which takes longer than the call, some 500 times
            except (OSError, ValueError):
                return None
        fd = self._opened(path, _LINK)
        if fd is None:
            return None
        try:
            return os.readlink("", dir_fd=fd)
        except OSError:
            return None
        finally:
            os.close(fd)

    def _opened(self, path: str, flags: int) -> int | None:
        """Open a file or directory; None if that fails."""
        try:
            return self._open_in_capture(path, flags) if self.root else os.open(f"/{path}", flags)
        except (OSError, ValueError):  # ValueError: a cgroup path with a NUL in it
            return None

    def _open_in_capture(self, path: str, flags: int) -> int:
        """Open a regular file or directory, or a link as such with `_LINK`. Raises OSError, ValueError."""
        if "\0" in path:
            raise ValueError(path)
        taken = self._taken
        if taken.seconds > _FREE_S + _MAX_S_PER_FILE * taken.num_files:
            problem = f"{taken.num_files} of its files took {taken.seconds:.1f} s of CPU time; its links lead too far"
            raise self.error(path, problem)
        if taken.num_files + taken.num_names > _MAX_STEPS:
            raise self.error(path, f"it takes more than {_MAX_STEPS} files and names, the most that are accepted")
        begun_s = time.thread_time()
        top = os.open(self.root, os.O_PATH | os.O_CLOEXEC)
        try:
            # To open a device, or the end of a pipe, may have an effect, so it is looked at first.
            try:
                seen = calls.open_inside(top, path, os.O_PATH | os.O_CLOEXEC | flags & os.O_NOFOLLOW)
            except OSError as error:
                if error.errno in (errno.ENOSYS, errno.EPERM):
                    problem = f"the kernel refuses openat2, with which captures are read: {error.strerror}"
                    raise MachineFileError(f"{self.root}/{path}: {problem}", _NEEDS_OPENAT2) from None
                raise
            if flags == _LINK:
                return seen
            try:
                found = os.fstat(seen)
                if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
                    raise OSError(errno.EINVAL, "not a regular file", path)
                opened = calls.open_inside(top, path, flags)
            finally:
                os.close(seen)
            if os.path.samestat(os.fstat(opened), found):
                return opened
            os.close(opened)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        finally:
            os.close(top)
            taken.num_files += 1
            taken.seconds += time.thread_time() - begun_s
