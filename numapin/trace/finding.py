"""A finding about a trace, and what all findings share. Pure.

Comes in: what a check found in an `Analysis`. Goes out: a `TraceFinding`, with times in its evidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from numapin.trace.analysis import Analysis

FLOOR: Final = 0.01
"""The share of the step time below which nothing is reported."""
_IN_WORDS: Final = {
    "other": "other work of the loop",
    "copy": "copies",
    "pin": "pinning memory",
    "epoch": "the start of an epoch",
    "wait": "waiting for data",
}
"""The parts of a step whose names are not words of a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFinding:
    """Something that costs time, or the statement that nothing does.

    `costs` is the share of the step time that the remedy can save at most; 0 if nothing can be gained. `part` is the
    part of a step that it is about, None if there is no single one.
    """

    what: str
    costs: float
    evidence: str
    remedy: str
    part: str | None = None


def ms_per_step(analysis: Analysis, time_us: float) -> str:
    """Return a time of all steps as milliseconds per step."""
    return f"{time_us / len(analysis.trace.steps) / 1000:.2f} ms"


def ms(time_us: float) -> str:
    """Return a time as milliseconds."""
    return f"{time_us / 1000:.1f} ms"


def in_words(part: str) -> str:
    """Return a part of a step as it is named in a sentence."""
    return _IN_WORDS.get(part, part)
