"""Chrome traces of any kind are read into records and analyzed, or rejected with an error that names what is missing.

What is read from each trace is in recorded/readings.txt; NUMAPIN_UPDATE_GOLDEN=1 records it again.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numapin.errors import NumapinError
from tests.recorded.screens import compare, rendered
from tests.trace.made import LOOP, Made, loop
from tests.unit.trace import seam
from tests.unit.trace.cases import CASES
from tests.unit.trace.seam import Lengths, analyze, common, length, make_report, read_trace, union, without

PAIRS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair))))


def _numbers(pairs: Any) -> set[int]:
    return {n for start, end in pairs for n in range(int(start), int(end))}


@given(PAIRS, PAIRS)
def test_intervals_are_sets(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    """Union, intersection, difference and length agree with those of sets."""
    a, b = union(one), union(other)
    assert _numbers(a) == _numbers(one)
    assert (length(a), Lengths(a).within(b)) == (len(_numbers(one)), len(_numbers(one) & _numbers(other)))
    assert _numbers(common(a, b)) == _numbers(one) & _numbers(other)
    assert _numbers(without(a, b)) == _numbers(one) - _numbers(other)
    assert all(first[1] < second[0] for first, second in pairwise(a))


def copying(called: float, waited: float) -> Made:
    return loop(steps=1, copy=1000, called=called, waited=waited)


def unmarked(*names: str) -> dict[str, Any]:
    """Return a trace of three kernels without marks of steps, each after annotations of these names."""
    made = Made()
    for n in range(3):
        for name in names:
            made.event("user_annotation", name, n * 100, 5)
        made.kernel(n * 100 + 10, 80)
    return {"traceEvents": made.events}


def broken() -> dict[str, Any]:
    made = loop(copy=100, compute=100)
    made.event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 5, 10, bytes="many", device=True, stream=[])
    made.events[-1]["tid"] = {"not": "a number"}
    made.event("cuda_runtime", SYNC, 5, 10, tid=["not", "a number"])
    made.copy(9, 10, num_bytes=-5)
    content = made.content(rank="none", loads=[[1], "x", None])
    content["traceEvents"] += [None, [], {"ph": "X"}, {"ph": "X", "ts": 1, "dur": None}]
    content["traceEvents"] += [{"ph": "X", "ts": [], "dur": 0}]
    return content


def huge(number: float) -> dict[str, Any]:
    made = loop(copy=100, compute=100)
    made.event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 5, 10, bytes=number, device=number, stream=number)
    made.events += [made.events[0] | {"ts": number}, made.events[0] | {"dur": abs(number)}]
    return made.content(rank=number, loads=[[1, number, number]]) | {"baseTimeNanoseconds": number}


EVIL = "\x1b[31mred\x1b]0;x\x07\ud800"


def evil() -> dict[str, Any]:
    made = loop(copy=100, compute=100)
    for event in made.events:
        event["name"] = event["name"].replace("Pinned", f"Pinned{EVIL}").replace("aten::copy_", EVIL)
        event["args"]["Input Dims"] = [EVIL]
    return made.content(step_unit=EVIL)


SYNC = "cudaStreamSynchronize"
NEXT = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
TRACES: dict[str, Made | dict[str, Any]] = {
    # The kind of memory is in the GPU's record; the host's call has the same name for every kind.
    **{f"a copy of {memory} memory": loop(copy=100, memory=memory) for memory in ("Pinned", "Pageable", "Managed")},
    **{
        f"a copy named {name}": loop(compute=10).event("gpu_memcpy", name, 5, 10, bytes=8, device=0, stream=7)
        for name in (
            *("Memcpy HtoD (Unknown -> Device)", "Memcpy DtoH (Device -> Pinned)", "Memcpy PtoP (Device -> Device)"),
            "CopyHostToDevice",
        )
    },
    # A copy blocks the host if it waits in the same operator, or if its call is as long as the copy.
    "an asynchronous copy": copying(10, 0),
    "a copy that is waited for": copying(10, 990),
    "a staged copy": copying(1000, 0),
    "a copy with a slow call": copying(60, 0),
    "waits after the operator, and in another thread": loop(steps=1, copy=1000)
    .event("cuda_runtime", SYNC, 20, 900, correlation=0)
    .event("cuda_runtime", SYNC, 6, 900, LOOP + 1, correlation=0),
    # Times count from the start of the first marked step; the GPU's own annotations are not steps.
    "marked steps": loop(wait=10, compute=90).event("gpu_user_annotation", "ProfilerStep#0", 5, 100),
    "a last step that the script's end cut short": loop(compute=9).content(num_steps=3),
    "optimizer steps": unmarked("Optimizer.step#SGD.step", NEXT),
    "batches": unmarked(NEXT),
    "neither": unmarked(),
    # The hook's times, in nanoseconds since 1970, are converted to Kineto's clock.
    "loads": loop(wait=100, compute=100),
    "broken events are left out": broken(),
    # A number beyond 2**63 counts as unknown, so that no sum is infinite.
    **{f"the number {number:.0e}": huge(number) for number in (1e308, -1e30, math.inf)},
    "an integer of 400 digits": huge(10**400),
    "escape sequences": evil(),
    "CUDA calls without records of a GPU": Made().step(0, 0, 100).event("cuda_runtime", "cudaLaunchKernel", 10, 5),
}


def shown(made: Made | dict[str, Any]) -> str:
    """Return what is read from a trace, in lines; each text must be printable, and each number JSON."""
    trace = read_trace(made if isinstance(made, dict) else made.content(), source=EVIL)
    steps = [(round(step.start, 1), round(step.end, 1)) for step in trace.steps]
    lines = [f"  rank {trace.rank}, {len(trace.kernels)} kernels, {trace.step_unit} {steps}"]
    for copy, number in Counter(
        (one.direction, one.source, one.target, one.num_bytes, one.device, one.operator, one.shapes, one.blocking,
         round(sum(end - start for start, end in one.blocked), 1))
        for one in trace.copies
    ).items():  # fmt: skip
        lines.append(f"  {number} x copy {copy}")
    lines += [f"  load at {load.start:.0f}" for load in trace.loads]
    lines += [f"  note: {note}" for note in trace.notes]
    assert all(line.isprintable() for line in (trace.source, *lines))
    json.dumps(make_report([analyze(trace)]).to_json(), allow_nan=False)
    return "".join(f"{line}\n" for line in lines)


def test_readings_are_the_recorded_ones() -> None:
    """Steps, copies with their memory, size and cost to the host, loads, and notes on what is unknown."""
    text = "".join(f"{title}\n{shown(made)}" for title, made in TRACES.items())
    compare(text, str(Path(__file__).parent / "recorded/readings.txt"))


def test_a_long_name() -> None:
    """A name is read in one pass, whatever is in it."""
    name = "Memcpy HtoD (" + " -> " * 250_000
    content = {"traceEvents": [{"ph": "X", "cat": "gpu_memcpy", "ts": 0, "dur": 9, "name": name}]}
    begun = time.process_time()
    assert read_trace(content, source="x").copies[0].source is None
    assert time.process_time() - begun < 5  # in two passes it took minutes


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
def test_nothing_in_it(content: object, seen: str) -> None:
    """The error names the file and what was found in it."""
    with pytest.raises(NumapinError, match=seen) as caught:
        read_trace(content, source="my.json")
    assert caught.value.message.startswith("my.json: ")
    assert "numapin trace" in caught.value.hint


# --- every loop of cases.py has the recorded report: recorded/reports.txt ---------------------------------------------


Started: TypeAlias = tuple[int, int]  # a start and a duration
STARTED = st.tuples(st.integers(0, 40), st.integers(0, 40))


def report_of(sentence: str) -> seam.TraceReport:
    traces = [read_trace(made.content(rank=rank), source="x") for rank, made in enumerate(CASES[sentence])]
    return make_report([analyze(trace) for trace in traces])


def test_every_case_is_shown_as_recorded() -> None:
    """The report is the recorded one: shares, copies, findings with their costs, evidence and remedies, notes.

    So are the waiting and the starts of epochs, which a terminal does not show.
    """
    text = ""
    for name in CASES:
        report = report_of(name)
        text += f"## {name}\n{rendered(seam.trace_table(report), 400)}"
        for one in report.analyses:
            text += f"waited {one.waited_us:.2f} us for {one.num_batches} batches, epochs: {len(one.epoch_starts)}\n"
    compare(text, str(Path(__file__).parent / "recorded/reports.txt"))


def test_json() -> None:
    """The report has the fields of its schema, in milliseconds and shares, and is valid JSON."""
    report = report_of("ranks that wait differently")
    content = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert content["schema"] == "numapin.trace/1"
    assert content["ranks"][1]["parts"]["wait"] == {"ms": 0.5, "share": 0.5}
    assert content["findings"][0]["ranks"] == ["0", "1"]
    assert content["findings"][0]["costs"] == pytest.approx(0.5)
    (copy,) = report_of("a copy without a size or a call has dashes").to_json()["ranks"][0]["copies"]
    assert [copy[key] for key in ("direction", "source", "bytes", "blocking", "operator")] == [None] * 5


def test_a_narrow_terminal() -> None:
    """The tables fit into 100 columns."""
    table = seam.trace_table(report_of("consecutive parts have their own lengths"))
    assert max(map(len, rendered(table, 100).splitlines())) <= 100


# --- times that overlap in any way -----------------------------------------------------------------------------------


def content_of(*, steps: list[Started], copies: list[Started], kernels: list[Started]) -> dict[str, Any]:
    kinds = {
        ("user_annotation", "ProfilerStep#0"): steps,
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)"): copies,
        ("kernel", "sgemm"): kernels,
    }
    events = [
        {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}
        for (category, name), started in kinds.items()
        for start, duration in started
    ]
    return {"traceEvents": events}


def moments(started: list[Started]) -> set[int]:
    return {moment for start, duration in started for moment in range(start, start + duration)}


@given(STARTED, st.lists(STARTED, min_size=1), st.lists(STARTED), st.lists(STARTED))
def test_steps_and_copies_that_overlap(
    first: Started, others: list[Started], copies: list[Started], kernels: list[Started]
) -> None:
    """Each step has the moments that it has when each moment is looked at by itself."""
    analysis = analyze(read_trace(content_of(steps=[first, *others], copies=copies, kernels=kernels), source="x"))
    computing, copying = moments(kernels), moments(copies) - moments(kernels)
    steps = sorted([first, *others], key=lambda step: step[0])
    for step, parts in zip(steps, analysis.steps_us, strict=True):
        inside = moments([step])
        if kernels or copies:
            assert (parts["compute"], parts["copy"]) == (len(computing & inside), len(copying & inside))
        assert parts["other"] == len(inside - computing - copying)
    seen = [copy for copy in copies if moments([copy]) & moments(steps)]
    assert sum(group.count for group in analysis.groups) == len(seen)
    overlapped = [len(moments([copy]) & computing) for copy in seen]
    assert sum(group.overlapped_us for group in analysis.groups) == sum(overlapped)
    assert sum(group.exposed_us for group in analysis.groups) == sum(copy[1] for copy in seen) - sum(overlapped)


def test_the_time_for_many_that_overlap() -> None:
    """The time to analyze a trace grows with its size only, whatever overlaps in it."""
    number = 4000
    long = [(i, 3 * number) for i in range(number)]
    trace = read_trace(content_of(steps=long, copies=long, kernels=[(3 * i, 1) for i in range(number)]), source="x")
    begun = time.process_time()
    assert analyze(trace).steps_us[0]["compute"] == number
    assert time.process_time() - begun < 5


@pytest.mark.parametrize(
    "noted",
    [
        7,
        {"loaders": 3, "epochs": [1, [1], ["a", 2, 3]], "samples": [[1, 5, 0], [1, -1, 0], [1.5, 0, 0]], "stacks": 4},
        {"loaders": [{"num_workers": -1, "num_batches": True}], "stacks": [[1, 2], []], "cpus": 5, "num_cpus": "x"},
    ],
)
def test_notes_that_are_malformed(noted: Any) -> None:
    """Malformed notes of any kind are left out."""
    read = seam.read_noted(noted, 0)
    assert (read.epochs, read.samples, read.host, read.num_cpus) == ((), (), "", None)
