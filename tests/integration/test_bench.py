"""`numapin bench loader` as users run it, also without a GPU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.integration.launching import forked_bench
from tests.integration.seam import CASES, PEERS

if TYPE_CHECKING:
    from pathlib import Path

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


def test_table_and_what_was_skipped() -> None:
    """Without a GPU the table shows the case that runs; the reason why the other does not and the verdict come last."""
    done = forked_bench("loader", "--cases", "38MB,transport", "--peers", "torch", "--quick", CUDA_VISIBLE_DEVICES="")
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines if line][2:5] == ["transport", "peer", "torch"]
    assert lines[-3].startswith("skipped: 38MB (")
    assert ": torch " in lines[-3]
    assert lines[-1].endswith("cannot tell: numapin-device and torch were not both measured")


def test_nothing_to_measure() -> None:
    """If no case can run, the status is 1, with the reason and the benchmarks that would run."""
    done = forked_bench("loader", "--cases", "38MB", "--peers", "torch", CUDA_VISIBLE_DEVICES="")
    assert done.status == 1
    assert "nothing was measured: torch" in done.err
    assert "--cases transport" in done.err


@pytest.mark.parametrize(("option", "known"), [("--cases", CASES), ("--peers", PEERS)])
def test_unknown_names(option: str, known: dict[str, object]) -> None:
    """An unknown case or peer is a usage error that lists the known ones."""
    done = forked_bench("loader", option, "torhc")
    assert done.status == 2
    message = " ".join(done.err.split())
    assert "'torhc' is not one of" in message
    assert all(name in message for name in known)


def test_a_file_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    """The error comes before anything is measured."""
    path = str(tmp_path / "nowhere" / "loader.json")
    done = forked_bench("loader", "--cases", "transport", "--timeout", "1", "--output", path)
    assert done.status == 2
    assert f"{path} cannot be written" in done.err
