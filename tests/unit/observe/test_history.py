"""Rates and curves of a running job over several samples."""

from __future__ import annotations

import pytest

from numapin.observe.history import History, LoaderState
from tests.unit.watched import job, loop, rank


def _history(*loops: tuple[float, float, int], interval_s: float = 1.0) -> History:
    """Return the history of rank 0, whose loop has these totals: waited, stepped, steps."""
    history = History()
    for waited_s, stepped_s, num_steps in loops:
        history = history.added(job(rank(loop=loop(waited_s, stepped_s, num_steps)), interval_s=interval_s))
    return history


def test_rates_between_samples() -> None:
    """Steps per second, the share of waiting and the bytes come from the totals in between."""
    pace = _history((0.0, 10.0, 100), (0.5, 12.0, 120), (1.0, 14.0, 140), interval_s=2.0).pace(0)
    assert (pace.steps_per_s, pace.wait_share, pace.curve) == (10.0, 0.25, (10.0, 10.0))
    assert pace.bytes_per_s == pytest.approx(10 * 1e6)
    assert pace.copy_share == pytest.approx(40 * 1e6 / 20e9 / 4.0)
    assert pace.state is LoaderState.BEHIND


def test_first_sample() -> None:
    """After one sample, the rates are those since the loops began; there is no curve yet."""
    pace = _history((0.1, 10.0, 50)).pace(0)
    assert (pace.steps_per_s, pace.wait_share, pace.curve, pace.state) == (5.0, 0.01, (), LoaderState.OK)


def test_steps_longer_than_an_interval() -> None:
    """A step every third interval is a third of a step per second, and the loader is not idle in between."""
    pace = _history(*((0.0, 3.0 * (i // 3), i // 3) for i in range(13))).pace(0)
    assert pace.steps_per_s == 0.4  # 4 steps in 10 intervals
    assert pace.state is LoaderState.OK


def test_no_step() -> None:
    """A loop that stands still is idle; a rank without our loader has no pace at all."""
    idle = _history((1.0, 2.0, 3), (1.0, 2.0, 3)).pace(0)
    assert (idle.steps_per_s, idle.wait_share, idle.state) == (0.0, None, LoaderState.IDLE)
    none = History().added(job(rank(loop=None))).pace(0)
    assert (none.steps_per_s, none.curve, none.state) == (None, (), LoaderState.NONE)


def test_restarted_rank() -> None:
    """Another process begins anew: its totals are not compared with those of the one before."""
    history = _history((1.0, 50.0, 500))
    history = history.added(job(rank(loop=loop(0.0, 1.0, 10), pid=99)))
    assert (history.pace(0).steps_per_s, history.pace(0).curve) == (10.0, ())


def test_older_rank() -> None:
    """A rank of an older numapin does not count steps: its rate is unknown, its waiting is not."""
    pace = _history((0.0, 1.0, 0), (0.5, 2.0, 0)).pace(0)
    assert (pace.steps_per_s, pace.wait_share, pace.curve) == (None, 0.5, ())


def test_past_is_bounded() -> None:
    """A long job keeps the points of the widest curve only."""
    assert len(_history(*((0.0, float(i), i) for i in range(200))).pace(0).curve) == 63
