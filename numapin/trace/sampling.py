"""Stack samples of the loop's thread while it is traced.

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
from typing import TYPE_CHECKING, Final

import numapin

if TYPE_CHECKING:
    from types import FrameType

_EVERY_S: Final = 0.005
_MANY: Final = 4000  # samples; then the time between samples doubles, so that the metadata stays short
_MOST: Final = 20_000
_DEEPEST: Final = 200  # frames
_RUNNING: Final = 0.5  # CPU time of the thread between two samples, as a share
_FOREIGN: Final = (
    *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")),
    str(PurePath(numapin.__file__).parent),
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
        if own is None or _is_own(own.f_code.co_filename):
            break
        own = own.f_back
    return _name(own or frame), _name(frame)


def _is_own(file: str) -> bool:
    """Return whether a file is the script's, and no library's."""
    return not file.startswith(_FOREIGN) and not any(folder in file for folder in _PACKAGES)


def _name(frame: FrameType) -> str:
    """Return the function, the file's name and the line."""
    code = frame.f_code
    function = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
    return f"{function} ({PurePath(code.co_filename).name}:{frame.f_lineno})"
