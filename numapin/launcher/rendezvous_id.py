"""Stage 3: whether other users can know a rendezvous id, with which they could sign a state of their own."""

from __future__ import annotations

from typing import Final

_HEX_DIGITS: Final = frozenset("0123456789abcdef")
_NUM_HEX_DIGITS: Final = 16
_NUM_TOKEN_CHARACTERS: Final = 20
_NUM_DIFFERENT: Final = 6  # of 40,000 random ids of 16 hexadecimal digits, one has fewer different ones


def why_known(run_id: str, *, is_typed: bool) -> str | None:
    """Return why others can know the id, or None if it looks like a secret."""
    if not _looks_random(run_id):
        return f"the rendezvous id {run_id!r} is easy to guess"
    if is_typed:
        return "ps shows --rdzv-id to every user of this host"
    return None


def _looks_random(run_id: str) -> bool:
    """Return whether an id may be random: hexadecimal digits, as in a UUID, or text of mixed case, as in base64."""
    digits = run_id.replace("-", "").lower()
    is_hex = len(digits) >= _NUM_HEX_DIGITS and _HEX_DIGITS.issuperset(digits)
    has_mixed_case = any(map(str.islower, run_id)) and any(map(str.isupper, run_id))
    is_token = len(run_id) >= _NUM_TOKEN_CHARACTERS and has_mixed_case
    is_number = digits.isdecimal()  # a date, or the number of a job
    return (is_hex or is_token) and not is_number and len(set(digits)) >= _NUM_DIFFERENT
