"""`numapin trace` on a GPU distinguishes scripts that copy batches in different ways."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.integration.launching import numapin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False"),
]
PROGRAM = str(Path(__file__).with_name("gpu_tracing.py"))


@cache
def traced(case: str) -> Any:
    with TemporaryDirectory() as folder:
        options = ("--nproc-per-node", "1", "--quiet", "--skip", "40", "--steps", "10", "--json")
        done = numapin("trace", *options, "--output", f"{folder}/out", PROGRAM, case)
        assert done.status == 0, done.err
        return json.loads(done.out)


def batches(case: str) -> dict[str, Any]:
    (rank,) = traced(case)["ranks"]
    large = [one for one in rank["copies"] if one["direction"] == "HtoD" and one["bytes"] >= 30e6 * one["count"]]
    assert len(large) == 1, rank["copies"]
    return dict(large[0])


@pytest.mark.parametrize(
    ("case", "memory", "blocks"),
    [
        ("pageable", "Pageable", True),
        ("blocking", "Pinned", True),
        ("asynchronous", "Pinned", False),
        ("device", "Pinned", None),  # the profiler does not record calls of the driver's cuMemcpyHtoDAsync
    ],
)
def test_copies(case: str, memory: str, blocks: bool | None) -> None:  # noqa: FBT001 - a parameter
    """For every copy the report has the kind of memory and whether the host was blocked."""
    copies = batches(case)
    assert copies["source"] == memory
    num_ahead = 4 if case == "device" else 1  # copies at the edge, inside or outside the steps
    assert abs(copies["count"] - 10) <= num_ahead
    assert copies["bytes"] == copies["count"] * 64 * 3 * 224 * 224 * 4
    assert copies["blocking"] == (None if blocks is None else copies["count"] * blocks)


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("pageable", "pageable copies"),
        ("blocking", "pinned, but blocking"),
        ("asynchronous", "asynchronous, but not overlapped"),
    ],
)
def test_findings(case: str, what: str) -> None:
    """Each script gets its own finding about copies, and none of the others'."""
    about_copies = {"pageable copies", "pinned, but blocking", "asynchronous, but not overlapped"}
    assert {finding["what"] for finding in traced(case)["findings"]} & about_copies == {what}


def test_batches_copied_ahead() -> None:
    """With numapin.DataLoader(device="cuda") copies cause no finding, and kernels run during most of them."""
    found = {finding["what"] for finding in traced("device")["findings"]}
    assert not found & {"pageable copies", "pinned, but blocking", "asynchronous, but not overlapped"}
    assert batches("device")["overlapped_share"] > 0.5


def test_shares_are_of_the_gpu() -> None:
    """The kernels were recorded: compute has a share, the shares add up to one, and no note reports missing data."""
    (rank,) = traced("asynchronous")["ranks"]
    assert rank["on_gpu"]
    assert rank["parts"]["compute"]["share"] > 0.3
    assert sum(part["share"] for part in rank["parts"].values()) == pytest.approx(1, abs=0.01)
    assert [note for note in traced("asynchronous")["notes"] if not note.startswith("other programs")] == []
