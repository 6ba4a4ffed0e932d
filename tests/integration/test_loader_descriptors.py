"""A loader that runs out of descriptors, at every step of its start."""

from __future__ import annotations

import fcntl
import gc
import os
import resource
import termios
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import TensorDataset

import numapin
from tests.integration.seam import state_of
from tests.waiting import joins_in_vain, wait_until

if TYPE_CHECKING:
    import pytest

_DATASET = TensorDataset(torch.zeros(8))


def open_files() -> dict[int, str]:
    paths = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    found = {int(path.name): str(path.readlink()) for path in paths}
    return {fd: link for fd, link in found.items() if not link.startswith("/proc/")}  # without the look itself


def fill_gaps() -> list[int]:
    """Open descriptors until all numbers below the largest one are taken; return them."""
    top = max(open_files())
    opened = [os.open(os.devnull, os.O_RDONLY)]
    while opened[-1] < top:
        opened.append(os.open(os.devnull, os.O_RDONLY))
    return opened


def starts(limit: int) -> bool:
    """Return whether an iterator starts under a limit of descriptors; it is gone afterwards."""
    loader = numapin.DataLoader(_DATASET, batch_size=2, num_workers=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        iter(loader)
    except (OSError, RuntimeError):
        return False
    else:
        return True
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        loader.close()


def test_every_shortage() -> None:
    """However few descriptors are free, an iterator that cannot start leaves none open."""
    starts(1000)  # opens what a process opens once
    gc.collect()
    opened = fill_gaps()
    before = open_files()
    num_failed = 0
    try:
        while not starts(opened[-1] + 1 + num_failed):
            num_failed += 1
            gc.collect()
            lost = {fd: link for fd, link in open_files().items() if fd not in before}
            # multiprocessing opens two pipes to fork, and loses the first one if there is no room for the second.
            assert all(link.startswith("pipe:") for link in lost.values())
            assert len(lost) <= 2
            for fd in lost:
                os.close(fd)
    finally:
        for fd in opened:
            os.close(fd)
    assert num_failed > 5


def test_workers_close_the_slots_of_other_loaders() -> None:
    """Those of a validation loader would keep the memory of a training loader that is closed meanwhile."""
    dataset = TensorDataset(torch.zeros(4, 8192))  # small batches have no slots
    with numapin.DataLoader(dataset, batch_size=2, num_workers=1) as training:
        kept = list(training)
        assert num_slots(os.getpid())
        with numapin.DataLoader(dataset, batch_size=2, num_workers=1, persistent_workers=True) as validation:
            iterator: Any = iter(validation)
            next(iterator)
            pid = iterator._workers[0].pid
            assert wait_until(lambda: num_slots(pid) == 0, limit_s=60)  # it has its own until the batch is sent
        assert torch.equal(kept[0][0], torch.zeros(2, 8192))


def num_slots(pid: int) -> int:
    links = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    return sum("numapin-slot" in link for link in links)


def test_workers_that_wait_to_hand_slots_over_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket has room for some 280 descriptors; torch gives each worker 5 s to end, which it does not need."""
    dataset = TensorDataset(torch.zeros(10_000))
    iterator: Any = iter(numapin.DataLoader(dataset, num_workers=1, prefetch_factor=500))
    next(iterator)
    assert wait_until(lambda: is_stuck(iterator), limit_s=60)
    in_vain = joins_in_vain(monkeypatch)
    iterator._shutdown_workers()
    assert in_vain == []


def is_stuck(iterator: Any) -> bool:
    num_bytes = array("i", [0])
    fcntl.ioctl(iterator._worker_result_queue._reader.fileno(), termios.FIONREAD, num_bytes)
    return num_bytes[0] > 250 * 150 and state_of(iterator._workers[0].pid) == "S"
