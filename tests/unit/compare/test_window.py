"""Which steps of a loop are measured, and whose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.compare.seam import Phase, Place, StepMeter, StepSettings, StepWindow, claim_file

if TYPE_CHECKING:
    from pathlib import Path

S = 10**9


def window(*, skip: int = 2, steps: int = 3, seconds: float = 100) -> StepWindow:
    """Return a window."""
    return StepWindow(skip=skip, steps=steps, limit_ns=int(seconds * S))


def test_steps_and_borders() -> None:
    """After two steps, three are measured; the GPU is waited for at the begin and the end of the window only."""
    one, noted, borders = window(), [], []
    for time in (10, 20, 25, 31, 38):
        borders.append(one.is_border(time))
        noted.append(one.stepped(time))
    assert borders == [False, True, False, False, True]
    assert noted == [True, True, False, False, True]
    assert not one.stepped(50)
    assert (one.first_ns, one.begin_ns, one.step_ns, one.is_done) == (10, 20, (5, 6, 7), True)


def test_the_window_begins_after_what_was_fetched_ahead() -> None:
    """The measurement begins that many steps later, at most as many as are measured; once begun, it stays there."""
    one = window(skip=1, steps=3)
    one.begin_after(2)
    assert [one.stepped(time) for time in (10, 20)] == [True, True]
    one.begin_after(3)
    assert (one.skip, one.begin_ns) == (2, 20)
    one = window(skip=1, steps=3)
    one.begin_after(1000)
    assert one.skip == 3


@given(
    st.integers(1, 5), st.integers(2, 8), st.floats(0.01, 50), st.lists(st.integers(1, 10 * S), min_size=1, max_size=30)
)
def test_steps_fill_the_window(skip: int, steps: int, seconds: float, took: list[int]) -> None:
    """The measured steps follow each other without a gap, are at most those asked for, and none is a first one."""
    one, now = window(skip=skip, steps=steps, seconds=seconds), 0
    for step in took:
        now += step
        one.stepped(now)
    assert len(one.step_ns) <= steps
    assert list(one.step_ns) == took[skip : skip + len(one.step_ns)]
    assert one.is_done == (len(one.step_ns) == steps or (len(one.step_ns) > 1 and sum(one.step_ns) >= seconds * S - 1))


def test_one_process_takes_over_from_one_that_has_ended(tmp_path: Path) -> None:
    """Once the first process of a rank has ended, one other is measured, also before it has written anything."""
    settings, place = StepSettings(folder=str(tmp_path), skip=1, steps=2), Place(0, 0, 1, 1, 0)
    path = claim_file(settings, place)
    StepMeter(settings=settings, place=place, path=path, pid=1 << 30).write(Phase.STARTED)
    assert claim_file(settings, place) == path
    with pytest.raises(FileExistsError):
        claim_file(settings, place)
