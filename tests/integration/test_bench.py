"""`numapin bench` as users run it on a machine without a GPU."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest

from tests.integration.launching import NUMAPIN, environment, forked_bench
from tests.integration.seam import CASES, proc
from tests.waiting import gone, wait_until

pytestmark = pytest.mark.xdist_group("bench")  # so that torch is imported once
SHORT = ("--repeats", "2", "--seconds", "0.2", "--warm-up", "0", "--batches", "1")


def test_transport(tmp_path: Path) -> None:
    """The report and the file have both peers' figures of both repeats, the ratio, the machine and the command."""
    path = tmp_path / "loader.json"
    peers = "torch,numapin-transport"
    done = forked_bench("loader", "--cases", "transport", "--peers", peers, *SHORT, "--json", "--output", str(path))
    assert done.status == 0, done.err
    report = json.loads(done.out)
    assert report == json.loads(path.read_text())
    assert (report["schema"], report["benchmark"]) == ("numapin.bench/1", "loader")
    assert report["command"][1:3] == ["bench", "loader"]
    assert report["machine"]["versions"]["torch"]
    (case,) = report["cases"]
    torchs, ours = case["peers"]
    assert (torchs["name"], ours["name"]) == ("torch", "numapin-transport")
    for peer in case["peers"]:
        assert peer["skipped"] is None
        assert len(peer["figures"]["batches_per_s"]["values"]) == 2
        gbps = peer["figures"]["batches_per_s"]["median"] * (CASES["transport"].batch_bytes + 256 * 8) / 1e9
        assert peer["figures"]["gbps"]["median"] == pytest.approx(gbps)
        assert peer["figures"]["first_batch_s"]["low"] > 0
    assert torchs["figures"]["ratio"]["values"] == [1.0, 1.0]
    assert ours["figures"]["hits"]["low"] > 0
    assert ours["details"][0]["stats"]["hits"] > 0


def test_alloc() -> None:
    """The report has the cases that can be measured here; others are skipped with a reason."""
    options = ("--sizes", "4K,1M", "--repeats", "2", "--samples", "2")
    done = forked_bench("alloc", *options, "--json", CUDA_VISIBLE_DEVICES="")
    assert done.status == 0, done.err
    report = json.loads(done.out)
    assert report["benchmark"] == "alloc"
    small, large, skipped = report["cases"]
    assert (small["num_bytes"], large["num_bytes"], small["group"]) == (4096, 1 << 20, "alloc")
    assert skipped["skipped"].startswith("torch ")
    assert "pinned-cold" in skipped["about"]
    fresh = next(peer for peer in large["peers"] if peer["name"] == "fresh")
    assert len(fresh["figures"]["touch_us"]["values"]) == 2
    assert fresh["figures"]["touch_us"]["low"] > fresh["figures"]["again_us"]["low"]  # 256 page faults


def test_table_and_what_was_skipped() -> None:
    """Without a GPU the table shows the case that runs; the reason why the other does not and the verdict come last."""
    done = forked_bench("loader", "--cases", "38MB,transport", "--peers", "torch", "--quick", CUDA_VISIBLE_DEVICES="")
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines if line][2:5] == ["transport", "peer", "torch"]
    assert lines[-3].startswith("skipped: 38MB (")
    assert ": torch " in lines[-3]
    assert lines[-1].endswith("cannot tell: numapin-device and torch were not both measured")


@pytest.mark.parametrize("words", ["transfer", "loader --cases 38MB --peers torch"])
def test_without_a_gpu_nothing_is_measured(words: str, tmp_path: Path) -> None:
    """The status is 1, with the reason and the benchmarks that would run; the report is still written."""
    path = tmp_path / "report.json"
    done = forked_bench(*words.split(), "--quick", "--output", str(path), CUDA_VISIBLE_DEVICES="")
    assert done.status == 1
    assert "nothing was measured: torch" in done.err
    assert "numapin bench alloc, bench loader --cases transport" in done.err
    report = json.loads(path.read_text())
    assert {bool(case["skipped"]) for case in report["cases"]} == {True}
    assert report["settings"]["repeats"] == 1


def test_a_file_that_cannot_be_written_is_reported_at_once(tmp_path: Path) -> None:
    """The error comes before measuring and names the option; links are followed."""
    path = tmp_path / "link"
    path.symlink_to("nowhere/file")
    done = forked_bench("alloc", "--quick", "--timeout", "1", "--output", str(path))
    assert done.status == 2
    assert f"{path} cannot be written" in done.err
    assert "--output" in done.err


def test_a_signal_keeps_what_was_measured(tmp_path: Path) -> None:
    """Table and JSON are marked as partial, the status is the signal's, and the workers have ended."""
    report = tmp_path / "alloc.json"
    options = ("--sizes", "4K", "--samples", "1", "--repeats", "1000000", "--output", str(report))
    master, slave = pty.openpty()
    with subprocess.Popen(
        [*NUMAPIN, "bench", "alloc", *options], stdout=subprocess.PIPE, stderr=slave, env=environment()
    ) as bench:
        os.close(slave)
        seen = b""
        while b"repeat 3 " not in seen:
            seen += os.read(master, 1 << 16)
        workers = wait_until(lambda: proc.descendants(bench.pid, proc.children_of()), limit_s=60)
        assert workers
        bench.send_signal(signal.SIGINT)
        out = bench.communicate()[0].decode()
    seen += os.read(master, 1 << 20)
    os.close(master)
    assert bench.returncode == -signal.SIGINT
    assert wait_until(lambda: all(map(gone, workers)), limit_s=60)
    assert "partial" in out
    assert "reuse memory: " in out.splitlines()[-1]
    written = json.loads(report.read_text())
    assert written["is_complete"] is False
    assert written["verdict"]["text"] == out.splitlines()[-1]
    assert b" left" in seen
    assert b"stopped by SIGINT; the report covers" in seen
