"""The steps, batches and waits of one rank of `numapin compare`. Edge.

Comes in: batches and optimizer steps from `hook`, and NUMAPIN_STEPS. Goes out: a file per rank with a `RankSteps`,
written at the first batch, at the first step, and at both ends of the window.

Nothing is written, and no GPU is waited for, within the window. At both ends of it the rank waits for its GPU, so that
work that the host has only queued is neither missing nor counted twice.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from numapin.base.files import replace_at
from numapin.base.folders import opened
from numapin.base.records import read_record, to_json
from numapin.base.stderr import say
from numapin.base.strict_json import encode
from numapin.compare.record import SCHEMA, Phase, RankSteps, StepUnit
from numapin.compare.settings import StepSettings
from numapin.compare.window import StepWindow
from numapin.errors import MachineFileError
from numapin.launcher.preload import STEPS_VARIABLE
from numapin.system import proc
from numapin.trace.pace import FollowedOptimizer

if TYPE_CHECKING:
    from types import ModuleType


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


class _Place(NamedTuple):
    """The rank that this process is, and which start of it."""

    rank: int
    local_rank: int
    num_ranks: int
    restart: int


@dataclass(slots=True, kw_only=True)
class StepMeter:
    """The steps of one process, written to the file `path`."""

    settings: StepSettings
    place: _Place
    path: Path
    pid: int = field(default_factory=os.getpid)
    makes_optimizers: bool = False
    num_ahead: int = 0
    threads: dict[StepUnit, int] = field(default_factory=dict)
    optimizer: FollowedOptimizer = field(default_factory=FollowedOptimizer)
    totals: _BatchTotals = field(default_factory=_BatchTotals)
    windows: dict[StepUnit, StepWindow] = field(default_factory=dict)
    at_begin: dict[StepUnit, _BatchTotals] = field(default_factory=dict)
    at_end: dict[StepUnit, _BatchTotals] = field(default_factory=dict)

    def batch(self, waited_ns: int, size: int | None, num_ahead: int = 0) -> None:
        """Count a batch, and the end of a step if batches are the steps."""
        self.num_ahead = max(self.num_ahead, num_ahead)
        is_in_loop = self.threads.get(self.unit, 0) in (0, threading.get_ident())  # the loop does not wait for others
        self.totals.note(waited_ns if is_in_loop else 0, size)
        self._step(StepUnit.BATCH)
        if self.totals.num_batches == 1 and self.unit is not StepUnit.BATCH:
            self.write(Phase.STARTED)  # the command can say that there was a batch, if no optimizer ever steps

    def optimizer_step(self, optimizer: object) -> None:
        """Count a step of the followed optimizer."""
        if self.optimizer.counts(optimizer):
            self._step(StepUnit.OPTIMIZER_STEP)

    @property
    def unit(self) -> StepUnit:
        """Return the unit of steps: batches only in a program without optimizers."""
        is_training = self.makes_optimizers or StepUnit.OPTIMIZER_STEP in self.windows
        return StepUnit.OPTIMIZER_STEP if is_training else StepUnit.BATCH

    def _step(self, unit: StepUnit) -> None:
        if not self._is_loop(unit):
            return
        window = self._window(unit)
        if window.is_done:
            return
        window.begin_after(self.num_ahead)
        is_unit = unit is self.unit
        if window.stepped(_step_end_ns(window) if is_unit else time.monotonic_ns()):
            self._note_border(unit, window)
            if is_unit:
                self.write(_phase(window))

    def _window(self, unit: StepUnit) -> StepWindow:
        if unit not in self.windows:
            self.windows[unit] = self._new_window()
        return self.windows[unit]

    def _is_loop(self, unit: StepUnit) -> bool:
        """Return whether this thread's steps count. Only the first thread that steps counts, until it ends."""
        thread = threading.get_ident()
        first = self.threads.setdefault(unit, thread)
        if first != thread and all(other.ident != first for other in threading.enumerate()):
            first = self.threads[unit] = thread
        return first == thread

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

    def _unit_at(self, phase: Phase) -> StepUnit:
        """Return the unit of a record: at the script's end it is batches if its optimizer never stepped."""
        never_stepped = phase is Phase.ENDED and self.unit not in self.windows
        return StepUnit.BATCH if never_stepped else self.unit

    def _record(self, phase: Phase) -> RankSteps:
        unit = self._unit_at(phase)
        window = self.windows.get(unit) or self._new_window()
        begin, end = self.at_begin.get(unit, _BatchTotals()), self.at_end.get(unit, self.totals)
        return RankSteps(
            rank=self.place.rank,
            local_rank=self.place.local_rank,
            num_ranks=self.place.num_ranks,
            restart=self.place.restart,
            pid=self.pid,
            phase=phase,
            unit=unit,
            num_seen=window.num_seen,
            num_skipped=window.skip,
            num_ahead=self.num_ahead,
            first_ns=window.first_ns,
            begin_ns=window.begin_ns,
            step_ns=window.step_ns if phase in (Phase.DONE, Phase.ENDED) else (),
            waited_ns=end.waited_ns - begin.waited_ns,
            num_batches=end.num_batches - begin.num_batches,
            num_samples=_samples_between(begin, end),
            gpu_memory_bytes=_gpu_memory(),
        )

    def at_exit(self) -> None:
        """Write what was measured if the script ends before the last step."""
        if self.pid != os.getpid() or self._is_done():
            return
        try:
            self.write(Phase.ENDED)
        except FileNotFoundError:
            pass  # the command has ended, and removed the folder
        except OSError as error:
            say(f"warning: rank {self.place.rank}: {self.path} cannot be written: {error.strerror}")

    def _is_done(self) -> bool:
        window = self.windows.get(self.unit)
        return window is not None and window.is_done


def _step_end_ns(window: StepWindow) -> int:
    """Return the time at which a step ends: at a border of the window, once the GPU has caught up."""
    now_ns = time.monotonic_ns()
    if not window.is_border(now_ns):
        return now_ns
    _wait_for_gpu()
    return time.monotonic_ns()


def _phase(window: StepWindow) -> Phase:
    if window.is_done:
        return Phase.DONE
    return Phase.STARTED if window.begin_ns is None else Phase.MEASURING


def _samples_between(begin: _BatchTotals, end: _BatchTotals) -> int | None:
    """Return the number of samples in the batches since `begin`; None if it is unknown or there was no batch."""
    if begin.num_samples is None or end.num_samples is None:
        return None
    return None if begin.num_batches == end.num_batches else end.num_samples - begin.num_samples


def claim() -> StepMeter | None:
    """Return a meter for this process, unless another process of the same rank is measured."""
    from torch.utils.data import get_worker_info

    settings = StepSettings.from_text(os.environ.get(STEPS_VARIABLE, ""))
    if settings is None or get_worker_info() is not None:
        return None
    place = _place()
    path = Path(settings.folder, f"rank-{place.rank}-{place.restart}.json")
    meter = StepMeter(settings=settings, place=place, path=path)
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        if not _is_free(path):
            return None
    meter.write(Phase.STARTED)
    atexit.register(meter.at_exit)
    return meter


def _place() -> _Place:
    """Return the rank of the process group if there is one, because a script may start its ranks itself."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    rank, local_rank, num_ranks, restart = map(_number, names)
    distributed = _process_group()
    if distributed is not None:
        rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
        local_rank = local_rank if "LOCAL_RANK" in os.environ else rank
    return _Place(rank, local_rank, max(num_ranks, 1), restart)


def _number(variable: str) -> int:
    return int(os.environ.get(variable) or "0")


def _process_group() -> ModuleType | None:
    """Return torch.distributed if the script has initialized it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return None
    return distributed if distributed.is_initialized() else None


def _is_free(path: Path) -> bool:
    """Return whether the process that has claimed this rank has ended without measuring the steps of a training."""
    with suppress(MachineFileError, OSError):
        other = read_record(RankSteps, path.read_text("utf-8"), source=path.name, hint="", schema=SCHEMA)
        has_measured = other.phase is Phase.DONE or (other.unit is StepUnit.OPTIMIZER_STEP and other.has_steps)
        return not has_measured and not proc.is_running(other.pid)
    return False  # it is about to write its first record


def report_failure(error: Exception) -> None:
    """Say that the steps of this process are not measured, to the user and to the command."""
    say(f"warning: the steps of process {os.getpid()} are not measured: {error}")
    with suppress(Exception):  # there may be no folder, which may be the error
        settings = StepSettings.from_text(os.environ.get(STEPS_VARIABLE, ""))
        if settings is not None:
            Path(settings.folder, f"failed-{os.getpid()}").write_text(f"{type(error).__name__}: {error}", "utf-8")


def _wait_for_gpu() -> None:
    """Let the GPU catch up with a loop that runs ahead."""
    import torch

    with warnings.catch_warnings(action="ignore"):
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()


def _gpu_memory() -> int | None:
    import torch

    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_initialized() else None
