"""The known word that a mistyped one resembles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOST_BEGUN: Final = 3  # a beginning of more words than this says too little


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" with the closest known word, or with the few that begin so; "" if none is close."""
    from difflib import get_close_matches  # takes 3 ms

    candidates = list(known) if word.strip("-") else []
    begun = [name for name in candidates if name.startswith(word)]
    found = begun if 0 < len(begun) <= _MOST_BEGUN else get_close_matches(word.lower(), candidates, n=1)
    return f"; did you mean {' or '.join(found)}?" if found else ""
