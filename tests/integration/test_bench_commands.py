"""`numapin bench transfer`, `alloc` and `overlap` as users run them, also without a GPU."""

from __future__ import annotations

import json
from importlib import metadata
from typing import TYPE_CHECKING

import pytest

from tests.integration.launching import forked_bench

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("bench")  # so that torch is imported once


def test_alloc(tmp_path: Path) -> None:
    """The report has the cases that can be measured here; others are skipped with a reason."""
    path = tmp_path / "alloc.json"
    options = ("--sizes", "4K,1M", "--repeats", "2", "--samples", "2", "--output", str(path))
    done = forked_bench("alloc", *options, "--json", CUDA_VISIBLE_DEVICES="")
    assert done.status == 0, done.err
    report = json.loads(done.out)
    assert report == json.loads(path.read_text())
    assert (report["schema"], report["benchmark"]) == ("numapin.bench/1", "alloc")
    assert report["machine"]["versions"]["torch"]
    small, large, skipped = report["cases"]
    assert (small["num_bytes"], large["num_bytes"], small["group"]) == (4096, 1 << 20, "alloc")
    assert skipped["skipped"].startswith("torch ")
    assert "pinned-cold" in skipped["about"]
    fresh = next(peer for peer in large["peers"] if peer["name"] == "fresh")
    assert len(fresh["figures"]["touch_us"]["values"]) == 2
    assert fresh["figures"]["touch_us"]["low"] > fresh["figures"]["again_us"]["low"]  # 256 page faults


def test_alloc_as_a_table() -> None:
    """The table has sizes in rows and peers in columns, and fits a terminal of 100 columns."""
    done = forked_bench("alloc", "--quick", CUDA_VISIBLE_DEVICES="")
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].endswith(f"torch {torch_version()}")
    header = next(line.split() for line in lines if line.startswith("allocate"))
    assert header == ["allocate", "pageable", "fresh"]
    assert max(len(line.rstrip()) for line in lines) <= 100


@pytest.mark.parametrize("name", ["transfer", "overlap"])
def test_without_a_gpu_nothing_is_measured(name: str, tmp_path: Path) -> None:
    """The status is 1, with the reason and the benchmarks that would run; the report is still written."""
    path = tmp_path / "report.json"
    done = forked_bench(name, "--quick", "--output", str(path), CUDA_VISIBLE_DEVICES="")
    assert done.status == 1
    assert "nothing was measured: torch" in done.err
    assert "numapin bench alloc" in done.err
    assert all(case["skipped"] for case in json.loads(path.read_text())["cases"])


@pytest.mark.parametrize("name", ["nowhere/file", "link"])
def test_a_file_that_cannot_be_written_is_told_at_once(name: str, tmp_path: Path) -> None:
    """The error comes before measuring and names the option; links are followed."""
    path = str(tmp_path / name)
    (tmp_path / "link").symlink_to("nowhere/file")
    done = forked_bench("alloc", "--quick", "--timeout", "1", "--output", path)
    assert done.status == 2
    assert f"{path} cannot be written" in done.err
    assert "--output" in done.err


def torch_version() -> str:
    """Return the installed torch's version, without importing it."""
    return metadata.version("torch")
