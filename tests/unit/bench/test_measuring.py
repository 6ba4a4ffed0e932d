"""What measuring processes report where there is no GPU, measured in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.unit.bench.seam import alloc, loader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


class Connection:
    """The harness that a measuring function talks to."""

    def __init__(self) -> None:
        self.figures: Mapping[str, float] = {}
        self.details: Mapping[str, object] = {}

    def wait_for_start(self, idle: Callable[[], object]) -> None:
        """Start at once."""
        idle()

    def report(
        self, figures: Mapping[str, float], *, details: Mapping[str, object], idle: Callable[[], object]
    ) -> None:
        """Keep what is reported."""
        idle()
        self.figures, self.details = figures, details


@pytest.fixture(autouse=True)
def _threads_of_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore torch's number of threads, and the variable that a measuring process sets."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("peer", ["torch", "numapin-transport", "numapin-balanced"])
def test_a_loader(peer: str) -> None:
    """A window has its batches per second, bytes and CPU time; numapin's loader also its hits and statistics."""
    made, sizes = Connection(), {"num_workers": 1, "prefetch": 2, "num_ranks": 1, "num_batches": 3}
    times = {"seconds": 0.05, "warm_up_s": 0.0}
    loader.measure({"case": "gil-transport", "peer": peer, "gpu": None, **sizes, **times}, made)  # type: ignore[arg-type]
    rate = made.figures["batches_per_s"]
    assert made.figures["gbps"] == pytest.approx(rate * (loader.CASES["1MB"].batch_bytes + 32 * 8) / 1e9)
    assert made.figures["num_batches"] >= 3
    assert min(made.figures["first_batch_s"], made.figures["main_cpu_ms"]) > 0
    is_torchs = peer == "torch"
    assert ("hits" in made.figures) != is_torchs
    assert (made.details["stats"] is None) == is_torchs


@pytest.mark.parametrize("peer", ["pageable", "fresh"])
def test_allocation(peer: str) -> None:
    """Each step is timed; the sum of the first two is the time until memory is filled."""
    made = Connection()
    alloc.measure({"peer": peer, "num_bytes": 1 << 20, "num_samples": 3, "gpu": None}, made)  # type: ignore[arg-type]
    assert made.figures.keys() == {"alloc_us", "touch_us", "again_us", "filled_us"}
    assert made.figures["filled_us"] >= made.figures["touch_us"] > 0
