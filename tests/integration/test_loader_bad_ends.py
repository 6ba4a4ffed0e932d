"""Bad ends of a slot: a worker without descriptors, memory or a life, and a rank that cannot take a slot over."""

from __future__ import annotations

import gc
import os
import re
import resource
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import numapin
from tests.contract.datasets import Made

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = 64
BATCH = 4
SICK = 24  # the row from which on something is missing
_REASONS = re.compile("File too large|Too many open files|Cannot allocate memory")


def numbers(fail: Callable[[], None] = lambda: None) -> Made:
    """Return rows of 64 KiB, each filled with its index; `fail` is called in the worker that makes row SICK."""

    def make(index: int) -> torch.Tensor:
        if index == SICK:
            fail()
        return torch.full((16384,), float(index))

    return Made(make, ROWS)


@pytest.fixture(autouse=True, scope="module")
def _what_a_process_opens_once() -> None:
    list(numapin.DataLoader(numbers(), BATCH, num_workers=1))


def no_descriptors() -> None:
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208 - names only
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    for fd in range(highest + 1):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDONLY)  # takes the lowest free number


def no_file_sizes() -> None:
    """Let this process make no file larger than 4 KiB, so that a memfd cannot get its size."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def no_address_space() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))


def right(batches: list[torch.Tensor]) -> bool:
    return [batch[:, -1].tolist() for batch in batches] == [
        [float(row) for row in range(start, start + BATCH)] for start in range(0, ROWS, BATCH)
    ]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names only


def slot_maps() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:numapin-slot")


@pytest.mark.parametrize("fail", [no_descriptors, no_file_sizes, no_address_space])
def test_a_worker_that_can_make_no_slots(fail: Callable[[], None]) -> None:
    """Batches are correct, or, if torch could not send them either, the error names the reason. Nothing leaks."""
    gc.collect()
    before = open_files(), slot_maps()
    loader: Any = numapin.DataLoader(numbers(fail), BATCH, num_workers=2)
    kept: list[torch.Tensor] = []  # asks for new slots
    reasons: list[str] = []
    try:
        kept.extend(loader)
    except (RuntimeError, OSError) as error:
        reasons.append(str(error))
        traceback.clear_frames(error.__traceback__)
    assert right(kept) if not reasons else _REASONS.search(reasons[0])
    loader.close()
    kept.clear()
    gc.collect()
    assert (open_files(), slot_maps()) == before


def test_a_rank_without_descriptors() -> None:
    """If the rank cannot receive a slot's descriptor, that is the error of this batch; later batches arrive."""
    loader = numapin.DataLoader(numbers(), BATCH, num_workers=1, prefetch_factor=2)
    iterator = iter(loader)
    kept: list[torch.Tensor] = []
    lost: list[str] = []
    kept.append(next(iterator))
    limits, opened = resource.getrlimit(resource.RLIMIT_NOFILE), []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() + 64, limits[1]))
        try:
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        for _ in range(6):
            try:
                kept.append(next(iterator))  # keeping them asks for new slots
            except OSError as error:
                lost.append(str(error))
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    rest = list(iterator)
    assert lost
    assert all("ulimit -n" in text for text in lost)
    assert len(kept) + len(rest) == ROWS // BATCH - len(lost)
    assert all(bool((batch == batch[:, :1]).all()) for batch in (*kept, *rest))


def test_a_forked_child_keeps_its_batch() -> None:
    """A batch that a forked child got stays as it was there, although the rank drops it and goes on, as with torch."""
    loader = numapin.DataLoader(numbers(), BATCH, num_workers=1)
    iterator = iter(loader)
    for _ in range(4):
        batch = next(iterator)
    expected, go = batch.tolist(), os.pipe()
    child = os.fork()
    if child == 0:
        os.read(go[0], 1)  # until the rank has gone on
        os._exit(0 if batch.tolist() == expected else 1)
    del batch
    rest = [int(batch[0, 0]) for batch in iterator]
    os.write(go[1], b"x")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for end in go:
        os.close(end)
    assert (len(rest), status) == (ROWS // BATCH - 4, 0)
