"""YAML as people like to read it. Pure.

Comes in: dicts, lists, strings, numbers, booleans, some with a comment. Goes out: a YAML 1.2 document that 1.1 readers
take the same way. Strings are quoted wherever a reader might see anything else in them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_WORDS: Final = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})  # in any case; YAML 1.1's too
_NAMED: Final = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """A value with a comment of a line or more, which stands before its key."""

    value: object
    note: str


def document(value: Mapping[str, object]) -> str:
    """Return a mapping as a document, from its --- on."""
    return "\n".join(["---", *_mapping(value, "")]) + "\n"


def scalar(value: object) -> str:
    """Return a string, number or boolean on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    text = str(value)
    is_plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return text if is_plain else f'"{"".join(map(_letter, text))}"'


def _letter(letter: str) -> str:
    """Return a letter between double quotes: as it is where it can be seen, by its number else."""
    code = ord(letter)
    if letter in _NAMED:
        return _NAMED[letter]
    if letter.isprintable() and code < 0x10000:
        return letter
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _mapping(mapping: Mapping[str, object], indent: str) -> Iterator[str]:
    for key, value in mapping.items():
        if isinstance(value, Noted):
            yield from (f"{indent}# {line}" for line in value.note.splitlines())
        inner = value.value if isinstance(value, Noted) else value
        yield from _pair(f"{indent}{scalar(key)}:", inner, indent)


def _pair(key: str, value: object, indent: str) -> Iterator[str]:
    if isinstance(value, dict) and value:
        yield key
        yield from _mapping(value, f"{indent}  ")
    elif isinstance(value, list) and value:
        yield key
        for item in value:
            yield from _item(item, indent)
    else:
        yield f"{key} {_leaf(value, indent)}"


def _item(item: object, indent: str) -> Iterator[str]:
    if not isinstance(item, dict):
        yield f"{indent}- {_leaf(item, indent)}"
        return
    first, *rest = _mapping(item, f"{indent}  ")
    yield f"{indent}- {first.removeprefix(indent + '  ')}"
    yield from rest


def _leaf(value: object, indent: str) -> str:
    if isinstance(value, dict | list):
        return "{}" if isinstance(value, dict) else "[]"
    if isinstance(value, str) and _is_block(value):
        return "\n".join(["|-", *(f"{indent}  {line}" for line in value.split("\n"))])
    return scalar(value)


def _is_block(text: str) -> bool:
    """Return whether a text may stand as it is: several lines of plain ASCII, none empty or ending in a space."""
    lines = text.split("\n")
    whole = all(line.strip() and line == line.rstrip() and line.isascii() and line.isprintable() for line in lines)
    return len(lines) > 1 and whole and not lines[0].startswith(" ")
