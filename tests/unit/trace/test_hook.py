"""The hook of a traced rank: what it notes, which optimizer's steps count, when a step is overdue, what it writes."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from tests.unit.trace.seam import CpuSet, CpuUse, StepSettings, hook, meter, proc, script
from tests.unit.trace.seam import tracer as tracing


@pytest.fixture
def tracer(tmp_path: Path) -> tracing.Tracer:
    tracer = tracing.Tracer(
        settings=StepSettings(folder=str(tmp_path), steps=1, skip=1),
        place=meter.Place(rank=0, local_rank=0, num_ranks=1, num_local_ranks=1, restart=0),
        claim=tmp_path / "rank-0.json",
        check=lambda: None,
    )
    tracer.step, tracer.thread = cast("Any", object()), threading.get_ident()
    tracer.pace.stepped(time.monotonic())
    return tracer


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_with_workers(tracer: tracing.Tracer, num_workers: int) -> None:
    """The recording does not end while the loop waits for workers; the end of their epoch is noted."""
    later_s = time.monotonic() + 100
    tracer.enter_loader(num_workers)
    assert bool(tracer.pace.overdue("batch", later_s)) == (not num_workers)
    tracer.leave_loader(num_workers, 1000, is_over=True)
    assert tracer.pace.overdue("batch", later_s)
    assert len(tracer.notes.ends) == (num_workers > 0)


def test_epochs_are_noted(tracer: tracing.Tracer) -> None:
    """An epoch has the number of its loader; a loader that has the id of one that is gone is another one."""
    one, other = SimpleNamespace(), SimpleNamespace()
    for loader, num_workers in ((one, 2), (other, 0), (one, 2), (other, 4)):
        loader.num_workers = num_workers
        tracer.notes.iterated(cast("Any", loader), object(), 0, 1)
    assert [found["num_workers"] for found in tracer.notes.loaders.values()] == [2, 0, 4]
    assert [number for number, _, _ in tracer.notes.epochs] == [0, 0, 2]


def test_the_scripts_own_code() -> None:
    """A function is the script's own in any folder but those of numapin, packages and the standard library."""
    package = str(Path(hook.__file__).parents[1])
    found = {}
    for folder in (f"{package}-jobs", package, "/v/site-packages/torch", str(Path(os.__file__).parent)):
        frames: dict[str, Any] = {}
        exec(compile("def f(): return sys._getframe()", f"{folder}/x.py", "exec"), {"sys": sys}, frames)  # noqa: S102
        found[folder] = script._place(frames["f"]())[0]
    assert [place == "f (x.py:1)" for place in found.values()] == [True, False, False, False]


def test_the_scripts_own_profiler(monkeypatch: pytest.MonkeyPatch, tracer: tracing.Tracer) -> None:
    """Ours ends before it begins, and may begin again only when it has ended."""
    reasons: list[str] = []
    monkeypatch.setattr(hook._recording, "listener", tracer)
    monkeypatch.setattr(tracing.Tracer, "yield_to_script", lambda _: reasons.append("ended"))
    own = type("Own", (), {"begin": lambda self: self, "__exit__": lambda _: None})
    hook._watch_profiler(own, "begin")
    begun = own().begin()
    assert (hook._notes.profiles_itself, len(reasons)) == (True, 1)
    begun.__exit__()
    assert not hook._notes.profiles_itself


def test_the_last_batches_of_a_long_job(monkeypatch: pytest.MonkeyPatch, tracer: tracing.Tracer) -> None:
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
    monkeypatch: pytest.MonkeyPatch, tracer: tracing.Tracer, batch: object, seen: set[str], *, decodes: bool
) -> None:
    """A worker notes that PIL has read JPEG files there, and that its batches have floats of images."""
    monkeypatch.delitem(sys.modules, "PIL.JpegImagePlugin", raising=False)
    if decodes:
        monkeypatch.setitem(sys.modules, "PIL.JpegImagePlugin", sys)
    Path(tracer.settings.loads).mkdir(mode=0o700)
    assert hook._timed(lambda: batch, record=hook._Loads(tracer.settings).record)() is batch
    assert len(tracer._loads()) == 1
    assert tracer.notes.to_json(cpu_use=None)["image_work"] == sorted(seen)


def test_the_cpu_time_of_the_job() -> None:
    """The time of a process that the job started, and that has ended, is the job's and not another program's."""
    cpus, tick_s = CpuSet(os.sched_getaffinity(0)), 1 / os.sysconf("SC_CLK_TCK")
    before = CpuUse.read(cpus)
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-I", "-S", "-c", busy], check=True)
    after = CpuUse.read(cpus)
    assert before is not None
    assert after is not None
    assert min(after.job_ticks - before.job_ticks, after.all_ticks - before.all_ticks) * tick_s >= 0.4


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


# --- which optimizer's steps count -----------------------------------------------------------------------------------


class Optimizer:
    pass


def test_only_the_first_optimizer_counts() -> None:
    """Others do not, even if they step a few times as often; when it is collected, the next one that steps does."""
    first, *others = (Optimizer() for _ in range(30))
    followed = meter.FollowedOptimizer()
    for _ in range(50):
        assert followed.counts(first)
        assert not any(followed.counts(other) for other in [*others, *others[:1] * 5])
    del first
    assert followed.counts(others[0])


def test_an_optimizer_that_no_longer_steps() -> None:
    """Another one is followed after 20 steps, even though the first one still exists."""
    followed, first, second = meter.FollowedOptimizer(), Optimizer(), Optimizer()
    assert followed.counts(first)
    assert [followed.counts(second) for _ in range(25)] == [False] * 19 + [True] * 6
    assert not followed.counts(first)


# --- a step is overdue after ten times the usual step time -----------------------------------------------------------


def _overdue(pace: tracing.Pace, *now_s: float) -> list[bool]:
    return [bool(pace.overdue("batch", each)) for each in now_s]


def test_the_limit_of_a_step() -> None:
    """The usual time is the median of recent steps, the limit at least 2 s; before the first step it is a minute."""
    pace = tracing.Pace()
    assert not pace.overdue("batch", 1000.0)
    pace.stepped(0.0)
    assert _overdue(pace, 59.0, 61.0) == [False, True]
    for now_s in (300.0, 301.0, 302.0):  # the first one compiled
        pace.stepped(now_s)
    assert (pace.limit_s, _overdue(pace, 311.0, 313.0)) == (10, [False, True])
    for n in range(100):
        pace.stepped(400 + n / 1000)
    assert pace.limit_s == 2


def test_time_in_a_loader() -> None:
    """Time in a loader does not make a step overdue, such as the start of an epoch's workers."""
    pace = tracing.Pace()
    for n in range(3):
        pace.stepped(float(n))
    pace.enter_loader(2.5)
    pace.enter_loader(50.0)  # one that the first one's batches are made from
    pace.leave_loader(60.0)
    assert not pace.overdue("batch", 99.0)
    pace.leave_loader(100.0)
    assert (pace.limit_s, _overdue(pace, 109.0, 110.0)) == (10, [False, True])
    assert pace.overdue("batch", 110.0) == "no batch for 10 s"


# --- records and traces on a full disk, and in a folder that others can write to -------------------------------------


def test_a_record_on_a_full_disk(
    tracer: tracing.Tracer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If no second file can be created, the record is rewritten in place; a link in that place is not followed."""
    monkeypatch.setattr(meter, "replace_at", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    claim, target = tmp_path / "rank-0.json", tmp_path / "target"
    claim.touch()
    for reason in ("long " * 500, "short"):
        tracer.record(trace=None, num_steps=0, reason=reason)
    assert json.loads(claim.read_text())["reason"] == "short"
    assert list(tmp_path.iterdir()) == [claim]
    claim.rename(target)
    claim.symlink_to(target)
    tracer.record(trace=None, num_steps=0, reason="of a link")
    assert json.loads(target.read_text())["reason"] == "short"
    assert f"{claim} cannot be written: a link, not a regular file" in capsys.readouterr().err


class _Kineto:
    """A stand-in for Kineto: it writes a temporary file first, by a path whose links it follows."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.links: list[Path] = []

    def export_chrome_trace(self, path: str) -> None:
        Path(f"{path}.tmp").write_text(self.text)
        self.links += [entry for entry in Path(path).parent.iterdir() if entry.is_symlink()]
        Path(f"{path}.tmp").replace(path)


def test_planted_links_are_not_followed(tmp_path: Path) -> None:
    """Links under every predictable name are not followed, and only the trace is left behind."""
    target, path = tmp_path / "target", tmp_path / "out" / "rank-0.trace.json"
    target.write_text("before")
    path.parent.mkdir()
    planted = [path, *(path.with_name(f".{path.name}{end}") for end in ("", ".tmp"))]
    for link in planted:
        link.symlink_to(target)
    kineto = _Kineto('{"traceEvents": []}\n')
    tracing._export(cast("Any", kineto), path, [])
    assert (path.is_symlink(), path.read_text()) == (False, kineto.text)
    assert target.read_text() == "before"
    assert kineto.links == []
    assert {*path.parent.iterdir()} == {*planted}


HEAD = '{\n    "numapin": {"pins":[]},\n    "baseTimeNanoseconds": 5000,\n    "traceEvents": [\n'
EVENTS = HEAD + '  {"ph": "M", "name": "process_name"}\n  ],"traceName": "/a]/b" }'
SHOWN = [(7, "load", 6000, 9500), (8, "pin 9", 8000, 9000)]


def test_loads_and_pins_are_events(tmp_path: Path) -> None:
    """A viewer of Chrome traces shows them among the profiler's events, at their times in its clock."""
    path = tmp_path / "rank-0.trace.json"
    tracing._export(cast("Any", _Kineto(EVENTS)), path, SHOWN)
    kinetos, load, pin = json.loads(path.read_text())["traceEvents"]
    assert load == {"ph": "X", "cat": "numapin", "name": "load", "pid": 7, "tid": "load", "ts": 1.0, "dur": 3.5}
    assert (pin["name"], pin["pid"], pin["tid"], pin["ts"], pin["dur"]) == ("pin", 8, "pin 9", 3.0, 1.0)
    assert kinetos["name"] == "process_name"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ['{"traceEvents": []}\n', EVENTS], ids=["of another form", "on a full disk"])
def test_a_trace_without_room_for_events(tmp_path: Path, text: str) -> None:
    """A trace to which nothing can be added stays as the profiler wrote it."""
    path, limits = tmp_path / "rank-0.trace.json", resource.getrlimit(resource.RLIMIT_FSIZE)
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(EVENTS) + 20, limits[1]))
    try:
        tracing._export(cast("Any", _Kineto(text)), path, SHOWN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, former)
    assert path.read_text() == text
