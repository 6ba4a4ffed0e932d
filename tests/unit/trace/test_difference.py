"""The difference between two traced runs."""

from __future__ import annotations

from statistics import NormalDist

import pytest

from numapin.trace.analysis import Analysis, analyze
from numapin.trace.reading import read_trace
from numapin.trace.report import TraceReport, difference, make_report
from tests.trace.made import Made, loop


def report(made: Made) -> TraceReport:
    """Return the report on one synthetic rank."""
    return make_report([analyze(read_trace(made.content(), source="x"))])


def computing(lengths: list[float], *, ranks: int = 1) -> TraceReport:
    """Return the report on ranks that wait for each other: their steps are equal."""
    made, now = Made(), 0.0
    for i, length in enumerate(lengths):
        made.step(i, now, length)
        made.kernel(now, length)
        now += length
    return make_report([analyze(read_trace(made.content(rank=rank), source="x")) for rank in range(ranks)])


def test_what_changed() -> None:
    """The whole step comes first, then parts by the size of their change, in seconds a step."""
    found = difference(
        report(loop(wait=500, copy=100, compute=400)), report(loop(copy=120, compute=400)), names=("a", "b")
    )
    assert [part.part for part in found.parts] == ["step", "wait", "copy", "compute"]
    assert found.parts[0].change_s == pytest.approx(-480e-6)
    assert [part.differs for part in found.parts] == [True, True, True, False]
    assert found.verdict == "B is faster: 0.00048 s a step (-48%)"
    assert found.notes == ()


def test_equal_runs() -> None:
    """Two runs whose means differ by less than the spread of their steps do not differ."""
    a, b = computing([90, 110, 100, 95]), computing([112, 92, 99, 101])
    assert difference(a, b, names=("a", "b")).verdict.startswith("no difference")


def test_ranks_that_wait_for_each_other() -> None:
    """Eight ranks with equal steps count as one sample per step: equal runs differ in about 5 % of all cases."""
    num_differ, num_runs = 0, 60
    for i in range(num_runs):
        a, b = (computing(NormalDist(1000, 100).samples(8, seed=name + str(i)), ranks=8) for name in "ab")
        step, *_ = difference(a, b, names=("a", "b")).parts
        num_differ += bool(step.differs)
    assert num_differ <= 0.12 * num_runs


def test_ranks_that_were_restarted() -> None:
    """The last start of each rank counts, up to the step that all ranks have, which is said."""

    def started(rank: int, restart: int, lengths: list[float]) -> Analysis:
        made = Made()
        for i, length in enumerate(lengths):
            made.step(i, sum(lengths[:i]), length)
        return analyze(read_trace(made.content(rank=rank, restart=restart), source="x"))

    a = make_report([started(0, 0, [900]), started(0, 1, [100] * 6), started(1, 1, [100] * 4)])
    found = difference(a, a, names=("a", "b"))
    assert found.parts[0].a_s == pytest.approx(100e-6)
    assert found.parts[0].differs is False
    note = "only the first 4 steps of each rank are compared: rank 1 has no more"
    assert found.notes == (f"a: {note}", f"b: {note}")


def test_traces_that_name_no_rank() -> None:
    """All of them count."""

    def both(*lengths: float) -> TraceReport:
        made = [loop(steps=6, compute=length) for length in lengths]
        return make_report([analyze(read_trace(each.content(rank=None), source="x")) for each in made])

    found = difference(both(100, 100), both(300, 100), names=("a", "b"))
    assert found.parts[0].b_s == pytest.approx(200e-6)


@pytest.mark.parametrize(("num_steps", "width"), [(2, 4.303), (6, 2.228), (21, 2.021)])
def test_few_steps(num_steps: int, width: float) -> None:
    """The interval is as wide as Student's t distribution says: few steps say little about their spread."""
    lengths = [900.0 + 200.0 * (i % 2) for i in range(num_steps)]
    step, *_ = difference(computing(lengths), computing(lengths), names=("a", "b")).parts
    mean = sum(lengths) / num_steps
    variance = sum((length - mean) ** 2 for length in lengths) / (num_steps - 1)
    assert step.margin_s == pytest.approx(width * (2 * variance / num_steps) ** 0.5 / 1e6, rel=0.002)


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
