"""In a rank of `numapin trace`: torch's own modules tell of a script's batches, steps and profilers. Edge.

Comes in: torch's modules as they are imported (sitehook/sitecustomize.py), and NUMAPIN_TRACE. Goes out: calls of this
process's `Tracer`, and when batches were loaded and pinned.

Workers time the batches they make, and torch's pin thread those that it pins: the profiler sees neither. Nothing that
fails here stops the script.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from numapin.base.folders import FILE, opened, require_own
from numapin.base.stderr import say
from numapin.launcher.preload import TRACE_VARIABLE
from numapin.system import process
from numapin.trace.settings import Settings
from numapin.trace.tracer import Tracer

if TYPE_CHECKING:
    from collections.abc import Callable

_PROFILES_ITSELF: Final = "the script profiles itself; read its trace with: numapin trace --read FILE"
_MOST_LOADS: Final = 10_000  # a worker's file stays below 600 kB in a job of weeks


class _Traced:
    """What this process traces; None until its first batch or optimizer step."""

    tracer: Tracer | None = None
    closed: bool = False
    acting: bool = False  # whoever uses the profiler now is us
    other_profiles: bool = False
    lock: Final = threading.RLock()  # a signal's handler comes in again


def attach(module: Any) -> None:  # noqa: ANN401 - torch's profiler, optimizer or DataLoader, which may be half of torch
    """Count the steps of this module's optimizers, or the batches of its DataLoaders; or see who else profiles."""
    settings = Settings.from_text(os.environ.get(TRACE_VARIABLE, ""))
    if settings is None:
        return
    if hasattr(module, "register_optimizer_step_post_hook"):
        module.register_optimizer_step_post_hook(lambda optimizer, *_: _count(lambda t: t.optimizer_step(optimizer)))
    elif hasattr(module, "emit_nvtx"):
        for cls, begin in ((module.profile, "_prepare_trace"), (module.emit_itt, "__enter__")):
            _announce(cls, begin)
        _announce(module.emit_nvtx, "__enter__")
    else:
        try:
            _attach_to_loaders(module, settings)
        except AttributeError as error:
            say(f"warning: batches are not traced, this torch has other names: {error}")


def _attach_to_loaders(module: Any, settings: Settings) -> None:  # noqa: ANN401 - torch's
    iterators = (module._SingleProcessDataLoaderIter, module._MultiProcessingDataLoaderIter)  # noqa: SLF001
    fetch, pinning = module._utils.fetch, module._utils.pin_memory  # noqa: SLF001 - torch has no hooks there
    fetchers = (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher)  # noqa: SLF001
    for cls in iterators:
        _count_batches(cls)
    loads = _Loads(settings)
    for cls in fetchers:
        cls.fetch = _timed(cls.fetch, loads.note)
    pinning.pin_memory = _timed(pinning.pin_memory, _note_pin)


def _announce(cls: Any, begin: str) -> None:  # noqa: ANN401 - a profiler of torch's
    """Have ours make way before the script's own begins: with two at once, torch raises or crashes."""
    torchs_begin, torchs_exit = getattr(cls, begin), cls.__exit__

    def begins(self: Any) -> Any:  # noqa: ANN401 - as torch's
        with _Traced.lock:
            if not _Traced.acting:
                _Traced.other_profiles = True
                _act(lambda tracer: tracer.make_way(_PROFILES_ITSELF))
        return torchs_begin(self)

    def exits(self: Any, *error: Any) -> Any:  # noqa: ANN401 - as torch's
        try:
            return torchs_exit(self, *error)
        finally:
            if not _Traced.acting:
                _Traced.other_profiles = False

    setattr(cls, begin, begins)
    cls.__exit__ = exits


def _require_no_other() -> None:
    if _Traced.other_profiles:
        raise RuntimeError(_PROFILES_ITSELF)


def _count_batches(cls: Any) -> None:  # noqa: ANN401 - torch's class
    """Count the batches that this class hands out. `__next__` would not do: numapin's own iterators replace it."""
    torchs_own = cls._next_data

    def _next_data(self: Any) -> Any:  # noqa: ANN401 - as torch's
        data = torchs_own(self)
        _count(Tracer.batch)
        return data

    cls._next_data = _next_data


def _count(act: Callable[[Tracer], None]) -> None:
    """Hand a batch or step to this process's tracer; a process forked off later, or a loader's worker, has none."""
    if _Traced.closed:
        return
    with _Traced.lock:
        if _Traced.tracer is None:
            try:
                _Traced.tracer = _claim()
            except Exception as error:  # noqa: BLE001 - it is said, and the script goes on
                say(f"warning: process {os.getpid()} is not traced: {error}")
            _Traced.closed = _Traced.tracer is None
        _act(act)


def _act(act: Callable[[Tracer], None]) -> None:
    """Have the tracer do something, if it still does anything."""
    with _Traced.lock:
        tracer = _Traced.tracer
        if tracer is None or tracer.done or _Traced.acting or tracer.pid != os.getpid():
            return
        _Traced.acting = True
        with warnings.catch_warnings(action="ignore"):  # the script may have made errors of them
            try:
                act(tracer)
            except Exception as error:  # noqa: BLE001 - it is said, and the script goes on
                tracer.give_up(str(error))
            finally:
                _Traced.acting = False
        _Traced.closed = tracer.done


def _claim() -> Tracer | None:
    """Return a tracer for this process, unless another one of the same rank is traced already."""
    from torch.utils.data import get_worker_info

    settings = Settings.from_text(os.environ.get(TRACE_VARIABLE, ""))
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
    )
    tracer.record(trace=None, num_steps=0, reason="the process was killed, or is still running")
    atexit.register(tracer.at_exit)
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
    return tracer


def _name() -> str:
    """Return the name of this life of the rank: files of another one are not mixed up with its own."""
    rank, restart = (os.environ.get(name, "0") for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
    return f"rank-{rank}" if restart == "0" else f"rank-{rank}-restart-{restart}"


def _before_fork() -> None:
    """End the trace: a profiler that records hangs or aborts the child.

    Not for those children that run nothing of this process's own: multiprocessing's leave by _exit, subprocess's exec.
    """
    caller = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001 - documented
    if caller.partition(".")[0] not in ("multiprocessing", "subprocess"):
        _act(Tracer.end_at_fork)


def _after_fork() -> None:
    """Let the child of a process that was profiled end: Kineto's destructor waits for a thread that is not there."""
    if _Traced.tracer is not None and _Traced.tracer.has_profiled:
        process.exit_without_destructors()


@dataclass(slots=True)
class _Loads:
    """When this process, a worker or the loop itself, made batches: a line each in a file of its own."""

    settings: Settings
    pid: int = 0
    file: int | None = None
    left: int = _MOST_LOADS

    def note(self, start_ns: int, end_ns: int) -> None:
        """Write one down; after the rank's trace was written, and where it cannot, no more."""
        if self.pid != os.getpid():
            self.pid, self.left = os.getpid(), _MOST_LOADS
            self.file = self._open()
        if self.file is None or self.left <= 0:
            return
        self.left -= 1
        try:
            os.write(self.file, f"{self.pid} {start_ns} {end_ns}\n".encode())
        except OSError:  # a full disk costs the picture its first lane, and says so where the trace is written
            self.left = 0

    def _open(self) -> int | None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | FILE
        try:
            if _Traced.closed or Path(self.settings.folder, f"{_name()}.trace.json").exists():
                return None
            with opened(self.settings.loads) as folder:
                require_own(folder)
                return os.open(f"{_name()}.{self.pid}", flags, 0o600, dir_fd=folder)
        except (OSError, ValueError):  # ValueError: a rank that is no part of a path
            return None


def _note_pin(start_ns: int, end_ns: int) -> None:
    tracer = _Traced.tracer
    if tracer is not None and tracer.step is not None:
        tracer.pins.append((threading.get_native_id(), start_ns, end_ns))


def _timed(function: Callable[..., Any], note: Callable[[int, int], None]) -> Callable[..., Any]:
    """Return the function, which also notes when it ran."""

    def timed(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - whatever torch hands on
        start_ns = time.time_ns()
        try:
            return function(*arguments, **named)
        finally:
            note(start_ns, time.time_ns())

    return timed
