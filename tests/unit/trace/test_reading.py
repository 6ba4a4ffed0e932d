"""Chrome traces of any kind are read into records, or rejected with an error that names what is missing."""

from __future__ import annotations

import json
import math
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numapin.errors import NumapinError
from tests.trace.made import LOOP, Made, loop
from tests.unit.trace.seam import Lengths, analyze, common, length, make_report, read_trace, union, without

PAIRS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair))))

TIMES = st.floats(0, 1e9)


class TestIntervals:
    """Intervals behave as sets of integers do."""

    @staticmethod
    def _numbers(pairs: Any) -> set[int]:
        return {n for start, end in pairs for n in range(int(start), int(end))}

    @given(PAIRS, PAIRS)
    def test_they_are_sets(self, one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
        """Union, intersection and difference agree with those of sets."""
        a, b = union(one), union(other)
        assert self._numbers(a) == self._numbers(one)
        assert length(a) == len(self._numbers(one))
        assert self._numbers(common(a, b)) == self._numbers(one) & self._numbers(other)
        assert self._numbers(without(a, b)) == self._numbers(one) - self._numbers(other)
        assert all(first[1] < second[0] for first, second in pairwise(a))

    @given(PAIRS, st.integers(0, 60), st.integers(0, 60))
    def test_lengths(self, pairs: list[tuple[int, int]], start: int, end: int) -> None:
        """The binary search finds the same length as an intersection of sets."""
        found = Lengths(union(pairs)).between(start, end)
        assert found == len(self._numbers(pairs) & set(range(start, end)))

    @given(st.lists(st.tuples(TIMES, TIMES)), TIMES, TIMES)
    def test_lengths_of_fractions(self, pairs: list[tuple[float, float]], start: float, end: float) -> None:
        """The sums agree with the simple way, and are above 0 for the same ranges."""
        moments, around = union(pairs), union([(start, end)])
        simple = length(common(moments, around))
        assert Lengths(moments).between(start, end) == pytest.approx(simple, rel=1e-9, abs=1e-6)
        assert Lengths(moments).within(around) == Lengths(moments).between(start, end)
        assert (Lengths(moments).between(start, end) > 0) == (simple > 0)

    def test_gap(self) -> None:
        """Intervals closer than the gap are merged; others are not."""
        assert union([(0, 1), (2, 3), (9, 10)], gap=1) == ((0, 3), (9, 10))


def record(category: str, start: int, duration: int, name: str) -> dict[str, Any]:
    """Return a complete event."""
    return {"ph": "X", "cat": category, "ts": start, "dur": duration, "name": name}


class TestCopies:
    """The memory, size and cost of copies."""

    @pytest.mark.parametrize("memory", ["Pinned", "Pageable", "Managed"])
    def test_memory_is_from_the_gpus_record(self, memory: str) -> None:
        """The kind of memory is in the GPU's record; the host's call has the same name for every kind."""
        copy = read_trace(loop(copy=100, memory=memory).content(), source="x").copies[0]
        assert (copy.direction, copy.source, copy.target) == ("HtoD", memory, "Device")
        assert (copy.num_bytes, copy.operator, copy.shapes) == (1_000_000, "aten::copy_", "[8, 4]")

    @pytest.mark.parametrize(
        ("name", "kinds"),
        [
            ("Memcpy HtoD (Unknown -> Device)", ("HtoD", None, "Device")),
            ("Memcpy DtoH (Device -> Pinned)", ("DtoH", "Device", "Pinned")),
            ("Memcpy PtoP (Device -> Device)", ("PtoP", "Device", "Device")),
            ("CopyHostToDevice", (None, None, None)),
        ],
    )
    def test_unknown_memory(self, name: str, kinds: tuple[str | None, ...]) -> None:
        """A kind of memory that the trace does not name is None, and counted in a note."""
        made = loop(compute=10)
        made.event("gpu_memcpy", name, 5, 10, bytes=8, device=0, stream=7)
        trace = read_trace(made.content(), source="x")
        assert (trace.copies[0].direction, trace.copies[0].source, trace.copies[0].target) == kinds
        assert trace.copies[0].blocking is None
        noted = "copies whose kind of memory the trace does not name: 1" in trace.notes
        assert noted == (kinds in ((None, None, None), ("HtoD", None, "Device")))

    def test_a_long_name(self) -> None:
        """A name is read in one pass, whatever is in it."""
        content = {"traceEvents": [record("gpu_memcpy", 0, 9, "Memcpy HtoD (" + " -> " * 250_000)]}
        begun = time.process_time()
        assert read_trace(content, source="x").copies[0].source is None
        assert time.process_time() - begun < 1

    @pytest.mark.parametrize(
        ("called", "waited", "blocking"),
        [(10, 0, False), (10, 990, True), (1000, 0, True), (60, 0, False)],
        ids=["asynchronous", "synchronized", "staged", "slow call"],
    )
    def test_blocking(self, *, called: float, waited: float, blocking: bool) -> None:
        """A copy blocks the host if it waits in the same operator, or if its call is as long as the copy."""
        made = loop(steps=1, copy=1000, called=called, waited=waited)
        copy = read_trace(made.content(), source="x").copies[0]
        assert copy.blocking is blocking
        assert sum(end - start for start, end in copy.blocked) == pytest.approx((called + waited) * blocking)

    def test_unrelated_waits(self) -> None:
        """A synchronization after the operator, or in another thread, does not make the copy blocking."""
        made = loop(steps=1, copy=1000)
        made.event("cuda_runtime", "cudaStreamSynchronize", 20, 900, correlation=0)
        made.event("cuda_runtime", "cudaStreamSynchronize", 6, 900, tid=LOOP + 1, correlation=0)
        assert read_trace(made.content(), source="x").copies[0].blocking is False


class TestSteps:
    """The recognition of steps."""

    def test_marked(self) -> None:
        """Times count from the start of the first marked step; the GPU's own annotations are not steps."""
        made = loop(wait=10, compute=90)
        made.event("gpu_user_annotation", "ProfilerStep#0", 5, 100)
        trace = read_trace(made.content(), source="x")
        assert [(step.start, step.end) for step in trace.steps] == [
            pytest.approx((n * 100, n * 100 + 100), abs=0.01) for n in range(4)
        ]
        assert (trace.rank, trace.step_unit) == (0, "optimizer step")

    def test_one_that_was_cut_short(self) -> None:
        """A last step that the end of the script cut short is not counted."""
        assert len(read_trace(loop(compute=9).content(num_steps=3), source="x").steps) == 3

    @pytest.mark.parametrize(
        ("names", "unit", "num_steps"),
        [
            (
                ["Optimizer.step#SGD.step", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"],
                "optimizer step",
                2,
            ),
            (["enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"], "batch", 2),
            ([], "whole trace", 1),
        ],
    )
    def test_unmarked(self, names: list[str], unit: str, num_steps: int) -> None:
        """Without marks, steps are optimizer steps, else batches, else the whole trace."""
        made = Made()
        for n in range(3):
            for name in names:
                made.event("user_annotation", name, n * 100, 5)
            made.kernel(n * 100 + 10, 80)
        trace = read_trace({"traceEvents": made.events}, source="x")
        assert (trace.step_unit, len(trace.steps), trace.rank) == (unit, num_steps, None)

    def test_loads_and_pins_lie_on_the_profilers_clock(self) -> None:
        """The hook's times, in nanoseconds since 1970, are converted to Kineto's clock; nested pins are dropped."""
        made = loop(wait=100, compute=100)
        begin_ns = made.loads[1][1]
        made.pins = [[5, begin_ns, begin_ns + 9000], [5, begin_ns + 1000, begin_ns + 2000], [6, begin_ns, begin_ns + 1]]
        trace = read_trace(made.content(), source="x")
        assert [load.start for load in trace.loads] == pytest.approx([-200, 0, 200, 400], abs=0.5)
        assert [(pin.row, round(pin.end - pin.start, 3)) for pin in trace.pins] == [(5, 9.0), (6, 0.001)]


class TestOddTraces:
    """Files that are not traces, or not complete."""

    @pytest.mark.parametrize(
        ("content", "seen"),
        [
            ({}, "no list traceEvents"),
            ({"traceEvents": {}}, "no list traceEvents"),
            (17, "no list traceEvents"),
            ({"traceEvents": []}, "none of its 0 events"),
            ([{"ph": "M", "name": "process_name"}, None], "none of its 2 events"),
            ([{"ph": "X", "ts": "soon", "dur": 1}, {"ph": "X", "ts": math.nan, "dur": 1}], "none of its 2 events"),
        ],
    )
    def test_nothing_in_it(self, content: object, seen: str) -> None:
        """The error names the file and what was found in it."""
        with pytest.raises(NumapinError, match=seen) as caught:
            read_trace(content, source="my.json")
        assert caught.value.message.startswith("my.json: ")
        assert "numapin trace" in caught.value.hint

    def test_broken_events_are_left_out(self) -> None:
        """Events without a time, and arguments of the wrong type, are skipped; the rest is read."""
        made = loop(copy=100, compute=100)
        odd: list[Any] = [None, [], {"ph": "X"}, {"ph": "X", "ts": 1, "dur": None}, {"ph": "X", "ts": [], "dur": 0}]
        made.event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 5, 10, bytes="many", device=True, stream=[])
        made.events[-1]["tid"] = {"not": "a number"}
        made.copy(9, 10, num_bytes=-5)
        content = made.content(rank="none", loads=[[1], "x", None], pins=7)
        content["traceEvents"] += odd
        trace = read_trace(content, source="x")
        assert (len(trace.copies), len(trace.kernels), trace.rank, trace.loads) == (6, 4, None, ())
        assert [trace.copies[i].num_bytes for i in (1, 2)] == [None, None]
        assert trace.copies[1].device is None

    @pytest.mark.parametrize("number", [10**400, 1e308, -(10**30), math.inf])
    def test_huge_numbers(self, number: float) -> None:
        """A number beyond 2**63 counts as unknown, so that no sum is infinite."""
        made = loop(copy=100, compute=100)
        made.event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 5, 10, bytes=number, device=number, stream=number)
        made.events.append(made.events[0] | {"ts": number})
        made.events.append(made.events[0] | {"dur": abs(number)})
        content = made.content(rank=number, loads=[[1, number, number]]) | {"baseTimeNanoseconds": number}
        report = make_report([analyze(read_trace(content, source="x"))])
        assert (report.analyses[0].trace.rank, report.analyses[0].trace.loads) == (None, ())
        json.dumps(report.to_json(), allow_nan=False)

    def test_names_with_escape_sequences(self) -> None:
        """Escape sequences and lone surrogates are made visible in every text of the trace."""
        evil = "\x1b[31mred\x1b]0;x\x07\ud800"
        made = loop(copy=100, compute=100)
        for event in made.events:
            event["name"] = event["name"].replace("Pinned", f"Pinned{evil}").replace("aten::copy_", evil)
            event["args"]["Input Dims"] = [evil]
        trace = read_trace(made.content(step_unit=evil), source=evil)
        copy = trace.copies[0]
        texts = (trace.source, trace.step_unit, copy.source, copy.operator, copy.shapes)
        assert all(text and "red" in text and text.isprintable() for text in texts)

    def test_calls_without_records(self) -> None:
        """A note distinguishes CUDA calls without GPU records from a trace without a GPU."""
        made = Made()
        made.step(0, 0, 100)
        made.event("cuda_runtime", "cudaLaunchKernel", 10, 5, correlation=1)
        assert any("another profiler" in note for note in read_trace(made.content(), source="x").notes)
