"""Times and container images: one notation for users, and that of each engine.

A time that engines read differently is refused: 4:00 is four minutes to Slurm and four hours to LSF; 60 is an hour to
both and a minute to PBS.
"""

from __future__ import annotations

import re
from typing import Final

from numapin.errors import UsageError

_CLOCK: Final = re.compile(r"(?:(?P<d>[0-9]{1,3})-)?(?P<h>[0-9]{1,4}):(?P<m>[0-5][0-9]):(?P<s>[0-5][0-9])")
_DAYS: Final = re.compile(r"(?P<d>[0-9]{1,3})-(?P<h>[0-9]{1,2})(?::(?P<m>[0-5][0-9]))?(?P<s>)")
_UNITS: Final = re.compile(
    r"(?:(?P<d>[0-9]{1,3})d)?(?:(?P<h>[0-9]{1,4})h)?(?:(?P<m>[0-9]{1,6})m)?(?:(?P<s>[0-9]{1,8})s)?"
)
_FORMS: Final = (_CLOCK, _DAYS, _UNITS)
_DAY_S: Final = 24 * 3600

SAMPLE_IMAGE: Final = "an image such as nvcr.io/nvidia/pytorch:25.01-py3, or a file"

_DOCKER: Final = "docker://"
_APPTAINERS: Final = ("library://", "oras://", "shub://", "https://", "http://")
_SQUASHED: Final = (".sqsh", ".squashfs")
_ENROOTS_USER: Final = re.compile(r"^[^@/#]*@(?=[^#]*#)")


def parse_time(text: str) -> int:
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


# --- images -----------------------------------------------------------------------------------------------------------


def for_apptainer(image: str) -> str:
    """Return the image as Apptainer takes it. Raises UsageError for an image that only enroot can unpack."""
    if image.endswith(_SQUASHED):
        raise UsageError(
            f"--container {image} is an enroot file, which only Slurm with pyxis runs",
            "give an Apptainer image (.sif), or the image in its registry",
        )
    named = in_registry(image)
    return image if named is None else _DOCKER + named


def for_pyxis(image: str) -> str | None:
    """Return the image as pyxis takes it, in which paths start with a dot or a slash. None: it is Apptainer's."""
    if image.endswith(_SQUASHED):
        return image if _is_path(image) else f"./{image}"
    if in_registry(image) is None:
        return None
    named = image.removeprefix(_DOCKER)
    host, _, rest = named.partition("/")
    is_host = host == "localhost" or "." in host or ":" in host  # Docker's rule
    # Without a # after the registry's host, enroot asks Docker Hub.
    return f"{host}#{rest}" if rest and is_host and "#" not in named else named


def in_registry(image: str) -> str | None:
    """Return the image as `docker pull` names it. None: it is not in a registry."""
    is_file = _is_path(image) or image.endswith((".sif", *_SQUASHED))
    if is_file or image.startswith(_APPTAINERS):
        return None
    return _ENROOTS_USER.sub("", image.removeprefix(_DOCKER)).replace("#", "/")


def require_known_image(image: str) -> None:
    """Raise UsageError for an unknown URI scheme, and for an image with an empty part, as from an empty $TAG."""
    if "://" in image.removeprefix(_DOCKER) and not image.startswith(_APPTAINERS):
        raise UsageError(f"--container {image!r}: no engine runs such a URI", f"use {SAMPLE_IMAGE}")
    named = in_registry(image)
    parts = [image.rpartition("://")[2]] if named is None else named.split("/")
    has_empty_tag = parts[-1].endswith((":", "@")) and not _is_path(image)
    if "" in parts or has_empty_tag:
        raise UsageError(f"--container {image!r} names no image: a part of the name is empty", f"use {SAMPLE_IMAGE}")


def _is_path(image: str) -> bool:
    return image.startswith((".", "/"))
