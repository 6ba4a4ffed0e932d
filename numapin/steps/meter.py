"""The meter of a rank of `numapin compare`: its steps in a window, written to a file.

A step ends when the program's optimizer steps; if the program makes no optimizer, when a DataLoader returns a batch.
Nothing is written, and no GPU is waited for, within the window. At both ends of it the rank waits for its GPU, so that
work that the host has only queued is neither missing nor counted twice.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import sys
import threading
import time
import warnings
import weakref
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.files import open_file, opened, replace_at
from numapin.base.records import read_record, to_json
from numapin.base.stderr import say
from numapin.base.strict_json import encode
from numapin.errors import MachineFileError
from numapin.rank.hook_env import STEPS_VARIABLE
from numapin.steps import recorder
from numapin.steps.record import FEWEST_STEPS, SCHEMA, Phase, RankSteps, StepSettings, StepUnit
from numapin.system import proc

if TYPE_CHECKING:
    from types import ModuleType

_MANY: Final = 20  # steps of another optimizer; GANs train a critic five times per step of the generator
_BLOCK_BYTES: Final = 4096  # of a file that exists, which a full disk does not take away


def attach(module: ModuleType) -> None:
    """Measure the steps or batches of this module of torch."""
    if _recording not in recorder.recordings:
        recorder.recordings.append(_recording)
    recorder.attach(module)


class Place(NamedTuple):
    """The rank that this process is, and which start of it."""

    rank: int
    local_rank: int
    num_ranks: int
    num_local_ranks: int
    restart: int


def claim() -> StepMeter | None:
    """Return a meter for this process, unless another process of the same rank is measured."""
    from torch.utils.data import get_worker_info

    settings = StepSettings.from_text(os.environ.get(STEPS_VARIABLE, ""))
    if settings is None or get_worker_info() is not None:
        return None
    place = find_place()
    try:
        path = claim_file(settings, place)
    except FileExistsError:
        return None
    meter = StepMeter(settings=settings, place=place, path=path)
    meter.write(Phase.STARTED)
    atexit.register(meter.at_exit)
    return meter


def _report(_: recorder.StepListener | None, error: Exception) -> None:
    """Report an error of the meter to the user and to the command."""
    say(f"warning: the steps of process {os.getpid()} are not measured: {error}")
    with suppress(Exception):  # there may be no folder, which may be the error
        settings = StepSettings.from_text(os.environ.get(STEPS_VARIABLE, ""))
        if settings is not None:
            text = f"{type(error).__name__}: {error}"
            Path(settings.folder, f"failed-{os.getpid()}").write_text(text, "utf-8")


def find_place() -> Place:
    """Return the rank of the process group if there is one, because a script may start its ranks itself.

    Some launchers set LOCAL_RANK only.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    rank, local_rank, num_ranks, num_local_ranks, restart = (int(os.environ.get(name) or "0") for name in names)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
        local_rank = local_rank if "LOCAL_RANK" in os.environ else rank
    elif not os.environ.get("RANK"):
        rank = local_rank
    num_ranks = max(num_ranks, 1)
    return Place(rank, local_rank, num_ranks, min(num_local_ranks or num_ranks, num_ranks), restart)


def claim_file(settings: StepSettings, place: Place) -> Path:
    """Return the file of a rank's record, which is this process's from now on.

    Raises OSError if another process has it, but for one that has ended without measuring the steps of a training.
    """
    restart = f"-restart-{place.restart}" if place.restart else ""
    path = Path(settings.folder, f"rank-{place.rank}{restart}.json")
    folder = os.open(settings.folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(folder, fcntl.LOCK_EX)  # else two processes could take over one file
        with suppress(MachineFileError, OSError):  # there is no file, or its first record is about to be written
            other = read_record(RankSteps, path.read_text("utf-8"), source=path.name, hint="", schema=SCHEMA)
            is_training = other.unit is StepUnit.OPTIMIZER_STEP and (other.has_steps or other.num_traced > 0)
            if not (other.phase is Phase.DONE or is_training or proc.is_running(other.pid)):
                path.unlink()
        path.touch(exist_ok=False)
    finally:
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_UN)  # a child that was forked meanwhile keeps the descriptor
        os.close(folder)
    return path


def write_record(path: Path, record: RankSteps) -> None:
    """Replace a rank's record; on a full disk, write into its existing block if it fits. Raises OSError."""
    text = encode({"schema": SCHEMA, **to_json(record)}, indent=None) + "\n"
    with opened(str(path.parent)) as folder:
        try:
            replace_at(folder, path.name, text)
        except OSError:
            if len(text) > _BLOCK_BYTES:
                raise
            with os.fdopen(open_file(folder, path.name, os.O_RDWR), "r+", encoding="utf-8") as file:
                file.write(text)
                file.truncate()


@dataclass(slots=True)
class FollowedOptimizer:
    """The optimizer whose steps count: the first one, until it is collected or no longer steps."""

    current: weakref.ref[object] | None = None
    other: weakref.ref[object] | None = None  # the first that stepped after the current one last did
    num_other_steps: int = 0

    def counts(self, optimizer: object) -> bool:
        """Return whether this optimizer's step is one of the loop's."""
        followed = self.current() if self.current else None
        if followed is not None and followed is not optimizer:
            # Another one is followed once it has stepped so often that the current one no longer does.
            other = self.other() if self.other else None
            if other is None:
                self.other, self.num_other_steps = weakref.ref(optimizer), 0
            elif other is not optimizer:
                return False
            self.num_other_steps += 1
            if self.num_other_steps < _MANY:
                return False
        self.current, self.other = weakref.ref(optimizer), None
        return True


@dataclass(slots=True)
class _BatchTotals:
    """The batches that the loops of this process took until now. `num_samples` is None after a loader of no size."""

    waited_ns: int = 0
    num_batches: int = 0
    num_samples: int | None = 0


@dataclass(slots=True)
class _Loop:
    """The steps of one kind: the thread whose steps count, and the batches taken until each end of the window."""

    thread: int
    window: StepWindow
    at_begin: _BatchTotals = field(default_factory=_BatchTotals)
    at_end: _BatchTotals | None = None


@dataclass(slots=True, kw_only=True)
class StepMeter(recorder.StepListener):
    """The steps of one process, written to the file `path`."""

    settings: StepSettings
    place: Place
    path: Path
    pid: int = field(default_factory=os.getpid)
    num_ahead: int = 0
    optimizer: FollowedOptimizer = field(default_factory=FollowedOptimizer)
    totals: _BatchTotals = field(default_factory=_BatchTotals)
    loops: dict[StepUnit, _Loop] = field(default_factory=dict)

    @property
    def unit(self) -> StepUnit:
        """Return the unit of steps: batches only in a program without optimizers."""
        is_training = recorder.makes_optimizers() or StepUnit.OPTIMIZER_STEP in self.loops
        return StepUnit.OPTIMIZER_STEP if is_training else StepUnit.BATCH

    def batch(self, waited_ns: int, size: int | None, num_ahead: int) -> None:
        """Count a batch, and the end of a step if batches are the steps."""
        self.num_ahead = max(self.num_ahead, num_ahead)
        loop, totals = self.loops.get(self.unit), self.totals
        if loop is None or loop.thread == threading.get_ident():  # the loop does not wait for other threads' batches
            totals.waited_ns += waited_ns
        totals.num_batches += 1
        totals.num_samples = None if size is None or totals.num_samples is None else totals.num_samples + size
        self._step(StepUnit.BATCH)
        if totals.num_batches == 1 and self.unit is not StepUnit.BATCH:
            self.write(Phase.STARTED)  # the command can say that there was a batch, if no optimizer ever steps

    def optimizer_step(self, optimizer: object) -> None:
        """Count a step of the followed optimizer."""
        if self.optimizer.counts(optimizer):
            self._step(StepUnit.OPTIMIZER_STEP)

    def _step(self, unit: StepUnit) -> None:
        """Note the end of a step. Only the first thread that steps counts, until it ends."""
        thread = threading.get_ident()
        loop = self.loops.get(unit)
        if loop is None:
            loop = self.loops[unit] = _Loop(thread, self._new_window())
        elif loop.thread != thread and all(other.ident != loop.thread for other in threading.enumerate()):
            loop.thread = thread
        window = loop.window
        if loop.thread != thread or window.is_done:
            return
        window.begin_after(self.num_ahead)
        is_unit, now_ns = unit is self.unit, time.monotonic_ns()
        if is_unit and window.is_border(now_ns):
            wait_for_gpu()
            now_ns = time.monotonic_ns()
        if window.stepped(now_ns):
            if window.is_done:
                loop.at_end = replace(self.totals)
            else:
                loop.at_begin = replace(self.totals)
            if is_unit:
                started = Phase.STARTED if window.begin_ns is None else Phase.MEASURING
                self.write(Phase.DONE if window.is_done else started)

    def _new_window(self) -> StepWindow:
        settings = self.settings
        return StepWindow(skip=settings.skip, steps=settings.steps, limit_ns=int(settings.seconds * 1e9))

    def write(self, phase: Phase) -> None:
        """Write what was measured so far. At the script's end, batches count as steps if no optimizer has stepped."""
        unit = self.unit
        if phase is Phase.ENDED and unit not in self.loops:
            unit = StepUnit.BATCH
        loop = self.loops.get(unit) or _Loop(0, self._new_window())
        window, begin, end = loop.window, loop.at_begin, loop.at_end or self.totals
        num_batches, num_samples = end.num_batches - begin.num_batches, None
        if num_batches and begin.num_samples is not None and end.num_samples is not None:
            num_samples = end.num_samples - begin.num_samples
        with warnings.catch_warnings(action="ignore"):  # the script may turn warnings into errors
            record = RankSteps(
                **self.place._asdict(),
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
                num_batches=num_batches,
                num_samples=num_samples,
            )
        write_record(self.path, record)

    def at_exit(self) -> None:
        """Write what was measured if the script ends before the last step."""
        loop = self.loops.get(self.unit)
        if self.pid != os.getpid() or (loop is not None and loop.window.is_done):
            return
        try:
            self.write(Phase.ENDED)
        except FileNotFoundError:
            pass  # the command has ended, and removed the folder
        except OSError as error:
            say(f"warning: rank {self.place.rank}: {self.path} cannot be written: {error.strerror}")


def wait_for_gpu() -> None:
    """Let the GPU catch up with a loop that runs ahead; not while a stream is captured, which would fail."""
    import torch

    with warnings.catch_warnings(action="ignore"):
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()


@dataclass(slots=True, kw_only=True)
class StepWindow:
    """The steps of one kind. The window begins with the end of step number `skip`. Times are in nanoseconds.

    Batches that a loader has fetched ahead would hide waiting, so `begin_after` moves the begin behind them.
    """

    skip: int
    steps: int
    limit_ns: int
    num_seen: int = 0
    first_ns: int | None = None
    begin_ns: int | None = None
    ends_ns: list[int] = field(default_factory=list)
    is_done: bool = False

    def begin_after(self, num_steps: int) -> None:
        """Skip at least this many steps, at most `steps`; no effect once the window has begun."""
        if self.begin_ns is None:
            self.skip = max(self.skip, min(num_steps, self.steps))

    def is_border(self, now_ns: int) -> bool:
        """Return whether a step that ends now begins or ends the window, so that the GPU has to catch up first."""
        if self.begin_ns is None:
            return self.num_seen + 1 >= self.skip
        num_steps = len(self.ends_ns) + 1
        is_late = now_ns - self.begin_ns >= self.limit_ns and num_steps >= FEWEST_STEPS
        return num_steps >= self.steps or is_late

    def stepped(self, now_ns: int) -> bool:
        """Note the end of a step. Return whether it is the first one, begins the window, or ends it."""
        if self.is_done:
            return False
        is_border, is_first = self.is_border(now_ns), self.first_ns is None
        self.num_seen += 1
        if is_first:
            self.first_ns = now_ns
        if self.begin_ns is None:
            self.begin_ns = now_ns if is_border else None
        else:
            self.ends_ns.append(now_ns)
            self.is_done = is_border
        return is_border or is_first

    @property
    def step_ns(self) -> tuple[int, ...]:
        """The time of each step in the window."""
        if self.begin_ns is None:
            return ()
        starts = [self.begin_ns, *self.ends_ns]
        return tuple(end - start for start, end in zip(starts, self.ends_ns, strict=False))


_recording: Final = recorder.Recording(claim, _report)
