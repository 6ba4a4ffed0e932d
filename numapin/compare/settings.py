"""Settings that `numapin compare` passes to its ranks in their environment. Pure.

Comes in: the command's options, or the text of NUMAPIN_STEPS. Goes out: the other of the two.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from numapin.base.strict_json import decode, encode


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Measure up to `steps` steps or `seconds` seconds after the first `skip` steps; write into the folder."""

    folder: str
    skip: int
    steps: int
    seconds: float

    def to_text(self) -> str:
        """Return the text that `from_text` reads."""
        return encode(asdict(self), indent=None)

    @classmethod
    def from_text(cls, text: str) -> StepSettings | None:
        """Return the settings, None if the variable is unset or empty."""
        given: Any = decode(text) if text else None
        return None if given is None else cls(**given)
