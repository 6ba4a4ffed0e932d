"""Keep forked workers from destroying CUDA objects that they inherited as garbage. Edge (the garbage collector).

Comes in: the start of workers in a rank that uses CUDA. Goes out: workers that collect only their own garbage.

CUDA does not work in a forked child: the destructor of torch's CUDAEvent throws there, which aborts the process
(CUDAEvent.h, CUDAFunctions.cpp). So no collection may run between the fork and the worker's first line either.
"""

from __future__ import annotations

import gc
import threading
from typing import Final

import torch


class _Pause:
    """A block that several threads may be in at once; no collection runs meanwhile, if the process uses CUDA."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_inside:
                self._was_enabled = torch.cuda.is_initialized() and gc.isenabled()
                if self._was_enabled:
                    gc.disable()
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                self.end()

    def end(self) -> None:
        """Let the collector run again, if it did before."""
        if self._was_enabled:
            gc.enable()


collection_paused: Final = _Pause()
"""The block in which workers are forked. They call `leave_inherited`."""


def leave_inherited() -> None:
    """Never collect what this worker inherited; from now on collect its own garbage, if its parent does so."""
    if is_in_bad_fork():
        gc.freeze()
        collection_paused.end()


def is_in_bad_fork() -> bool:
    """Return whether this process was forked from one that uses CUDA."""
    return bool(torch.cuda._is_in_bad_fork())  # torch has no public way to ask
