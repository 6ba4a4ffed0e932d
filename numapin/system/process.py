"""What libc and the kernel do to this process itself. Edge.

Comes in: a signal number, or nothing. Goes out: nothing, or OSError.
"""

from __future__ import annotations

import ctypes

from numapin.system.calls import _LIBC, call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

PR_SET_PDEATHSIG: Final = 1


def end_with_parent(number: int) -> None:
    """Have this process get a signal when the thread that started it ends, however it ends; exec keeps that.

    What this process starts does not inherit it. Raises OSError: EINVAL.
    """
    call("prctl", PR_SET_PDEATHSIG, number, 0, 0, 0)


def exit_without_destructors() -> None:
    """Have this process, when it ends by exit(3), run no handler of C or C++ that was registered before.

    What a C stream still holds is lost. A C library without on_exit(3), as musl is, runs them all.
    """
    from contextlib import suppress  # here, because each rank imports this module before its own program starts

    libc = ctypes.CDLL(_LIBC)
    with suppress(AttributeError):
        libc.on_exit(ctypes.cast(libc["_exit"], ctypes.c_void_p), None)
