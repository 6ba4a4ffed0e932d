"""The report on a run: what was requested, applied and observed for each rank, as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from numapin.base.records import to_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numapin.observe.model import ObservedRank
    from numapin.plan.model import RankPlan

SCHEMA: Final = "numapin.report/1"


class VerifySeverity(StrEnum):
    """The weight of a finding."""

    ERROR = "error"
    """The plan does not hold."""
    UNVERIFIED = "unverified"
    """It is unknown whether the plan holds."""
    WARNING = "warning"
    NOTE = "note"


_HOLDS: Final = {VerifySeverity.ERROR: False, VerifySeverity.UNVERIFIED: None}
"""Whether the plan holds, for the findings that decide it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyFinding:
    """One difference from the plan: what it is, where it was seen, and the remedy."""

    severity: VerifySeverity
    what: str
    where: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank: the request, the record of what was applied (None if missing), and what was observed."""

    requested: RankPlan
    applied: Mapping[str, object] | None
    observed: ObservedRank
    findings: tuple[VerifyFinding, ...]
    num_off_plan: int  # threads

    @property
    def holds(self) -> bool | None:
        """Return whether this rank is as planned; None if that could not be verified."""
        return _all_hold(_HOLDS.get(finding.severity, True) for finding in self.findings)

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {
            **unobserved(self.requested, self.observed.pid, self.applied),
            "observed": {"processes": [process.to_json() for process in self.observed.processes]},
            "findings": [to_json(finding) for finding in self.findings],
        }


def unobserved(requested: RankPlan, pid: int | None, applied: Mapping[str, object] | None) -> dict[str, object]:
    """Return the JSON form of a rank that has not been observed; `pid` is None if it did not start."""
    return {
        "local_rank": requested.local_rank,
        "pid": pid,
        "requested": requested.to_json(),
        "applied": applied,
        "observed": {"processes": []},
        "findings": [],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The findings of `verify` on one run on this host."""

    run: str
    ranks: tuple[RankReport, ...]

    @property
    def holds(self) -> bool | None:
        """Return whether the plan holds; None if nothing contradicts it but something could not be verified.

        In a report without ranks, nothing was verified.
        """
        return _all_hold(rank.holds for rank in self.ranks) if self.ranks else None

    def to_json(self) -> dict[str, object]:
        """Return the JSON form (schema numapin.report/1)."""
        return {
            "schema": SCHEMA,
            "run": self.run,
            "ranks": [rank.to_json() for rank in self.ranks],
            "holds": self.holds,
        }


def _all_hold(verdicts: Iterable[bool | None]) -> bool | None:
    """Return False if a verdict is False, else None if one is None, else True."""
    found = set(verdicts)
    return next((worst for worst in (False, None) if worst in found), True)
