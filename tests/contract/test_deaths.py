"""Workers that die, exit or time out cause torch's error at once."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.contract.datasets import At, Rows, crash_worker, exit_worker, kill_worker, sleep_long
from tests.contract.watching import LoaderClass, failure, pass_first_batches

if TYPE_CHECKING:
    from collections.abc import Callable


# When a second worker ends, torch's handler reports the first again, also in torch's __del__.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def kill(worker: Any) -> None:
    """Kill a worker; the error may be raised at any point from here on."""
    worker.kill()


def after_pause(act: Callable[[], object]) -> Callable[[], object]:
    """Act when the rank has taken all earlier batches and waits; an earlier exit would truncate a batch being sent."""

    def paused() -> object:
        time.sleep(0.3)
        return act()

    return paused


@pytest.mark.parametrize(
    ("act", "cause"),
    [
        (kill_worker, "DataLoader worker (pid) is killed by signal: Killed. "),
        (crash_worker, "DataLoader worker (pid) is killed by signal: Segmentation fault. "),
        (exit_worker, "DataLoader worker (pid) exited unexpectedly with exit code 3. Details are lost due to"),
    ],
)
def test_a_worker_that_dies(loader_class: LoaderClass, act: Callable[[], object], cause: str) -> None:
    """Torch's RuntimeError is raised, with torch's own report as its cause, and no other worker is left."""
    dataset = At(index=90, act=after_pause(act), size=200)
    iterator = iter(loader_class(dataset, batch_size=2, num_workers=2))
    with pytest.raises(RuntimeError) as caught:
        list(iterator)
    texts = [failure(error).text for error in (caught.value, caught.value.__cause__) if error]
    assert texts[-1].startswith(cause)
    assert len(texts) == 1 or texts[0] == "DataLoader worker (pid) exited unexpectedly"
    del iterator, caught
    assert not multiprocessing.active_children()


def test_a_worker_killed_while_the_ring_runs(loader_class: LoaderClass) -> None:
    """A worker that is killed is reported at one of the next batches, and the batches in hand do not change."""
    loader = loader_class(Rows(2000, delay_s=0.001), batch_size=2, num_workers=2)
    iterator: Any = iter(loader)
    held = [batch["x"] for batch in pass_first_batches(loader, iterator)]
    expected = [batch.clone() for batch in held]
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid"):
        list(itertools.chain(map(kill, iterator._workers[1:]), iterator))
    assert all(map(torch.equal, held, expected))


def test_timeout(loader_class: LoaderClass) -> None:
    """A batch that takes too long is torch's error, and not before the time is over."""
    loader = loader_class(At(index=9, act=sleep_long), batch_size=2, num_workers=1, timeout=60)
    iterator: Any = iter(loader)
    for _ in range(4):
        next(iterator)
    iterator._timeout = 0.4  # not earlier: the worker has to start
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"^DataLoader timed out after 0.4 seconds$"):
        next(iterator)
    assert time.monotonic() - start > 0.3
