"""Kubernetes manifests as text. Pure.

Comes in: a document as mappings, lists and scalars, with notes. Goes out: YAML that readers of YAML 1.1 and 1.2 read
the same way, with each note as a comment above its key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_INDENT: Final = 2  # of a mapping inside a mapping or sequence
_NEVER_FOLDED: Final = 1 << 30  # characters in a line
# Strings that need no quotes, except for these words, which YAML 1.1 readers take for other values.
_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_NOT_PLAIN: Final = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
# Several lines of visible ASCII, none of them empty or ending in a space: a literal block holds them as they are.
_BLOCK: Final = re.compile(r"(?! )[ -~]*[!-~](\n[ -~]*[!-~])+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """The value of a key, and a comment of one or more lines above that key."""

    value: object
    note: str


def yaml_document(value: Mapping[str, object]) -> str:
    """Return a mapping as a YAML document, starting with `---`, that YAML 1.1 and 1.2 readers read the same way."""
    from ruamel.yaml import YAML  # here: no other command needs it

    writer = YAML()
    writer.explicit_start = True
    writer.allow_unicode = False  # invisible characters are escaped
    writer.width = _NEVER_FOLDED
    text = StringIO()
    writer.dump(_yaml_node(value, column=0), text)
    return text.getvalue()


def _yaml_node(value: object, *, column: int) -> object:
    """Return a value as ruamel.yaml's types, with quotes and comments; `column` is that of a mapping's keys.

    Every node is new, because the writer would turn a shared one into an anchor and aliases.
    """
    from ruamel.yaml.comments import CommentedSeq

    if isinstance(value, list):
        return CommentedSeq([_yaml_node(item, column=_inner_column(item, column)) for item in value])
    return _yaml_mapping(value, column) if isinstance(value, dict) else _yaml_scalar(value)


def _yaml_mapping(mapping: Mapping[str, object], column: int) -> object:
    from ruamel.yaml.comments import CommentedMap

    node = CommentedMap()
    for key, item in mapping.items():
        name = _yaml_scalar(key)
        value = item.value if isinstance(item, Noted) else item
        node[name] = _yaml_node(value, column=_inner_column(value, column))
        if isinstance(item, Noted):
            node.yaml_set_comment_before_after_key(name, before=item.note, indent=column)
    return node


def _inner_column(value: object, column: int) -> int:
    """Return the column of a value inside a mapping or sequence at `column`; only mappings are indented."""
    return column + (_INDENT if isinstance(value, dict) else 0)


def _yaml_scalar(value: object) -> object:
    """Return a string with quotes if a reader could misread it; other values stay as they are."""
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

    if not isinstance(value, str):
        return value
    if _BLOCK.fullmatch(value):
        return LiteralScalarString(value)
    is_plain = _PLAIN.fullmatch(value) and value.lower() not in _NOT_PLAIN
    return value if is_plain else DoubleQuotedScalarString(value)
