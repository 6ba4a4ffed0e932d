"""Keep forked workers from destroying CUDA objects that they inherited as garbage. Edge (the garbage collector).

Comes in: the start of workers in a rank that uses CUDA. Goes out: workers that collect only their own garbage.

CUDA does not work in a forked child: the destructor of torch's CUDAEvent throws there, which aborts the process
(CUDAEvent.h, CUDAFunctions.cpp). So no collection may run between the fork and the worker's first line either.
"""

from __future__ import annotations

import gc
import os
import threading
from functools import cache
from typing import Final

import torch


class _Pause:
    """Garbage collection is off inside the block, if the process uses CUDA; several threads may be inside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        _watch_forks()
        with self._lock:
            if not self._num_inside:
                self._was_enabled = torch.cuda.is_initialized() and gc.isenabled()
                if self._was_enabled:
                    gc.disable()
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside and self._was_enabled:
                gc.enable()

    def leave_in_child(self) -> None:
        """Freeze what a child inherited, and let it collect again if its parent did. Not only workers may come by."""
        if self._num_inside:
            if is_in_bad_fork():
                gc.freeze()
            if self._was_enabled:
                gc.enable()
        self._lock, self._num_inside = threading.Lock(), 0


collection_paused: Final = _Pause()
"""The block in which workers are forked."""


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=collection_paused.leave_in_child)


def is_in_bad_fork() -> bool:
    """Return whether this process was forked from one that uses CUDA."""
    return bool(torch.cuda._is_in_bad_fork())  # torch has no public way to ask
