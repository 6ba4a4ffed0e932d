"""numapin.DataLoader when something around it fails: errors come at their batch's turn, and no other batch is lost."""

from __future__ import annotations

import gc
import os
import socket
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import numapin
from tests.contract.datasets import Made

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS = 200
NUMBERS = Made(lambda index: torch.full((1024,), float(index)), ROWS)  # 4 KiB each


class Awkward:
    """A batch that cannot be unpickled if its first row's index is a multiple of 40."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self.rows = torch.stack(rows)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        if self.rows[0, 0] % 40 == 0:
            raise ValueError("this one does not arrive")


def firsts(loader: Any) -> list[int]:
    return [int(batch[0, 0]) for batch in loader]


def test_batches_that_fail_to_arrive_cost_no_others() -> None:
    """Each broken batch raises at its turn, and the others arrive; torch's loader stops handing out work instead."""
    loader = numapin.DataLoader(NUMBERS, 4, num_workers=2, collate_fn=Awkward)
    iterator, errors, got = iter(loader), 0, []
    while True:
        try:
            got.append(int(next(iterator).rows[0, 0]))
        except StopIteration:
            break
        except ValueError:
            errors += 1
    assert (errors, got) == (5, [first for first in range(0, ROWS, 4) if first % 40])


def test_a_loader_may_be_changed_between_epochs() -> None:
    """Torch allows it; slots are made anew unless they still fit. Two forked children get their own batches."""
    loader: Any = numapin.DataLoader(NUMBERS, 4, num_workers=1)
    for num_workers in (1, 2, 1):
        loader.num_workers = num_workers
        assert firsts(loader) == list(range(0, ROWS, 4))
    (made,) = loader._numapin_path._idle
    assert firsts(loader) == list(range(0, ROWS, 4))
    assert loader._numapin_path._idle == [made]
    loader.prefetch_factor = 3
    assert firsts(loader) == list(range(0, ROWS, 4))
    assert loader._numapin_path._idle != [made]
    children = [os.fork() or _leave(loader) for _ in range(2)]
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0]


def _leave(loader: Any) -> int:
    try:
        os._exit(0 if all(firsts(loader) == list(range(0, ROWS, 4)) for _ in range(2)) else 1)
    finally:
        os._exit(2)


def test_a_start_that_fails_leaks_nothing() -> None:
    """If a sampler raises while the iterator is created, no slot and no descriptor are leaked."""
    failing = [False]

    class Sampler:
        def __iter__(self) -> Iterator[list[int]]:
            if failing[0]:
                raise ValueError("no samples")
            return iter([[row, row + 1, row + 2, row + 3] for row in range(0, ROWS, 4)])

    loader = numapin.DataLoader(NUMBERS, batch_sampler=Sampler(), num_workers=1)
    assert firsts(loader) == list(range(0, ROWS, 4))
    before, failing[0] = len(os.listdir("/proc/self/fd")), True  # noqa: PTH208
    for _ in range(3):
        with pytest.raises(ValueError, match="no samples"):
            iter(loader)
    failing[0] = False
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
    assert firsts(loader) == list(range(0, ROWS, 4))


def test_an_epoch_leaves_no_descriptors() -> None:
    """Descriptors are closed at the end of an epoch, without the garbage collector."""
    loader = numapin.DataLoader(NUMBERS, 4, num_workers=1)
    assert firsts(loader) == list(range(0, ROWS, 4))
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        for _ in range(3):
            assert firsts(loader) == list(range(0, ROWS, 4))
        assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
    finally:
        gc.enable()


def test_the_default_time_out_of_sockets_is_not_ours() -> None:
    """A program may set one for itself."""
    socket.setdefaulttimeout(0.01)
    try:
        assert firsts(numapin.DataLoader(NUMBERS, 4, num_workers=1)) == list(range(0, ROWS, 4))
    finally:
        socket.setdefaulttimeout(None)


def test_a_closed_stderr_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a closed stderr loading continues, and the message is in the notes."""
    monkeypatch.setattr(sys, "stderr", None)
    loader = numapin.DataLoader(NUMBERS, 4, num_workers=1, collate_fn=lambda rows: torch.stack(rows).requires_grad_())
    assert firsts(loader) == list(range(0, ROWS, 4))
    assert any(".detach()" in note for note in loader.stats().notes)
