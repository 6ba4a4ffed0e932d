"""`python -m bench.training` as a user runs it, on a machine without a GPU."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import ROOT
from tests.integration.launching import call

if TYPE_CHECKING:
    from pathlib import Path

TRAINING = (sys.executable, "-m", "bench.training")


def test_a_smoke_test_measures_every_loader(tmp_path: Path) -> None:
    """Two ranks train on the CPU; the table and the JSON file have each loader's figures and every single run."""
    path = tmp_path / "training.json"
    options = ("--quick", "--models", "cnn3d", "--repeats", "1", "--ranks", "2", "--json", str(path))
    done = call(*TRAINING, *options, cwd=ROOT, CUDA_VISIBLE_DEVICES="")
    assert done.status == 0, done.err
    report = json.loads(path.read_text())
    assert (report["schema"], report["benchmark"]) == ("numapin.bench/1", "training")
    assert report["command"][3:] == list(options)
    assert (report["settings"]["num_ranks"], report["machine"]["gpus"]) == (2, [])
    (case,) = report["cases"]
    figures = {peer["name"]: peer["figures"] for peer in case["peers"]}
    assert list(figures) == ["ceiling", "torch", "numapin"]
    order = [run["peer"] for run in report["runs"]]
    assert order == ["ceiling", "torch", "numapin"]  # tests/unit/bench/test_training.py has the order of more repeats
    for name, own in figures.items():
        runs = [run for run in report["runs"] if run["peer"] == name]
        for run, value in zip(runs, own["samples_per_s"]["values"], strict=True):
            (details,) = run["details"]
            assert value == pytest.approx(2 * 4 * details["num_steps"] / details["wall_s"])  # ranks x batch
    ratio = figures["numapin"]["x_torch"]["values"][0]
    assert ratio == pytest.approx(figures["numapin"]["samples_per_s"]["values"][0] / first_rate(report, "torch"))
    numapin = next(run for run in report["runs"] if run["peer"] == "numapin")
    assert numapin["details"][0]["stats"]["hits"] > 0
    rows = [line.split()[0] for line in done.out.splitlines() if line.strip()]
    assert rows[-4:] == ["peer", "ceiling", "torch", "numapin"]


def first_rate(report: dict[str, Any], loader: str) -> float:
    """Return the rate of a loader's first run."""
    return next(float(run["figures"]["samples_per_s"]) for run in report["runs"] if run["peer"] == loader)
