"""Training jobs killed at random batches: with the loader's state, each sample is trained exactly once per epoch."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launching import environment
from tests.integration.trainers import SIZE

pytest.importorskip("torchdata", reason="no torchdata; type: pip install .[dev]")

KILLS = {"shuffle": 14, "gloo": 6}
ROOT = Path(__file__).resolve().parents[2]


def test_every_sample_once_per_epoch(tmp_path: Path) -> None:
    """After 20 kills in all, at random moments, no epoch lacks a sample or has one twice."""
    seed = random.randrange(1 << 30)  # noqa: S311 - not a secret
    arguments = [str(tmp_path), str(seed), *(f"{case}={kills}" for case, kills in KILLS.items())]
    command = [sys.executable, "-m", "tests.integration.trainers", *arguments]
    options = {"timeout": 280, "cwd": ROOT, "env": environment()}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    found = {line["case"]: line["trained"] for line in map(json.loads, done.stdout.splitlines())}
    assert sum(KILLS.values()) == 20
    assert found.keys() == KILLS.keys()
    for case, (*epochs, unfinished) in found.items():
        assert epochs, (case, seed)
        assert all(sorted(epoch) == list(range(SIZE)) for epoch in epochs), (case, seed, epochs)
        assert len(set(unfinished)) == len(unfinished), (case, seed, unfinished)
