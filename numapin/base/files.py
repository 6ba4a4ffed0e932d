"""Write a file whole or not at all.

A file is written under a random name and then renamed, so that a reader never sees a partial file.

Each rank imports this before its program starts: the standard library only.
"""

from __future__ import annotations

import errno
import os
import stat

from numapin.base.folders import is_in_proc, place_of, refuse_planted, status_at
from numapin.errors import NumapinError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

# Without O_NONBLOCK, opening a pipe without a reader would block.
_SPECIAL: Final = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_STREAMS: Final = ("/dev/stdout", "/dev/stderr")
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write_text_to(path: str, text: str, *, remedy: str, patience_s: float | None = None) -> None:
    """Write to a path that the user named: a regular file whole or not at all, through links; a device or pipe as is.

    An existing file keeps its mode and, if this process may set it, its owner. A pipe that is full is waited for, but
    not for longer than `patience_s`. Raises NumapinError that names the path.
    """
    try:
        if is_special(path):
            _write_special(path, text, patience_s)
            return
        with place_of(path) as (folder, name):  # a link stays, and its target is replaced
            replace_at(folder, name, text)
    except (OSError, ValueError) as error:  # ValueError: text that cannot be encoded, e.g. a lone surrogate
        raise unwritten(path, error, remedy) from None


def is_special(path: str) -> bool:
    """Return whether the path is something that a rename must not replace: a device, a pipe, an open descriptor.

    A log file that stdout was redirected to holds what others wrote, and they go on writing to it.
    """
    from numapin.base.regular_file import is_inherited  # no rank needs it

    is_open = path in _STREAMS or is_inherited(path)
    return os.path.exists(path) and (is_open or not os.path.isfile(os.path.realpath(path)))


def is_writable(path: str) -> bool:
    """Return whether `write_text_to` can write this file, as far as that is known without writing."""
    try:
        if is_special(path):
            with place_of(path, into_proc=False) as (folder, name):
                return not os.path.isdir(path) and os.access(name, os.W_OK, dir_fd=folder)
        with place_of(path) as (folder, _):
            return os.access(".", os.W_OK, dir_fd=folder)
    except (OSError, ValueError):
        return False


def replace_at(folder: int, name: str, text: str, *, mode: int = 0o666) -> None:
    """Write a file into an opened folder under a random name, then rename it. A failed write leaves nothing.

    A new file gets `mode`, less the umask. Raises OSError, and ValueError for text that cannot be encoded.
    """
    temporary = f".numapin-{os.urandom(8).hex()}"  # random, because hosts and containers share folders and process ids
    old = status_at(folder, name)
    keeps = old is not None and stat.S_ISREG(old.st_mode)
    try:
        descriptor = os.open(temporary, _NEW_FILE, 0o600 if keeps else mode, dir_fd=folder)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            if old is not None and keeps:
                _take_over_rights(descriptor, old)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        try:
            os.unlink(temporary, dir_fd=folder)
        except OSError:  # it was renamed, or it cannot be removed
            pass


def unwritten(path: str, error: OSError | ValueError, remedy: str) -> NumapinError:
    """Return the error for a file that cannot be written."""
    return NumapinError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}", remedy)


def _take_over_rights(descriptor: int, old: os.stat_result) -> None:
    """Give a new file the owner, group and mode of the file that it replaces, as far as this process may."""
    mode = stat.S_IMODE(old.st_mode) & 0o777
    new = os.fstat(descriptor)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        try:
            os.fchown(descriptor, old.st_uid if os.geteuid() == 0 else -1, old.st_gid)
        except OSError:
            pass
        if os.fstat(descriptor).st_gid != old.st_gid:
            mode &= ~stat.S_IRWXG  # the old group's rights are not for another group
    try:
        os.fchmod(descriptor, mode)
    except OSError:  # a file system without modes
        pass


def _write_special(path: str, text: str, patience_s: float | None) -> None:
    """Write to a device or pipe. Raises OSError, also if it is a link or regular file or another user's by now."""
    with place_of(path, into_proc=False) as (folder, name):
        is_open = is_in_proc(folder)
        follow = os.O_APPEND if is_open else os.O_NOFOLLOW
        with open(_opened_special(folder, name, _SPECIAL | follow), "w", encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            refuse_planted(folder, name, found)
            if stat.S_ISREG(found.st_mode) and not is_open:
                raise OSError(errno.EINVAL, "it has become a regular file", path)
            if patience_s is not None:
                _write_in_time(file.fileno(), text.encode(), patience_s)
                return
            os.set_blocking(file.fileno(), True)
            file.write(text)


def _opened_special(folder: int, name: str, flags: int) -> int:
    """Open a device or pipe. Raises OSError."""
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError as error:
        found = status_at(folder, name)
        if error.errno == errno.ENXIO and found is not None and stat.S_ISFIFO(found.st_mode):
            raise OSError(errno.ENXIO, "no program reads this pipe") from None
        raise


def _write_in_time(descriptor: int, content: bytes, seconds: float) -> None:
    """Write to a descriptor that does not block. Raises OSError if its reader has not read all after this time."""
    import select  # no rank needs it
    import time

    rest, until_s = memoryview(content), time.monotonic() + seconds
    room = select.poll()
    room.register(descriptor, select.POLLOUT)
    while rest:
        left_s = until_s - time.monotonic()
        if left_s <= 0 or not room.poll(left_s * 1000):
            raise OSError(errno.ETIMEDOUT, f"its reader has not read all of it in {seconds:g} s")
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # another writer was faster
            pass
