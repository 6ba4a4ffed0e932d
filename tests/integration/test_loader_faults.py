"""numapin.DataLoader when something around it fails: errors come at their batch's turn, and nothing leaks."""

from __future__ import annotations

import fcntl
import gc
import os
import re
import resource
import socket
import sys
import termios
import traceback
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import numapin
from tests.contract.datasets import Made
from tests.integration.seam import state_of
from tests.waiting import joins_in_vain, wait_until

ROWS = 64
BATCH = 4
FIRSTS = list(range(0, ROWS, BATCH))
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


def firsts(loader: Any) -> list[int]:
    return [int(batch[0, 0]) for batch in loader]


def open_files(pid: int | str = "self") -> dict[int, str]:
    """Return a process's descriptors and where they lead to."""
    paths = [path for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    found = {int(path.name): str(path.readlink()) for path in paths}
    return {fd: link for fd, link in found.items() if not link.startswith("/proc/")}  # without the look itself


def fill_gaps() -> list[int]:
    """Open descriptors until all numbers up to the largest one are taken; return them."""
    top, opened = max(open_files()), [os.open(os.devnull, os.O_RDONLY)]
    while opened[-1] < top:
        opened.append(os.open(os.devnull, os.O_RDONLY))
    return opened


# --- workers and ranks without descriptors, memory or room for a file ------------------------------------------------


def no_descriptors() -> None:
    limit = fill_gaps()[-1] + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def no_file_sizes() -> None:
    """Let this process make no file larger than 4 KiB, so that a memfd cannot get its size."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def no_address_space() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))


@pytest.mark.parametrize("fail", [no_descriptors, no_file_sizes, no_address_space])
def test_a_worker_that_can_make_no_slots(fail: Callable[[], None]) -> None:
    """Batches are correct, or, if torch could not send them either, the error names the reason. Nothing leaks."""

    def held() -> tuple[int, int]:
        return len(open_files()), Path("/proc/self/maps").read_text().count("/memfd:numapin-slot")

    gc.collect()
    before = held()
    loader: Any = numapin.DataLoader(numbers(fail), BATCH, num_workers=2)
    kept: list[torch.Tensor] = []  # asks for new slots
    reasons: list[str] = []
    try:
        kept.extend(loader)
    except (RuntimeError, OSError) as error:
        reasons.append(str(error))
        traceback.clear_frames(error.__traceback__)
    rows = [row for batch in kept for row in batch[:, -1].tolist()]
    assert rows == list(range(ROWS)) if not reasons else _REASONS.search(reasons[0])
    loader.close()
    kept.clear()
    gc.collect()
    assert held() == before


def test_a_rank_without_descriptors() -> None:
    """If the rank cannot receive a slot's descriptor, that is the error of this batch; later batches arrive."""
    iterator = iter(numapin.DataLoader(numbers(), BATCH, num_workers=1, prefetch_factor=2))
    kept: list[torch.Tensor] = [next(iterator)]
    lost: list[str] = []
    limits, opened = resource.getrlimit(resource.RLIMIT_NOFILE), fill_gaps()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened[-1] + 1, limits[1]))
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
    assert len(kept) + len(rest) == len(FIRSTS) - len(lost)
    assert all(bool((batch == batch[:, :1]).all()) for batch in (*kept, *rest))


def starts(limit: int) -> bool:
    """Return whether an iterator starts under a limit of descriptors; it is gone afterwards."""
    loader = numapin.DataLoader(TensorDataset(torch.zeros(8)), batch_size=2, num_workers=1)
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

    def num_slots(pid: int) -> int:
        return sum("numapin-slot" in link for link in open_files(pid).values())

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


def test_workers_that_wait_to_hand_slots_over_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket has room for some 280 descriptors; torch gives each worker 5 s to end, which it does not need."""
    iterator: Any = iter(numapin.DataLoader(TensorDataset(torch.zeros(10_000)), num_workers=1, prefetch_factor=500))

    def is_stuck() -> bool:
        num_bytes = array("i", [0])
        fcntl.ioctl(iterator._worker_result_queue._reader.fileno(), termios.FIONREAD, num_bytes)
        has_sent = num_bytes[0] > 250 * 150  # messages of 200 bytes
        return has_sent and state_of(iterator._workers[0].pid) == "S"

    next(iterator)
    assert wait_until(is_stuck, limit_s=60)
    in_vain = joins_in_vain(monkeypatch)
    iterator._shutdown_workers()
    assert in_vain == []


# --- errors, forks, and settings of the program ----------------------------------------------------------------------


class Awkward:
    """A batch that cannot be unpickled if its first row's index is a multiple of 24."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self.rows = torch.stack(rows)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        if self.rows[0, 0] % 24 == 0:
            raise ValueError("this one does not arrive")


def test_batches_that_fail_to_arrive_cost_no_others() -> None:
    """Each broken batch raises at its turn, and the others arrive; torch's loader stops handing out work instead."""
    loader = numapin.DataLoader(numbers(), BATCH, num_workers=2, collate_fn=Awkward)
    iterator, errors, got = iter(loader), 0, []
    while True:
        try:
            got.append(int(next(iterator).rows[0, 0]))
        except StopIteration:
            break
        except ValueError:
            errors += 1
    assert (errors, got) == (3, [first for first in FIRSTS if first % 24])


def test_a_loader_may_be_changed_between_epochs() -> None:
    """Torch allows it; slots are made anew unless they still fit. Two forked children get their own batches."""
    loader: Any = numapin.DataLoader(numbers(), BATCH, num_workers=1)
    for num_workers in (1, 2, 1):
        loader.num_workers = num_workers
        assert firsts(loader) == FIRSTS
    (made,) = loader._numapin_path._idle
    assert firsts(loader) == FIRSTS
    assert loader._numapin_path._idle == [made]
    loader.prefetch_factor = 3
    assert firsts(loader) == FIRSTS
    assert loader._numapin_path._idle != [made]
    children = [os.fork() or _leave(loader) for _ in range(2)]
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0]


def _leave(loader: Any) -> int:
    try:
        os._exit(0 if all(firsts(loader) == FIRSTS for _ in range(2)) else 1)
    finally:
        os._exit(2)


def test_a_forked_child_keeps_its_batch() -> None:
    """A batch that a forked child got stays as it was there, although the rank drops it and goes on, as with torch."""
    iterator = iter(numapin.DataLoader(numbers(), BATCH, num_workers=1))
    for _ in range(4):
        batch = next(iterator)
    expected, go = batch.tolist(), os.pipe()
    child = os.fork()
    if child == 0:
        os.read(go[0], 1)  # until the rank has gone on
        os._exit(0 if batch.tolist() == expected else 1)
    del batch
    rest = firsts(iterator)
    os.write(go[1], b"x")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for end in go:
        os.close(end)
    assert (rest, status) == (FIRSTS[4:], 0)


def test_a_start_that_fails_leaks_nothing() -> None:
    """If a sampler raises while the iterator is created, no slot and no descriptor are leaked."""
    failing = [False]

    class Sampler:
        def __iter__(self) -> Iterator[list[int]]:
            if failing[0]:
                raise ValueError("no samples")
            return iter([[row, row + 1, row + 2, row + 3] for row in FIRSTS])

    loader = numapin.DataLoader(numbers(), batch_sampler=Sampler(), num_workers=1)
    assert firsts(loader) == FIRSTS
    before, failing[0] = len(open_files()), True
    for _ in range(3):
        with pytest.raises(ValueError, match="no samples"):
            iter(loader)
    failing[0] = False
    assert len(open_files()) <= before
    assert firsts(loader) == FIRSTS


def test_an_epoch_leaves_no_descriptors() -> None:
    """Descriptors are closed at the end of an epoch, without the garbage collector."""
    loader = numapin.DataLoader(numbers(), BATCH, num_workers=1)
    assert firsts(loader) == FIRSTS
    gc.collect()
    gc.disable()
    try:
        before = len(open_files())
        for _ in range(3):
            assert firsts(loader) == FIRSTS
        assert len(open_files()) <= before
    finally:
        gc.enable()


def test_the_default_time_out_of_sockets_is_not_ours() -> None:
    """A program may set one for itself."""
    socket.setdefaulttimeout(0.01)
    try:
        assert firsts(numapin.DataLoader(numbers(), BATCH, num_workers=1)) == FIRSTS
    finally:
        socket.setdefaulttimeout(None)


def test_a_closed_stderr_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a closed stderr loading continues, and the message is in the notes."""
    monkeypatch.setattr(sys, "stderr", None)
    collate = lambda rows: torch.stack(rows).requires_grad_()  # noqa: E731 - only a name
    loader = numapin.DataLoader(numbers(), BATCH, num_workers=1, collate_fn=collate)
    assert firsts(loader) == FIRSTS
    assert any(".detach()" in note for note in loader.stats().notes)
