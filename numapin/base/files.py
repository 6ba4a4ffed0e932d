"""Write a file whole or not at all. Edge.

Comes in: text, and a path of ours or one that the user named. Goes out: the file. It is written under another name and
then renamed, so that a reader never sees half of one.

Each rank imports this before its program starts: the standard library only.
"""

from __future__ import annotations

import os
from contextlib import suppress

from numapin.errors import NumapinError


def write_text_to(path: str, text: str, *, remedy: str) -> None:
    """Write to what the user named: a regular file whole or not at all, through links; a device or pipe as it is.

    Raises NumapinError that names it.
    """
    if not is_special(path):
        write_whole(os.path.realpath(path), text, remedy=remedy)  # the link stays, and what it leads to is replaced
        return
    try:
        # Without O_NONBLOCK a pipe that nobody reads would hold whoever opens it.
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with open(descriptor, "w", encoding="utf-8") as file:
            os.set_blocking(descriptor, True)
            file.write(text)
    except (OSError, ValueError) as error:
        raise unwritten(path, error, remedy) from None


def is_special(path: str) -> bool:
    """Return whether there is something that a rename would replace by a regular file: a device, a pipe."""
    return os.path.exists(path) and not os.path.isfile(os.path.realpath(path))


def write_whole(path: str, text: str, *, remedy: str) -> None:
    """Write under another name and rename; nothing is left of what failed. Raises NumapinError that names the file."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.urandom(8).hex()}")  # hosts and containers share folders and pids
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except (OSError, ValueError) as error:  # text that is none, such as half of a surrogate pair
        raise unwritten(path, error, remedy) from None
    finally:
        with suppress(OSError):  # after the rename it is not there; what cannot be removed has no better remedy
            os.unlink(temporary)


def unwritten(path: str, error: OSError | ValueError, remedy: str) -> NumapinError:
    """Return the error that says which file cannot be written, and why."""
    return NumapinError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}", remedy)
