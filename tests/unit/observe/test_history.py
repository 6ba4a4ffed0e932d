"""The pace of a running job's loops over several samples."""

from __future__ import annotations

from tests.unit.observe.seam import LoopPace, LoopPaces
from tests.unit.watched import job, loop, rank


def _pace(*loops: tuple[float, float, int], interval_s: float = 1.0) -> LoopPace:
    """Return the pace of rank 0, whose loop has these totals: waited, stepped, steps."""
    paces, found = LoopPaces(), {}
    for waited_s, stepped_s, num_steps in loops:
        found = paces.add(job(rank(loop=loop(waited_s, stepped_s, num_steps)), interval_s=interval_s))
    return found[0]


def test_rates_between_samples() -> None:
    """Steps per second and the share of waiting come from the totals in between."""
    assert _pace((0.0, 10.0, 100), (0.5, 12.0, 120), (1.0, 14.0, 140), interval_s=2.0) == (10.0, 0.25)


def test_first_sample() -> None:
    """After one sample, the rate is that since the loops began."""
    assert _pace((0.1, 10.0, 50)).steps_per_s == 5.0


def test_steps_longer_than_an_interval() -> None:
    """A step every third interval is a third of a step per second."""
    assert _pace(*((0.0, 3.0 * (i // 3), i // 3) for i in range(13))).steps_per_s == 0.4  # 4 steps in 10 intervals


def test_no_step() -> None:
    """A loop that stands still makes no steps, and its waiting is unknown; a rank without our loader has no pace."""
    assert _pace((1.0, 2.0, 3), (1.0, 2.0, 3)) == (0.0, None)
    assert LoopPaces().add(job(rank(loop=None))) == {}


def test_restarted_rank() -> None:
    """Another process begins anew: its totals are not compared with those of the one before."""
    paces = LoopPaces()
    paces.add(job(rank(loop=loop(1.0, 50.0, 500))))
    assert paces.add(job(rank(loop=loop(0.0, 1.0, 10), pid=99)))[0].steps_per_s == 10.0
