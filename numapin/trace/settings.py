"""Settings that `numapin trace` passes to its ranks in their environment."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from numapin.base.strict_json import decode, encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Trace `steps` steps after the first `skip` steps, into the folder."""

    folder: str
    steps: int
    skip: int

    @property
    def loads(self) -> str:
        """The folder where workers record when they made batches, until the ranks' traces are written."""
        return f"{self.folder}/.loads"

    def to_text(self) -> str:
        """Return the text that `from_text` reads."""
        return encode(asdict(self), indent=None)

    @classmethod
    def from_text(cls, text: str) -> Settings | None:
        """Return the settings, None if the variable is unset or empty."""
        given: Any = decode(text) if text else None
        return None if given is None else cls(**given)
