"""Metrics of a running job: names, values, and two parsers that other programs use."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from prometheus_client import parser as textfile
from prometheus_client.openmetrics import parser as strict

from tests.terminals import HOSTILE
from tests.unit.view.seam import GpuLoad, ended, openmetrics
from tests.unit.watched import job, rank

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.metrics_core import Metric

Found = dict[str, dict[tuple[str, str], float]]


def _read(families: Iterable[Metric]) -> Found:
    """Return the samples by name, and by the last label, which is the rank or the GPU."""
    found: Found = {}
    for family in families:
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name in ("local_rank", "uuid")}
            key = next(iter(labels.items()), ("", ""))
            found.setdefault(sample.name, {})[key] = sample.value
    return found


def test_values() -> None:
    """Each rank has its figures and each GPU its own, in base units, with totals as counters."""
    text = openmetrics(job(rank(0), rank(1, num_off_plan=2)))
    found = _read(strict.text_string_to_metric_families(text))
    first, second = ("local_rank", "0"), ("local_rank", "1")
    assert found["numapin_run_active"] == {("", ""): 1}
    assert found["numapin_rank_up"] == {first: 1, second: 1}
    assert found["numapin_rank_threads_off_plan"] == {first: 0, second: 2}
    assert found["numapin_rank_cpu_ratio"][first] == 4.25
    assert found["numapin_rank_uptime_seconds"][first] == 3723
    assert found["numapin_rank_steps_total"][first] == 1000
    assert found["numapin_rank_step_seconds_total"][first] == 100
    assert found["numapin_rank_wait_seconds_total"][first] == 10
    assert found["numapin_rank_loaded_bytes_total"][first] == 1000 * 10**6
    assert found["numapin_rank_pinned_bytes"][first] == 3 << 30
    assert found["numapin_gpu_memory_used_bytes"] == {("uuid", "GPU-0"): 40 << 30, ("uuid", "GPU-1"): 40 << 30}
    assert found["numapin_gpu_received_bytes_per_second"][("uuid", "GPU-0")] == 12.4e9
    assert found["numapin_gpu_power_watts"][("uuid", "GPU-1")] == 612.3


def test_conventions() -> None:
    """Types and units are as the names say, each family has a help text, and the end is marked."""
    text = openmetrics(job(rank()))
    families = {family.name: family for family in strict.text_string_to_metric_families(text)}
    assert len(families) == 18
    for name, family in families.items():
        assert family.documentation.endswith("."), name
        assert family.type == ("counter" if f"{name}_total" in text else "gauge"), name
        assert name.endswith(family.unit), name
    assert {family.unit for family in families.values()} == {
        *("", "bytes", "seconds", "ratio", "watts", "bytes_per_second")
    }
    assert text.endswith("# EOF\n")


def test_the_textfile_collector_reads_it() -> None:
    """The older text format, which node_exporter reads from files, has the same samples."""
    text = openmetrics(job(rank(0), rank(1)))
    old = _read(textfile.text_string_to_metric_families(text))
    assert old == _read(strict.text_string_to_metric_families(text))


def test_what_binds_a_rank() -> None:
    """One family joins a rank with its process, its CPUs, its node and its GPU."""
    (family,) = (
        family
        for family in strict.text_string_to_metric_families(openmetrics(job(rank(3))))
        if family.name == "numapin_rank_info"
    )
    (sample,) = family.samples
    assert sample.labels == {
        "run": "run-20261123-101500-host-8e8e0dd1",
        "local_rank": "3",
        "pid": "40003",
        "cpus": "24-31",
        "node": "1",
        "uuid": "GPU-3",
    }


def test_unknown_is_left_out() -> None:
    """An unknown figure has no sample, never a zero; a rank that is gone has only the sample that it is down."""
    bare = rank(0, loop=None, load=GpuLoad(), remote_share=None, pinned_bytes=None, cpu_share=None)
    found = _read(strict.text_string_to_metric_families(openmetrics(job(bare, rank(1, is_gone=True)))))
    assert set(found) == {
        *("numapin_run_active", "numapin_rank_info", "numapin_rank_up", "numapin_rank_uptime_seconds"),
        *("numapin_rank_threads", "numapin_rank_threads_off_plan"),
    }
    assert found["numapin_rank_up"] == {("local_rank", "0"): 1, ("local_rank", "1"): 0}
    assert found["numapin_rank_threads"] == {("local_rank", "0"): 120}


def test_hostile_names() -> None:
    """A run's name may hold quotes, backslashes and line breaks: it stays one label."""
    for name in ('a"b\\c\nd', HOSTILE, "\udc80"):
        (family, *_) = strict.text_string_to_metric_families(openmetrics(replace(job(rank()), run=name)))
        assert set(family.samples[0].labels) == {"run"}


def test_ended() -> None:
    """After the end there is one metric, which reports the end."""
    assert _read(strict.text_string_to_metric_families(ended("run-x"))) == {"numapin_run_active": {("", ""): 0}}
