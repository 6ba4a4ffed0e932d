"""`numapin bench train` as a user runs it, on a machine without a GPU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.integration.launching import no_compiler, numapin

if TYPE_CHECKING:
    from pathlib import Path


def test_two_ranks_train_with_every_loader(tmp_path: Path) -> None:
    """Loaders take turns in the same two ranks, with equal steps; figures count both, and nothing is left behind.

    numpy is not needed: the ranks cannot import it.
    """
    path = tmp_path / "train.json"
    options = ("--quick", "--cases", "cnn3d,lm", "--peers", "torch,numapin,ceiling", "--gpus", "2", "--steps", "5")
    started = ("--launcher", "numapin", "--output", str(path))
    variables = {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path), "PYTHONPATH": no_compiler(tmp_path)}
    variables["PYTHONFAULTHANDLER"] = "1"
    (tmp_path / "no-compiler" / "numpy.py").write_text("raise ModuleNotFoundError(name='numpy')")
    done = numapin("bench", "train", *options, *started, cwd=None, **variables)
    assert done.status == 0, done.err
    assert list(tmp_path.glob("numapin-bench-*")) == []
    report = json.loads(path.read_text())
    assert (report["schema"], report["benchmark"]) == ("numapin.bench/1", "train")
    for case, num_steps in zip(report["cases"], (8, 8), strict=True):  # 5, rounded up to all 4 distinct batches
        figures = {peer["name"]: peer["figures"] for peer in case["peers"]}
        assert list(figures) == ["torch", "numapin", "ceiling"]
        for peer in case["peers"]:
            (details,) = peer["details"]
            assert details["num_steps"] == num_steps
            rate = figures[peer["name"]]["samples_per_s"]["median"]
            assert rate == pytest.approx(2 * 4 * num_steps / details["wall_s"])  # ranks x batch
        ratio = figures["numapin"]["ratio"]["median"]
        rates = [figures[name]["samples_per_s"]["median"] for name in ("numapin", "torch")]
        assert ratio == pytest.approx(rates[0] / rates[1])
        assert figures["numapin"]["pss_gb"]["median"] > 0.1
        assert 0 <= figures["numapin"]["workers_busy"]["median"] < 2  # ticks of 10 ms, in a run of some 50
    last = done.out.splitlines()[-1]
    assert last == report["verdict"]["text"]
    assert last.startswith("numapin instead of torch's loader: cannot tell")


def test_full_sizes_need_a_gpu() -> None:
    """They would take hours on a CPU; the message names the option that works."""
    done = numapin("bench", "train", "--cases", "resnet18", CUDA_VISIBLE_DEVICES="")
    assert done.status == 1
    assert "numapin bench train --quick" in done.err


def test_a_rank_that_fails_is_reported(tmp_path: Path) -> None:
    """The reason is the rank's error, not the launcher's report on it."""
    folder = tmp_path / "spdl"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "pipeline.py").write_text("raise RuntimeError('no pipeline today')\n")
    options = ("--quick", "--cases", "cnn3d", "--peers", "spdl", "--launcher", "numapin")
    path = f"{tmp_path}:{no_compiler(tmp_path)}"
    done = numapin("bench", "train", *options, CUDA_VISIBLE_DEVICES="", PYTHONPATH=path)
    assert done.status == 1
    assert "nothing was measured: failed: RankFailedError: RuntimeError: no pipeline today" in done.err
