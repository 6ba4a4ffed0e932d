"""The hook in a rank of `numapin trace`: the tracer, and what the recorder of steps does not see.

That is the script's epochs and its own profilers, and when batches are made in workers and pinned, which the profiler
does not see. A failure here never stops the script.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from numapin.base.files import FILE, opened, require_own
from numapin.base.stderr import say
from numapin.rank.hook_env import TRACE_VARIABLE
from numapin.steps import recorder
from numapin.steps.meter import claim_file, find_place
from numapin.steps.record import TRACE, StepSettings
from numapin.system import calls
from numapin.trace.script import Notes
from numapin.trace.tracer import UNFINISHED, Tracer

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from torch.utils.data import DataLoader

    from numapin.steps.recorder import StepListener

_P = ParamSpec("_P")
_T = TypeVar("_T")

_MOST_LOADS: Final = 10_000  # the last ones of a worker; its file stays at 600 kB, even in a job of weeks
_LOAD_BYTES: Final = 60  # a line: a process id, two times in ns since 1970, and what was done to images
_notes: Final = Notes()


def attach(module: ModuleType) -> None:
    """Trace the steps or batches of this module of torch, or detect the script's own profiler."""
    settings = StepSettings.from_text(os.environ.get(TRACE_VARIABLE, ""))
    if settings is None:
        return
    if _recording not in recorder.recordings:
        recorder.recordings.append(_recording)
    if hasattr(module, "emit_nvtx"):
        _watch_profiler(module.profile, "_prepare_trace")
        _watch_profiler(module.emit_itt, "__enter__")
        _watch_profiler(module.emit_nvtx, "__enter__")
        return
    recorder.attach(module)
    if hasattr(module, "register_optimizer_step_post_hook"):
        return
    try:
        fetch, pinning = module._utils.fetch, module._utils.pin_memory  # torch has no hooks there
        loads = _Loads(settings)
        module.DataLoader.__iter__ = _noting_epochs(module.DataLoader.__iter__)
        for cls in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            cls.fetch = _timed(cls.fetch, record=loads.record)
        pinning.pin_memory = _timed(pinning.pin_memory, record=_record_pin)
    except AttributeError as error:
        say(f"warning: the making of batches is not traced: this version of torch has different internals: {error}")


def _begin() -> Tracer | None:
    """Return a tracer for this process, unless another process of the same rank is already traced."""
    from torch.utils.data import get_worker_info

    settings = StepSettings.from_text(os.environ.get(TRACE_VARIABLE, ""))
    if settings is None or get_worker_info() is not None:
        return None
    place = find_place()
    try:
        claim = claim_file(settings, place)
        claim.with_suffix(TRACE).unlink(missing_ok=True)
    except OSError as error:
        say(f"process {os.getpid()} of rank {place.rank} is not traced: {error.filename}: {error.strerror}")
        return None

    tracer = Tracer(
        settings=settings,
        place=place,
        claim=claim,
        check=lambda: _recording.pass_on(Tracer.end_if_overdue),
        notes=_notes,
    )
    tracer.record(trace=None, num_steps=0, reason=UNFINISHED)
    atexit.register(tracer.at_exit)
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
    return tracer


def _give_up(tracer: StepListener | None, error: Exception) -> None:
    if isinstance(tracer, Tracer):
        tracer.give_up(str(error))
    else:
        say(f"warning: process {os.getpid()} is not traced: {error}")


_recording: Final = recorder.Recording(_begin, _give_up)


def _watch_profiler(profiler: Any, begin: str) -> None:  # noqa: ANN401 - a class of torch
    """End our trace before one of the script's own profilers begins: torch raises or crashes with two at once."""
    own_begin, own_end = getattr(profiler, begin), profiler.__exit__

    def begins(*arguments: object, **named: object) -> object:
        with _recording.lock:
            if not _recording.is_acting:  # else it is our own
                _notes.profiles_itself = True
                _recording.pass_on(Tracer.yield_to_script)
        return own_begin(*arguments, **named)

    def ends(*arguments: object, **named: object) -> object:
        try:
            return own_end(*arguments, **named)
        finally:
            if not _recording.is_acting:
                _notes.profiles_itself = False

    setattr(profiler, begin, begins)
    profiler.__exit__ = ends


def _noting_epochs(iterate: Callable[[DataLoader[Any]], object]) -> Callable[[DataLoader[Any]], object]:
    """Note when `iter()` of a DataLoader ran, which starts its workers."""

    def __iter__(self: DataLoader[Any]) -> object:
        start_ns, num_workers = time.time_ns(), self.num_workers
        _recording.pass_on(lambda tracer: tracer.enter_loader(num_workers))
        try:
            iterator = iterate(self)
        finally:
            _recording.pass_on(lambda tracer: tracer.leave_loader(num_workers, 0, is_over=False))
        if not _recording.closed:
            try:
                _notes.iterated(self, iterator, start_ns, time.time_ns())
            except Exception as error:  # reported; the script continues
                say(f"warning: an epoch is not noted: {error}")
        return iterator

    return __iter__


def _before_fork() -> None:
    """End the trace: a recording profiler hangs or aborts the child.

    Children of multiprocessing and subprocess are exempt: they leave by _exit or exec.
    """
    caller = sys._getframe(1).f_globals.get("__name__", "")  # documented
    if caller.partition(".")[0] not in ("multiprocessing", "subprocess"):
        _recording.pass_on(Tracer.end_at_fork)


def _after_fork() -> None:
    """Let the child of a profiled process exit: Kineto's destructor waits for a thread that the child lacks."""
    if isinstance(_recording.listener, Tracer) and _recording.listener.has_profiled:
        calls.exit_without_destructors()


@dataclass(slots=True)
class _Loads:
    """The times when this process, a worker or the loop itself, last made batches: a line each, in a file per process.

    The file is named by the loop's process and this one. The trace may begin after any number of batches, so the oldest
    line is overwritten.
    """

    settings: StepSettings
    pid: int = 0
    file: int | None = None
    num_batches: int = 0

    def record(self, start_ns: int, end_ns: int, batch: object) -> None:
        """Write one line; nothing more after an error, or if the rank's trace was written before the first one."""
        if self.pid != os.getpid():
            self.pid, self.num_batches = os.getpid(), 0
            self.file = self._open()
        if self.file is None:
            return
        line = f"{self.pid} {start_ns} {end_ns} {_image_work(batch)}".ljust(_LOAD_BYTES - 1) + "\n"
        try:
            os.pwrite(self.file, line.encode(), self.num_batches % _MOST_LOADS * _LOAD_BYTES)
        except OSError:  # a full disk; writing the trace will report it
            self.file = None
        self.num_batches += 1

    def _open(self) -> int | None:
        from torch.utils.data import get_worker_info

        parent = multiprocessing.parent_process()
        loop = os.getpid() if parent is None or get_worker_info() is None else parent.pid
        flags = os.O_WRONLY | os.O_CREAT | FILE
        try:
            if Path(self.settings.loads, f"{loop}.done").exists():
                return None
            with opened(self.settings.loads) as folder:
                require_own(folder)
                return os.open(f"{loop}.{self.pid}", flags, 0o600, dir_fd=folder)
        except OSError:
            return None


def _image_work(batch: object) -> str:
    """Return the costly work on images of a process that makes batches: "jpeg", "float", both, or ""."""
    from torch import Tensor

    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else (batch,)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    does = {
        "jpeg": "PIL.JpegImagePlugin" in sys.modules,  # which PIL imports when it opens its first image
        "float": any(one.is_floating_point() and one.ndim == 4 and one.shape[1] == 3 for one in tensors),
    }
    return ",".join(name for name, is_done in does.items() if is_done)


def _record_pin(start_ns: int, end_ns: int, _batch: object) -> None:
    tracer = _recording.listener
    if isinstance(tracer, Tracer) and tracer.step is not None:
        tracer.pins.append((threading.get_native_id(), start_ns, end_ns))


def _timed(function: Callable[_P, _T], *, record: Callable[[int, int, object], None]) -> Callable[_P, _T]:
    """Return the function, which also records when it ran, and what it returned; None after an error."""

    def timed(*arguments: _P.args, **named: _P.kwargs) -> _T:
        start_ns, result = time.time_ns(), None
        try:
            result = function(*arguments, **named)
            return result
        finally:
            record(start_ns, time.time_ns(), result)

    return timed
