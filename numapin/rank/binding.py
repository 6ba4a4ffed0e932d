"""The reader of NUMAPIN_BINDING.

The rank's own start does not need it and does not import it.
"""

from __future__ import annotations

from typing import Final

from numapin.plan.model import RankPlan
from numapin.rank.become import BINDING

_HINT: Final = f"numapin sets it for each rank; to go on without it: unset {BINDING}"


def read_binding(text: str) -> RankPlan:
    """Return the rank's part of the plan. Raises MachineFileError that names the variable."""
    return RankPlan.from_json(text, source=BINDING, hint=_HINT)
