"""Whose steps count, and when one is overdue."""

from __future__ import annotations

from numapin.trace.pace import Followed, Pace


class Optimizer:
    """Something that steps."""


class TestFollowed:
    """One optimizer's steps are the loop's."""

    def test_the_first_one(self) -> None:
        """Others that step as often, or a few times as often, do not count."""
        first, *others = (Optimizer() for _ in range(30))
        followed = Followed()
        for _ in range(50):
            assert followed.counts(first)
            assert not any(followed.counts(other) for other in others for _ in range(5) if other is others[0])
            assert not any(followed.counts(other) for other in others)

    def test_one_that_is_gone(self) -> None:
        """When the followed one is collected, the next that steps is followed."""
        followed, first, second = Followed(), Optimizer(), Optimizer()
        assert followed.counts(first)
        assert not followed.counts(second)
        del first
        assert followed.counts(second)

    def test_one_that_steps_no_more(self) -> None:
        """Another that stepped 20 times since is followed, though the first one is kept somewhere."""
        followed, first, second = Followed(), Optimizer(), Optimizer()
        assert followed.counts(first)
        assert [followed.counts(second) for _ in range(25)] == [False] * 19 + [True] * 6
        assert not followed.counts(first)


class TestPace:
    """The next step is overdue after ten times a step's usual time."""

    def test_limit(self) -> None:
        """Usual is the median of the last ones; before any is known, a minute."""
        pace = Pace()
        assert not pace.is_overdue(1000.0)
        pace.stepped(0.0)
        assert (pace.is_overdue(59.0), pace.is_overdue(61.0)) == (False, True)
        for now_s in (300.0, 301.0, 302.0):  # the first one compiled
            pace.stepped(now_s)
        assert pace.limit_s == 10
        assert (pace.is_overdue(311.0), pace.is_overdue(313.0)) == (False, True)

    def test_short_steps(self) -> None:
        """Steps of a millisecond may pause for two seconds."""
        pace = Pace()
        for n in range(100):
            pace.stepped(n / 1000)
        assert pace.limit_s == 2
