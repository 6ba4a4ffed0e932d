"""Fill Kubernetes manifests in: the files of `templates`, as YAML that readers of 1.1 and 1.2 read the same way.

A line `key: $name` or `- $name` gets a value: a scalar in its place, a mapping, a list or other lines below it. A value
that is None or empty leaves the line out, with the comment above it. In comments, names are replaced by texts.
"""

from __future__ import annotations

import re
from string import Template
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_SLOT: Final = re.compile(r"(?P<indent> *)(?P<head>(?:- )?[\w./-]+:|-) \$(?P<name>\w+)")
# Strings that need no quotes, except for these words, which YAML 1.1 readers take for other values.
_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_NOT_PLAIN: Final = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


class Lines(tuple[str, ...]):
    """Lines of YAML that are a value, such as a template that has been filled in."""

    __slots__ = ()


def fill(template: str, values: Mapping[str, object]) -> Lines:
    """Return the lines of a template with its values. Raises KeyError for a name without a value."""
    lines: list[str] = []
    comment: list[str] = []
    for line in template.splitlines():
        indent, mark, remark = line.partition("# ")
        if mark and not indent.strip():
            texts = {name: value or "" for name, value in values.items()}
            comment += [f"{indent}# {text}" for text in Template(remark).substitute(texts).splitlines()]
            continue
        slot = _SLOT.fullmatch(line)
        if slot is None:
            lines += [*comment, line]
        elif values[slot["name"]] not in (None, "", [], {}, ()):
            filled = _entry(slot["head"], values[slot["name"]])
            lines += [*comment, *(slot["indent"] + each for each in filled)]
        comment = []
    return Lines(lines)


def yaml_lines(value: Mapping[str, object] | list[object]) -> list[str]:
    """Return a mapping or a list as a block of YAML lines."""
    if not isinstance(value, list):
        return [line for key, item in value.items() for line in _entry(f"{_word(key)}:", item)]
    lines: list[str] = []
    for item in value:
        if isinstance(item, dict | list) and item:
            first, *rest = yaml_lines(item)
            lines += [f"- {first}", *(f"  {line}" for line in rest)]
        else:
            lines += _entry("-", item)
    return lines


def _entry(head: str, value: object) -> list[str]:
    """Return the lines of a key or a dash with its value. A list is not indented below its key."""
    if isinstance(value, Lines):
        return [head, *(f"  {line}" for line in value)]
    if isinstance(value, dict | list) and value:
        indent = "  " if isinstance(value, dict) else ""
        return [head, *(indent + line for line in yaml_lines(value))]
    if isinstance(value, str):
        return [f"{head} {_word(value)}"]
    return [f"{head} {str(value).lower() if isinstance(value, bool) else value}"]


def _word(text: str) -> str:
    """Return a string in one line, with quotes if a reader could misread it."""
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_PLAIN:
        return text
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    """Return a character of a quoted string. JSON's pairs of surrogates would stay two characters in YAML."""
    if character in '"\\':
        return f"\\{character}"
    code = ord(character)
    if 0x20 <= code <= 0x7E:
        return character
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
