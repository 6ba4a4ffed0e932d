"""Every loop of cases.py has the recorded report: recorded/reports.txt. NUMAPIN_UPDATE_GOLDEN=1 records them again."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.unit.trace.cases import CASES
from tests.unit.trace.seam import analyze, make_report, read_noted, read_trace, trace_table

if TYPE_CHECKING:
    from tests.unit.trace.seam import TraceReport

RECORDED: Final = Path(__file__).parent / "recorded/reports.txt"
Started: TypeAlias = tuple[int, int]  # a start and a duration
STARTED = st.tuples(st.integers(0, 40), st.integers(0, 40))


def report_of(sentence: str) -> TraceReport:
    """Return the report on a case."""
    traces = [read_trace(made.content(rank=rank), source="x") for rank, made in enumerate(CASES[sentence])]
    return make_report([analyze(trace) for trace in traces])


def shown(report: TraceReport) -> str:
    """Return what a wide terminal shows, and the waiting and the starts of epochs, which it does not show."""
    console = Console(width=400, color_system=None)
    with console.capture() as captured:
        console.print(trace_table(report))
    lines = [line.rstrip() for line in captured.get().splitlines()]
    waited = [
        f"waited {one.waited_us:.2f} us for {one.num_batches} batches, epochs: {len(one.epoch_starts)}"
        for one in report.analyses
    ]
    return "\n".join([*lines, *waited]) + "\n"


def recorded() -> dict[str, str]:
    """Return the recorded texts by their sentences."""
    parts = re.split(r"^## (.*)\n", RECORDED.read_text() if RECORDED.exists() else "", flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("sentence", CASES)
def test_a_case_is_shown_as_recorded(sentence: str) -> None:
    """The report is the recorded one: shares, copies, findings with their costs, evidence and remedies, notes."""
    found, texts = shown(report_of(sentence)), recorded()
    if os.environ.get("NUMAPIN_UPDATE_GOLDEN"):
        texts = {name: texts.get(name, "") for name in CASES} | {sentence: found}
        RECORDED.write_text("".join(f"## {name}\n{text}" for name, text in texts.items()))
    assert found == texts.get(sentence)


def test_every_record_has_its_case() -> None:
    """No recorded report is left behind by a case that was renamed."""
    assert list(recorded()) == list(CASES)


def test_json() -> None:
    """The report has the fields of its schema, in milliseconds and shares, and is valid JSON."""
    report = report_of("ranks that wait differently")
    assert report.nothing_found == ""
    content = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert content["schema"] == "numapin.trace/1"
    assert content["ranks"][1]["parts"]["wait"] == {"ms": 0.5, "share": 0.5}
    assert content["findings"][0]["ranks"] == ["0", "1"]
    assert content["findings"][0]["costs"] == pytest.approx(0.5)
    (copy,) = report_of("a copy without a size or a call has dashes").to_json()["ranks"][0]["copies"]
    assert [copy[key] for key in ("direction", "source", "bytes", "blocking", "operator")] == [None] * 5


def test_a_narrow_terminal() -> None:
    """The tables fit into 100 columns."""
    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        console.print(trace_table(report_of("consecutive parts have their own lengths")))
    assert max(map(len, captured.get().splitlines())) <= 100


# --- times that overlap in any way -----------------------------------------------------------------------------------


def content_of(*, steps: list[Started], copies: list[Started], kernels: list[Started]) -> dict[str, Any]:
    """Return a trace of these steps, copies and kernels, each a start and a duration."""
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
    """Return the microseconds in any of these."""
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
    read = read_noted(noted, 0)
    assert (read.epochs, read.samples, read.host, read.num_cpus) == ((), (), "", None)
