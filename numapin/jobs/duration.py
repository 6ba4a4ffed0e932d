"""Times as users type them and as each engine takes them.

Text that engines read differently is refused: 4:00 is four minutes to Slurm and four hours to LSF; 60 is an hour to
both and a minute to PBS.
"""

from __future__ import annotations

import re
from typing import Final

_CLOCK: Final = re.compile(r"(?:(?P<d>[0-9]{1,3})-)?(?P<h>[0-9]{1,4}):(?P<m>[0-5][0-9]):(?P<s>[0-5][0-9])")
_DAYS: Final = re.compile(r"(?P<d>[0-9]{1,3})-(?P<h>[0-9]{1,2})(?::(?P<m>[0-5][0-9]))?(?P<s>)")
_UNITS: Final = re.compile(
    r"(?:(?P<d>[0-9]{1,3})d)?(?:(?P<h>[0-9]{1,4})h)?(?:(?P<m>[0-9]{1,6})m)?(?:(?P<s>[0-9]{1,8})s)?"
)
_FORMS: Final = (_CLOCK, _DAYS, _UNITS)
_DAY_S: Final = 24 * 3600


def parse(text: str) -> int:
    """Return a time in seconds. Raises ValueError if it is malformed, ambiguous or zero."""
    match = next(filter(None, (form.fullmatch(text) for form in _FORMS)), None)
    if match is None:
        raise ValueError(f"{text!r} is not a time")
    days, hours, minutes, seconds = (int(match[name] or 0) for name in "dhms")
    if match["d"] and match.re is not _UNITS and hours > 23:
        raise ValueError(f"{text!r} has {hours} hours after its days, more than 23")
    time_s = days * _DAY_S + hours * 3600 + minutes * 60 + seconds
    if time_s == 0:
        raise ValueError(f"{text!r} is zero")
    return time_s


def with_days(time_s: int) -> str:
    """Return D-HH:MM:SS, as Slurm takes it."""
    return f"{time_s // _DAY_S}-{clock(time_s % _DAY_S)}"


def clock(time_s: int) -> str:
    """Return HH:MM:SS, as PBS takes it. The hours may exceed 23."""
    return f"{time_s // 3600:02}:{time_s // 60 % 60:02}:{time_s % 60:02}"


def hours_and_minutes(time_s: int) -> str:
    """Return HH:MM, rounded up, as LSF takes it."""
    minutes = minutes_begun(time_s)
    return f"{minutes // 60:02}:{minutes % 60:02}"


def minutes_begun(time_s: int) -> int:
    """Return whole minutes, rounded up."""
    return -(-time_s // 60)
