"""Calls that decide how this process ends."""

from __future__ import annotations

import ctypes

from numapin.system.calls import LIBC, call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

PR_SET_PDEATHSIG: Final = 1


def end_with_parent(number: int) -> None:
    """Request a signal to this process when the thread that started it ends, however it ends; exec keeps the request.

    Children of this process do not inherit it. Raises OSError: EINVAL.
    """
    call("prctl", PR_SET_PDEATHSIG, number, 0, 0, 0)


def exit_without_destructors() -> None:
    """Skip all C and C++ exit handlers registered so far when this process ends by exit(3).

    Unwritten data in C streams is lost. A C library without on_exit(3), such as musl, still runs them all.
    """
    from contextlib import suppress  # here, because each rank imports this module before its own program starts

    libc = ctypes.CDLL(LIBC)
    with suppress(AttributeError):
        libc.on_exit(ctypes.cast(libc["_exit"], ctypes.c_void_p), None)
