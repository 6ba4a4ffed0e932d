"""The hook in a rank of `numapin compare`: the steps, batches and waits of an unmodified script. Edge.

Comes in: torch's modules as they are imported (sitehook/sitecustomize.py), and NUMAPIN_STEPS. Goes out: a file per rank
with a `RankSteps`, written at the first step and at both ends of the window. A failure here never stops the script.

A step ends when the program's optimizer steps, as in `numapin trace`; if the program makes no optimizer, when a
DataLoader returns a batch. Nothing is written, and no GPU is waited for, within the window: a step with one batch
costs some 8 us (bench/compare_hook.py). At both ends of the window the rank waits for its GPU, so that work that the
host has only queued is neither missing nor counted twice.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from numapin.base.files import replace_at
from numapin.base.folders import opened
from numapin.base.records import to_json
from numapin.base.stderr import say
from numapin.base.strict_json import encode
from numapin.compare.record import SCHEMA, Phase, RankSteps, StepUnit
from numapin.compare.settings import StepSettings
from numapin.compare.window import StepWindow
from numapin.launcher.preload import STEPS_VARIABLE
from numapin.trace.pace import FollowedOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(slots=True)
class _BatchTotals:
    """The batches that the loops of this process took until now. `num_samples` is None after a loader of no size."""

    waited_ns: int = 0
    num_batches: int = 0
    num_samples: int | None = 0

    def note(self, waited_ns: int, size: int | None) -> None:
        self.waited_ns += waited_ns
        self.num_batches += 1
        self.num_samples = None if size is None or self.num_samples is None else self.num_samples + size

    def copy(self) -> _BatchTotals:
        return _BatchTotals(self.waited_ns, self.num_batches, self.num_samples)


class _Counted:
    """The state of counting in this process."""

    meter: StepMeter | None = None
    closed: bool = False
    makes_optimizers: bool = False
    within: Final = threading.local()  # has `next` while this thread is in `next()`
    lock: Final = threading.RLock()


@dataclass(slots=True, kw_only=True)
class StepMeter:
    """The steps of one process, written to the file `path`."""

    settings: StepSettings
    rank: int
    local_rank: int
    num_ranks: int
    restart: int
    path: Path
    pid: int = field(default_factory=os.getpid)
    threads: dict[StepUnit, int] = field(default_factory=dict)
    optimizer: FollowedOptimizer = field(default_factory=FollowedOptimizer)
    totals: _BatchTotals = field(default_factory=_BatchTotals)
    windows: dict[StepUnit, StepWindow] = field(default_factory=dict)
    at_begin: dict[StepUnit, _BatchTotals] = field(default_factory=dict)
    at_end: dict[StepUnit, _BatchTotals] = field(default_factory=dict)

    def batch(self, waited_ns: int, size: int | None) -> None:
        """Count a batch, and the end of a step if batches are the steps."""
        thread = threading.get_ident()
        is_in_loop = self.threads.get(self.unit, thread) == thread  # the loop does not wait for a thread beside it
        self.totals.note(waited_ns if is_in_loop else 0, size)
        self._step(StepUnit.BATCH)

    def optimizer_step(self, optimizer: object) -> None:
        """Count a step of the followed optimizer."""
        if self.optimizer.counts(optimizer):
            self._step(StepUnit.OPTIMIZER_STEP)

    @property
    def unit(self) -> StepUnit:
        """Return the unit of steps: batches only in a program without optimizers."""
        is_training = _Counted.makes_optimizers or StepUnit.OPTIMIZER_STEP in self.windows
        return StepUnit.OPTIMIZER_STEP if is_training else StepUnit.BATCH

    def _step(self, unit: StepUnit) -> None:
        thread = threading.get_ident()
        if self.threads.setdefault(unit, thread) != thread:  # a loop beside the one that is measured
            return
        window = self.windows.get(unit)
        if window is None:
            window = self.windows[unit] = self._new_window()
        if window.is_done:
            return
        is_unit, now_ns = unit is self.unit, time.monotonic_ns()
        if is_unit and window.is_border(now_ns):
            _wait_for_gpu()
            now_ns = time.monotonic_ns()
        if window.stepped(now_ns):
            self._note_border(unit, window)
            if is_unit:
                self.write(Phase.DONE if window.is_done else _phase(window))

    def _new_window(self) -> StepWindow:
        settings = self.settings
        return StepWindow(skip=settings.skip, steps=settings.steps, limit_ns=int(settings.seconds * 1e9))

    def _note_border(self, unit: StepUnit, window: StepWindow) -> None:
        noted = self.at_end if window.is_done else self.at_begin
        noted[unit] = self.totals.copy()

    def write(self, phase: Phase) -> None:
        """Write what was measured so far."""
        with warnings.catch_warnings(action="ignore"):  # the script may turn warnings into errors
            record = {"schema": SCHEMA, **to_json(self._record(phase))}
        with opened(str(self.path.parent)) as folder:
            replace_at(folder, self.path.name, encode(record, indent=None) + "\n")

    def _record(self, phase: Phase) -> RankSteps:
        unit = self.unit
        if not self.windows.get(unit):  # an optimizer that never stepped
            unit = StepUnit.BATCH
        window = self.windows.get(unit) or self._new_window()
        begin, end = self.at_begin.get(unit, _BatchTotals()), self.at_end.get(unit, self.totals)
        sizes = (begin.num_samples, end.num_samples)
        num_batches = end.num_batches - begin.num_batches
        return RankSteps(
            rank=self.rank,
            local_rank=self.local_rank,
            num_ranks=self.num_ranks,
            restart=self.restart,
            pid=self.pid,
            phase=phase,
            unit=unit,
            num_seen=window.num_seen,
            first_ns=window.first_ns,
            begin_ns=window.begin_ns,
            step_ns=window.step_ns if phase in (Phase.DONE, Phase.ENDED) else (),
            waited_ns=end.waited_ns - begin.waited_ns,
            num_batches=num_batches,
            num_samples=None if None in sizes or not num_batches else _difference(*sizes),
            gpu_memory_bytes=_gpu_memory(),
        )

    def at_exit(self) -> None:
        """Write what was measured if the script ends before the last step."""
        window = self.windows.get(self.unit)
        if _Counted.closed or self.pid != os.getpid() or (window is not None and window.is_done):
            return
        try:
            self.write(Phase.ENDED)
        except OSError as error:
            say(f"warning: rank {self.rank}: {self.path} cannot be written: {error.strerror}")


def _phase(window: StepWindow) -> Phase:
    return Phase.STARTED if window.begin_ns is None else Phase.MEASURING


def _difference(begin: int | None, end: int | None) -> int:
    return (end or 0) - (begin or 0)


def attach(module: ModuleType) -> None:
    """Count the optimizer steps or the batches of this module of torch."""
    if hasattr(module, "register_optimizer_step_post_hook"):
        module.register_optimizer_step_post_hook(lambda optimizer, *_: _count(lambda m: m.optimizer_step(optimizer)))
        module.Optimizer.__init__ = _noting_optimizers(module.Optimizer.__init__)
        return
    try:
        base = module._BaseDataLoaderIter  # torch has no hooks there
        base.__init__ = _timing_its_class(base.__init__)
    except AttributeError as error:
        say(f"warning: batches are not counted: this version of torch has different internals: {error}")


def _noting_optimizers(make: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return the constructor, which also notes that the program trains: its batches are not its steps."""

    def __init__(*arguments: _P.args, **named: _P.kwargs) -> _T:  # replaces the constructor
        _Counted.makes_optimizers = True
        return make(*arguments, **named)

    return __init__


def _timing_its_class(make: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return the constructor of an iterator, which also lets `next()` of its class be timed.

    numapin's and torchdata's iterators have their own `__next__`, so that the base's is not enough.
    """
    timed: set[type] = set()

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

    def __next__(iterator: object) -> _T:  # replaces the method
        within = _Counted.within
        if _Counted.closed or getattr(within, "next", False):  # a subclass's calls its base's
            return next_batch(iterator)
        within.next, began_ns = True, time.monotonic_ns()
        try:
            batch = next_batch(iterator)
        finally:
            within.next = False
        waited_ns, size = time.monotonic_ns() - began_ns, _batch_size(iterator)
        _count(lambda meter: meter.batch(waited_ns, size))
        return batch

    return __next__


def _batch_size(iterator: object) -> int | None:
    """Return the loader's batch size; None for a loader that does not batch, or has a batch sampler without a size."""
    if not getattr(iterator, "_auto_collation", False):
        return None
    size = getattr(getattr(iterator, "_index_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def _count(act: Callable[[StepMeter], None]) -> None:
    """Pass a batch or step to this process's meter. Processes forked later and DataLoader workers have none."""
    if _Counted.closed:
        return
    with _Counted.lock:
        try:
            meter = _Counted.meter = _Counted.meter or _claim()
            if meter is None or meter.pid != os.getpid():
                _Counted.closed = True
                return
            act(meter)
        except Exception as error:  # reported; the script continues
            say(f"warning: the steps of process {os.getpid()} are not measured: {error}")
            _Counted.closed = True


def _claim() -> StepMeter | None:
    """Return a meter for this process, unless another process of the same rank is already measured."""
    from torch.utils.data import get_worker_info

    settings = StepSettings.from_text(os.environ.get(STEPS_VARIABLE, ""))
    if settings is None or get_worker_info() is not None:
        return None
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    rank, local_rank, num_ranks, restart = (int(os.environ.get(name) or "0") for name in names)
    path = Path(settings.folder, f"rank-{rank}-{restart}.json")
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return None
    meter = StepMeter(
        settings=settings, rank=rank, local_rank=local_rank, num_ranks=max(num_ranks, 1), restart=restart, path=path
    )
    atexit.register(meter.at_exit)
    return meter


def _wait_for_gpu() -> None:
    """Let the GPU catch up with a loop that runs ahead."""
    import torch

    with warnings.catch_warnings(action="ignore"):
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()


def _gpu_memory() -> int | None:
    import torch

    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_initialized() else None
