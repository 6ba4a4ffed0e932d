"""The hook of a traced rank, with stand-ins for torch's iterators."""

from __future__ import annotations

import pytest

from numapin.trace import hook
from numapin.trace.notes import Notes


class Ended:
    """A stand-in for an iterator of torch whose epoch has ended."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers

    def _next_data(self) -> object:
        raise StopIteration


@pytest.mark.parametrize(("num_workers", "num_ends"), [(0, 0), (2, 1)])
def test_ends_of_epochs(monkeypatch: pytest.MonkeyPatch, num_workers: int, num_ends: int) -> None:
    """Only the end of an epoch with workers is noted: nothing else ends there."""
    notes = Notes()
    monkeypatch.setattr(hook._Traced, "notes", notes)
    next_data = hook._counting_batches(Ended._next_data)
    with pytest.raises(StopIteration):
        next_data(Ended(num_workers))
    assert len(notes.ends) == num_ends
