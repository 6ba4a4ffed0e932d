"""JSON as RFC 8259 defines it, read and written: no NaN, no Infinity.

Python's own decoder and encoder accept NaN and Infinity, which other parsers refuse.

Each rank imports this before its program starts: the standard library only.
"""

from __future__ import annotations

import json
from functools import partial
from math import inf, isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn


def decode(text: str | bytes) -> object:
    """Decode JSON. Raises ValueError that says what is wrong.

    NaN and Infinity are errors, and so are a number such as 1e999 that would become infinite, an integer of thousands
    of digits, and nesting that is deeper than Python's stack.
    """
    try:
        return json.loads(text, parse_constant=_no_constant, parse_float=_finite_float)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def encode(
    content: object,
    *,
    indent: int | None = 1,
    ascii_only: bool = True,
    default: Callable[[object], object] | None = None,
) -> str:
    """Encode as JSON; NaN and infinities become null. Without an indent the text has no blanks."""
    write = partial(
        json.dumps,
        indent=indent,
        separators=(",", ":") if indent is None else None,
        ensure_ascii=ascii_only,
        allow_nan=False,
        default=default,
    )
    try:
        return write(content)
    except ValueError:
        return write(_with_null(content))


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def _finite_float(digits: str) -> float:
    number = float(digits)
    if number in (inf, -inf):
        raise ValueError(f"the number {digits[:40]} is too large")
    return number


def _with_null(content: object) -> object:
    """Return the same content with null for each number that JSON cannot write."""
    match content:
        case float():
            return content if isfinite(content) else None
        case dict():
            return {key: _with_null(value) for key, value in content.items()}
        case list() | tuple():
            return [_with_null(value) for value in content]
        case _:
            return content
