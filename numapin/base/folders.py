"""Open folders and files that other users may have prepared, and follow none of their links.

Paths are walked component by component on opened folders, and ownership is read from the descriptor, so that nothing
can be swapped in between.

In a folder that everybody may write to (with the sticky bit, as /tmp), other users' links, pipes and files are refused,
as Linux does if fs.protected_symlinks, protected_fifos and protected_regular are on.

Each rank imports this before its program starts: the standard library only.
"""

from __future__ import annotations

import errno
import os
import stat

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
OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_UNMAPPED: Final = 65534  # how Linux shows users that a user namespace does not map


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
    """The opened folder that holds a file, closed at the end of a `with` block, and the file's name in the folder."""

    __slots__ = ("_folder", "_make", "_name")

    def __init__(self, path: str, *, into_proc: bool = True, make: bool = False) -> None:
        self._make = make
        self._folder = os.open("/" if path.startswith("/") else ".", PLACE)
        try:
            self._name = self._walk(path, into_proc=into_proc)
        except BaseException:
            os.close(self._folder)
            raise

    def __enter__(self) -> tuple[int, str]:
        """Return the folder's descriptor and the name."""
        return self._folder, self._name

    def __exit__(self, *error: object) -> None:
        """Close the folder."""
        os.close(self._folder)

    def _walk(self, path: str, *, into_proc: bool) -> str:
        """Go to the file's folder; return the file's name there."""
        names, num_links = _components(path), 0
        while names:
            name = names.pop()
            is_last = not names
            target = _target(self._folder, name, is_last=is_last)
            if is_last and (target is None or (not into_proc and is_in_proc(self._folder))):
                return name
            if target is None:
                self._enter(name)
                continue
            num_links += 1
            if num_links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            names += _components(target)
            self._enter("/" if target.startswith("/") else ".")
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)

    def _enter(self, name: str) -> None:
        """Open a folder in the current one, which is closed. With `make`, make the folder if it is missing."""
        try:
            entered = os.open(name, PLACE, dir_fd=self._folder)
        except FileNotFoundError:
            if not self._make:
                raise
            _make_at(self._folder, name, 0o777)
            entered = os.open(name, PLACE, dir_fd=self._folder)
        os.close(self._folder)
        self._folder = entered


def place_of(path: str, *, into_proc: bool = True) -> OpenPlace:
    """Open the folder that holds a file (O_PATH); for a `with` block, which gets its descriptor and the file's name.

    Links are followed. Without `into_proc`, a link in /proc at the end of the way (/dev/stdout leads to one) stays,
    because only the kernel can follow it to a pipe. Raises OSError; PermissionError for a link or file that another
    user put into a folder that everybody may write to.
    """
    return OpenPlace(path, into_proc=into_proc)


def opened(path: str, flags: int = FOLDER) -> OpenFolder:
    """Open a folder; follow links on the way unless another user may have planted them. Raises OSError."""
    if not path.strip("/"):
        return OpenFolder(os.open("/", flags))
    with place_of(path) as (parent, name):
        return OpenFolder(os.open(name, flags, dir_fd=parent))


def make_folders(path: str, *, mode: int = 0o777) -> None:
    """Make a folder and the missing ones above it, as `mkdir -p`; follow only the links that `place_of` follows.

    The umask applies, and `mode` counts for the last folder only. Raises OSError, e.g. FileExistsError for a file.
    """
    if not _components(path):
        return
    with OpenPlace(path, make=True) as (parent, name):
        found = status_at(parent, name)
        if found is None:
            _make_at(parent, name, mode)
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
    make_folders(path, mode=0o700)
    with opened(path) as folder:
        require_own(folder)


def require_own(folder: int) -> None:
    """Raise PermissionError if an opened folder is another user's."""
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
    if found.st_mode & OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
        raise PermissionError(errno.EPERM, f"others may write to it (mode {stat.S_IMODE(found.st_mode):04o})")


def is_own(descriptor: int) -> bool:
    """Return whether an opened folder or file is this user's."""
    return os.fstat(descriptor).st_uid == os.geteuid()


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
        if is_link:
            _refuse_link_for_root(name, found)
        if is_link or is_last:
            refuse_planted(folder, name, found)
        return os.readlink("", dir_fd=seen) if is_link else None
    finally:
        os.close(seen)


def _refuse_link_for_root(name: str, found: os.stat_result) -> None:
    """Raise PermissionError if this is root and the link is another user's, who could make root write to any file."""
    if os.geteuid() == 0 and not _is_trusted(found.st_uid):
        raise PermissionError(
            errno.EACCES, f"{name} is a link of another user (uid {found.st_uid}), which root does not follow", name
        )


def refuse_planted(folder: int, name: str, found: os.stat_result) -> None:
    """Raise PermissionError for another user's link or file in a folder that everybody may write to."""
    where = os.fstat(folder)
    is_shared = bool(where.st_mode & stat.S_ISVTX and where.st_mode & OTHERS_WRITE)
    if is_shared and not stat.S_ISDIR(found.st_mode) and found.st_uid not in (os.geteuid(), where.st_uid):
        kind = "link" if stat.S_ISLNK(found.st_mode) else "file"
        problem = f"{name} is a {kind} of another user (uid {found.st_uid}) in a folder shared by all users"
        raise PermissionError(errno.EACCES, problem, name)


def _is_trusted(uid: int) -> bool:
    """Return whether a user is this one or root, including root outside a container that does not map it."""
    return uid in (os.geteuid(), 0) or (uid == _UNMAPPED and not _is_mapped(uid))


def _is_mapped(uid: int) -> bool:
    """Return whether this user namespace maps this user: user_namespaces(7)."""
    try:
        with open("/proc/self/uid_map", "rb") as file:
            ranges = [(int(first), int(count)) for first, _, count in map(bytes.split, file)]
    except (OSError, ValueError):
        return True
    return any(first <= uid < first + count for first, count in ranges)
