"""Counts of a running loader, and what is reported about it."""

from __future__ import annotations

import os
from dataclasses import FrozenInstanceError
from typing import TYPE_CHECKING, Final

import pytest
import torch
from torch.utils.data import DataLoader

from tests.data.loopback import Loopback, lent, make_head
from tests.unit.data.seam import Counts, Miss, Stats

if TYPE_CHECKING:
    from tests.unit.data.seam import DataPath

PAGE: Final = os.sysconf("SC_PAGE_SIZE")
HEAD: Final = make_head(slot=1, slot_bytes=100, num_bytes=100)
NEW: Final = make_head(slot=1, slot_bytes=100, made_bytes=PAGE, num_bytes=100)


class TestArrivals:
    """A batch that came from a worker is a hit, a miss, or neither."""

    def test_a_batch_in_a_slot_is_a_hit(self) -> None:
        """A batch in a slot is a hit, and its bytes are counted."""
        counts = Counts()
        counts.note_arrival(HEAD)
        assert (counts.hits, counts.slots_made, dict(counts.misses), counts.num_bytes) == (1, 0, {}, 100)

    def test_a_slot_that_was_made_for_its_batch_counts(self) -> None:
        """The batch is a hit; the slot is counted once, and not again when it is used again."""
        counts = Counts()
        for head in (NEW, HEAD, HEAD):
            counts.note_arrival(head)
        assert (counts.hits, counts.slots_made) == (3, 1)

    def test_a_batch_that_was_not_in_a_slot_as_a_whole_is_a_miss(self) -> None:
        """It counts under its reason, even if a part of it was in a slot; its bytes count, too."""
        counts = Counts()
        for miss in (Miss.NO_MEMORY, Miss.UNSUPPORTED, Miss.NO_MEMORY):
            counts.note_arrival(HEAD._replace(miss=miss))
        assert (counts.hits, counts.num_bytes) == (0, 300)
        assert dict(counts.misses) == {
            "the kernel had no memory for a slot": 2,
            "a tensor that only torch can send": 1,
        }

    def test_a_batch_without_memory_is_neither(self) -> None:
        """No part of it could have been in a slot."""
        counts = Counts()
        counts.note_arrival(make_head())
        assert (counts.hits, dict(counts.misses), counts.num_bytes) == (0, {}, 0)


class TestStats:
    """The result of `DataLoader.stats()`."""

    def test_of_a_loader_that_has_done_nothing(self, path: DataPath) -> None:
        """Counts are 0, and what cannot be known is None."""
        assert path.stats() == Stats(
            batches=0,
            bytes=0,
            hits=0,
            misses={},
            wait_s_per_batch=None,
            wait_share=None,
            transfer_gbps=None,
            slots=0,
            slots_made=0,
            slot_bytes=0,
            slots_on_loan=0,
            pinned_bytes=0,
            nodes=(),
            share_on_node=None,
            placement="a test",
            notes=(),
        )

    def test_it_is_a_snapshot(self, path: DataPath) -> None:
        """It cannot be changed, and does not include later batches."""
        path.note_arrival(HEAD._replace(miss=Miss.NO_MEMORY))
        before = path.stats()
        path.note_arrival(HEAD._replace(miss=Miss.NO_MEMORY))
        assert before.misses == {"the kernel had no memory for a slot": 1}
        with pytest.raises(FrozenInstanceError):
            before.batches = 3  # type: ignore[misc]

    def test_a_wait_is_counted_per_batch(self, path: DataPath) -> None:
        """The mean over all batches that were yielded, the first included."""
        path.counts.note_step(waited_s=3.0, stepped_s=None)
        path.counts.note_step(waited_s=1.0, stepped_s=4.0)
        stats = path.stats()
        assert (stats.batches, stats.wait_s_per_batch) == (2, 2.0)

    def test_a_first_batch_alone_has_no_share(self, path: DataPath) -> None:
        """There is no time between two batches."""
        path.counts.note_step(waited_s=3.0, stepped_s=None)
        assert path.stats().wait_share is None

    def test_the_share_is_of_the_steps(self, path: DataPath) -> None:
        """The start of an epoch, before its first batch, is in neither."""
        path.counts.note_step(waited_s=30.0, stepped_s=None)
        for _ in range(4):
            path.counts.note_step(waited_s=1.0, stepped_s=4.0)
        assert path.stats().wait_share == 0.25

    def test_slots_are_counted(self, path: DataPath) -> None:
        """They are counted while they exist; nothing is pinned without a GPU."""
        lane = path.lane(DataLoader(range(8), num_workers=2), pins=False)  # type: ignore[arg-type]
        assert lane.pool is not None
        loop = Loopback(lane.pool)
        small, large = (lent(loop, torch.zeros(num_pages * PAGE, dtype=torch.uint8)) for num_pages in (1, 3))
        del large
        lane.reclaim()
        stats = path.stats()
        assert (stats.slots, stats.slot_bytes, stats.slots_on_loan, stats.pinned_bytes) == (2, 3 * PAGE, 1, 0)
        lane.end(workers_are_gone=True)
        path.close()
        assert path.stats().slots == 0
        assert not small.any()

    def test_what_is_said_once_is_a_note(self, path: DataPath, capsys: pytest.CaptureFixture[str]) -> None:
        """A reason with a remedy is reported on stderr at its first batch only, and stays in the notes."""
        for _ in range(3):
            path.note_arrival(HEAD._replace(miss=Miss.UNSUPPORTED))
        said = capsys.readouterr().err
        assert said.count("numapin: warning:") == 1
        assert said.endswith("travel in torch's shared memory\n")
        assert ".detach() helps" in said
        assert [note in said for note in path.stats().notes] == [True]

    def test_what_the_user_cannot_change_is_not_said(self, path: DataPath, capsys: pytest.CaptureFixture[str]) -> None:
        """It is counted, and has no remedy."""
        path.note_arrival(HEAD._replace(miss=Miss.SHARED))
        assert capsys.readouterr().err == ""
        assert path.stats().notes == ()
