"""Keep our context-wide events and the user's CUDA-graph captures apart.

Recording an event of a whole context while one of its streams captures breaks the capture (cuCtxRecordEvent), and the
driver has no call that reports whether any stream captures. So captures through torch are watched. Captures through
other libraries are not seen.
"""

from __future__ import annotations

import threading
from functools import wraps
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

# Reentrant: a signal handler or finalizer that captures inside a block of its own thread must not wait for itself.
_lock: Final = threading.RLock()
_capturing: Final[Any] = WeakSet()  # weak: a capture is over if its graph died without ending it
_watched: Final[WeakSet[type]] = WeakSet()


def watch_captures() -> None:
    """Watch the captures of torch.cuda.CUDAGraph from now on. A second call, or a torch without it, changes nothing.

    It replaces capture_begin, capture_end and reset of the class, so call it before the first capture begins.
    """
    graphs = getattr(torch.cuda, "CUDAGraph", None)
    if graphs is None or graphs in _watched:  # in a forked child, a thread of the parent may hold the lock forever
        return
    with _lock:
        if graphs in _watched:
            return
        _watched.add(graphs)
        for name, watch in (("capture_begin", _begins), ("capture_end", _ends), ("reset", _ends)):
            setattr(graphs, name, watch(getattr(graphs, name)))


def no_capture() -> AbstractContextManager[bool]:
    """Hold back captures inside the block: True if none is in progress and so none will be, False if one is.

    If it is False, the caller must not record. Keep the block short: the user's capture_begin waits for its end.
    """
    return _NO_CAPTURE


class _NoCapture:
    """The block of `no_capture`. It is entered at every batch, and a generator costs three times as much."""

    __slots__ = ()

    def __enter__(self) -> bool:
        """Wait while a capture is beginning."""
        _lock.acquire()
        return not _capturing.data  # its len() is written in Python, and each batch comes here

    def __exit__(self, *error: object) -> None:
        """Let captures begin."""
        _lock.release()


_NO_CAPTURE: Final = _NoCapture()


def _begins(method: Callable[..., None]) -> Callable[..., None]:
    @wraps(method)
    def capture_begin(graph: object, *args: object, **kwargs: object) -> None:
        with _lock:
            _capturing.add(graph)
        try:
            method(graph, *args, **kwargs)
        except BaseException:
            _capturing.discard(graph)
            raise

    return capture_begin


def _ends(method: Callable[..., None]) -> Callable[..., None]:
    @wraps(method)
    def capture_end(graph: object, *args: object, **kwargs: object) -> None:
        try:
            method(graph, *args, **kwargs)
        finally:
            _capturing.discard(graph)

    return capture_end
