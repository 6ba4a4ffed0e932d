"""Read an untrusted file: regular files only, of bounded size, without blocking.

A pipe, device or socket is refused, because reading it could block.

Each rank imports this before its program starts: the standard library only.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_INHERITED: Final = ("/dev/fd", "/proc/self/fd")
_STDIN: Final = "/dev/stdin"
_KINDS: Final = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def read_file(path: str, *, max_bytes: int, what: str = "file") -> bytes:
    """Return the bytes of a regular file, or of a pipe that this process was started with (/dev/stdin, <(command)).

    Raises OSError with a path and a reason for anything else, and for a file of more than `max_bytes`. `what` names the
    kind of file in that error.
    """
    with os.fdopen(open_file(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes >> 20} MiB, which no {what} is", path)
    return content


def open_file(path: str) -> int:
    """Open a file for `read_file` and return its descriptor. Raises OSError."""
    try:
        descriptor = os.open(path, _FLAGS)
    except ValueError as error:  # a NUL in the path, or text that cannot be encoded
        raise OSError(errno.EINVAL, f"not a file name: {error}", path) from None
    except OSError as error:
        raise _named(error) from None
    found = os.fstat(descriptor)
    if stat.S_ISFIFO(found.st_mode) and is_inherited(path):
        os.set_blocking(descriptor, True)  # our caller is writing it
    elif not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{kind_of(found.st_mode)}, not a regular file", path)
    return descriptor


def is_inherited(path: str) -> bool:
    """Return whether a path names a descriptor that this process inherited, and not a file that others chose."""
    folder, _, name = path.rpartition("/")
    return path == _STDIN or (folder in _INHERITED and name.isdecimal())


def kind_of(mode: int) -> str:
    """Return the name of a file's type, such as "a named pipe"."""
    return next((kind for is_kind, kind in _KINDS if is_kind(mode)), "a regular file")


def _named(error: OSError) -> OSError:
    """Return a clearer error if the file is a socket or a device without a driver, which cannot be opened."""
    if error.errno == errno.ENXIO:
        return OSError(errno.ENXIO, "a socket or device that cannot be opened, not a regular file", error.filename)
    return error
