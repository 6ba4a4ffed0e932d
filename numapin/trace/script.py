"""A traced rank's script: its loaders and epochs, where it runs, and stack samples of the loop's thread.

The profiler records operators, and no Python: time between operators would have no name. A sample is a walk up the
stack and one small read from the kernel.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

import numapin
from numapin.base.cpu_set import CpuSet
from numapin.errors import MachineError, MachineFileError
from numapin.system import proc
from numapin.system.tree import NODES, Tree

if TYPE_CHECKING:
    from types import FrameType

    from torch.utils.data import DataLoader

_MOST_EPOCHS: Final = 1000
_MOST_LOADERS: Final = 20


@dataclass(slots=True)
class Notes:
    """The notes of this process so far."""

    loaders: dict[tuple[object, ...], dict[str, object]] = field(default_factory=dict)  # by id and description
    epochs: list[tuple[int, int, int]] = field(default_factory=list)
    ends: list[tuple[int, int, int]] = field(default_factory=list)
    image_work: set[str] = field(default_factory=set)  # of the processes that made batches
    profiles_itself: bool = False  # right now

    def iterated(self, loader: DataLoader[Any], iterator: object, start_ns: int, end_ns: int) -> None:
        """Note a call of `iter()` on a loader. Only starting workers takes time."""
        described = _described(loader, iterator)
        key = (id(loader), *described.values())  # a loader may have the id of an earlier one that is gone
        if key not in self.loaders and len(self.loaders) == _MOST_LOADERS:
            return
        self.loaders.setdefault(key, described)
        if loader.num_workers and len(self.epochs) < _MOST_EPOCHS:
            self.epochs.append((list(self.loaders).index(key), start_ns, end_ns))

    def ended(self, start_ns: int, end_ns: int) -> None:
        """Note a call of `next()` that ended an epoch; most of its time is the end of the workers."""
        if len(self.ends) < _MOST_EPOCHS:
            self.ends.append((0, start_ns, end_ns))

    def to_json(self, *, cpu_use: CpuUse | None) -> dict[str, object]:
        """Return the notes and the rank's surroundings; `cpu_use` is from the start of the recording."""
        cpus, nodes, tree = CpuSet(os.sched_getaffinity(0)), "", Tree("")
        with suppress(MachineFileError):  # the kernel does not say
            online = tree.numbers(f"{NODES}/online") or ()
            nodes = str(CpuSet(node for node in online if cpus & (tree.node_cpus(node) or CpuSet())))
        return {
            "host": os.uname().nodename,
            "cpus": str(cpus),
            "nodes": nodes,
            "num_cpus": len(cpus),
            **(cpu_use.until_now() if cpu_use else {}),
            "loaders": list(self.loaders.values()),
            "epochs": self.epochs,
            "ends": self.ends,
            "image_work": sorted(self.image_work),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuUse:
    """The CPU time, in clock ticks, that all programs have used on some CPUs, and that this job has."""

    cpus: CpuSet
    at_s: float
    all_ticks: int
    job_ticks: int

    @classmethod
    def read(cls, cpus: CpuSet) -> CpuUse | None:
        """Read it for these CPUs; None if /proc cannot be read.

        The job is the launcher, this process's parent, with all processes below it that may use one of the CPUs. The
        time of a process includes that of its children which have ended.
        """
        job_ticks, launcher = 0, os.getppid()
        try:
            processes = dict(proc.processes())
            for pid in processes.keys() & {launcher, *proc.descendants(launcher, proc.children_of(processes))}:
                with suppress(ProcessLookupError):
                    job_ticks += processes[pid].cpu_ticks if cpus & os.sched_getaffinity(pid) else 0
            names = {f"cpu{cpu}" for cpu in cpus}
            rows = [line.split() for line in proc.read("/proc/stat").splitlines()]
            # user, nice and system (proc_stat(5)); interrupts may be the job's own
            all_ticks = sum(sum(map(int, row[1:4])) for row in rows if row and row[0] in names)
        except (OSError, ValueError, MachineError, proc.Gone):
            return None
        return cls(cpus=cpus, at_s=time.monotonic(), all_ticks=all_ticks, job_ticks=job_ticks)

    def until_now(self) -> dict[str, object]:
        """Return the time since then, and the CPU time of other programs on these CPUs; nothing if it is unknown."""
        now = self.read(self.cpus)
        if now is None:
            return {}
        other_ticks = max(now.all_ticks - self.all_ticks - (now.job_ticks - self.job_ticks), 0)
        per_second = os.sysconf("SC_CLK_TCK")
        return {"traced_ms": round((now.at_s - self.at_s) * 1000), "other_cpu_ms": other_ticks * 1000 // per_second}


def _described(loader: DataLoader[Any], iterator: object) -> dict[str, object]:
    num_batches = None
    with suppress(Exception):  # a loader of an iterable dataset may have no length
        num_batches = len(loader)
    device = getattr(getattr(loader, "_numapin_options", None), "device", None)
    return {
        "is_numapin": type(iterator).__module__.startswith("numapin."),
        "num_workers": loader.num_workers,
        "is_persistent": bool(getattr(loader, "persistent_workers", False)),
        "delivers_on_gpu": "cuda" in str(device),
        "num_batches": num_batches,
    }


# --- stack samples ---------------------------------------------------------------------------------------------------

_EVERY_S: Final = 0.005
_MANY: Final = 4000  # samples; then the time between samples doubles, so that the metadata stays short
_MOST: Final = 20_000
_DEEPEST: Final = 200  # frames
_RUNNING: Final = 0.5  # CPU time of the thread between two samples, as a share
_FOREIGN: Final = (
    *(f"{sysconfig.get_paths()[name]}/" for name in ("stdlib", "platstdlib")),
    f"{PurePath(numapin.__file__).parent}/",  # scripts may be in numapin-jobs/ beside it
    "<frozen",
)
_PACKAGES: Final = ("/site-packages/", "/dist-packages/")  # of any environment on the path


@dataclass(slots=True)
class StackSampler:
    """Samples of one thread, from `start` to `stop`: rows [time in ns, number of the stack, 1 running | 0 not]."""

    thread: int
    native: int
    stopped: threading.Event = field(default_factory=threading.Event)
    stacks: dict[tuple[str, str], int] = field(default_factory=dict)
    samples: list[tuple[int, int, int]] = field(default_factory=list)

    @classmethod
    def start(cls) -> StackSampler:
        """Begin to sample the calling thread."""
        sampler = cls(thread=threading.get_ident(), native=threading.get_native_id())
        threading.Thread(target=sampler._run, daemon=True, name="numapin trace stacks").start()
        return sampler

    def stop(self) -> dict[str, object]:
        """End; return the samples as the trace's metadata has them."""
        self.stopped.set()
        return {"stacks": list(self.stacks), "samples": list(self.samples)}

    def _run(self) -> None:
        with suppress(OSError), closing(_BusyClock(self.thread, self.native)) as clock:  # OSError: the thread has ended
            last_s, last_busy_s, every_s = time.monotonic(), clock.now_s(), _EVERY_S
            while not self.stopped.wait(every_s) and len(self.samples) < _MOST:
                frame = sys._current_frames().get(self.thread)  # noqa: SLF001 - documented
                if frame is None:
                    return
                now_s, busy_s = time.monotonic(), clock.now_s()
                is_running = busy_s - last_busy_s > _RUNNING * (now_s - last_s)
                last_s, last_busy_s = now_s, busy_s
                number = self.stacks.setdefault(_place(frame), len(self.stacks))
                self.samples.append((time.time_ns(), number, int(is_running)))
                every_s = _EVERY_S * 2 ** (len(self.samples) // _MANY)


class _BusyClock:
    """The time for which a thread has run or waited for a CPU: a loop that shares its CPU does not sleep.

    A kernel without schedstat reports CPU time only.
    """

    def __init__(self, thread: int, native: int) -> None:
        self._clock = time.pthread_getcpuclockid(thread)
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open(f"/proc/self/task/{native}/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def now_s(self) -> float:
        if self._file is None:
            return time.clock_gettime(self._clock)
        ran_ns, waited_ns, _ = map(int, os.pread(self._file, 100, 0).split())
        return (ran_ns + waited_ns) / 1e9

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)


def _place(frame: FrameType) -> tuple[str, str]:
    """Return the innermost function of the script's own code, and the innermost one of all."""
    own: FrameType | None = frame
    for _ in range(_DEEPEST):
        file = own.f_code.co_filename if own else ""
        if own is None or not (file.startswith(_FOREIGN) or any(folder in file for folder in _PACKAGES)):
            break
        own = own.f_back
    return _name(own or frame), _name(frame)


def _name(frame: FrameType) -> str:
    """Return the function, the file's name and the line."""
    code = frame.f_code
    function = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
    return f"{function} ({PurePath(code.co_filename).name}:{frame.f_lineno})"
