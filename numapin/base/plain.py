"""Records as JSON: the way out, whose way back is `fields`. Pure.

Comes in: a dataclass. Goes out: what `json.dumps` takes, one key for each field, in their order.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING

from numapin.base.cpu_set import CpuSet

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def to_json(record: DataclassInstance) -> dict[str, object]:
    """Return a record as an object: sets of CPUs or nodes as list strings, choices as their words."""
    return {field.name: _value(getattr(record, field.name)) for field in fields(record)}


def _value(value: object) -> object:
    match value:
        case CpuSet():
            return str(value)
        case Enum():
            return value.value
        case tuple():
            return [_value(item) for item in value]
        case dict():
            return {str(key): item for key, item in sorted(value.items())}
        case _:
            return to_json(value) if is_dataclass(value) and not isinstance(value, type) else value
