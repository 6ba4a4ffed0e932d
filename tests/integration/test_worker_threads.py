"""The threads of numpy's BLAS and of other libraries in workers, in a real program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU here, so that BLAS has one thread anyway")
def test_numpy_in_workers() -> None:
    """BLAS uses one thread in our workers, forked or spawned, or the user's number; in torch's, that of the rank.

    torch keeps its one thread. No idle BLAS threads are left behind: a worker has its main thread and the one that
    watches the rank. What the user's worker_init_fn sets stays.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.data.blas"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = {name: [int(n) for n in numbers] for name, *numbers in map(str.split, done.stdout.splitlines())}
    assert [numbers.pop() for numbers in seen.values()] == [1] * len(seen)
    assert seen["torch"] == [2, 2, 2]
    assert seen["numapin"] == seen["numapin-spawn"] == [1, 2, 1]
    assert seen["numapin-2"][::2] == seen["numapin-0"][::2] == [2, 2]
    assert seen["numapin-own"][::2] == [1, 5]
