"""Run as a program: print how many threads numpy's BLAS uses in workers, with torch's loader and ours."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import numapin

_BUSY_NS = 1_000_000
_MATRIX = np.random.default_rng(0).random((500, 500))


def _busy_ns() -> dict[str, int]:
    return {path.name: int((path / "schedstat").read_text().split()[0]) for path in Path("/proc/self/task").iterdir()}


class Products(Dataset[Any]):
    """Items that multiply matrices.

    Each is the number of threads that took part, the number that exist, OMP_NUM_THREADS, and torch's number.
    """

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _index: int) -> Any:
        before = _busy_ns()
        until_s = time.process_time() + 0.1
        while time.process_time() < until_s:
            _MATRIX @ _MATRIX
        busy = [thread for thread, ns in _busy_ns().items() if ns - before.get(thread, 0) > _BUSY_NS]
        numbers = len(busy), len(_busy_ns()), int(os.environ["OMP_NUM_THREADS"]), torch.get_num_threads()
        return numapin.batch_buffer(4, torch.int64).copy_(torch.tensor(numbers))


def _own_number(_worker: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "5"


def main() -> None:
    Products()[0]
    runs: list[tuple[str, type[DataLoader[Any]], dict[str, Any]]] = [
        ("torch", DataLoader, {}),
        ("numapin", numapin.DataLoader, {}),
        ("numapin-spawn", numapin.DataLoader, {"multiprocessing_context": "spawn"}),
        ("numapin-2", numapin.DataLoader, {"worker_threads": 2}),
        ("numapin-0", numapin.DataLoader, {"worker_threads": 0}),
        ("numapin-own", numapin.DataLoader, {"worker_init_fn": _own_number}),
    ]
    for name, kind, options in runs:
        seen = next(iter(kind(Products(), batch_size=None, num_workers=1, **options))).tolist()
        sys.stdout.write(f"{name} {' '.join(map(str, seen))}\n")


if __name__ == "__main__":
    main()
