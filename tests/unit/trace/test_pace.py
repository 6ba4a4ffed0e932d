"""Which optimizer's steps count, and when a step is overdue."""

from __future__ import annotations

from tests.unit.trace.seam import FollowedOptimizer, Pace


class Optimizer:
    """A stand-in for an optimizer."""


class TestFollowed:
    """Only one optimizer's steps count."""

    def test_the_first_one(self) -> None:
        """Other optimizers do not count, even if they step a few times as often."""
        first, *others = (Optimizer() for _ in range(30))
        followed = FollowedOptimizer()
        for _ in range(50):
            assert followed.counts(first)
            assert not any(followed.counts(other) for other in others for _ in range(5) if other is others[0])
            assert not any(followed.counts(other) for other in others)

    def test_a_collected_optimizer(self) -> None:
        """When the followed optimizer is collected, the next one that steps is followed."""
        followed, first, second = FollowedOptimizer(), Optimizer(), Optimizer()
        assert followed.counts(first)
        assert not followed.counts(second)
        del first
        assert followed.counts(second)

    def test_an_optimizer_that_no_longer_steps(self) -> None:
        """Another one is followed after 20 steps, even though the first one still exists."""
        followed, first, second = FollowedOptimizer(), Optimizer(), Optimizer()
        assert followed.counts(first)
        assert [followed.counts(second) for _ in range(25)] == [False] * 19 + [True] * 6
        assert not followed.counts(first)


def is_overdue(pace: Pace, now_s: float) -> bool:
    """Return whether there is a reason to end the trace."""
    return bool(pace.overdue("batch", now_s))


class TestPace:
    """The next step is overdue after ten times the usual step time."""

    def test_limit(self) -> None:
        """The usual time is the median of recent steps; before the first one the limit is a minute."""
        pace = Pace()
        assert not pace.overdue("batch", 1000.0)
        pace.stepped(0.0)
        assert (is_overdue(pace, 59.0), is_overdue(pace, 61.0)) == (False, True)
        for now_s in (300.0, 301.0, 302.0):  # the first one compiled
            pace.stepped(now_s)
        assert pace.limit_s == 10
        assert (is_overdue(pace, 311.0), is_overdue(pace, 313.0)) == (False, True)

    def test_time_in_a_loader(self) -> None:
        """The start of an epoch's workers does not make a step overdue; a loader that hangs does."""
        pace = Pace()
        for n in range(3):
            pace.stepped(float(n))
        pace.enter_loader(2.5)
        pace.enter_loader(50.0)  # one that the first one's batches are made from
        pace.leave_loader(60.0)
        assert not pace.overdue("batch", 99.0)
        pace.leave_loader(100.0)
        assert (pace.limit_s, is_overdue(pace, 108.0), is_overdue(pace, 110.0)) == (10, False, True)
        assert pace.overdue("batch", 110.0) == "no batch for 10 s, besides 98 s in DataLoaders"
        pace.enter_loader(100.5)
        assert (is_overdue(pace, 300.0), is_overdue(pace, 315.0)) == (False, True)
        pace.leave_loader(800.0)
        pace.stepped(801.0)
        assert pace.overdue("batch", 815.0) == "no batch for 10 s"

    def test_short_steps(self) -> None:
        """The limit is at least two seconds, even for steps of a millisecond."""
        pace = Pace()
        for n in range(100):
            pace.stepped(n / 1000)
        assert pace.limit_s == 2
