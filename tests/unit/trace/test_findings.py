"""The analysis of synthetic training loops, and the findings: when each one appears and when it does not."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.trace.made import Made, loop
from tests.unit.trace.seam import PARTS, Analysis, analyze, find, make_report, read_trace, trace_table

if TYPE_CHECKING:
    from typing import Any

    from tests.unit.trace.seam import TraceFinding

Started: TypeAlias = tuple[int, int]  # a start and a duration
STARTED = st.tuples(st.integers(0, 40), st.integers(0, 40))


def analyzed(made: Made, **ours: object) -> Analysis:
    """Return the analysis of a synthetic trace."""
    return analyze(read_trace(made.content(**ours), source="x"))


def found(made: Made) -> dict[str, TraceFinding]:
    """Return the findings by name."""
    return {finding.what: finding for finding in find(analyzed(made))}


def shares(made: Made) -> dict[str, float]:
    """Return the share of each part that took time."""
    analysis = analyzed(made)
    return {part: round(analysis.share(part), 2) for part in PARTS if analysis.share(part) > 0.005}


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


def length_of(started: Started) -> int:
    """Return the duration."""
    return started[1]


class TestShares:
    """Each moment of a step counts once."""

    def test_one_after_the_other(self) -> None:
        """Consecutive parts get their own lengths, which add up to all of the time."""
        made = loop(wait=200, copy=100, compute=600, idle=100)
        assert shares(made) == {"wait": 0.2, "copy": 0.1, "compute": 0.6, "other": 0.1}
        analysis = analyzed(made)
        assert sum(analysis.parts_us.values()) == pytest.approx(analysis.window_us)
        assert analysis.step_us == pytest.approx(1000)
        assert [round(step["wait"]) for step in analysis.steps_us] == [200] * 4

    def test_what_compute_hides_costs_nothing(self) -> None:
        """Copies and waits during kernels count as compute; the loop's waiting time is still reported."""
        made = loop(copy=300, compute=1000, ahead=True)
        for i in range(4):
            made.wait(i * 1000 + 400, 500)
        assert shares(made) == {"compute": 1.0}
        assert analyzed(made).waited_us == pytest.approx(2000)
        assert analyzed(made).num_batches == 4

    def test_communication(self) -> None:
        """Kernels of NCCL are communication while they run alone."""
        made = loop(steps=1, compute=600, idle=400)
        made.kernel(500, 300, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)")
        assert shares(made) == {"compute": 0.6, "communication": 0.2, "other": 0.2}

    def test_on_the_cpu_waiting_comes_first(self) -> None:
        """Operators inside the loop's next() make the batch; they are not the model's compute."""
        made = Made()
        made.step(0, 0, 1000)
        made.wait(0, 400, "_SingleProcessDataLoaderIter")
        made.event("cpu_op", "aten::stack", 100, 200)
        made.event("cpu_op", "aten::mm", 500, 300)
        assert shares(made) == {"wait": 0.4, "compute": 0.3, "other": 0.3}

    def test_several_devices(self) -> None:
        """A copy to one GPU is not hidden by another GPU's kernels."""
        made = loop(steps=1, compute=1000)
        made.copy(100, 200, device=1)
        made.copy(500, 200, device=0)
        by_copy = sorted(group.overlapped_us for group in analyzed(made).groups)
        assert by_copy == pytest.approx([200])  # equal copies are one group
        assert analyzed(made).groups[0].count == 2

    def test_outside_the_steps(self) -> None:
        """Work before the first step and after the last one is not counted."""
        made = loop(steps=1, compute=1000)
        made.kernel(1000, 5000)
        made.copy(-900, 500)
        analysis = analyzed(made)
        assert shares(made) == {"compute": 1.0}
        assert analysis.groups == ()

    @given(STARTED, st.lists(STARTED, min_size=1), st.lists(STARTED), st.lists(STARTED))
    def test_steps_and_copies_that_overlap(
        self, first: Started, others: list[Started], copies: list[Started], kernels: list[Started]
    ) -> None:
        """Each step has the moments that it has when each moment is looked at by itself."""
        content = content_of(steps=[first, *others], copies=copies, kernels=kernels)
        analysis = analyze(read_trace(content, source="x"))
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
        assert sum(group.exposed_us for group in analysis.groups) == sum(map(length_of, seen)) - sum(overlapped)

    def test_the_time_for_many_that_overlap(self) -> None:
        """The time to analyze a trace grows with its size only, whatever overlaps in it."""
        number = 4000
        long = [(i, 3 * number) for i in range(number)]
        trace = read_trace(content_of(steps=long, copies=long, kernels=[(3 * i, 1) for i in range(number)]), source="x")
        begun = time.process_time()
        assert analyze(trace).steps_us[0]["compute"] == number
        assert time.process_time() - begun < 1


class TestFindings:
    """When each finding appears, and when it does not."""

    @pytest.mark.parametrize(
        ("made", "expected"),
        [
            (loop(copy=200, compute=800, memory="Pageable", called=220), {"pageable copies"}),
            (loop(copy=5, compute=995, memory="Pageable"), {"bound by compute"}),
            (loop(copy=200, compute=800, called=10, waited=190), {"pinned, but blocking"}),
            (loop(copy=200, compute=800), {"asynchronous, but not overlapped"}),
            (loop(copy=200, compute=1000, ahead=True), {"bound by compute"}),
            (
                loop(copy=20, compute=1000, ahead=True, called=10, waited=15),
                {"bound by compute"},
            ),
            (loop(copy=100, compute=1000, memory="Pageable", waited=800), {"pageable copies"}),
            (loop(copy=500, compute=500, memory="Pageable", waited=490, to_host=True), {"copies to the host"}),
            (loop(copy=5, compute=995, memory="Pageable", to_host=True), {"bound by compute"}),
            (loop(wait=300, compute=700), {"waiting for data"}),
            (loop(wait=30, compute=970), {"bound by compute"}),
            (loop(compute=500, idle=500), {"GPU idle"}),
            (loop(compute=850, idle=150), set()),
        ],
        ids=[
            *(
                "pageable",
                "few pageable",
                "blocking",
                "not overlapped",
                "overlapped",
                "hidden but blocking",
                "behind kernels",
                "to the host",
                "few to the host",
            ),
            *("waiting", "hardly waiting", "idle", "hardly idle"),
        ],
    )
    def test_which(self, made: Made, expected: set[str]) -> None:
        """Each loop has the expected findings and no others."""
        assert set(found(made)) == expected

    def test_pageable(self) -> None:
        """The evidence has count, size, time, operator and shape; the remedy has what to type."""
        finding = found(loop(copy=200, compute=800, memory="Pageable", called=220))["pageable copies"]
        assert "4 copies from pageable memory (4.0 MB in total, 0.20 ms per step" in finding.evidence
        assert "host blocked for 0.22 ms per step" in finding.evidence
        assert "aten::copy_ of shape [8, 4]" in finding.evidence
        assert "pin_memory=True" in finding.remedy
        assert finding.costs == pytest.approx(0.2, abs=0.005)

    def test_pinned_advice_is_not_given_for_pageable_copies(self) -> None:
        """A pageable copy that blocks is one finding, not two."""
        assert "pinned, but blocking" not in found(loop(copy=200, compute=800, memory="Pageable", waited=150))

    def test_on_which_stream(self) -> None:
        """The evidence says if the copies run on the stream of the kernels."""
        same = found(loop(copy=200, compute=800))["asynchronous, but not overlapped"]
        other = found(loop(copy=200, compute=800, stream=21))["asynchronous, but not overlapped"]
        assert "on the stream of the kernels" in same.evidence
        assert "on the stream of the kernels" not in other.evidence

    def test_waiting_without_workers(self) -> None:
        """The remedy is workers for a loop that loads its own batches, and more workers for one that has some."""
        made = Made()
        for i in range(2):
            made.step(i, i * 100, 100)
            made.wait(i * 100, 50, "_SingleProcessDataLoaderIter")
            made.kernel(i * 100 + 50, 50)
        assert "num_workers=N" in found(made)["waiting for data"].remedy
        for i in range(4):  # most of the waiting is for a loader with workers now
            made.wait(i * 50 + 200, 49)
        made.event("user_annotation", "ProfilerStep#2", 200, 200)
        assert "more workers" in found(made)["waiting for data"].remedy
        assert "more workers" in found(loop(wait=300, compute=700))["waiting for data"].remedy

    def test_pinning_in_the_loop(self) -> None:
        """Pinning in the loop's own thread is found."""
        made = loop(steps=1, compute=800, idle=200)
        made.event("cpu_op", "aten::pin_memory", 800, 200)
        assert "pinning in the loop" in found(made)

    @pytest.mark.parametrize("on_gpu", [True, False])
    def test_pinning_inside_next(self, *, on_gpu: bool) -> None:
        """A loader without workers pins in the loop's thread, in next(): that is waiting, and workers remove it."""
        made = Made()
        made.step(0, 0, 1000)
        made.wait(0, 500, "_SingleProcessDataLoaderIter")
        made.event("cpu_op", "aten::pin_memory", 100, 400)
        if on_gpu:
            made.kernel(500, 500)
        else:
            made.event("cpu_op", "aten::mm", 500, 500)
        assert set(found(made)) == {"waiting for data"}
        assert "num_workers=N" in found(made)["waiting for data"].remedy

    def test_copies_to_the_host(self) -> None:
        """The evidence has where the copies go and what issued them; the remedy has what to do about it."""
        finding = found(loop(copy=500, compute=500, memory="Pageable", waited=490, to_host=True))["copies to the host"]
        assert finding.costs == pytest.approx(0.5, abs=0.01)
        assert "4 copies to the host (4.0 MB in total" in finding.evidence
        assert "kernels ran during 0% of that time" in finding.evidence
        assert "copy less often" in finding.remedy

    def test_pinning_in_another_thread(self) -> None:
        """Pinning in torch's pin thread is not a finding."""
        made = loop(steps=1, compute=800, idle=200)
        made.pins = [[5, *loop(wait=10).loads[0][1:]]]
        assert "pinning in the loop" not in found(made)

    def test_compute_bound_says_so(self) -> None:
        """If nothing can be gained, the remedy says so and the cost is 0."""
        finding = found(loop(compute=1000))["bound by compute"]
        assert (finding.costs, finding.remedy.startswith("nothing")) == (0.0, True)

    def test_the_most_costly_first(self) -> None:
        """Findings are in descending order of their cost."""
        costs = [finding.costs for finding in find(analyzed(loop(wait=200, copy=500, compute=300)))]
        assert costs == sorted(costs, reverse=True)
        assert len(costs) == 2


class TestReport:
    """The report on several ranks."""

    @staticmethod
    def _report() -> Any:
        slow = analyzed(loop(wait=500, compute=500), rank=1)
        return make_report([slow, analyzed(loop(wait=100, compute=900), rank=0)], ["rank 2: killed"])

    def test_json(self) -> None:
        """The report has the fields of its schema, in milliseconds and shares, and is valid JSON."""
        content = json.loads(json.dumps(self._report().to_json(), allow_nan=False))
        assert content["schema"] == "numapin.trace/1"
        assert [rank["rank"] for rank in content["ranks"]] == [0, 1]
        assert content["ranks"][1]["parts"]["wait"] == {"ms": 0.5, "share": 0.5}
        assert content["findings"][0]["ranks"] == ["1", "0"]
        assert content["findings"][0]["costs"] == pytest.approx(0.5)
        assert content["findings"][0]["evidence"].startswith("on rank 1, the loop waited")
        assert content["notes"][0] == "rank 2: killed"

    def test_no_finding(self) -> None:
        """A report without findings says so, and which part takes most time besides compute."""
        report = make_report([analyzed(loop(compute=850, idle=150))])
        assert report.nothing_found.endswith("; the largest part besides compute is other, with 15%")
        console = Console(width=150)
        with console.capture() as capture:
            console.print(trace_table(report))
        assert report.nothing_found in capture.get()
        assert self._report().nothing_found == ""

    def test_unknown_is_null(self) -> None:
        """A copy without a size or a call has null in the fields that depend on them."""
        made = loop(compute=10)
        made.event("gpu_memcpy", "Memcpy", 5, 2)
        (copy,) = make_report([analyzed(made)]).to_json()["ranks"][0]["copies"]
        assert [copy[key] for key in ("direction", "source", "bytes", "blocking", "operator")] == [None] * 5

    def test_table(self) -> None:
        """The table has each rank's shares, findings with their ranks, and notes, in 100 columns."""
        console = Console(width=100)
        with console.capture() as capture:
            console.print(trace_table(self._report()))
        text = capture.get()
        assert "waiting for data  all ranks" in text
        assert "  cost: up to 50% of the time\n  seen: on rank 1, the loop waited" in text
        assert "\n  fix: " in text
        assert "50.0%" in text
        assert "note: rank 2: killed" in text
        assert max(map(len, text.splitlines())) <= 100
