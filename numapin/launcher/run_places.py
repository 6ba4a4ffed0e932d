"""The directories in which runs have their folders by default: find them, and this user's own folder in each.

Other users may have put anything there first, so a folder is trusted by its owner and mode, read from its descriptor.
"""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from numapin.base.files import FOLDER, OTHERS_WRITE, PLACE, is_own, opened, require_stable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

DEFAULT_PLACES: Final = ("/tmp", "/var/tmp", "/usr/tmp")  # noqa: S108 - our folder has mode 0700
"""The temporary directories that are looked at whatever the environment names."""
_OLD_BASE: Final = "numapin"  # in $XDG_RUNTIME_DIR
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def temporary_directories(environ: Mapping[str, str]) -> list[str]:
    """Return the directories that Python's tempfile tries, in its order, then one that is in memory."""
    named = filter(None, map(environ.get, ("TMPDIR", "TEMP", "TMP")))
    places = [*map(os.path.abspath, named), *DEFAULT_PLACES]
    with suppress(FileNotFoundError):  # the current directory may have been removed
        places.append(os.getcwd())
    places.append("/dev/shm")  # noqa: S108 - writable in containers whose other file systems are not
    return list(dict.fromkeys(filter(os.path.isabs, places)))


def own_bases(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield this user's private folders in the default places of runs, and in the default place of older versions."""
    for place in temporary_directories(environ):
        with suppress(OSError), opened(place, PLACE) as parent:
            yield from _private_bases(place, parent, _base_names(parent))
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime:
        with suppress(OSError), _opened_place(os.path.abspath(runtime), is_stable=True) as parent:
            yield from _private_bases(os.path.abspath(runtime), parent, [_OLD_BASE])


def open_own_base(place: str, *, is_stable: bool) -> tuple[str, int]:
    """Open this user's folder in a temporary directory, or make one; return its path and descriptor.

    A folder that another user made first, or to which others may write, is not used; another name is. Other users'
    rights to read ours are removed: torch grants them when it remakes a removed folder.

    Raises OSError, with `is_stable` also if other users could replace this user's folder in the directory.
    """
    with _opened_place(place, is_stable=is_stable) as parent:
        with suppress(FileExistsError):  # another launcher of this user may be making it
            os.mkdir(_base_name(), 0o700, dir_fd=parent)
        for name in _base_names(parent):
            base = _open_base(parent, name)
            if base is not None:
                os.fchmod(base, 0o700)
                return os.path.join(place, name), base
        name = f"{_base_name()}-{os.urandom(4).hex()}"
        os.mkdir(name, 0o700, dir_fd=parent)
        return os.path.join(place, name), os.open(name, FOLDER, dir_fd=parent)


@contextmanager
def _opened_place(place: str, *, is_stable: bool) -> Iterator[int]:
    """Open a temporary directory. Raises OSError."""
    with opened(place, PLACE) as parent:
        if is_stable:
            require_stable(parent)
        yield parent


def _private_bases(place: str, parent: int, names: Iterable[str]) -> Iterator[str]:
    """Yield the paths of the folders that belong to this user and to which other users have no access."""
    for name in names:
        base = _open_base(parent, name)
        if base is None:
            continue
        is_private = not os.fstat(base).st_mode & _OTHERS
        os.close(base)
        if is_private:
            yield os.path.join(place, name)


def _base_name() -> str:
    return f"numapin-{os.geteuid()}"


def _base_names(parent: int) -> Iterator[str]:
    """Yield the names that our folder can have in a temporary directory, the usual one first."""
    yield _base_name()
    try:
        listed = os.open(".", FOLDER, dir_fd=parent)
    except PermissionError:  # one may make files in the directory but not list them
        return
    try:
        names = os.listdir(listed)
    finally:
        os.close(listed)
    yield from sorted(name for name in names if name.startswith(f"{_base_name()}-"))


def _open_base(parent: int, name: str) -> int | None:
    """Open a folder of this user; None if it is missing, not a folder, another user's, or writable by others."""
    try:
        base = os.open(name, FOLDER, dir_fd=parent)
    except OSError:
        return None
    if is_own(base) and not os.fstat(base).st_mode & OTHERS_WRITE:
        return base
    os.close(base)
    return None
