"""Counts of a running loader, and what is reported about it."""

from __future__ import annotations

import os
from dataclasses import FrozenInstanceError
from typing import TYPE_CHECKING, Final

import pytest
from torch.utils.data import DataLoader

from numapin.data.path import DataPath, PathOptions
from numapin.data.stats import Counts, Stats
from numapin.data.wire.message import Miss
from tests.data.loopback import ANYWHERE, build, make_head

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE: Final = os.sysconf("SC_PAGE_SIZE")
HEAD: Final = make_head(parts=((0, 100), None), wanted_bytes=100)


class TestArrivals:
    """A batch that came from a worker is a hit, a miss, or neither."""

    def test_a_batch_in_a_slot_is_a_hit(self) -> None:
        """A batch in a slot is a hit, and its bytes are counted."""
        counts = Counts()
        counts.note_arrival(HEAD)
        assert (counts.hits, dict(counts.misses), counts.num_bytes) == (1, {}, 100)

    def test_a_batch_that_was_not_in_a_slot_as_a_whole_is_a_miss(self) -> None:
        """It counts under its reason, even if a part of it was in a slot; its bytes count, too."""
        counts = Counts()
        for miss in (Miss.NO_SLOT, Miss.TOO_LARGE, Miss.NO_SLOT):
            counts.note_arrival(HEAD._replace(miss=miss))
        assert (counts.hits, counts.num_bytes) == (0, 300)
        assert dict(counts.misses) == {"no slot was free": 2, "larger than a slot": 1}

    def test_a_batch_without_memory_is_neither(self) -> None:
        """No part of it could have been in a slot."""
        counts = Counts()
        counts.note_arrival(HEAD._replace(parts=(None, None), wanted_bytes=0))
        assert (counts.hits, dict(counts.misses), counts.num_bytes) == (0, {}, 0)


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[DataPath]:
    """Give a new loader's data path, on an unknown machine."""
    made = DataPath(PathOptions())
    monkeypatch.setattr(made.home, "_locality", ANYWHERE)
    yield made
    made.close()


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
        path.note_arrival(HEAD._replace(miss=Miss.STARTING))
        before = path.stats()
        path.note_arrival(HEAD._replace(miss=Miss.STARTING))
        assert before.misses == {"the ring was being set up": 1}
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

    def test_the_ring_is_told(self, path: DataPath) -> None:
        """Its slots are counted while it exists; nothing is pinned without a GPU."""
        lane = path.lane(DataLoader(range(8), num_workers=2), pins=False)  # type: ignore[arg-type]
        assert lane.ring is not None
        build(lane.ring, 3 * PAGE)
        view = lane.ring.lend(HEAD)
        stats = path.stats()
        assert (stats.slots, stats.slot_bytes, stats.slots_on_loan, stats.pinned_bytes) == (8, 3 * PAGE, 1, 0)
        del view
        lane.end(workers_are_gone=True)

    def test_what_is_said_once_is_a_note(self, path: DataPath, capsys: pytest.CaptureFixture[str]) -> None:
        """A reason with a remedy is reported on stderr at its first batch only, and stays in the notes."""
        for _ in range(3):
            path.note_arrival(HEAD._replace(miss=Miss.KEPT))
        said = capsys.readouterr().err
        assert said.count("numapin: warning:") == 1
        assert said.endswith("clone() them there\n")
        assert [note in said for note in path.stats().notes] == [True]

    def test_starting_is_nothing_to_say(self, path: DataPath, capsys: pytest.CaptureFixture[str]) -> None:
        """It is counted, and needs no remedy."""
        path.note_arrival(HEAD._replace(miss=Miss.STARTING))
        assert capsys.readouterr().err == ""
        assert path.stats().notes == ()
