"""Limit the threads of the libraries in a worker. Edge.

Comes in: the number of threads that the user wants. Goes out: a worker whose numpy, MKL, OpenMP and OpenCV use no more.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

import torch

from numapin.errors import UsageError
from numapin.system.threads import limit_threads

if TYPE_CHECKING:
    from collections.abc import Mapping

_VARIABLE: Final = "NUMAPIN_WORKER_THREADS"
_ONE: Final = 1  # like torch's own in a worker: the workers are the parallelism


def num_worker_threads(wanted: int | None, environ: Mapping[str, str]) -> int:
    """Return the threads that each library in a worker may use; 0: the library's default.

    Raises:
        UsageError: NUMAPIN_WORKER_THREADS is not a number.
    """
    if wanted is not None:
        return wanted
    text = environ.get(_VARIABLE, str(_ONE))
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{_VARIABLE}={text!r} is not a number of threads", f"use e.g. {_VARIABLE}=1")
    return int(text)


def limit_libraries(num_threads: int) -> None:
    """Let libraries other than torch use `num_threads` threads in this worker; 0: leave them as they are.

    torch keeps the one thread that its worker loop has set, even where it shares its OpenMP runtime with another
    library: with more, GNU's runtime hangs in a forked process.
    """
    if num_threads == 0:
        return
    torchs = torch.get_num_threads()
    limit_threads(num_threads, os.environ)
    set_for_opencv = getattr(sys.modules.get("cv2"), "setNumThreads", None)
    if set_for_opencv is not None:
        set_for_opencv(num_threads)
    torch.set_num_threads(torchs)
