"""The difference between two traced runs."""

from __future__ import annotations

import pytest

from numapin.trace.analysis import analyze
from numapin.trace.difference import difference
from numapin.trace.reading import read_trace
from numapin.trace.report import TraceReport, make_report
from tests.trace.made import Made, loop


def report(made: Made) -> TraceReport:
    """Return the report on one synthetic rank."""
    return make_report([analyze(read_trace(made.content(), source="x"))])


def test_what_changed() -> None:
    """The whole step comes first, then parts by the size of their change, in seconds a step."""
    found = difference(
        report(loop(wait=500, copy=100, compute=400)), report(loop(copy=120, compute=400)), names=("a", "b")
    )
    assert [part.part for part in found.parts] == ["step", "wait", "copy", "compute"]
    assert found.parts[0].change_s == pytest.approx(-480e-6)
    assert [part.differs for part in found.parts] == [True, True, True, False]
    assert found.verdict == "B is faster: 0.0005 s a step (-48%)"
    assert found.notes == ()


def test_equal_runs() -> None:
    """Two runs whose means differ by less than the spread of their steps do not differ."""
    a, b = Made(), Made()
    for made, lengths in ((a, (90, 110, 100, 95)), (b, (112, 92, 99, 101))):
        now = 0
        for i, length in enumerate(lengths):
            made.step(i, now, length)
            made.kernel(now, length)
            now += length
    assert difference(report(a), report(b), names=("a", "b")).verdict.startswith("no difference")


def test_one_step() -> None:
    """A run of one step has no spread, so nothing is said about it."""
    found = difference(report(loop(steps=1, compute=5)), report(loop(steps=1, compute=50)), names=("a", "b"))
    assert [part.differs for part in found.parts] == [None, None]
    assert found.verdict == "one step only: its spread is unknown"


def test_runs_that_cannot_be_compared() -> None:
    """Other steps and devices are noted."""
    made = Made()
    made.step(0, 0, 10)
    made.event("cpu_op", "aten::mm", 0, 10)
    other = make_report([analyze(read_trace(made.content(step_unit="batch"), source="x"))])
    notes = difference(report(loop(compute=5)), other, names=("a", "b")).notes
    assert notes == (
        "the runs differ in more than time: definition of a step: optimizer step and batch",
        "the runs differ in more than time: GPU used: True and False",
    )
