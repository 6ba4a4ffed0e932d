"""The data path of a loader: which pool each of its iterators gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
import torch
from torch.utils.data import DataLoader

from tests.data.loopback import Loopback, lent, num_open
from tests.unit.data.seam import NO_SLOT

if TYPE_CHECKING:
    from tests.unit.data.seam import DataPath

LOADER: Final[DataLoader[int]] = DataLoader(range(4), num_workers=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("are_gone", [True, False])
def test_a_pool_is_used_again_if_its_workers_are_gone(path: DataPath, *, are_gone: bool) -> None:
    """One that lives may still write to its slots, so the next iterator gets others."""
    first = path.lane(LOADER, pins=False)
    pool = first.pool
    assert pool is not None
    first.end(workers_are_gone=are_gone)
    second = path.lane(LOADER, pins=False)
    assert (second.pool is pool) is are_gone
    second.end(workers_are_gone=True)


def test_what_a_workers_child_may_read_though_the_batch_never_arrives(path: DataPath) -> None:
    """The loop is left while the message waits in the pipe: the slot that it names goes to no other worker."""
    lane = path.lane(LOADER, pins=False)
    assert lane.pool is not None
    loop = Loopback(lane.pool)
    lent(loop, torch.arange(1000.0))
    packer = loop.begin()
    batch = packer.allocate(torch.float32, (1000,))
    loop.workers[0].note_fork()
    lane.results.send(loop.pack(batch))
    (slot,) = loop.pool.slots
    assert not slot.is_inherited
    lane.end(workers_are_gone=True)
    assert slot.is_inherited
    assert loop.pool.grant(0).slot == NO_SLOT


@pytest.mark.parametrize("step", ["forget", "close"])
def test_ctrl_c_at_the_end_of_an_epoch(path: DataPath, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """The queue is closed and the pool given back; not used again unless all messages in the pipe were read."""
    lane = path.lane(LOADER, pins=False)
    pool, results, close = lane.pool, lane.results, lane.results.close
    assert pool is not None
    loop = Loopback(pool)
    lent(loop, torch.arange(1000.0))

    def interrupt(*_: object) -> None:
        if step == "close":
            close()
        raise KeyboardInterrupt

    monkeypatch.setattr(results, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        lane.end(workers_are_gone=True)
    assert results._reader.closed
    assert num_open() == (0 if step == "forget" else 1)
    following = path.lane(LOADER, pins=False)
    assert (following.pool is pool) is (step == "close")
    following.end(workers_are_gone=True)
