"""The queue from the rank to a worker: tasks, each with a slot."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from tests.unit.data.seam import NO_GRANT, Grant, TaskQueue
from tests.unit.data.seam import packing as setup

GRANT = Grant(7, expected_bytes=4096, forgotten=(3,))


class Worker:
    """A packer that notes what came with its tasks."""

    def __init__(self) -> None:
        self.grants: list[Grant] = []

    def accept(self, grant: Grant) -> None:
        """Note a grant."""
        self.grants.append(grant)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    """Make this process a worker."""
    made = Worker()
    monkeypatch.setattr(setup, "own", made)
    return made


def test_a_task_brings_a_slot(worker: Worker) -> None:
    """The worker accepts it when it reads the task."""
    with closing(TaskQueue(lambda: GRANT)) as queue:
        queue.put((5, [1, 2, 3]))
        assert queue.get(1) == (5, [1, 2, 3])
    assert worker.grants == [GRANT]


def test_what_is_no_task_brings_none(worker: Worker) -> None:
    """The beginning and the end of an epoch are messages, too; without a pool there are no slots."""
    with closing(TaskQueue(lambda: GRANT)) as queue, closing(TaskQueue(None)) as without:
        queue.put(None)
        without.put((1, [2]))
        assert (queue.get(1), without.get(1)) == (None, (1, [2]))
    assert worker.grants == [NO_GRANT, NO_GRANT]


def test_a_task_that_cannot_be_sent_takes_no_slot() -> None:
    """A sampler may yield anything: the error is pickle's, and the slot stays free for the next task."""
    granted: list[Any] = []

    def grant() -> Grant:
        granted.append(NO_GRANT)
        return NO_GRANT

    with closing(TaskQueue(grant)) as queue:
        with pytest.raises(TypeError, match="cannot pickle"):
            queue.put((5, [(number for number in range(3))]))
        assert not granted
        queue.put((5, [1]))
        assert len(granted) == 1
