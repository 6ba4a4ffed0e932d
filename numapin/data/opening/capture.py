"""Keep our context-wide events and the user's CUDA-graph captures apart.

Comes in: the calls of torch.cuda.CUDAGraph. Goes out: a block in which no capture is in progress, or the word that one
is. To record an event of a whole context while a stream of it captures breaks the capture (cuCtxRecordEvent), and the
driver has no call that asks whether any stream captures. So captures that go through torch are watched; others, through
other libraries, are not seen.
"""

from __future__ import annotations

import threading
from functools import wraps
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

# Reentrant: a signal handler or finalizer that captures inside a block of its own thread must not wait for itself.
_lock: Final = threading.RLock()
_capturing: Final[WeakSet[Any]] = WeakSet()  # weak: a capture whose graph died without an end is over
_watched: Final[WeakSet[type]] = WeakSet()


def watch_captures() -> None:
    """Watch the captures of torch.cuda.CUDAGraph from now on; a second call, or a torch without it, changes nothing.

    Effects: replaces capture_begin, capture_end and reset of the class, so call it before the first capture begins.
    """
    graphs = getattr(torch.cuda, "CUDAGraph", None)
    with _lock:
        if graphs is None or graphs in _watched:
            return
        _watched.add(graphs)
        for name, watch in (("capture_begin", _begins), ("capture_end", _ends), ("reset", _ends)):
            setattr(graphs, name, watch(getattr(graphs, name)))


class no_capture:  # noqa: N801 - read as a block, and entered at every batch: a generator costs three times as much
    """Hold back captures inside the block: True if none is in progress and so none will be, False if one is.

    Where it is False the caller must not record. Keep the block short: the user's capture_begin waits for its end.
    """

    __slots__ = ()

    def __enter__(self) -> bool:
        """Wait until no capture is just beginning."""
        _lock.acquire()
        return not _capturing

    def __exit__(self, *error: object) -> None:
        """Let captures begin."""
        _lock.release()


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
