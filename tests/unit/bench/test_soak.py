"""`python -m bench.soak` notices wrong values and resources that grow."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from bench.soak import Resources, Soak, growth, main

_FLAT = Resources(resident_mb=500, slots_mb=8, pinned_mb=4, gpu_mb=2, descriptors=9, threads=3, children=0)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Resources)])
def test_what_grows_is_named(name: str) -> None:
    """A resource that is higher in every round of the second half is named; one high round is not growth."""
    more = dataclasses.replace(_FLAT, **{name: getattr(_FLAT, name) + 40})
    assert growth([more, more, _FLAT, _FLAT, _FLAT, _FLAT]) == []  # the first rounds fill caches
    assert growth([_FLAT] * 5 + [more]) == []
    (grown,) = growth([_FLAT, _FLAT, _FLAT, _FLAT, more, more])
    assert grown.startswith(f"{name} grew from")


def test_wrong_values_are_noticed() -> None:
    """One wrong element among right ones is found; right batches are not."""
    soak = Soak(device=torch.device("cpu"), quick=True, num_workers=1, seed=0)
    numbers = torch.tensor([3, 125])
    right = (numbers % 120).to(torch.uint8)[:, None].repeat(1, 50)
    soak.check(right, numbers)
    assert soak.finish()
    wrong = right.clone()
    wrong[1, 49] += 1
    soak.check(wrong, numbers)
    soak.check(right, numbers)
    assert not soak.finish()


def test_a_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A round runs every kind of loop, and writes what the process holds afterwards."""
    path, before = tmp_path / "soak.json", Resources.read()
    assert main(["--quick", "--seconds", "0", "--workers", "1", "--json", str(path)]) == 0
    assert "nothing grew in 1 rounds" in capsys.readouterr().out
    report = json.loads(path.read_text())
    assert report["is_right"] is True
    assert report["batches"] > 64
    (only,) = report["rounds"]
    assert only["slots_mb"] <= before.slots_mb  # of other tests in this process
