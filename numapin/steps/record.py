"""The measurements of a rank, and what it is asked to measure, as data.

Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Annotated, Any, Final

from numapin.base.records import AtMost
from numapin.base.strict_json import decode, encode

SCHEMA: Final = "numapin.steps/1"
TRACE: Final = ".trace.json"
"""The end of the name of a rank's trace, beside its record."""
MOST_STEPS: Final = 10_000
FEWEST_STEPS: Final = 2
"""The fewest steps of a window: one step is no average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Record up to `steps` steps after the first `skip` steps; write into the folder.

    `numapin compare` measures fewer if these take more than `seconds` seconds.
    """

    folder: str
    skip: int
    steps: int
    seconds: float = 0.0

    @property
    def loads(self) -> str:
        """The folder where workers of a traced rank record when they made batches, until its trace is written."""
        return f"{self.folder}/.loads"

    def to_text(self) -> str:
        """Return the text that `from_text` reads."""
        return encode(asdict(self), indent=None)

    @classmethod
    def from_text(cls, text: str) -> StepSettings | None:
        """Return the settings, None if the variable is unset or empty."""
        given: Any = decode(text) if text else None
        return None if given is None else cls(**given)


class Phase(StrEnum):
    """The progress of a rank."""

    STARTED = "started"
    """It has stepped."""
    MEASURING = "measuring"
    DONE = "done"
    ENDED = "ended"
    """The script ended before the last step that was asked for."""


class StepUnit(StrEnum):
    """The unit in which steps are counted."""

    OPTIMIZER_STEP = "optimizer step"
    BATCH = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """The measured steps of one rank, and what happened during them. None: unknown."""

    rank: int
    local_rank: int
    num_ranks: int
    restart: int  # how often the launcher has restarted the ranks
    pid: int
    phase: Phase
    unit: StepUnit
    num_seen: int  # steps until now
    num_skipped: int = 0  # steps before the window
    num_ahead: int = 0  # the most batches that a DataLoader of the loop fetches ahead; 0 without workers
    first_ns: int | None = None  # the end of the first step
    begin_ns: int | None = None  # the begin of the window
    step_ns: Annotated[tuple[int, ...], AtMost(MOST_STEPS)] = ()  # the time of each step in the window
    waited_ns: int = 0  # the time that the loop was inside `next()` of a DataLoader during the window
    num_batches: int = 0  # that the loop took during the window
    num_samples: int | None = None  # in these batches, by the loader's batch size
    num_local_ranks: int = 0  # on this host; 0: unknown
    trace: str | None = None  # the file with the trace, beside the record
    num_traced: int = 0  # whole steps in the trace
    reason: str = ""  # why the trace has fewer steps than were asked for, or why there is none

    @property
    def has_steps(self) -> bool:
        """Return whether the rank has measured enough steps, and measures no more."""
        return self.phase in (Phase.DONE, Phase.ENDED) and len(self.step_ns) >= FEWEST_STEPS

    @property
    def window_s(self) -> float:
        """The length of the window."""
        return sum(self.step_ns) / 1e9
