"""What the ranks of a run have measured so far, from their files. Edge.

Comes in: the folder that the ranks write into. Goes out: their `RankSteps`, whether all are done, and how far they are
in words.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from numapin.base.not_none import not_none
from numapin.base.plural import counted
from numapin.base.printable import printable
from numapin.base.records import read_record
from numapin.compare.record import SCHEMA, Phase, RankSteps, StepUnit
from numapin.errors import MachineFileError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_REST_WAIT_S: Final = 30.0  # for ranks that seem not to step, once another one has measured its last step
_SHOWN_CHARS: Final = 300
NO_STEP: Final = (
    "no step: no process took a batch from a torch DataLoader or stepped a torch optimizer, or the command's Python "
    "lacks numapin or our PYTHONPATH"
)


@dataclass(slots=True)
class RankFiles:
    """The ranks' files as they were read last, by name."""

    folder: Path
    found: dict[str, RankSteps] = field(default_factory=dict)
    done_s: float | None = None
    """The time at which the first rank had measured its last step."""

    def read(self, now_s: float) -> bool:
        """Read the files, and return whether one has changed."""
        before = dict(self.found)
        for path in sorted(self.folder.glob("rank-*.json")):
            with suppress(OSError, MachineFileError):  # a file that is still empty
                text = path.read_text("utf-8")
                self.found[path.name] = read_record(RankSteps, text, source=path.name, hint="", schema=SCHEMA)
        if self.done_s is None and self._is_any(Phase.DONE):
            self.done_s = now_s
        return self.found != before

    @property
    def ranks(self) -> Mapping[int, RankSteps]:
        """Return the measurements of each rank; for a restarted one, since its last start."""
        return {rank.rank: rank for rank in sorted(self.found.values(), key=lambda rank: rank.restart)}

    @property
    def measured(self) -> Sequence[RankSteps]:
        """Return the ranks that have measured steps, and measure no more."""
        return [rank for rank in self.ranks.values() if rank.has_steps]

    def is_done(self, now_s: float) -> bool:
        """Return whether all ranks are done, or all that step. One that is measuring is waited for."""
        if self.done_s is None:
            return False
        ranks = self.ranks.values()
        phases = [rank.phase for rank in ranks]
        is_all = phases.count(Phase.DONE) >= max(rank.num_ranks for rank in ranks)
        others_step = Phase.MEASURING in phases
        return is_all or (not others_step and now_s - self.done_s > _REST_WAIT_S)

    def failure(self) -> str | None:
        """Return why a process could not be measured; None if none has failed."""
        for path in self.folder.glob("failed-*"):
            with suppress(OSError):
                text = printable(path.read_text("utf-8", errors="replace")[:_SHOWN_CHARS])
                return f"its steps cannot be measured: process {path.name.removeprefix('failed-')}: {text}"
        return None

    def doing(self) -> str:
        """Return what the job is doing, for the progress."""
        if self._is_any(Phase.MEASURING):
            return "measuring"
        return "first steps" if self.found else "starting"

    def _is_any(self, phase: Phase) -> bool:
        return any(rank.phase is phase for rank in self.found.values())

    def progress(self) -> str:
        """Return how far the rank is that has stepped least."""
        if not self.ranks:
            return NO_STEP
        rank = min(self.ranks.values(), key=lambda rank: rank.num_seen)
        if rank.unit is StepUnit.OPTIMIZER_STEP and not rank.num_seen:
            return f"no optimizer step of rank {rank.rank}, though the script has made an optimizer and taken a batch"
        return f"{counted(rank.num_seen, rank.unit)} of rank {rank.rank}"


def oddities(ranks: Sequence[RankSteps], num_steps: int) -> list[str]:
    """Return what is odd about the measured steps of a run that was to measure `num_steps`."""
    num_ranks = ranks[0].num_ranks
    missing = f"{len(ranks)} of {counted(num_ranks, 'rank')} measured steps" if len(ranks) < num_ranks else None
    return not_none([missing, _why_short(ranks, num_steps)])


def _why_short(ranks: Sequence[RankSteps], num_steps: int) -> str | None:
    """Return why a rank measured fewer steps; None if none did."""
    ended = next((rank for rank in ranks if rank.phase is Phase.ENDED), None)
    if ended is not None:
        return f"the script ended after {counted(ended.num_seen, ended.unit)}"
    is_short = min(len(rank.step_ns) for rank in ranks) < num_steps
    return "cut short, because its steps took four times --seconds" if is_short else None
