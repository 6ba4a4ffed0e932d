"""The hook in a rank of `numapin trace`: batches, steps and profilers of a script, seen from torch's modules.

Workers time the batches they make, and torch's pin thread those it pins: the profiler sees neither. A failure here
never stops the script.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from numapin.base.files import FILE, opened, require_own
from numapin.base.stderr import say
from numapin.rank.hook_env import TRACE_VARIABLE
from numapin.steps.record import StepSettings
from numapin.system import calls
from numapin.trace.notes import Notes
from numapin.trace.tracer import Tracer

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import ModuleType

    from torch.utils.data import DataLoader

_P = ParamSpec("_P")
_T = TypeVar("_T")

_PROFILES_ITSELF: Final = "the script profiles itself; read its own trace with: numapin trace --read FILE"
_MOST_LOADS: Final = 10_000  # the last ones of a worker; its file stays at 600 kB, even in a job of weeks
_LOAD_BYTES: Final = 60  # a line: a process id and two times in ns since 1970


class _Traced:
    """The state of tracing in this process. The tracer is None until the first batch or optimizer step."""

    tracer: Tracer | None = None
    closed: bool = False
    in_tracer: bool = False  # the profiler is in use by our tracer
    script_profiles: bool = False
    notes: Final = Notes()
    lock: Final = threading.RLock()  # a signal handler may enter again


def attach(module: ModuleType) -> None:
    """Count the optimizer steps or DataLoader batches of this module of torch, or detect the script's own profiler."""
    settings = StepSettings.from_text(os.environ.get(TRACE_VARIABLE, ""))
    if settings is None:
        return
    if hasattr(module, "register_optimizer_step_post_hook"):
        module.register_optimizer_step_post_hook(lambda optimizer, *_: _count(lambda t: t.optimizer_step(optimizer)))
    elif hasattr(module, "emit_nvtx"):
        _attach_to_profilers(module)
    else:
        try:
            _attach_to_loaders(module, settings)
        except AttributeError as error:
            say(f"warning: batches are not traced: this version of torch has different internals: {error}")


def _attach_to_profilers(module: ModuleType) -> None:
    for cls, begin in (
        (module.profile, "_prepare_trace"),
        (module.emit_itt, "__enter__"),
        (module.emit_nvtx, "__enter__"),
    ):
        _wrap(cls, begin, _yield_to_script)
        _wrap(cls, "__exit__", _resume_after_script)


def _attach_to_loaders(module: ModuleType, settings: StepSettings) -> None:
    iterators = (module._SingleProcessDataLoaderIter, module._MultiProcessingDataLoaderIter)
    fetch, pinning = module._utils.fetch, module._utils.pin_memory  # torch has no hooks there
    fetchers = (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher)
    loads = _Loads(settings)
    for cls in iterators:
        _wrap(cls, "_next_data", _counting_batches)  # not __next__: numapin's own iterators replace it
    module.DataLoader.__iter__ = _noting_epochs(module.DataLoader.__iter__)
    for cls in fetchers:
        _wrap(cls, "fetch", partial(_timed, record=loads.record))
    _wrap(pinning, "pin_memory", partial(_timed, record=_record_pin))


def _wrap(owner: object, name: str, wrap: Callable[[Callable[..., object]], Callable[..., object]]) -> None:
    """Replace a function of a module, or a method of a class."""
    setattr(owner, name, wrap(getattr(owner, name)))


def _yield_to_script(begin: Callable[_P, _T]) -> Callable[_P, _T]:
    """End our trace before the script's own begins: torch raises or crashes with two at once."""

    def begins(*arguments: _P.args, **named: _P.kwargs) -> _T:
        with _Traced.lock:
            if not _Traced.in_tracer:
                _Traced.script_profiles = True
                _act(lambda tracer: tracer.yield_to_script(_PROFILES_ITSELF))
        return begin(*arguments, **named)

    return begins


def _resume_after_script(end: Callable[_P, _T]) -> Callable[_P, _T]:
    """Note when the script's own profiler has ended."""

    def ends(*arguments: _P.args, **named: _P.kwargs) -> _T:
        try:
            return end(*arguments, **named)
        finally:
            if not _Traced.in_tracer:
                _Traced.script_profiles = False

    return ends


def _counting_batches(next_data: Callable[[Any], object]) -> Callable[[Any], object]:
    """Count each batch that a DataLoader's iterator returns."""

    def _next_data(self: object) -> object:
        start_ns = time.time_ns()
        num_workers = getattr(self, "_num_workers", 0)
        try:
            with _during_loading(num_workers):
                data = next_data(self)
        except StopIteration:  # torch ends workers that do not stay before it raises this
            if num_workers and not _Traced.closed:
                _Traced.notes.ended(start_ns, time.time_ns())
            raise
        _count(Tracer.batch)
        return data

    return _next_data


def _noting_epochs(iterate: Callable[[DataLoader[Any]], object]) -> Callable[[DataLoader[Any]], object]:
    """Note when `iter()` of a DataLoader ran, which starts its workers."""

    def __iter__(self: DataLoader[Any]) -> object:
        start_ns = time.time_ns()
        with _during_loading(self.num_workers):
            iterator = iterate(self)
        if not _Traced.closed:
            try:
                _Traced.notes.iterated(self, iterator, start_ns, time.time_ns())
            except Exception as error:  # reported; the script continues
                say(f"warning: an epoch is not noted: {error}")
        return iterator

    return __iter__


def _during_loading(num_workers: int) -> AbstractContextManager[None]:
    tracer = None if _Traced.closed else _Traced.tracer
    return tracer.during_loading(num_workers) if tracer else nullcontext()


def _require_no_other() -> None:
    if _Traced.script_profiles:
        raise RuntimeError(_PROFILES_ITSELF)


def _count(act: Callable[[Tracer], None]) -> None:
    """Pass a batch or step to this process's tracer. Processes forked later and DataLoader workers have none."""
    if _Traced.closed:
        return
    with _Traced.lock:
        if _Traced.tracer is None:
            try:
                _Traced.tracer = _claim()
            except Exception as error:  # reported; the script continues
                say(f"warning: process {os.getpid()} is not traced: {error}")
            _Traced.closed = _Traced.tracer is None
        _act(act)


def _act(act: Callable[[Tracer], None]) -> None:
    """Call the tracer, unless it has finished."""
    with _Traced.lock:
        tracer = _Traced.tracer
        if tracer is None or tracer.done or _Traced.in_tracer or tracer.pid != os.getpid():
            return
        _Traced.in_tracer = True
        with warnings.catch_warnings(action="ignore"):  # the script may turn warnings into errors
            try:
                act(tracer)
            except Exception as error:  # reported; the script continues
                tracer.give_up(str(error))
            finally:
                _Traced.in_tracer = False
        _Traced.closed = tracer.done


def _claim() -> Tracer | None:
    """Return a tracer for this process, unless another process of the same rank is already traced."""
    from torch.utils.data import get_worker_info

    settings = StepSettings.from_text(os.environ.get(TRACE_VARIABLE, ""))
    if settings is None or get_worker_info() is not None:
        return None
    rank = int(os.environ.get("RANK", "0"))
    claim = Path(settings.folder, f"{_name()}.json")
    try:
        claim.touch(exist_ok=False)
    except OSError as error:
        say(f"process {os.getpid()} of rank {rank} is not traced: {claim}: {error.strerror}")
        return None
    tracer = Tracer(
        settings=settings,
        rank=rank,
        restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        claim=claim,
        check=lambda: _act(Tracer.end_if_overdue),
        require_no_other=_require_no_other,
        notes=_Traced.notes,
        num_local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )
    tracer.record(trace=None, num_steps=0, reason="the process was killed, or is still running")
    atexit.register(tracer.at_exit)
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
    return tracer


def _name() -> str:
    """Return the name of the rank's files; a restarted rank has its own."""
    rank, restart = (os.environ.get(name, "0") for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
    return f"rank-{rank}" if restart == "0" else f"rank-{rank}-restart-{restart}"


def _before_fork() -> None:
    """End the trace: a recording profiler hangs or aborts the child.

    Children of multiprocessing and subprocess are exempt: they leave by _exit or exec.
    """
    caller = sys._getframe(1).f_globals.get("__name__", "")  # documented
    if caller.partition(".")[0] not in ("multiprocessing", "subprocess"):
        _act(Tracer.end_at_fork)


def _after_fork() -> None:
    """Let the child of a profiled process exit: Kineto's destructor waits for a thread that the child lacks."""
    if _Traced.tracer is not None and _Traced.tracer.has_profiled:
        calls.exit_without_destructors()


@dataclass(slots=True)
class _Loads:
    """The times when this process, a worker or the loop itself, last made batches: a line each, in a file per process.

    The trace may begin after any number of batches, so the oldest line is overwritten.
    """

    settings: StepSettings
    pid: int = 0
    file: int | None = None
    num_batches: int = 0

    def record(self, start_ns: int, end_ns: int) -> None:
        """Write one line; nothing more after an error, or if the rank's trace was written before the first one."""
        if self.pid != os.getpid():
            self.pid, self.num_batches = os.getpid(), 0
            self.file = self._open()
        if self.file is None:
            return
        line = f"{self.pid} {start_ns} {end_ns}".ljust(_LOAD_BYTES - 1) + "\n"
        try:
            os.pwrite(self.file, line.encode(), self.num_batches % _MOST_LOADS * _LOAD_BYTES)
        except OSError:  # a full disk; writing the trace will report it
            self.file = None
        self.num_batches += 1

    def _open(self) -> int | None:
        flags = os.O_WRONLY | os.O_CREAT | FILE
        try:
            if _Traced.closed or Path(self.settings.folder, f"{_name()}.trace.json").exists():
                return None
            with opened(self.settings.loads) as folder:
                require_own(folder)
                return os.open(f"{_name()}.{self.pid}", flags, 0o600, dir_fd=folder)
        except (OSError, ValueError):  # ValueError: RANK is not part of a valid path
            return None


def _record_pin(start_ns: int, end_ns: int) -> None:
    tracer = _Traced.tracer
    if tracer is not None and tracer.step is not None:
        tracer.pins.append((threading.get_native_id(), start_ns, end_ns))


def _timed(function: Callable[_P, _T], *, record: Callable[[int, int], None]) -> Callable[_P, _T]:
    """Return the function, which also records when it ran."""

    def timed(*arguments: _P.args, **named: _P.kwargs) -> _T:
        start_ns = time.time_ns()
        try:
            return function(*arguments, **named)
        finally:
            record(start_ns, time.time_ns())

    return timed
