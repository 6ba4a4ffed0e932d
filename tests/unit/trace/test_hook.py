"""The hook of a traced rank."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast
from unittest.mock import ANY

import pytest
import torch

from tests.unit.trace.seam import CpuSet, CpuUse, Place, StepSettings, Tracer, hook, proc

if TYPE_CHECKING:
    from torch.autograd.profiler import record_function
    from torch.utils.data import DataLoader


@pytest.fixture
def tracer(tmp_path: Path) -> Tracer:
    """Return the tracer of a rank that records a step."""
    tracer = Tracer(
        settings=StepSettings(folder=str(tmp_path), steps=1, skip=1),
        place=Place(rank=0, local_rank=0, num_ranks=1, num_local_ranks=1, restart=0),
        claim=tmp_path / "rank-0.json",
        check=lambda: None,
    )
    tracer.step, tracer.thread = cast("record_function", object()), threading.get_ident()
    tracer.pace.stepped(time.monotonic())
    return tracer


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_with_workers(tracer: Tracer, num_workers: int) -> None:
    """The recording does not end while the loop waits for workers; the end of their epoch is noted."""
    later_s = time.monotonic() + 100
    tracer.enter_loader(num_workers)
    assert bool(tracer.pace.overdue("batch", later_s)) == (not num_workers)
    tracer.leave_loader(num_workers, 1000, is_over=True)
    assert tracer.pace.overdue("batch", later_s)
    assert len(tracer.notes.ends) == (num_workers > 0)


def test_epochs_are_noted(monkeypatch: pytest.MonkeyPatch, tracer: Tracer) -> None:
    """The notes have each loader once, and the starts of the epochs of those with workers."""
    monkeypatch.setattr(hook, "_notes", tracer.notes)
    iterate = hook._noting_epochs(lambda _: object())
    with_workers, without = (SimpleNamespace(num_workers=number) for number in (2, 0))
    for loader in (with_workers, without, with_workers):
        iterate(cast("DataLoader[object]", loader))
    noted = tracer.notes.to_json(cpu_use=CpuUse.read(CpuSet(os.sched_getaffinity(0))))
    described = {"is_numapin": False, "is_persistent": False, "delivers_on_gpu": False, "num_batches": None}
    assert noted["loaders"] == [{"num_workers": number, **described} for number in (2, 0)]
    assert [number for number, _, _ in tracer.notes.epochs] == [0, 0]
    assert noted["other_cpu_ms"] == ANY


def test_the_scripts_own_profiler(monkeypatch: pytest.MonkeyPatch, tracer: Tracer) -> None:
    """Ours ends before it begins, and may begin again only when it has ended."""
    reasons: list[str] = []
    monkeypatch.setattr(hook._recording, "listener", tracer)
    monkeypatch.setattr(Tracer, "yield_to_script", lambda _: reasons.append("ended"))
    own = type("Own", (), {"begin": lambda self: self, "__exit__": lambda _: None})
    hook._watch_profiler(own, "begin")
    begun = own().begin()
    assert (hook._notes.profiles_itself, len(reasons)) == (True, 1)
    begun.__exit__()
    assert not hook._notes.profiles_itself


def test_the_last_batches_of_a_long_job(monkeypatch: pytest.MonkeyPatch, tracer: Tracer) -> None:
    """However many batches a worker made before the trace, its file has the times of the last ones, and stays small."""
    monkeypatch.setattr(hook, "_MOST_LOADS", 3)
    Path(tracer.settings.loads).mkdir(mode=0o700)
    loads = hook._Loads(tracer.settings)
    for i in range(8):
        loads.record(time.time_ns(), i, None)
    assert sorted(end for _, _, end in tracer._loads()) == [5, 6, 7]


IMAGES = torch.zeros(2, 3, 8, 8)


@pytest.mark.parametrize(
    ("batch", "decodes", "seen"),
    [
        ([IMAGES, torch.zeros(2)], False, {"float"}),
        ({"image": IMAGES.byte(), "label": 3}, True, {"jpeg"}),
        (IMAGES, True, {"float", "jpeg"}),
        ([IMAGES.flatten(1), "text"], False, set()),
        (None, False, set()),
    ],
)
def test_work_on_images(
    monkeypatch: pytest.MonkeyPatch,
    tracer: Tracer,
    batch: object,
    decodes: bool,  # noqa: FBT001
    seen: set[str],
) -> None:
    """A worker notes that PIL has read JPEG files there, and that its batches have floats of images."""
    monkeypatch.delitem(sys.modules, "PIL.JpegImagePlugin", raising=False)
    if decodes:
        monkeypatch.setitem(sys.modules, "PIL.JpegImagePlugin", sys)
    Path(tracer.settings.loads).mkdir(mode=0o700)

    def fetch() -> object:
        return batch

    assert hook._timed(fetch, record=hook._Loads(tracer.settings).record)() is batch
    assert len(tracer._loads()) == 1
    assert tracer.notes.to_json(cpu_use=None)["image_work"] == sorted(seen)


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


def test_the_cpu_time_of_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the user, nice and system time of the rank's CPUs without the job's; idle time and interrupts are not."""
    launcher = os.getppid()
    cpu = min(os.sched_getaffinity(launcher))
    texts = iter(f"cpu 1 1 1 1\ncpu{cpu} {row}\ncpu4095 {row}\n" for row in ("100 20 30 500 4 5", "170 30 50 900 8 9"))
    job_ticks = iter((11, 51))
    monkeypatch.setattr(proc, "read", lambda _: next(texts))
    monkeypatch.setattr(proc, "processes", lambda: [(launcher, SimpleNamespace(parent=1, cpu_ticks=next(job_ticks)))])
    before = CpuUse.read(CpuSet({cpu}))
    assert before is not None
    assert (before.all_ticks, before.job_ticks) == (150, 11)
    assert before.until_now()["other_cpu_ms"] == (100 - 40) * 1000 // os.sysconf("SC_CLK_TCK")
