"""Text for people and shells: sizes, durations, quoted words, Python commands, similar words, stand-ins."""

from __future__ import annotations

import codecs
import math
import re
import shlex
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable


# --- sizes and durations ----------------------------------------------------------------------------------------------

_UNITS: Final = "KMGT"
_SIZE: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s?(?:([KMGT])(?:i?B)?|B)?", re.ASCII | re.IGNORECASE)


def parse_size(text: str) -> int:
    """Parse a size in bytes: a number with K, M, G or T, each 1024 times the one before. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    size = 0.0 if match is None else float(match[1]) * 1024 ** (_UNITS.find((match[2] or " ").upper()) + 1)
    is_part_of_a_byte = match is not None and not match[2] and not size.is_integer()  # 38.5: the unit is missing
    if size < 1 or is_part_of_a_byte:
        raise ValueError(f"{text!r} is not a size such as 38.5M or 1G")
    return int(size)


def gib(num_bytes: int) -> str:
    """Return a size in GiB, however small or large."""
    return f"{num_bytes / 2**30:.1f} GiB"


def render_size(num_bytes: int) -> str:
    """Return a size in the largest unit that gives a number of at least 1."""
    power = min(max(num_bytes, 1).bit_length() - 1, 10 * len(_UNITS)) // 10
    return f"{num_bytes / 1024**power:.1f} {_UNITS[power - 1]}iB" if power else f"{num_bytes} B"


def size_label(num_bytes: float) -> str:
    """Return a size up to GiB in the largest unit that leaves at least 1, in short: 4 KiB, 1.5 MiB."""
    power = min(3, int(math.log2(max(num_bytes, 1)) // 10))
    return f"{num_bytes / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def duration(seconds: float) -> str:
    """Return a duration as people say it: "40 s", "12 min", "1 h 05 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def left_in_words(num_done: int, num_planned: int, elapsed_s: float) -> str:
    """Return the time left if the other runs take as long on average; "" before the first ends, and after the last."""
    if num_done in (0, num_planned):
        return ""
    return f"about {duration(elapsed_s / num_done * (num_planned - num_done))} left"


# --- shells ----------------------------------------------------------------------------------------------------------

_NAMED: Final = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\x1b": "\\e"}


def quote(word: str) -> str:
    """Return a word for a shell as `shlex.quote` does, or in $'…' if it could control a terminal."""
    return shlex.quote(word) if word.isprintable() else f"$'{''.join(map(_letter, word))}'"


def quote_all(words: Iterable[str]) -> str:
    """Return the quoted words as one line."""
    return " ".join(map(quote, words))


def _letter(letter: str) -> str:
    """Write a letter for use in $'…'. Three octal digits per byte mean the same in every locale and shell."""
    if letter in _NAMED:
        return _NAMED[letter]
    if letter.isprintable():
        return letter
    return "".join(f"\\{byte:03o}" for byte in letter.encode("utf-8", "surrogateescape"))


# --- command lines that run code of this package ---------------------------------------------------------------------

# A benchmark may be started in any folder, and `python -m` and `python -c` would prefer modules there to the standard
# library; these commands do not.
PYTHON: Final = (sys.executable, "-P")
"""An interpreter that does not import from the working directory; nor do its multiprocessing children."""

# Appended, so that no module beside this package can replace a standard one.
_FIND_NUMAPIN: Final = f"import sys; sys.path.append({__file__.rsplit('/', 3)[0]!r})"


def running(code: str) -> tuple[str, ...]:
    """Return a command that runs code, which can import this package even if it is not installed."""
    return *PYTHON, "-c", f"{_FIND_NUMAPIN}; {code}"


# --- similar words ---------------------------------------------------------------------------------------------------

_MOST_BEGUN: Final = 3  # a beginning of more words than this says too little


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" with the closest known word, or with the few that begin so; "" if none is close."""
    from difflib import get_close_matches  # takes 3 ms

    candidates = list(known) if word.strip("-") else []
    begun = [name for name in candidates if name.startswith(word)]
    bare = {name.lstrip("-"): name for name in candidates}  # else hyphens alone would make them alike
    close = [bare[name] for name in get_close_matches(word.lower().lstrip("-"), bare, n=1)]
    found = begun if 0 < len(begun) <= _MOST_BEGUN else close
    return f"; did you mean {' or '.join(found)}?" if found else ""


# --- encodings -------------------------------------------------------------------------------------------------------

STAND_INS: Final = "numapin.encodable"  # the name of the handler among Python's, once `register_stand_ins` was called
_REPLACEMENTS: Final = {"…": "...", "±": "+-", "·": "-"}  # of our own messages; rich replaces the lines that it draws
_ESCAPED_BYTES: Final = range(0xDC80, 0xDD00)  # bytes of names that were not text, see PEP 383


def register_stand_ins() -> None:
    """Make the handler for characters that a stream's encoding lacks known to Python's encoders."""
    codecs.register_error(STAND_INS, _replace)


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    """Return what stands in for the characters that cannot be encoded, and where encoding continues."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    first = error.object[error.start]
    if ord(first) in _ESCAPED_BYTES:
        return bytes([ord(first) - 0xDC00]), error.start + 1
    return _REPLACEMENTS.get(first) or ascii(first)[1:-1], error.start + 1
