"""The hook in a rank of `numapin compare`, by which an unmodified script is measured. Edge.

Comes in: torch's modules as they are imported (sitehook/sitecustomize.py). Goes out: calls of the process's
`StepMeter`. A failure here never stops the script: the meter is closed, and the failure is reported once.

A step ends when the program's optimizer steps, as in `numapin trace`; if the program makes no optimizer, when a
DataLoader returns a batch. A step with one batch costs some 8 us (bench/compare_hook.py).
"""

from __future__ import annotations

import os
import threading
import time
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from numapin.base.stderr import say
from numapin.compare.meter import StepMeter, claim, report_failure

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Counted:
    """The state of counting in this process."""

    meter: StepMeter | None = None
    closed: bool = False
    makes_optimizers: bool = False
    watches_forks: bool = False
    within: Final = threading.local()  # has `next` while this thread is in `next()`
    lock = threading.RLock()


def attach(module: ModuleType) -> None:
    """Count the optimizer steps or the batches of this module of torch."""
    if not _Counted.watches_forks:
        _Counted.watches_forks = True
        os.register_at_fork(after_in_child=_in_child)
    if hasattr(module, "register_optimizer_step_post_hook"):
        module.register_optimizer_step_post_hook(lambda optimizer, *_: _count(lambda m: m.optimizer_step(optimizer)))
        module.Optimizer.__init__ = _noting_optimizers(module.Optimizer.__init__)
        return
    try:
        base = module._BaseDataLoaderIter  # torch has no hooks there
        base.__init__ = _timing_its_class(base.__init__)
    except AttributeError as error:
        say(f"warning: batches are not counted: this version of torch has different internals: {error}")


def _in_child() -> None:
    """Count nothing in a fork of a measured process. Another thread may hold the lock there forever, so make a new one.

    A process that was forked before the first step may become a rank.
    """
    _Counted.lock = threading.RLock()
    _Counted.closed = _Counted.closed or _Counted.meter is not None


def _noting_optimizers(make: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return the constructor, which also notes that the program trains: its batches are not its steps."""

    @wraps(make)
    def __init__(*arguments: _P.args, **named: _P.kwargs) -> _T:  # replaces the constructor
        _Counted.makes_optimizers = True
        if _Counted.meter is not None:
            _Counted.meter.makes_optimizers = True
        return make(*arguments, **named)

    return __init__


def _timing_its_class(make: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return the constructor of an iterator, which also lets `next()` of its class be timed.

    numapin's and torchdata's iterators have their own `__next__`, so that the base's is not enough.
    """
    timed: set[type] = set()

    @wraps(make)
    def __init__(*arguments: _P.args, **named: _P.kwargs) -> _T:  # replaces the constructor
        made = make(*arguments, **named)
        cls = type(arguments[0])
        if cls not in timed:
            timed.add(cls)
            cls.__next__ = _counting_batches(cls.__next__)  # type: ignore[attr-defined]
        return made

    return __init__


def _counting_batches(next_batch: Callable[[Any], _T]) -> Callable[[Any], _T]:
    """Return `__next__`, which also counts the batch and the time that the loop waited for it."""

    @wraps(next_batch)
    def __next__(iterator: object) -> _T:  # replaces the method
        within = _Counted.within
        if _Counted.closed or getattr(within, "next", False):  # a subclass's calls its base's
            return next_batch(iterator)
        within.next, began_ns = True, time.monotonic_ns()
        try:
            batch = next_batch(iterator)
        finally:
            within.next = False
        waited_ns = time.monotonic_ns() - began_ns
        _count(lambda meter: meter.batch(waited_ns, _batch_size(iterator), _num_ahead(iterator)))
        return batch

    return __next__


def _batch_size(iterator: object) -> int | None:
    """Return the loader's batch size; None for a loader that does not batch, or has a batch sampler without a size."""
    if not getattr(iterator, "_auto_collation", False):
        return None
    size = getattr(getattr(iterator, "_index_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def _num_ahead(iterator: object) -> int:
    """Return how many batches the loader's workers fetch ahead."""
    return int(getattr(iterator, "_num_workers", 0) * (getattr(iterator, "_prefetch_factor", 0) or 0))


def _count(act: Callable[[StepMeter], None]) -> None:
    """Pass a batch or step to this process's meter. Processes forked later and DataLoader workers have none."""
    if _Counted.closed:
        return
    with _Counted.lock:
        try:
            meter = _Counted.meter = _Counted.meter or _claimed()
            if meter is None:
                _Counted.closed = True
                return
            act(meter)
        except Exception as error:  # reported; the script continues
            _Counted.closed = True
            report_failure(error)


def _claimed() -> StepMeter | None:
    meter = claim()
    if meter is not None:
        meter.makes_optimizers = _Counted.makes_optimizers
    return meter
