"""The hook of a traced rank, with stand-ins for torch's iterators."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from tests.unit.trace.seam import CpuSet, CpuUse, Notes, StepSettings, Tracer, hook

if TYPE_CHECKING:
    from torch.autograd.profiler import record_function
    from torch.utils.data import DataLoader


class Ended:
    """A stand-in for an iterator of torch whose epoch has ended."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers

    def _next_data(self) -> object:
        raise StopIteration


@pytest.mark.parametrize(("num_workers", "num_ends"), [(0, 0), (2, 1)])
def test_ends_of_epochs(monkeypatch: pytest.MonkeyPatch, num_workers: int, num_ends: int) -> None:
    """Only the end of an epoch with workers is noted: nothing else ends there."""
    notes = Notes()
    monkeypatch.setattr(hook._Traced, "notes", notes)
    next_data = hook._counting_batches(Ended._next_data)
    with pytest.raises(StopIteration):
        next_data(Ended(num_workers))
    assert len(notes.ends) == num_ends


class Loader:
    """A stand-in for a loader, and for its iterator: a step is not overdue while these wait for workers."""

    def __init__(self, tracer: Tracer, num_workers: int) -> None:
        self.tracer, self.num_workers, self._num_workers = tracer, num_workers, num_workers

    def is_overdue(self) -> bool:
        """Return whether the next step is overdue 100 s from now."""
        return self.tracer.pace.is_overdue(time.monotonic() + 100)


def new_tracer(folder: Path) -> Tracer:
    """Return the tracer of a rank that has not begun."""
    return Tracer(
        settings=StepSettings(folder=str(folder), steps=1, skip=1),
        rank=0,
        restart=0,
        claim=folder / "rank-0.json",
        check=lambda: None,
        require_no_other=lambda: None,
    )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_waiting_for_workers_is_not_overdue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_workers: int) -> None:
    """The recording does not end while the loop is in iter() or next() of a loader with workers."""
    tracer = new_tracer(tmp_path)
    tracer.step, tracer.thread = cast("record_function", object()), threading.get_ident()
    tracer.pace.stepped(time.monotonic())
    monkeypatch.setattr(hook._Traced, "tracer", tracer)
    monkeypatch.setattr(hook, "_count", lambda _: None)
    loader = Loader(tracer, num_workers)
    iterate = hook._noting_epochs(lambda one: cast("Loader", one).is_overdue())
    next_data = hook._counting_batches(Loader.is_overdue)
    monkeypatch.setattr(hook._Traced, "notes", Notes())
    assert (iterate(cast("DataLoader[object]", loader)), next_data(loader)) == (not num_workers, not num_workers)
    assert loader.is_overdue()


def test_the_last_batches_of_a_long_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However many batches a worker made before the trace, its file has the times of the last ones, and stays small."""
    monkeypatch.setattr(hook, "_MOST_LOADS", 3)
    tracer = new_tracer(tmp_path)
    Path(tracer.settings.loads).mkdir(mode=0o700)
    loads = hook._Loads(tracer.settings)
    for i in range(8):
        loads.record(time.time_ns(), i)
    assert sorted(end for _, _, end in tracer._loads()) == [5, 6, 7]


def test_the_cpu_time_of_the_job() -> None:
    """The time of a process that the job started, and that has ended, is the job's and not another program's."""
    cpus = CpuSet(os.sched_getaffinity(0))
    before = CpuUse.read(cpus)
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-I", "-S", "-c", busy], check=True)
    after = CpuUse.read(cpus)
    assert before is not None
    assert after is not None
    assert after.job_ticks - before.job_ticks >= 0.4 * os.sysconf("SC_CLK_TCK")
    assert after.all_ticks - before.all_ticks >= 0.4 * os.sysconf("SC_CLK_TCK")
