"""One process of a traced script: count its steps, profile some of them, write the trace.

A step ends when the program's optimizer steps. Before the first optimizer step, a step ends when a DataLoader returns a
batch, so that inference is traced too.
"""

from __future__ import annotations

import _thread
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final, TypeAlias

from numapin.base.cpu_set import CpuSet
from numapin.base.files import FOLDER, open_file, opened
from numapin.base.stderr import say
from numapin.base.strict_json import encode
from numapin.base.text import counted
from numapin.steps.meter import FollowedOptimizer, Place, wait_for_gpu, write_record
from numapin.steps.record import TRACE, Phase, RankSteps, StepUnit
from numapin.steps.recorder import StepListener
from numapin.trace.script import CpuUse, Notes, StackSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.autograd.profiler import record_function
    from torch.profiler import profile

    from numapin.steps.record import StepSettings

_TAIL_BYTES: Final = 8192  # has the end of the events, and the trace's name, which is a path
_LONGEST_REASON: Final = 500  # characters; keeps a record within the disk block of its first version
_RECENT: Final = 16
_SLOW: Final = 10
_SHORTEST_LIMIT_S: Final = 2.0  # a loop of small operators makes 250 MB of records per second
_FIRST_LIMIT_S: Final = 60.0  # before any step's time is known; the first steps compile and allocate
_CHECK_EVERY_S: Final = 0.5
UNFINISHED: Final = "the process was killed, or is still running"
_PROFILES_ITSELF: Final = "the script profiles itself; read its own trace with: numapin trace --read FILE"

_Shown: TypeAlias = tuple[int, str, int, int]  # process, row, start and end in ns since 1970


# --- an overdue step -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Pace:
    """The end of the last step, and the time between recent ones.

    Time in a loader with workers does not count: it is what the trace is to show, and only the workers are busy then,
    which are not recorded. `entered_s` is when the loop entered it.
    """

    last_s: float | None = None
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    entered_s: float = 0.0
    num_entered: int = 0  # one loader's batches may be made from another's

    def stepped(self, now_s: float) -> None:
        """Note that a step has ended."""
        if self.last_s is not None:
            self.recent_s.append(now_s - self.last_s)
        self.last_s = now_s

    def enter_loader(self, now_s: float) -> None:
        """Do not count the time from now on, in which the loop waits for a loader with workers."""
        if not self.num_entered:
            self.entered_s = now_s
        self.num_entered += 1

    def leave_loader(self, now_s: float) -> None:
        """Count the time again. A loader may have been entered before the recording; then the time does count."""
        if self.num_entered == 1 and self.last_s is not None:  # first: a signal handler calls `overdue`
            self.last_s += now_s - max(self.entered_s, self.last_s)
        self.num_entered = max(self.num_entered - 1, 0)

    @property
    def limit_s(self) -> float:
        """The time that the next step may take."""
        return max(_SLOW * median(self.recent_s), _SHORTEST_LIMIT_S) if self.recent_s else _FIRST_LIMIT_S

    def overdue(self, step_unit: str, now_s: float) -> str:
        """Return why the trace ends, if the next step takes longer than the limit; else ""."""
        if self.last_s is None or self.num_entered or now_s - self.last_s <= self.limit_s:
            return ""
        return f"no {step_unit} for {self.limit_s:.0f} s"


class PeriodicCall:
    """Periodic calls of a function in the main thread, until `stop`, while the script's own code runs there.

    The profiler can be stopped only in the thread that it records, and that thread may never call us again.
    `interrupt_main` runs Python's handler of a signal there without sending the signal, so no system call is
    interrupted. SIGURG is ignored by default.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        """Begin, unless this is not the main thread, or the script uses the signal itself."""
        self.stopped, self.handler = threading.Event(), lambda *_: function()
        if threading.current_thread() is threading.main_thread() and not signal.getsignal(signal.SIGURG):
            signal.signal(signal.SIGURG, self.handler)
            threading.Thread(target=self._run, daemon=True, name="numapin trace").start()

    def _run(self) -> None:
        while not self.stopped.wait(_CHECK_EVERY_S) and signal.getsignal(signal.SIGURG) is self.handler:
            _thread.interrupt_main(signal.SIGURG)

    def stop(self) -> None:
        """End the calls. Outside the main thread the handler stays, but is no longer called."""
        self.stopped.set()
        is_ours = signal.getsignal(signal.SIGURG) is self.handler
        if is_ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGURG, signal.SIG_DFL)


# --- the tracer ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tracer(StepListener):
    """The steps of one process: skip `skip` of them, trace the next `steps`, write the trace.

    `check` is called in the main thread from time to time during the recording.
    """

    settings: StepSettings
    place: Place
    claim: Path
    check: Callable[[], None]
    notes: Notes = field(default_factory=Notes)
    pid: int = field(default_factory=os.getpid)
    num_batches: int = 0
    num_optimizer_steps: int = 0
    optimizer: FollowedOptimizer = field(default_factory=FollowedOptimizer)
    step_unit: StepUnit = StepUnit.BATCH
    pace: Pace = field(default_factory=Pace)
    begun: int = 0  # steps, once tracing
    start_ns: int = 0  # of the recording, since 1970
    thread: int | None = None
    profiler: profile | None = None
    step: record_function | None = None
    watch: PeriodicCall | None = None
    sampler: StackSampler | None = None
    cpu_use: CpuUse | None = None
    has_profiled: bool = False
    pins: list[tuple[int, int, int]] = field(default_factory=list)
    done: bool = False
    is_cut_short: bool = False  # the script ended before the last step

    def batch(self, waited_ns: int, size: int | None, num_ahead: int) -> None:
        """Count a batch. If batches are the steps, a step ends when the next batch is returned."""
        del waited_ns, size, num_ahead
        self.num_batches += 1
        if self.step_unit is StepUnit.BATCH:
            self._advance(self.num_batches - 1)
        else:
            self.end_if_overdue()

    def optimizer_step(self, optimizer: object) -> None:
        """Count a step of the followed optimizer; a trace that began with batches as its steps keeps them."""
        if not self.optimizer.counts(optimizer):
            self.end_if_overdue()
            return
        self.num_optimizer_steps += 1
        if self.step is None:
            self.step_unit = StepUnit.OPTIMIZER_STEP
        if self.step_unit is StepUnit.OPTIMIZER_STEP:
            self._advance(self.num_optimizer_steps)

    def _advance(self, count: int) -> None:
        """Act on the end of step number `count`. Only the loop that is traced counts, not one beside it."""
        from torch.profiler import profile

        if self.thread not in (None, threading.get_ident()):
            return
        with warnings.catch_warnings(action="ignore"):  # the script may turn warnings into errors
            if self.step is not None and self.begun >= self.settings.steps:
                self.finish("")
                return
            self.end_if_overdue()
            if self.done:
                return
            self.pace.stepped(time.monotonic())
            if self.profiler is None and count >= self.settings.skip - 1:  # prepared one step before it records
                if self.notes.profiles_itself:
                    raise RuntimeError(_PROFILES_ITSELF)
                profiler = profile(record_shapes=True)
                self.has_profiled = True
                profiler.prepare_trace()
                self.profiler = profiler
            if self.step is not None:
                self._next_step()
            elif self.profiler is not None and count >= self.settings.skip:
                self.thread = threading.get_ident()
                self.record(trace=None, num_steps=0, reason=UNFINISHED)
                self.cpu_use = CpuUse.read(CpuSet(os.sched_getaffinity(0)))
                wait_for_gpu()
                self.start_ns = time.time_ns()
                self.profiler.start_trace()
                self._next_step()
                self.sampler = StackSampler.start()
                self.watch = PeriodicCall(self.check)

    def _next_step(self) -> None:
        from torch.autograd.profiler import record_function

        if self.step is not None:
            self.step.__exit__(None, None, None)
        self.step = record_function(f"ProfilerStep#{self.begun}")
        self.step.__enter__()
        self.begun += 1

    def end_if_overdue(self) -> None:
        """End the trace if the next step is overdue: what the script does instead would fill the memory."""
        reason = self.pace.overdue(self.step_unit, time.monotonic()) if self.recording else ""
        if reason:
            self.finish(reason)

    def enter_loader(self, num_workers: int) -> None:
        """Let the loop take its time in `iter()` or `next()` of a loader with workers."""
        if num_workers and self.recording:
            self.pace.enter_loader(time.monotonic())

    def leave_loader(self, num_workers: int, waited_ns: int, *, is_over: bool) -> None:
        """Note a call of `next()` that ended an epoch: torch ends workers that do not stay before it returns."""
        if num_workers and self.recording:
            self.pace.leave_loader(time.monotonic())
        if num_workers and is_over:
            now_ns = time.time_ns()
            self.notes.ended(now_ns - waited_ns, now_ns)

    def end_at_fork(self) -> None:
        """End a trace that has begun."""
        if self.recording:
            self.finish("the script forked")

    @property
    def recording(self) -> bool:
        """True if this thread is being recorded; only it can end the recording."""
        return self.step is not None and self.thread == threading.get_ident() and self.pid == os.getpid()

    def yield_to_script(self) -> None:
        """End a trace that has begun, and give up one that is about to begin: the script's own profiler begins."""
        if self.recording:
            self.finish(_PROFILES_ITSELF)
        elif self.profiler is not None:
            self.give_up(_PROFILES_ITSELF)

    def finish(self, reason: str) -> None:
        """Write the trace, if it has a complete step, and the record."""
        num_steps = max(self.begun - bool(reason), 0)  # an early end cuts the last one short
        own = {
            "rank": self.place.rank,
            "restart": self.place.restart,
            "step_unit": self.step_unit,
            "num_steps": num_steps,
        }
        loads = self._loads()
        noted = self.notes.to_json(cpu_use=self.cpu_use)
        samples = self.sampler.stop() if self.sampler else {}
        metadata = own | {"loads": loads, "noted": noted | samples}
        with warnings.catch_warnings(action="ignore"):
            profiler, name = self._stop(encode(metadata, indent=None)), None
        if profiler is not None and num_steps:
            name = self.claim.stem + TRACE
            shown = [(pid, "load", start, end) for pid, start, end in loads if end >= self.start_ns]
            shown += [(self.pid, f"pin {thread}", start, end) for thread, start, end in self.pins]
            _export(profiler, self.claim.with_name(name), shown)
        usage = sys.modules.get("numapin.data.usage")  # the record below lets --stop end this process
        if usage is not None:
            usage.update()
        self.record(trace=name, num_steps=num_steps, reason=reason)
        if name is not None:
            say(f"rank {self.place.rank}: traced {counted(num_steps, 'step')} into {self.claim.with_name(name)}")

    def give_up(self, reason: str) -> None:
        """Stop tracing for good, and report why."""
        with suppress(Exception):  # the reason is reported below
            self._stop()
        say(f"warning: rank {self.place.rank} is not traced: {reason}")
        self.record(trace=None, num_steps=0, reason=reason)

    def _stop(self, metadata: str = "{}") -> profile | None:
        """Stop the profiler for good; return it if it recorded. A prepared profiler must start first, as in torch."""
        profiler, step, watch, self.done = self.profiler, self.step, self.watch, True
        with suppress(OSError):  # workers record no more loads
            Path(self.settings.loads, f"{self.pid}.done").touch()
        self.profiler = self.step = self.watch = None
        if self.sampler is not None:
            self.sampler.stop()
        if watch is not None:
            watch.stop()
        if profiler is None:
            return None
        if step is None:
            profiler.start_trace()
        else:
            wait_for_gpu()
            step.__exit__(None, None, None)
            profiler.add_metadata_json("numapin", metadata)
        profiler.stop_trace()
        return None if step is None else profiler

    def record(self, *, trace: str | None, num_steps: int, reason: str) -> None:
        """Write what this rank has done so far."""
        phase = Phase.STARTED if self.thread is None else Phase.MEASURING
        if self.done:
            phase = Phase.ENDED if self.is_cut_short else Phase.DONE
        is_by_batch = self.step_unit is StepUnit.BATCH
        record = RankSteps(
            **self.place._asdict(),
            pid=self.pid,
            phase=phase,
            unit=self.step_unit,
            num_seen=self.num_batches if is_by_batch else self.num_optimizer_steps,
            num_skipped=self.settings.skip,
            trace=trace,
            num_traced=num_steps,
            reason=reason[:_LONGEST_REASON],
        )
        try:
            write_record(self.claim, record)
        except OSError as error:
            say(f"warning: rank {self.place.rank}: {self.claim} cannot be written: {error.strerror}")

    def at_exit(self) -> None:
        """Write what was traced if the script ends before the last step."""
        if self.done or self.pid != os.getpid():
            return
        self.is_cut_short = True
        end = (
            f"the script ended after {counted(self.num_optimizer_steps, 'optimizer step')} and "
            f"{counted(self.num_batches, 'batch')}"
        )
        if self.step is None:
            self.profiler = None  # never started
        with warnings.catch_warnings(action="ignore"):
            try:
                self.finish(end)
            except Exception as error:  # noqa: BLE001 - reported; the script's exit status must not change
                self.give_up(f"{end}; {error}")

    def _loads(self) -> list[tuple[int, int, int]]:
        """Return process, start and end of each batch that workers or this process made."""
        rows: list[tuple[int, int, int]] = []
        with suppress(FileNotFoundError), opened(self.settings.loads) as folder:
            with os.scandir(folder) as entries:
                names = sorted(entry.name for entry in entries if entry.name.startswith(f"{self.pid}."))
            for name in names:
                with os.fdopen(open_file(folder, name), encoding="ascii", errors="replace") as file:
                    words = [line.split() for line in file]  # some of which may be cut off
                rows += [(int(row[0]), int(row[1]), int(row[2])) for row in words if len(row) in (3, 4)]
                self.notes.image_work.update(name for row in words if len(row) == 4 for name in row[3].split(","))
        return rows


# --- files -----------------------------------------------------------------------------------------------------------


def _export(profiler: profile, path: Path, shown: Sequence[_Shown]) -> None:
    """Write the Chrome trace with the rows `shown` in it, complete or not at all. Raises OSError.

    Kineto does not report a full disk, so the end of its file is looked at. And it opens a path and
    follows links: so it writes into a folder that only this user may enter, with a random name, through the folder's
    descriptor, which another user who may write to the trace folder cannot replace.
    """
    name = f".numapin-{os.urandom(8).hex()}"
    with opened(str(path.parent)) as parent:
        os.mkdir(name, 0o700, dir_fd=parent)
        folder = os.open(name, FOLDER, dir_fd=parent)
        try:
            written = Path(f"/proc/self/fd/{folder}", path.name)
            profiler.export_chrome_trace(str(written))
            end = b""
            with suppress(FileNotFoundError), written.open("rb") as file:
                file.seek(-min(8, written.stat().st_size), os.SEEK_END)
                end = file.read()
            if not end.rstrip().endswith(b"}"):
                raise OSError(f"{path} was cut off; is the disk full?")
            with suppress(OSError, ValueError):
                _add_rows(written, shown)
            os.replace(path.name, path.name, src_dir_fd=folder, dst_dir_fd=parent)
        finally:
            os.close(folder)
            shutil.rmtree(name, ignore_errors=True, dir_fd=parent)


def _add_rows(path: Path, shown: Sequence[_Shown]) -> None:
    """Add to a Chrome trace what the profiler does not see. A trace of another form, or on a full disk, stays as it is.

    Our reader takes loads from the metadata, and no event of the category "numapin". They have rows of their own,
    because their clock may differ from the profiler's by more than an event lasts.
    """
    base_ns = 0
    with path.open("rb") as file:
        for line in file:  # the metadata, of which ours may be long, then the events
            if line.lstrip().startswith(b'"baseTimeNanoseconds":'):
                base_ns = int(line.partition(b":")[2].strip(b" ,\n"))
            if line.strip() == b'"traceEvents": [':
                break
        begin = max(path.stat().st_size - _TAIL_BYTES, 0)
        file.seek(begin)
        tail = file.read()
    end_of_events = tail.rfind(b"]", 0, tail.rfind(b'"traceName"') + 1)
    if end_of_events < 0:
        return
    rows = []
    for process, row, start_ns, end_ns in shown:
        event = {"ph": "X", "cat": "numapin", "name": row.partition(" ")[0], "pid": process, "tid": row}
        times = {"ts": (start_ns - base_ns) / 1000, "dur": (end_ns - start_ns) / 1000}
        rows.append(f",\n{encode(event | times, indent=None)}")
    rest, position = tail[end_of_events:], begin + end_of_events
    content = "".join(rows).encode() + rest
    with path.open("r+b", buffering=0) as writer:
        writer.seek(position)
        if writer.write(content) < len(content):  # the disk is full now
            writer.seek(position)
            writer.write(rest)
            writer.truncate(position + len(rest))
