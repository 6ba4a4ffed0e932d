"""The choices of a person who looks at a running job. Pure.

Comes in: names of keys. Goes out: `TopView`: order, selected rank, details, pause.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numapin.observe.history import History
    from numapin.observe.top import TopRank


class RowOrder(StrEnum):
    """The order of the rows."""

    RANK = "rank"
    SLOWEST = "steps/s"
    WAIT = "wait"
    CPU = "CPU"
    OFF = "off plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopView:
    """The state of the screen.

    Attributes:
        order: The order of the rows.
        selected: The selected local rank. None: none.
        shows_details: Whether the details of the selected rank are shown.
        is_paused: Whether the figures stand still.
    """

    order: RowOrder = RowOrder.RANK
    selected: int | None = None
    shows_details: bool = False
    is_paused: bool = False

    def pressed(self, key: str, rows: Sequence[int]) -> TopView:
        """Return the view after a key; `rows` are the ranks from top to bottom. An unknown key changes nothing."""
        return _KEYS[key](self, rows) if key in _KEYS else self


def _sorted(view: TopView, _rows: Sequence[int]) -> TopView:
    orders = list(RowOrder)
    return replace(view, order=orders[(orders.index(view.order) + 1) % len(orders)])


def _paused(view: TopView, _rows: Sequence[int]) -> TopView:
    return replace(view, is_paused=not view.is_paused)


def _detailed(view: TopView, rows: Sequence[int]) -> TopView:
    selected = view.selected if view.selected in rows else next(iter(rows), None)
    return replace(view, selected=selected, shows_details=not view.shows_details and selected is not None)


def _plain(view: TopView, _rows: Sequence[int]) -> TopView:
    return replace(view, shows_details=False, selected=None)


def _moved(by: int) -> Callable[[TopView, Sequence[int]], TopView]:
    def move(view: TopView, rows: Sequence[int]) -> TopView:
        if not rows:
            return view
        if view.selected not in rows:
            return replace(view, selected=rows[0 if by > 0 else -1])
        at = rows.index(view.selected) + by
        return replace(view, selected=rows[min(max(at, 0), len(rows) - 1)])

    return move


_KEYS: Final[Mapping[str, Callable[[TopView, Sequence[int]], TopView]]] = {
    "s": _sorted,
    "p": _paused,
    " ": _paused,
    "d": _detailed,
    "enter": _detailed,
    "escape": _plain,
    "down": _moved(1),
    "j": _moved(1),
    "up": _moved(-1),
    "k": _moved(-1),
}


def ordered(ranks: Sequence[TopRank], history: History, order: RowOrder) -> tuple[TopRank, ...]:
    """Return the ranks in an order; the ones that need attention come first, unknown ones last, then by number."""
    return tuple(sorted(ranks, key=lambda rank: (_ATTENTION[order](rank, history), rank.plan.local_rank)))


def _or_last(value: float | None) -> float:
    return float("inf") if value is None else value


def _slowness(rank: TopRank, history: History) -> float:
    return _or_last(history.pace(rank.plan.local_rank).steps_per_s)


def _waiting(rank: TopRank, history: History) -> float:
    share = history.pace(rank.plan.local_rank).wait_share
    return _or_last(None if share is None else -share)


def _cpu(rank: TopRank, _history: History) -> float:
    return _or_last(None if rank.cpu_share is None else -rank.cpu_share)


def _off(rank: TopRank, _history: History) -> float:
    return -float(rank.num_off_plan) - (rank.remote_share or 0.0)


_ATTENTION: Final[Mapping[RowOrder, Callable[[TopRank, History], float]]] = {
    RowOrder.RANK: lambda _rank, _history: 0.0,
    RowOrder.SLOWEST: _slowness,
    RowOrder.WAIT: _waiting,
    RowOrder.CPU: _cpu,
    RowOrder.OFF: _off,
}
