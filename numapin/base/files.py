"""Files and folders that other users may have prepared: read and write them, follow none of their links.

Paths are walked component by component on opened folders, and ownership is read from the descriptor, so that nothing
can be swapped in between. In a folder that everybody may write to (with the sticky bit, as /tmp), other users' links,
pipes and files are refused, as Linux does if fs.protected_symlinks, protected_fifos and protected_regular are on.

A file is written under a random name and then renamed, so that a reader never sees a partial file.

Each rank imports this before its program starts: the standard library only.
"""

from __future__ import annotations

import errno
import os
import stat

from numapin.errors import NumapinError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags that open a folder whose name is not a link."""
PLACE: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""The same for a folder that need not be readable."""
FILE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Flags that open a file without following a link or waiting for a pipe."""
_LOOK: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_LINKS: Final = 40  # as Linux
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_UNMAPPED: Final = 65534  # how Linux shows users that a user namespace does not map
_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_INHERITED: Final = ("/dev/fd", "/proc/self/fd")
_STDIN: Final = "/dev/stdin"
# Without O_NONBLOCK, opening a pipe without a reader would block.
_SPECIAL: Final = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_STREAMS: Final = ("/dev/stdout", "/dev/stderr")
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


# --- folders ---------------------------------------------------------------------------------------------------------


class OpenFolder:
    """An opened folder for a `with` block, which gets its descriptor and closes it at the end."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def __exit__(self, *error: object) -> None:
        """Close it."""
        os.close(self._descriptor)


class OpenPlace:
    """The opened folder (O_PATH) that holds a file; a `with` block gets its descriptor and the file's name in it.

    Links are followed. Without `into_proc`, a link in /proc at the end of the way (/dev/stdout leads to one) stays,
    because only the kernel can follow it to a pipe. With `make`, missing folders on the way are made. Raises OSError;
    PermissionError for a link or file that another user put into a folder that everybody may write to.
    """

    __slots__ = ("_folder", "_name")

    def __init__(self, path: str, *, into_proc: bool = True, make: bool = False) -> None:
        names, num_links = _components(path), 0
        self._folder = os.open("/" if path.startswith("/") else ".", PLACE)
        try:
            while names and num_links <= _MAX_LINKS:
                self._name = name = names.pop()
                target = _target(self._folder, name, is_last=not names)
                if not names and (target is None or (not into_proc and is_in_proc(self._folder))):
                    return
                if target is not None:
                    num_links += 1
                    names += _components(target)
                    name = "/" if target.startswith("/") else "."
                try:
                    entered = os.open(name, PLACE, dir_fd=self._folder)
                except FileNotFoundError:
                    if not make:
                        raise
                    _make_at(self._folder, name, 0o777)
                    entered = os.open(name, PLACE, dir_fd=self._folder)
                os.close(self._folder)
                self._folder = entered
        except BaseException:
            os.close(self._folder)
            raise
        os.close(self._folder)
        problem = errno.ELOOP if names else errno.EISDIR
        raise OSError(problem, os.strerror(problem), path)

    def __enter__(self) -> tuple[int, str]:
        """Return the folder's descriptor and the name."""
        return self._folder, self._name

    def __exit__(self, *error: object) -> None:
        """Close the folder."""
        os.close(self._folder)


def opened(path: str, flags: int = FOLDER) -> OpenFolder:
    """Open a folder; follow links on the way unless another user may have planted them. Raises OSError."""
    if not path.strip("/"):
        return OpenFolder(os.open("/", flags))
    with OpenPlace(path) as (parent, name):
        return OpenFolder(os.open(name, flags, dir_fd=parent))


def open_at(path: str, flags: int) -> int:
    """Open a file, as an opener for Python's `open`; follow only the links that `OpenPlace` follows. Raises OSError."""
    with OpenPlace(path) as (folder, name):
        try:
            return os.open(name, flags | os.O_NOFOLLOW, 0o666, dir_fd=folder)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None  # the kernel saw the name only


def make_folders(path: str) -> None:
    """Make a folder and the missing ones above it, as `mkdir -p`; follow only the links that `OpenPlace` follows.

    The last folder is for this user only (mode 0700); the umask applies to the others. Raises OSError, e.g.
    FileExistsError for a file.
    """
    if not _components(path):
        return
    with OpenPlace(path, make=True) as (parent, name):
        found = status_at(parent, name)
        if found is None:
            _make_at(parent, name, 0o700)
        elif not stat.S_ISDIR(found.st_mode):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)


def open_file(folder: int, name: str, flags: int = os.O_RDONLY) -> int:
    """Open a regular file of this user or of root in an opened folder; for root, also of the folder's owner.

    Links are refused, and so are pipes, which could block the reader: the folder's owner may have put them there.
    """
    try:
        descriptor = os.open(name, flags | FILE, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.EINVAL, "a link, not a regular file", name) from None
        raise
    found, user = os.fstat(descriptor), os.geteuid()
    if not stat.S_ISREG(found.st_mode):
        problem = OSError(errno.EINVAL, "not a regular file", name)
    elif found.st_uid not in (0, user or os.fstat(folder).st_uid):
        problem = PermissionError(errno.EPERM, "another user's file", name)
    else:
        return descriptor
    os.close(descriptor)
    raise problem


def make_own(path: str) -> None:
    """Make a folder (mode 0700), or check that an existing one is this user's. Raises OSError, e.g. PermissionError."""
    make_folders(path)
    with opened(path) as folder:
        require_own(folder)


def require_own(folder: int) -> None:
    """Raise PermissionError if an opened folder or file is another user's."""
    owner = os.fstat(folder).st_uid
    if owner != os.geteuid():
        raise PermissionError(errno.EPERM, f"belongs to another user (uid {owner})")


def require_stable(folder: int) -> None:
    """Raise PermissionError if others may rename or remove this user's files in a folder.

    The folders above it are not checked. A user who may write to one of them can move the run folder away, after which
    ranks use only a folder that is this user's (`require_own`). A check of all of them would refuse common
    setups: project folders of a group, and containers that another user unpacked, who owns their "/".
    """
    found = os.fstat(folder)
    if not _is_trusted(found.st_uid):
        raise PermissionError(errno.EPERM, f"belongs to another user (uid {found.st_uid})")
    if found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
        raise PermissionError(errno.EPERM, f"others may write to it (mode {stat.S_IMODE(found.st_mode):04o})")


def is_in_proc(folder: int) -> bool:
    """Return whether an opened folder is in /proc, where only the kernel makes links."""
    try:
        return os.fstat(folder).st_dev == os.stat("/proc/self").st_dev
    except FileNotFoundError:
        return False


def status_at(folder: int, name: str) -> os.stat_result | None:
    """Return the status of a file, without following a link; None if the file does not exist."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _make_at(parent: int, name: str, mode: int) -> None:
    """Make a folder in an opened one unless another process was faster."""
    try:
        os.mkdir(name, mode, dir_fd=parent)
    except FileExistsError:
        pass


def _components(path: str) -> list[str]:
    """Return the names of a path in reverse order."""
    return [name for name in path.split("/") if name not in ("", ".")][::-1]


def _target(folder: int, name: str, *, is_last: bool) -> str | None:
    """Return a link's target; None if the name is not a link. Raises OSError if another user may have planted it."""
    try:
        seen = os.open(name, _LOOK, dir_fd=folder)  # so that the link that is checked is the one that is read
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(seen)
        is_link = stat.S_ISLNK(found.st_mode)
        if is_link and os.geteuid() == 0 and not _is_trusted(found.st_uid):  # who could make root write to any file
            problem = f"{name} is a link of another user (uid {found.st_uid}), which root does not follow"
            raise PermissionError(errno.EACCES, problem, name)
        if is_link or is_last:
            refuse_planted(folder, name, found)
        return os.readlink("", dir_fd=seen) if is_link else None
    finally:
        os.close(seen)


def refuse_planted(folder: int, name: str, found: os.stat_result) -> None:
    """Raise PermissionError for another user's link or file in a folder that everybody may write to."""
    where = os.fstat(folder)
    is_shared = bool(where.st_mode & stat.S_ISVTX and where.st_mode & _OTHERS_WRITE)
    if is_shared and not stat.S_ISDIR(found.st_mode) and found.st_uid not in (os.geteuid(), where.st_uid):
        kind = "link" if stat.S_ISLNK(found.st_mode) else "file"
        problem = f"{name} is a {kind} of another user (uid {found.st_uid}) in a folder shared by all users"
        raise PermissionError(errno.EACCES, problem, name)


def _is_trusted(uid: int) -> bool:
    """Return whether a user is this one or root, including root outside a container that does not map it."""
    is_own_or_root = uid in (os.geteuid(), 0)
    if is_own_or_root or uid != _UNMAPPED:
        return is_own_or_root
    try:
        with open("/proc/self/uid_map", "rb") as file:  # user_namespaces(7)
            ranges = [(int(first), int(count)) for first, _, count in map(bytes.split, file)]
    except (OSError, ValueError):
        return False
    return not any(first <= uid < first + count for first, count in ranges)


# --- read ------------------------------------------------------------------------------------------------------------


def read_file(path: str, *, max_bytes: int, what: str = "file") -> bytes:
    """Return the bytes of a regular file, or of a pipe that this process was started with (/dev/stdin, <(command)).

    It never blocks on another pipe, a device or a socket. Raises OSError with a path and a reason for anything else,
    and for a file of more than `max_bytes`. `what` names the kind of file in that error.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes >> 20} MiB, which no {what} is", path)
    return content


def open_regular(path: str) -> int:
    """Open a file for `read_file` and return its descriptor. Raises OSError."""
    try:
        descriptor = os.open(path, _READ)
    except ValueError as error:  # a NUL in the path, or text that cannot be encoded
        raise OSError(errno.EINVAL, f"not a file name: {error}", path) from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(mode) and is_inherited(path):
        os.set_blocking(descriptor, True)  # our caller is writing it: <(command)
    elif not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return descriptor


def is_inherited(path: str) -> bool:
    """Return whether a path names a descriptor that this process inherited, and not a file that others chose."""
    folder, _, name = path.rpartition("/")
    return path == _STDIN or (folder in _INHERITED and name.isdecimal())


# --- write -----------------------------------------------------------------------------------------------------------


def write_text_to(path: str, text: str, *, remedy: str, patience_s: float | None = None) -> None:
    """Write to a path that the user named: a regular file whole or not at all, through links; a device or pipe as is.

    An existing file keeps its mode and, if this process may set it, its owner. A pipe that is full is waited for, but
    not for longer than `patience_s`. Raises NumapinError that names the path.
    """
    try:
        is_stream = is_special(path)
        with OpenPlace(path, into_proc=not is_stream) as (folder, name):  # a link stays, and its target is replaced
            if is_stream:
                _write_special(folder, name, text, patience_s)
            else:
                replace_at(folder, name, text)
    except (OSError, ValueError) as error:  # ValueError: text that cannot be encoded, e.g. a lone surrogate
        raise unwritten(path, error, remedy) from None


def is_special(path: str) -> bool:
    """Return whether the path is something that a rename must not replace: a device, a pipe, an open descriptor.

    A log file that stdout was redirected to holds what others wrote, and they go on writing to it.
    """
    is_open = path in _STREAMS or is_inherited(path)
    return os.path.exists(path) and (is_open or not os.path.isfile(os.path.realpath(path)))


def is_writable(path: str) -> bool:
    """Return whether `write_text_to` can write this file, as far as that is known without writing."""
    try:
        is_stream = is_special(path)
        with OpenPlace(path, into_proc=not is_stream) as (folder, name):
            is_folder = is_stream and os.path.isdir(path)
            return not is_folder and os.access(name if is_stream else ".", os.W_OK, dir_fd=folder)
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


def _write_special(folder: int, name: str, text: str, patience_s: float | None) -> None:
    """Write to a device or pipe. Raises OSError, also if it is a link or regular file or another user's by now."""
    import select  # no rank needs it
    import time

    rest, until_s = memoryview(text.encode()), None if patience_s is None else time.monotonic() + patience_s
    is_open = is_in_proc(folder)
    try:
        descriptor = os.open(name, _SPECIAL | (os.O_APPEND if is_open else os.O_NOFOLLOW), dir_fd=folder)
    except OSError as error:
        found = status_at(folder, name)
        if error.errno == errno.ENXIO and found is not None and stat.S_ISFIFO(found.st_mode):
            raise OSError(errno.ENXIO, "no program reads this pipe") from None
        raise
    try:
        found = os.fstat(descriptor)
        refuse_planted(folder, name, found)
        if stat.S_ISREG(found.st_mode) and not is_open:
            raise OSError(errno.EINVAL, "it has become a regular file", name)
        room = select.poll()
        room.register(descriptor, select.POLLOUT)
        while rest:
            left_s = None if until_s is None else until_s - time.monotonic()
            is_late = left_s is not None and left_s <= 0
            if is_late or not room.poll(None if left_s is None else left_s * 1000):
                raise OSError(errno.ETIMEDOUT, f"its reader has not read all of it in {patience_s:g} s")
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BlockingIOError:  # another writer was faster
                pass
    finally:
        os.close(descriptor)
