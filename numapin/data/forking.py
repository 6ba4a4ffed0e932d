"""Keep forked children from destroying CUDA objects that they inherited.

CUDA does not work in a forked child: the destructor of torch's CUDAEvent throws there, which aborts the process
(CUDAEvent.h, CUDAFunctions.cpp). So does torch when it frees memory that several streams use, because it records an
event for each of them (CUDACachingAllocator.cpp, insert_events). No collection may run between the fork and the child's
first line either.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing.process
import os
import sys
import threading
from functools import cache
from typing import Final
from weakref import ref

import torch

from numapin.system import memory

if "numpy" in sys.modules:
    # Loaded now, and not when torch first seeds it: a worker that another thread forks during the import inherits its
    # lock, and waits for it forever.
    importlib.import_module("numpy.random")

_on_devices: Final[set[ref[torch.UntypedStorage]]] = set()  # those that are alive
_at_forks: Final[list[list[torch.UntypedStorage]]] = []  # of the forks in progress; threads may fork at once


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


def keep_in_children(storage: torch.UntypedStorage) -> None:
    """Let no child that is forked from now on free this device memory, whoever refers to it there."""
    _watch_forks()
    _on_devices.add(ref(storage, _on_devices.discard))  # all in C: each batch comes here


@cache
def _watch_forks() -> None:
    os.register_at_fork(before=_hold_memory, after_in_parent=_at_forks.pop, after_in_child=_leave_in_child)


def _hold_memory() -> None:
    """Hold the memory during the fork: the child may collect garbage before it comes to `_leave_in_child`."""
    storages = [reference() for reference in _on_devices.copy()]  # `tuple` may collect garbage, which discards some
    held = [storage for storage in storages if storage is not None]
    for storage in held:
        fix = getattr(storage, "_fix_weakref", None)  # older torch: else the object does not keep the memory
        if fix is not None:
            fix()
    _at_forks.append(held)


def _leave_in_child() -> None:
    # As in multiprocessing's own children: at its end, this child would terminate its parent's workers as its own.
    getattr(multiprocessing.process, "_children", set()).clear()
    for storages in _at_forks:
        for storage in storages:
            memory.keep_forever(storage)
    _at_forks.clear()
    collection_paused.leave_in_child()


def is_in_bad_fork() -> bool:
    """Return whether this process was forked from one that uses CUDA."""
    return bool(torch.cuda._is_in_bad_fork())  # torch has no public way to ask
