"""The verdict of `bench train`, from made figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from numapin.bench.model import BenchReport, CaseResult, PeerResult, Spread
from numapin.view.train_verdict import train_lines, train_verdict

if TYPE_CHECKING:
    from collections.abc import Sequence


def model(name: str, *ratios: float, share: float = 0.99, busy: float = 0.5, about: str = "") -> CaseResult:
    """Return a model whose training with numapin is so many times as fast as with torch in each repeat."""
    figures = {"ratio": Spread.of(ratios), "of_ceiling": Spread.of([share]), "workers_busy": Spread.of([busy])}
    ours = PeerResult(name="numapin", num_runs=len(ratios), figures=figures, details=(), skipped=None)
    return CaseResult(name=name, about=about, peers=(ours,), skipped=None)


def report(*cases: CaseResult, gpus: Sequence[str] = ("GPU",)) -> BenchReport:
    """Return a report of these models."""
    return BenchReport(benchmark="train", command=(), machine={"gpus": gpus}, settings={}, cases=cases)


def test_each_model_has_its_outcome() -> None:
    """Faster and slower need an interval that excludes 1; close repeats around 1 are no difference."""
    text = train_verdict(
        [
            model("a", 3.0, 3.1, 2.9),
            model("b", 1.0, 1.001, 0.999, share=0.5),
            model("c", 0.5, 0.51, 0.5),
            model("d", 1.0, 2.0, 0.9),
        ]
    )
    assert text == (
        "numapin instead of torch's loader: faster for a (3.00x, 99 % of the ceiling); "
        "slower for c (0.50x, 99 % of the ceiling); "
        "no difference for b (1.00x, 50 % of the ceiling); "
        "cannot tell for d (1.00x, 99 % of the ceiling): the repeats differ too much"
    )


def test_few_repeats_tell_nothing() -> None:
    """However far apart the loaders are, one run of each does not show how far apart runs of one loader are."""
    assert train_verdict([model("a", 3.0)]).endswith(
        "cannot tell for a (3.00x, 99 % of the ceiling): 1 repeat is too few"
    )
    assert train_verdict([model("a", 3.0, 3.0)]).endswith("2 repeats are too few")


def test_without_both_loaders_there_is_no_verdict() -> None:
    """A report without torch's loader names what is missing."""
    nothing = CaseResult(name="a", about="", peers=(), skipped="no GPU")
    assert train_verdict([nothing]).endswith("cannot tell: numapin and torch were not both measured")


@pytest.mark.parametrize(
    ("case", "limit"),
    [
        (model("a", 1.0, share=0.96, busy=1.0), None),
        (model("a", 1.0, share=0.4, busy=0.9, about="JPEG"), "40 % of the ceiling: decoding is the limit"),
        (model("a", 1.0, share=0.4, busy=0.9), "40 % of the ceiling: the workers' own work is the limit"),
        (model("a", 1.0, share=0.8, busy=0.3), "30 % busy, so memory or the loop's own thread is the limit"),
    ],
)
def test_the_limit_of_a_model_below_its_ceiling(case: CaseResult, limit: str | None) -> None:
    """Busy workers are the limit, whatever the loader, and the line says what helps; near the ceiling there is none."""
    *lines, verdict = train_lines(report(case))
    assert verdict == train_verdict([case])
    assert [limit in line for line in lines if limit] == ([True] if limit else [])
    assert len(lines) == (limit is not None)
    assert all("more workers" in line for line in lines if "own work" in line or "decoding" in line)


def test_without_a_gpu_figures_show_nothing() -> None:
    """A model on the CPU competes with the workers."""
    first, _ = train_lines(report(model("a", 1.0, share=0.4, busy=0.9), gpus=()))
    assert first.startswith("without a GPU, models and workers share the CPUs")
