"""Writing records and traces on a full disk, and in a folder that others can write to."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.unit.trace.seam import Place, StepSettings, Tracer, meter
from tests.unit.trace.seam import tracer as module

if TYPE_CHECKING:
    from torch.profiler import profile


def _tracer(claim: Path) -> Tracer:
    settings = StepSettings(folder=str(claim.parent), steps=1, skip=1)
    place = Place(rank=0, local_rank=0, num_ranks=1, num_local_ranks=1, restart=0)
    return Tracer(settings=settings, place=place, claim=claim, check=lambda: None)


def _no_room(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every replacement of a file fail with ENOSPC."""
    monkeypatch.setattr(meter, "replace_at", _no_room)


@pytest.mark.usefixtures("full")
def test_a_record_on_a_full_disk(tmp_path: Path) -> None:
    """If no second file can be created, the record is rewritten in place."""
    claim = tmp_path / "rank-0.json"
    claim.touch()
    tracer = _tracer(claim)
    tracer.record(trace=None, num_steps=0, reason="long " * 500)
    tracer.record(trace=None, num_steps=0, reason="short")
    assert json.loads(claim.read_text())["reason"] == "short"
    assert list(tmp_path.iterdir()) == [claim]


@pytest.mark.usefixtures("full")
def test_a_record_that_became_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A link that another user put in the record's place is not followed."""
    claim, target = tmp_path / "rank-0.json", tmp_path / "target"
    target.write_text("before")
    claim.symlink_to(target)
    _tracer(claim).record(trace=None, num_steps=0, reason="short")
    assert target.read_text() == "before"
    assert f"{claim} cannot be written: a link, not a regular file" in capsys.readouterr().err


class _Kineto:
    """A stand-in for Kineto: it writes a temporary file first, by a path whose links it follows."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.links: list[Path] = []

    def export_chrome_trace(self, path: str) -> None:
        """Write the file, and record the links in its folder."""
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
    module._export(cast("profile", kineto), path, [])
    assert (path.is_symlink(), path.read_text()) == (False, kineto.text)
    assert target.read_text() == "before"
    assert kineto.links == []
    assert {*path.parent.iterdir()} == {*planted}


@pytest.mark.parametrize("text", ["", '{"traceEvents": ['])
def test_a_trace_that_was_cut_off(tmp_path: Path, text: str) -> None:
    """A truncated trace raises an error and is removed; Kineto does not report a full disk."""
    path = tmp_path / "rank-0.trace.json"
    with pytest.raises(OSError, match=r"rank-0\.trace\.json was cut off; is the disk full\?"):
        module._export(cast("profile", _Kineto(text)), path, [])
    assert not list(tmp_path.iterdir())


HEAD = '{\n    "numapin": {"pins":[]},\n    "baseTimeNanoseconds": 5000,\n    "traceEvents": [\n'
EVENTS = HEAD + '  {"ph": "M", "name": "process_name"}\n  ],"traceName": "/a]/b" }'
SHOWN = [(7, "load", 6000, 9500), (8, "pin 9", 8000, 9000)]


def test_loads_and_pins_are_events(tmp_path: Path) -> None:
    """A viewer of Chrome traces shows them among the profiler's events, at their times in its clock."""
    path = tmp_path / "rank-0.trace.json"
    module._export(cast("profile", _Kineto(EVENTS)), path, SHOWN)
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
        module._export(cast("profile", _Kineto(text)), path, SHOWN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, former)
    assert path.read_text() == text
