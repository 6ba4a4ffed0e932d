"""The recorder in a rank: the batches and optimizer steps of an unmodified script, seen from torch's modules.

Each step goes to its listeners: the meter of `numapin compare` and the tracer of `numapin trace`. What each loop waits
is published for `numapin top` in every process that the recorder is attached to. A step with one batch costs some
microseconds (docs/results/compare-hook-cpu.txt). A failure here never stops the script: it is reported once.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from numapin.base.stderr import say
from numapin.steps.totals import totals_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_P = ParamSpec("_P")
_T = TypeVar("_T")


class StepListener:
    """A listener to the batches and steps of this process, until it is `done`. Times are in nanoseconds."""

    done = False

    def batch(self, waited_ns: int, size: int | None, num_ahead: int) -> None:
        """Take note of a batch: the time in `next()`, its samples if known, and how many the loader fetches ahead."""

    def optimizer_step(self, optimizer: object) -> None:
        """Take note of an optimizer's step."""

    def enter_loader(self, num_workers: int) -> None:
        """Take note that the loop calls `next()`."""

    def leave_loader(self, num_workers: int, waited_ns: int, *, is_over: bool) -> None:
        """Take note that `next()` has ended; `is_over`: with the epoch."""


@dataclass(slots=True)
class Recording:
    """One listener of this process.

    `begin` makes it with the first batch or step, or returns None if this process has none; `fail` is called with the
    error that ends it.
    """

    begin: Callable[[], StepListener | None]
    fail: Callable[[StepListener | None, Exception], None]
    listener: StepListener | None = None
    closed: bool = False
    is_acting: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)  # a signal handler may enter again

    def pass_on(self, act: Callable[[Any], None], *, begins: bool = False) -> None:
        """Pass something on to the listener; with `begins`, make the listener first."""
        if self.closed:
            return
        with self.lock:
            if self.closed or self.is_acting:
                return
            try:
                self.is_acting = True
                if self.listener is None and begins:
                    self.listener = self.begin()
                    self.closed = self.listener is None
                if self.listener is not None:
                    act(self.listener)
                    self.closed = self.listener.done
            except Exception as error:  # reported; the script continues
                self.closed = True
                self.fail(self.listener, error)
            finally:
                self.is_acting = False


recordings: Final[list[Recording]] = []
"""The recordings of this process."""


class _Attached:
    """The state of the recorder in this process."""

    modules: Final[set[str]] = set()
    timed: Final[set[type]] = set()  # the classes of iterators whose `next()` is timed
    makes_optimizers: bool = False
    within: Final = threading.local()  # has `next` while this thread is in `next()`


def attach(module: ModuleType) -> None:
    """Record the optimizer steps or the batches of this module of torch."""
    if module.__name__ in _Attached.modules:
        return
    if not _Attached.modules:
        os.register_at_fork(after_in_child=_in_child)
    _Attached.modules.add(module.__name__)
    if hasattr(module, "register_optimizer_step_post_hook"):
        module.register_optimizer_step_post_hook(_count_step)
        module.Optimizer.__init__ = _noting(module.Optimizer.__init__, _note_optimizer)
        return
    try:
        # torch has no hooks there; a frame around __init__ would be where torch's warnings point
        base = module._BaseDataLoaderIter
        base.__new__ = staticmethod(partial(_new_iterator, base))
    except AttributeError as error:
        say(f"warning: batches are not counted: this version of torch has different internals: {error}")


def _in_child() -> None:
    """Count nothing in a fork of a recorded process. Another thread may hold a lock there forever, so make new ones.

    A process that was forked before the first step may become a rank.
    """
    for recording in recordings:
        recording.lock, recording.is_acting = threading.RLock(), False
        recording.closed = recording.closed or recording.listener is not None


def _count_step(optimizer: object, *_: object) -> None:
    for recording in recordings:
        recording.pass_on(lambda listener: listener.optimizer_step(optimizer), begins=True)


def _noting(make: Callable[_P, _T], note: Callable[[Any], None]) -> Callable[_P, _T]:
    """Return the constructor, which also notes the object that it made."""

    @wraps(make)
    def __init__(*arguments: _P.args, **named: _P.kwargs) -> _T:  # replaces the constructor
        made = make(*arguments, **named)
        note(arguments[0])
        return made

    return __init__


def _note_optimizer(_: object) -> None:
    """Note that the program trains: its batches are not its steps."""
    _Attached.makes_optimizers = True


def makes_optimizers() -> bool:
    """Return whether the program has made an optimizer."""
    return _Attached.makes_optimizers


def _new_iterator(base: Any, cls: Any, *arguments: object, **named: object) -> object:  # noqa: ANN401 - of any class
    """Time `next()` of the iterator's class: numapin's and torchdata's have their own, so the base's is not enough."""
    if cls not in _Attached.timed:
        _Attached.timed.add(cls)
        cls.__next__ = _recorded(cls.__next__)
    theirs: Any = super(base, cls).__new__  # a mixin's, or object's, which takes no arguments
    return theirs(cls) if theirs is object.__new__ else theirs(cls, *arguments, **named)


def _recorded(next_batch: Callable[[Any], _T]) -> Callable[[Any], _T]:
    """Return `__next__`, which also records the batch and the time that the loop waited for it.

    The batch has no known size if the loader does not batch, or has a batch sampler without a size.
    """

    @wraps(next_batch)
    def __next__(iterator: Any) -> _T:  # noqa: ANN401 - replaces the method of any class
        within = _Attached.within
        if getattr(within, "next", False):  # a subclass's calls its base's
            return next_batch(iterator)
        num_workers = getattr(iterator, "_num_workers", 0)
        current = [recording for recording in recordings if not recording.closed]
        is_over, began_ns = False, time.monotonic_ns()
        try:  # a signal handler may raise at any point, after which the next batch must be recorded again
            within.next = True
            for recording in current:
                recording.pass_on(lambda listener: listener.enter_loader(num_workers))
            began_ns = time.monotonic_ns()
            batch = next_batch(iterator)
        except StopIteration:
            is_over = True
            raise
        finally:
            within.next = False
            now_ns = time.monotonic_ns()
            waited_ns = now_ns - began_ns
            for recording in current:
                recording.pass_on(lambda listener: listener.leave_loader(num_workers, waited_ns, is_over=is_over))
        if not getattr(iterator, "publishes_steps", False):  # from batch to batch; an epoch's first one ends no step
            last_ns = getattr(iterator, "_numapin_last_ns", None)
            iterator._numapin_last_ns = now_ns
            if last_ns is not None and getattr(iterator, "_num_yielded", 0) != 1:
                totals_of(os.getpid()).add(waited_s=waited_ns / 1e9, stepped_s=(now_ns - last_ns) / 1e9)
        if current:
            is_batched = getattr(iterator, "_auto_collation", False)
            size = getattr(getattr(iterator, "_index_sampler", None), "batch_size", None) if is_batched else None
            size = size if isinstance(size, int) else None
            num_ahead = int(num_workers * (getattr(iterator, "_prefetch_factor", 0) or 0))
            for recording in current:
                recording.pass_on(lambda listener: listener.batch(waited_ns, size, num_ahead), begins=True)
        return batch

    return __next__
