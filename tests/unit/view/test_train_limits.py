"""What `bench train` says about models below their ceiling, from made figures."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from numapin.bench.model import BenchAnswer, BenchReport, BenchVerdict, CaseResult, PeerResult, Spread
from numapin.view.bench_layouts import TRAIN
from numapin.view.bench_table import bench_table
from numapin.view.train_limits import train_limits

if TYPE_CHECKING:
    from collections.abc import Sequence


def report(name: str, *, share: float, busy: float, gpus: Sequence[str] = ("GPU",)) -> BenchReport:
    """Return a report of one model whose figures are as wide as they get."""
    figures = {"of_ceiling": (share,) * 4, "workers_busy": (busy,) * 4, "samples_per_s": (123456.0,) * 4}
    more = {"ratio": (10.0, 11.0, 12.0, 13.0), "wait_share": (1.0,) * 4, "cpu_s_per_1000": (0.123,) * 4}
    spreads = {name: Spread.of(values) for name, values in (figures | more | {"pss_gb": (1234.5,) * 4}).items()}
    ours = PeerResult(name="numapin", num_runs=4, figures=spreads, details=(), skipped=None)
    case = CaseResult(name=name, about="", peers=(ours,), skipped=None)
    return BenchReport(benchmark="train", command=(), machine={"gpus": gpus}, settings={}, cases=(case,))


@pytest.mark.parametrize(
    ("name", "share", "busy", "limit"),
    [
        (
            "vit-jpeg",
            0.4,
            0.9,
            ": decoding is the limit for any loader (workers 90 % busy); what helps: more CPU",
        ),
        ("resnet18", 0.4, 0.9, ": the workers' own work is the limit (90 % busy); more CPU cores per rank help"),
        ("vit-jpeg", 0.4, 0.3, "; its workers are 30 % busy, so memory or the loop's own thread is the limit"),
    ],
)
def test_the_limit_of_a_model_below_its_ceiling(name: str, share: float, busy: float, limit: str) -> None:
    """Busy workers are the limit, whatever the loader, and the line says what helps."""
    (line,) = train_limits(report(name, share=share, busy=busy))
    assert line.startswith(f"{name}: numapin reaches 40 % of the ceiling{limit}")


def test_at_the_ceiling_there_is_nothing_to_say() -> None:
    """The GPU is the limit there, however busy the workers are. Nor is there without numapin's figures."""
    made = report("vit-jpeg", share=0.96, busy=1.0)
    assert list(train_limits(made)) == []
    nothing = replace(made.cases[0], peers=(), skipped="why")
    assert list(train_limits(replace(made, cases=(nothing,)))) == []


def test_without_a_gpu_figures_show_nothing() -> None:
    """A model on the CPU competes with the workers."""
    (line,) = train_limits(report("vit-jpeg", share=0.4, busy=0.9, gpus=()))
    assert line.startswith("without a GPU, models and workers share the CPUs")


def test_the_table_fits_and_ends_with_the_verdict() -> None:
    """The largest figures fit 80 columns; the limits come before the verdict."""
    verdict = BenchVerdict(answer=BenchAnswer.YES, text="the verdict")
    out = StringIO()
    made = replace(report("vit-jpeg", share=0.4, busy=0.9), verdict=verdict)
    Console(file=out, width=80).print(bench_table(made, TRAIN))
    lines = out.getvalue().splitlines()
    header = next(line for line in lines if line.startswith("peer"))
    assert header.split() == ["peer", "samples/s", "x", "torch", "of", "ceiling", "wait", "CPU", "s", "GB"]
    assert lines[lines.index(header) + 1].split()[-1] == "1,234.5"  # in one row
    assert "vit-jpeg: numapin reaches 40 % of the ceiling: decoding" in out.getvalue()
    assert lines[-1] == "the verdict"
