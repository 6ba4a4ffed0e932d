"""In a rank of `numapin trace`: torch's profiler around some steps of a script that stays as it is. Edge.

Comes in: torch's modules as they are imported (sitehook/sitecustomize.py), and NUMAPIN_TRACE. Goes out: a Chrome trace
rank-N.trace.json, and rank-N.json, which says how far the rank came.

A step ends when the program's first optimizer steps. Until one has, a step ends when a DataLoader hands out a batch; so
inference is traced, too. Workers time the batches they make, and torch's pin thread those that it pins: the profiler
sees neither. Nothing that fails here stops the script.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from numapin.trace.settings import VARIABLE, Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.autograd.profiler import record_function
    from torch.profiler import profile

_MOST_LOADS: Final = 10_000  # a worker's file stays below 600 kB in a job of weeks


@dataclass(slots=True)
class _Tracer:
    """One process's steps: counted, traced from the `skip`th on, written after `steps` more."""

    settings: Settings
    rank: int
    claim: Path
    pid: int = field(default_factory=os.getpid)
    num_batches: int = 0
    num_optimizer_steps: int = 0
    optimizer: int | None = None  # id of the first one; others step as often
    step_unit: str = "batch"
    begun: int = 0  # steps, once tracing
    thread: int | None = None
    profiler: profile | None = None
    step: record_function | None = None
    pins: list[tuple[int, int, int]] = field(default_factory=list)
    done: bool = False

    def batch(self) -> None:
        """Count a batch. A step by batches ends when the next batch is there."""
        self.num_batches += 1
        if self.step_unit == "batch":
            self._advance(self.num_batches - 1)

    def optimizer_step(self, optimizer: object) -> None:
        """Count a step of the first optimizer; a trace that batches have begun goes on by batches."""
        if self.optimizer in (None, id(optimizer)):
            self.optimizer = id(optimizer)
            self.num_optimizer_steps += 1
            if self.step is None:
                self.step_unit = "optimizer step"
            if self.step_unit == "optimizer step":
                self._advance(self.num_optimizer_steps)

    def _advance(self, count: int) -> None:
        """Do what is due when so many steps have ended. The profiler gets ready a step before it records."""
        if self.thread not in (None, threading.get_ident()):
            return  # another loop beside the traced one
        if self.profiler is None and count >= self.settings.skip - 1:
            self._prepare()
        if self.profiler is not None and self.step is None and count >= self.settings.skip:
            _require_no_other()
            self.thread = threading.get_ident()
            _wait_for_gpu()
            self.profiler.start_trace()
            self._next_step()
        elif self.step is not None and self.begun < self.settings.steps:
            self._next_step()
        elif self.step is not None:
            self.finish("")

    def _prepare(self) -> None:
        from torch.profiler import profile

        _require_no_other()
        self.profiler = profile(record_shapes=True)
        self.profiler.prepare_trace()

    def _next_step(self) -> None:
        from torch.autograd.profiler import record_function

        if self.step is not None:
            self.step.__exit__(None, None, None)
        self.step = record_function(f"ProfilerStep#{self.begun}")
        self.step.__enter__()
        self.begun += 1

    def finish(self, reason: str) -> None:
        """Write the trace, if one has begun, and the record."""
        self.done = True
        name = None
        num_steps = self.begun - 1 if reason and self.begun > 1 else self.begun  # without one that was cut short
        if self.profiler is not None and self.step is not None:
            _wait_for_gpu()
            self.step.__exit__(None, None, None)
            own = {"rank": self.rank, "step_unit": self.step_unit, "num_steps": num_steps}
            timed = {"pins": self.pins, "loads": self._loads()}
            self.profiler.add_metadata_json("numapin", json.dumps(own | timed))
            self.profiler.stop_trace()
            name = self.claim.stem + ".trace.json"
            _export(self.profiler, self.claim.with_name(name))
        self.profiler = self.step = None
        self.record(trace=name, num_steps=num_steps, reason=reason)
        if name is not None:
            _say(f"rank {self.rank}: traced {num_steps} steps into {self.claim.with_name(name)}")

    def give_up(self, reason: str) -> None:
        """Trace nothing any more, and say why."""
        self.done, self.profiler, self.step = True, None, None
        _say(f"warning: rank {self.rank} is not traced: {reason}")
        self.record(trace=None, num_steps=0, reason=reason)

    def record(self, *, trace: str | None, num_steps: int, reason: str) -> None:
        """Write how far this rank came."""
        record = {
            "schema": "numapin.traced/1",
            "rank": self.rank,
            "pid": self.pid,
            "trace": trace,
            "num_steps": num_steps,
            "step_unit": self.step_unit,
            "num_batches": self.num_batches,
            "num_optimizer_steps": self.num_optimizer_steps,
            "reason": reason,
        }
        try:
            temporary = self.claim.with_name(f".{self.claim.name}")
            temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            temporary.replace(self.claim)
        except OSError as error:
            _say(f"warning: rank {self.rank}: {self.claim} cannot be written: {error.strerror}")

    def at_exit(self) -> None:
        """Write what there is when the script ends before the steps do."""
        if self.done or self.pid != os.getpid():
            return
        end = f"the script ended after {self.num_optimizer_steps} optimizer steps and {self.num_batches} batches"
        with warnings.catch_warnings(action="ignore"):
            try:
                self.finish(end)
            except Exception as error:  # noqa: BLE001 - it is said, and the script's own end must not change
                self.give_up(f"{end}; {error}")

    def _loads(self) -> list[tuple[int, int, int]]:
        """Return what workers, or this process itself, loaded."""
        rows: list[tuple[int, int, int]] = []
        for path in sorted(Path(self.settings.loads).glob(f"{self.rank}-*")):
            lines = (line.split() for line in path.read_text(encoding="ascii", errors="replace").splitlines())
            rows += [(int(a), int(b), int(c)) for a, b, c in (line for line in lines if len(line) == 3)]
        return rows


def _export(profiler: profile, path: Path) -> None:
    """Write the Chrome trace, whole or not at all. Kineto does not tell that a disk is full. Raises OSError."""
    temporary = path.with_name(f".{path.name}")
    try:
        profiler.export_chrome_trace(str(temporary))
        with temporary.open("rb") as file:
            file.seek(-min(8, temporary.stat().st_size), os.SEEK_END)
            if not file.read().rstrip().endswith(b"}"):
                raise OSError(f"{temporary} was cut off; is the disk full?")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _wait_for_gpu() -> None:
    """Let the GPU catch up with a loop that runs ahead of it: the traced steps are then its work, too, and no other."""
    import torch

    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()


def _require_no_other() -> None:
    """Raise RuntimeError where the script itself profiles: a second profiler would take the first one's events."""
    from torch.autograd import profiler

    if profiler._is_profiler_enabled:  # noqa: SLF001 - torch has no other way to ask
        raise RuntimeError("the script profiles itself; read its trace with: numapin trace --read FILE")


class _State:
    """What this process traces; None until its first batch or optimizer step."""

    tracer: _Tracer | None = None
    closed: bool = False
    lock: Final = threading.Lock()


def attach(module: Any) -> None:  # noqa: ANN401 - torch's optimizer or DataLoader module, which may be half of torch
    """Count the steps of this module's optimizers, or the batches of its DataLoaders."""
    settings = Settings.from_text(os.environ.get(VARIABLE, ""))
    if settings is None:
        return
    if hasattr(module, "register_optimizer_step_post_hook"):
        module.register_optimizer_step_post_hook(lambda optimizer, *_: _count(lambda t: t.optimizer_step(optimizer)))
        return
    for cls in (module._SingleProcessDataLoaderIter, module._MultiProcessingDataLoaderIter):  # noqa: SLF001
        _count_batches(cls)
    fetch, pinning = module._utils.fetch, module._utils.pin_memory  # noqa: SLF001 - torch has no hooks there
    loads = _Loads(settings)
    for cls in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):  # noqa: SLF001
        cls.fetch = _timed(cls.fetch, loads.note)
    pinning.pin_memory = _timed(pinning.pin_memory, _note_pin)


def _count_batches(cls: Any) -> None:  # noqa: ANN401 - torch's class
    """Count the batches that this class hands out. `__next__` would not do: numapin's own iterators replace it."""
    torchs_own = cls._next_data

    def _next_data(self: Any) -> Any:  # noqa: ANN401 - as torch's
        data = torchs_own(self)
        _count(_Tracer.batch)
        return data

    cls._next_data = _next_data


def _count(act: Callable[[_Tracer], None]) -> None:
    """Hand a batch or step to this process's tracer; a process forked off later, or a loader's worker, has none."""
    if _State.closed:
        return
    with _State.lock:
        if _State.tracer is None:
            _State.tracer = _claim()
            _State.closed = _State.tracer is None
        tracer = _State.tracer
        if tracer is None or tracer.pid != os.getpid():
            return
        with warnings.catch_warnings(action="ignore"):  # the script may have made errors of them
            try:
                act(tracer)
            except Exception as error:  # noqa: BLE001 - it is said, and the script goes on
                tracer.give_up(str(error))
        _State.closed = tracer.done


def _claim() -> _Tracer | None:
    """Return a tracer for this process, unless another one of the same rank is traced already."""
    from torch.utils.data import get_worker_info

    settings = Settings.from_text(os.environ.get(VARIABLE, ""))
    if settings is None or get_worker_info() is not None:
        return None
    rank = int(os.environ.get("RANK", "0"))
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"rank-{rank}" if restart == "0" else f"rank-{rank}-restart-{restart}"
    claim = Path(settings.folder, f"{name}.json")
    try:
        claim.touch(exist_ok=False)
    except OSError as error:
        _say(f"process {os.getpid()} of rank {rank} is not traced: {claim}: {error.strerror}")
        return None
    tracer = _Tracer(settings=settings, rank=rank, claim=claim)
    tracer.record(trace=None, num_steps=0, reason="the process was killed, or is still running")
    atexit.register(tracer.at_exit)
    return tracer


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
        rank = os.environ.get("RANK", "0")
        if _State.closed or Path(self.settings.folder, f"rank-{rank}.trace.json").exists():
            return None
        path = Path(self.settings.loads, f"{rank}-{self.pid}")
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError:
            return None


def _note_pin(start_ns: int, end_ns: int) -> None:
    tracer = _State.tracer
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


def _say(text: str) -> None:
    """Write to stderr, which may be closed or full: that is no reason to lose the job."""
    try:
        sys.stderr.write(f"numapin: {text}\n")
        sys.stderr.flush()
    except (OSError, AttributeError):
        return
