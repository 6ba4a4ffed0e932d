"""Times: as they are typed, and as each engine takes them. Pure.

Comes in: text such as 4:00:00, 1-12 or 90m, or seconds. Goes out: seconds, or an engine's text. What engines read
differently is refused: 4:00 is four minutes to Slurm and four hours to LSF, and 60 an hour to both and a minute to PBS.
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
    """Return the seconds of a time. Raises ValueError for what is none, is ambiguous or is zero."""
    match = next((found for form in _FORMS if (found := form.fullmatch(text))), None)
    if match is None:
        msg = f"{text!r} is no time"
        raise ValueError(msg)
    days, hours, minutes, seconds = (int(match[name] or 0) for name in "dhms")
    if match["d"] and match.re is not _UNITS and hours > 23:
        msg = f"{text!r} has {hours} hours beside its days"
        raise ValueError(msg)
    total_s = days * _DAY_S + hours * 3600 + minutes * 60 + seconds
    if total_s == 0:
        msg = f"{text!r} is no time at all"
        raise ValueError(msg)
    return total_s


def with_days(time_s: int) -> str:
    """Return D-HH:MM:SS, as Slurm takes it."""
    return f"{time_s // _DAY_S}-{clock(time_s % _DAY_S)}"


def clock(time_s: int) -> str:
    """Return HH:MM:SS with as many hours as there are, as PBS takes it."""
    return f"{time_s // 3600:02}:{time_s // 60 % 60:02}:{time_s % 60:02}"


def hours_and_minutes(time_s: int) -> str:
    """Return HH:MM, the minute begun counted in, as LSF takes it."""
    minutes = minutes_begun(time_s)
    return f"{minutes // 60:02}:{minutes % 60:02}"


def minutes_begun(time_s: int) -> int:
    """Return whole minutes, the one begun counted in."""
    return -(-time_s // 60)
