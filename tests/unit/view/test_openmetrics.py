"""Metrics of a running job: names, values, and two parsers that other programs use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from prometheus_client import parser as textfile
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as strict

from tests.recorded.screens import compare
from tests.terminals import HOSTILE
from tests.unit.seam import GpuRef, Top
from tests.unit.view.seam import GpuLoad, JobOrigin, ended, openmetrics
from tests.unit.watched import job, loop, planned, rank

Found = dict[str, dict[tuple[str, str], float]]


def _read(families: Iterable[Metric]) -> Found:
    found: Found = {}
    for family in families:
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name in ("local_rank", "uuid")}
            key = next(iter(labels.items()), ("", ""))
            found.setdefault(sample.name, {})[key] = sample.value
    return found


NOWHERE: Final = JobOrigin(host="node7")
IN_A_POD: Final = JobOrigin(
    host="node7", user="alice", job_id="4711", pod="train-0", namespace="ml", ranks={0: 8, 1: 9}
)
JOBS: Final = {
    "two ranks, one with threads off the plan": job(rank(0), rank(1, num_off_plan=2)),
    "an unknown figure has no sample, never a zero; a rank that is gone has only the sample that it is down": job(
        rank(0, loop=None, load=GpuLoad(), remote_share=None, pinned_bytes=None, cpu_share=None), rank(1, is_gone=True)
    ),
    "a rank without a GPU or a node has no labels for them": job(
        rank(0, is_gone=True, plan=replace(rank().plan, gpu=None, node=None))
    ),
}


def test_each_job_has_the_recorded_metrics() -> None:
    """Figures in base units, totals as counters, and after the end one metric that reports it."""
    texts = {name: openmetrics([(made, NOWHERE)]) for name, made in JOBS.items()}
    both = [(JOBS[next(iter(JOBS))], IN_A_POD), (replace(job(rank()), run="run-y"), NOWHERE)]
    texts["two runs of a host, one in a pod"] = openmetrics(both, num_unread=1)
    texts["a host without a run"] = openmetrics([], num_unread=0)
    texts |= {"a run that has ended": ended("run-x", IN_A_POD), "a host that is not watched": openmetrics([])}
    compare(
        "".join(f"=== {name}\n{text}" for name, text in texts.items()), str(Path(__file__).with_name("metrics.txt"))
    )


@pytest.mark.parametrize("made", JOBS.values(), ids=JOBS)
def test_both_parsers_read_the_same(made: Top) -> None:
    """Types and units are as the names say; the older format, which node_exporter reads from files, is the same."""
    text = openmetrics([(made, IN_A_POD), (replace(made, run="run-y"), NOWHERE)], num_unread=3)
    for family in strict.text_string_to_metric_families(text):
        assert family.documentation.endswith("."), family
        assert family.type == ("counter" if f"{family.name}_total" in text else "gauge"), family
        assert family.name.endswith(family.unit), family
        names = {"user", "job_id", "pod", "namespace"}
        of_run = [sample for sample in family.samples if "run" in sample.labels]
        assert of_run or family.name == "numapin_runs_unread"
        for sample in of_run:
            assert sample.labels["host"] == "node7"
            assert (sample.labels.keys() & names) == (set() if sample.labels["run"] == "run-y" else names)
            is_of_rank = family.name.startswith("numapin_rank")
            assert ("rank" in sample.labels) == (is_of_rank and sample.labels["run"] != "run-y")
    old = _read(textfile.text_string_to_metric_families(text))
    assert old == _read(strict.text_string_to_metric_families(text))


def test_hostile_names() -> None:
    """A run's name may hold quotes, backslashes and line breaks: it stays one label."""
    for name in ('a"b\\c\nd', HOSTILE, "\udc80", "x" * 10**6):
        origin = replace(IN_A_POD, pod=name, job_id=name, user=name, host=name)
        text = openmetrics([(replace(job(rank()), run=name), origin)])
        (family, *_) = strict.text_string_to_metric_families(text)
        assert set(family.samples[0].labels) == {"run", "host", "user", "job_id", "pod", "namespace"}
        assert max(map(len, family.samples[0].labels.values())) <= 256


@pytest.mark.parametrize(
    ("name", "other"),
    [("run-x", "run-x"), ("\x01", "\x02"), ("x" * 300, "x" * 301)],
    ids=["equal", "not shown", "long"],
)
def test_runs_with_the_same_labels(name: str, other: str) -> None:
    """The first one has metrics, the other counts as unread: two samples with the same labels would be an error."""
    runs = [(replace(job(rank(0), rank(1)), run=run), IN_A_POD) for run in (name, other)]
    text = openmetrics(runs, num_unread=1)
    assert text == openmetrics(runs[:1], num_unread=2)
    assert openmetrics(runs) == openmetrics(runs[:1])


def test_gpus_with_the_same_label() -> None:
    """A user's plan may name GPUs that differ in characters that are not shown: one of them has metrics."""
    gpus = [GpuRef(index=number, uuid=f"GPU-{chr(1 + number)}", pci=None) for number in range(2)]
    ranks = [rank(number, plan=replace(planned(number), gpu=gpu)) for number, gpu in enumerate(gpus)]
    text = openmetrics([(job(*ranks), IN_A_POD)])
    assert text.count("numapin_gpu_power_watts{") == 1
    samples = [line.rpartition(" ")[0] for line in text.splitlines()]
    assert len(samples) == len({*samples})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_totals_that_make_no_sense(value: float) -> None:
    """Any process may write its own totals: a value that is no measurement has no sample."""
    text = openmetrics([(job(rank(loop=replace(loop(1.0, 2.0, 3), waited_s=value))), NOWHERE)])
    assert "numapin_rank_step_seconds_total" in text
    assert "numapin_rank_wait_seconds" not in text
