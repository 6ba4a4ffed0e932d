"""Data sets and checks that tests of the loader on a GPU share."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Dataset

from numapin import pinned
from tests.integration.seam import PINNED
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
BATCH = 4
MIB = 1 << 20
CYCLES = 100_000_000  # of a GPU's clock: 50 ms of an H200

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),  # Python 3.12: forks beside threads
]
uses_gpu = [*needs_gpu, pytest.mark.usefixtures("cuda_is_in_use")]  # for tests that use it in this process

cuda: Any = torch.cuda  # torch's streams have no type annotations
HOST: dict[str, Any] = {"pin_memory": True}
DEVICE: dict[str, Any] = {"device": "cuda"}


class Filled(Dataset[torch.Tensor]):
    """Samples of `num_bytes` of int32; sample i is filled with i, so overwritten samples can be recognized."""

    def __init__(self, size: int = 4000, num_bytes: int = MIB) -> None:
        self.size, self.num_elements = size, num_bytes // 4

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.num_elements,), index, dtype=torch.int32)


def is_right(batch: torch.Tensor, number: int) -> bool:
    samples = torch.arange(number * BATCH, (number + 1) * BATCH, dtype=torch.int32, device=batch.device)
    return bool((batch == samples[:, None]).all())


def wrong_ones(batches: Sequence[torch.Tensor] | torch.Tensor, first: int) -> list[int]:
    """Return the numbers of the batches of `Filled` that have wrong values; the first batch is `first`."""
    return [number for number, batch in enumerate(batches, first) if not is_right(batch, number)]


def warmed(loader: Any, num_hits: int = 8, pause_s: float = 0.005) -> tuple[Iterator[Any], int]:
    """Return an iterator of a numapin.DataLoader whose batches use slots again, and its next batch's number."""
    iterator, number, end = iter(loader), 0, time.monotonic() + 40  # spawned workers have to import torch first
    while loader.stats().hits - loader.stats().slots_made < num_hits:
        assert time.monotonic() < end, f"no slot is used again: {loader.stats()}"
        next(iterator)
        number += 1
        time.sleep(pause_s)
    return iterator, number


def lies_in_slot(loader: Any, tensor: torch.Tensor) -> bool:
    slots = loader._numapin_path.slots()
    return any(0 <= tensor.data_ptr() - slot.address < slot.num_bytes for slot in slots)


def settled_pinned_bytes() -> int:
    """Return how much numapin has locked here, once memory of earlier tests had two seconds to be unlocked."""
    gc.collect()
    wait_until(lambda: not pinned.trim() and not PINNED.total, limit_s=2)
    return PINNED.total


def assert_no_error_is_pending() -> None:
    """Fail if an earlier call left a CUDA error, which would surface at the next launch or synchronization."""
    torch.cuda.synchronize()
    assert int(torch.ones(8, device="cuda").sum()) == 8
    torch.cuda.synchronize()


def run_program(scene: str, argument: str, environment: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-m", "tests.integration.gpu_program", scene, argument]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def copies_to_device() -> Iterator[list[str]]:
    """Yield a list that, after the block, has CUDA's names for the host-to-device copies that ran inside it."""
    torch.cuda.synchronize()
    found: list[str] = []
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        yield found
        torch.cuda.synchronize()
    events: Any = seen.events()
    found += [event.name for event in events if event.name.startswith("Memcpy HtoD")]
