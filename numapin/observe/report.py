"""What was requested, applied and observed of each rank of a run, as data. Pure.

Comes in: what `verify` found. Goes out: `VerifyReport`, which goes to JSON (schema numapin.report/1).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numapin.observe.model import ObservedRank
    from numapin.plan.model import RankPlan

SCHEMA: Final = "numapin.report/1"


class VerifySeverity(StrEnum):
    """How a finding counts."""

    ERROR = "error"
    """The plan does not hold."""
    UNVERIFIED = "unverified"
    """Nobody can tell whether it does."""
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyFinding:
    """One thing that is not as planned: what, where it was seen, and what to do."""

    severity: VerifySeverity
    what: str
    where: str
    remedy: str

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {"severity": self.severity.value, "what": self.what, "where": self.where, "remedy": self.remedy}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank: what was requested, what it recorded as applied (None: it recorded nothing), what was observed."""

    requested: RankPlan
    applied: Mapping[str, object] | None
    observed: ObservedRank
    findings: tuple[VerifyFinding, ...]

    @property
    def holds(self) -> bool | None:
        """Return whether this rank is as planned; None where that could not be verified."""
        found = {finding.severity for finding in self.findings}
        return False if VerifySeverity.ERROR in found else None if VerifySeverity.UNVERIFIED in found else True

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {
            "local_rank": self.requested.local_rank,
            "pid": self.observed.pid,
            "requested": self.requested.to_json(),
            "applied": self.applied,
            "observed": {"processes": [process.to_json() for process in self.observed.processes]},
            "findings": [finding.to_json() for finding in self.findings],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `verify` found of one run on this host."""

    run: str
    ranks: tuple[RankReport, ...]

    @property
    def holds(self) -> bool | None:
        """Return whether the plan holds; None where nothing contradicts it and something could not be verified.

        Of a report without ranks nothing was verified.
        """
        found = {rank.holds for rank in self.ranks} or {None}
        return False if False in found else None if None in found else True

    def to_json(self) -> dict[str, object]:
        """Return the JSON form (schema numapin.report/1)."""
        return {
            "schema": SCHEMA,
            "run": self.run,
            "ranks": [rank.to_json() for rank in self.ranks],
            "holds": self.holds,
        }
