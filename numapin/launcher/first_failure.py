"""The order in which ranks failed: which was the first, and why it is not the earliest one. Pure.

Comes in: ranks that ended. Goes out: the same ranks in order, and a reason.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Final

from numapin.base.plural import listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numapin.launcher.failure import EndedRank

_SOON_S: Final = 60.0
"""A cause is seen at most this long after its consequences."""


def in_order(ranks: Iterable[EndedRank], *, is_only_host: bool) -> tuple[tuple[EndedRank, ...], str]:
    """Return the ranks in the order in which they failed, and why the first is not the earliest; "" if it is.

    If the earliest failures are exceptions about a lost connection, the first is the earliest other failure. A rank
    that dies closes its connections before its end is seen: GPU drivers and core dumps take their time. One that raises
    may close them in a `finally`, before its exception has left the program. But if the lost peer can be on another
    host, a rank that aborted may have lost it, too.
    """
    order = sorted(ranks, key=_by_failure)
    consequences = list(takewhile(_is_consequence, order))
    if not consequences:
        return tuple(order), ""
    rest, begun = order[len(consequences) :], order[0]
    first = _cause_among(rest, begun, is_only_host=is_only_host)
    if first is None:
        return tuple(order), _where_to_look(rest, is_only_host=is_only_host)
    return (first, *(rank for rank in order if rank is not first)), _why_first(first, begun)


def _is_consequence(rank: EndedRank) -> bool:
    """Return whether a rank failed because it lost its connection to another rank."""
    return rank.state == "failed" and rank.lost_peer


def _cause_among(ranks: Sequence[EndedRank], begun: EndedRank, *, is_only_host: bool) -> EndedRank | None:
    """Return the earliest failure that can be why `begun` lost its connection; an abort only if there is no other."""
    soon = [rank for rank in ranks if _is_cause(rank) and rank.failed_s - begun.failed_s <= _SOON_S]
    certain = [rank for rank in soon if not rank.has_aborted]
    causes = certain or (soon if is_only_host else [])
    return next(iter(causes), None)


def _is_cause(rank: EndedRank) -> bool:
    """Return whether a failure can be why others lost their connections."""
    return rank.is_silent or (rank.state == "failed" and bool(rank.exception) and not rank.lost_peer)


def _why_first(first: EndedRank, begun: EndedRank) -> str:
    """Return why a rank counts as the first, though `begun` failed before it."""
    earlier_s = first.failed_s - begun.failed_s
    what = f"the {'exception' if first.exception else 'end'} of rank {first.rank}"
    return f"rank {begun.rank} failed {earlier_s:.1f} s before {what} was seen, but because of a lost connection"


def _where_to_look(rest: Sequence[EndedRank], *, is_only_host: bool) -> str:
    """Return which ranks may be why the first one lost its connection, though none of them reported a failure."""
    suspects = [rank.rank for rank in rest if rank.state != "failed"]
    where = (listed("rank", suspects) if suspects else "", "" if is_only_host else "the other hosts")
    shown = " and ".join(filter(None, where))
    return f"it lost its connection to another rank; look also at {shown}" if shown else ""


def _by_failure(rank: EndedRank) -> tuple[bool, bool, bool, float]:
    """Return the place of a rank in the order of failures, by their times.

    A rank that was running when the first failure was seen can still have failed before it: Python takes its time to
    end, and the exact time of the exception says so.
    """
    ended_by_us = rank.was_ended and rank.raised_s is None
    return rank.state == "finished", ended_by_us, rank.state != "failed", rank.failed_s
