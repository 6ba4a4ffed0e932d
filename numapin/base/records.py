"""Dataclasses from JSON and back: the types of the fields say what is read.

A field may be a str, a non-negative int, a bool, a CpuSet, a StrEnum or another such dataclass; any of these or None; a
tuple of them, or a mapping of numbers, with an `AtMost`; or an object that is not examined (`Mapping[str, object]`).
The types are needed at run time. Modules that every start imports do not import annotations from __future__, because
evaluating strings takes a millisecond.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache, partial
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    NamedTuple,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from numapin.base.bounds import MAX_NUMBER, MAX_TEXTS
from numapin.base.cpu_set import CpuSet, Sets
from numapin.base.strict_json import decode
from numapin.errors import MachineFileError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")
_Reader: TypeAlias = Callable[[Any, Sets], object]

_MAX_DIGITS: Final = 19  # of MAX_NUMBER


class AtMost(NamedTuple):
    """The largest number of entries of a list or mapping; a longer one is refused before any of it is read."""

    most: int


Texts: TypeAlias = Annotated[tuple[str, ...], AtMost(MAX_TEXTS)]


class _WrongError(ValueError):
    """A value of the wrong type; each caller adds its step to the front of `path`."""

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(problem)
        self.path = path


def read_record(kind: type[R], text: str, *, source: str, hint: str, schema: str | None = None) -> R:
    """Read a file's text. `schema` is the required value of the element "schema". Raises MachineFileError."""
    try:
        value = decode(text)
    except ValueError as error:
        raise MachineFileError(f"{source}: not JSON: {error}", hint) from None
    try:
        if not isinstance(value, dict):
            raise _WrongError(f"top level: {_expected('an object', value)}")
        if schema is not None and value.get("schema") != schema:
            raise _WrongError(_expected(repr(schema), value.get("schema")), ".schema")
        return _record(kind, value, Sets())
    except ValueError as error:
        path = getattr(error, "path", "").removeprefix(".")
        raise MachineFileError(": ".join(part for part in (source, path, str(error)) if part), hint) from None


def to_json(record: DataclassInstance) -> dict[str, object]:
    """Return plain values: CPU sets become list strings, and enums their words."""
    names = [field.name for field in fields(record)]
    return dict(zip(names, map(_plain, map(partial(getattr, record), names)), strict=True))


def _plain(value: object) -> object:
    match value:
        case CpuSet() | StrEnum():
            return str(value)
        case tuple():
            return list(map(_plain, value))
        case dict():
            return {str(key): item for key, item in sorted(value.items())}
        case _ if is_dataclass(value) and not isinstance(value, type):
            return to_json(value)
        case _:
            return value


# --- readers, one per type -------------------------------------------------------------------------------------------


@cache
def _readers(kind: type) -> dict[str, _Reader]:
    return {name: _reader(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}


def _reader(hint: Any) -> _Reader:  # noqa: ANN401 - a type as it is written
    """Return the function that reads a value of a type."""
    options = get_args(hint)
    if get_origin(hint) is Annotated:
        collection, limit = options
        if get_origin(collection) is Mapping:
            return partial(_mapping, limit.most)
        return partial(_list, _reader(get_args(collection)[0]), limit.most)
    if NoneType in options:
        read = _reader(options[0])
        return lambda value, sets: None if value is None else read(value, sets)
    if isinstance(hint, type) and is_dataclass(hint):
        return partial(_record, hint)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return lambda value, sets: hint(_text(value, sets))
    return _SIMPLE[hint]


def _each(values: Iterable[tuple[str, _Reader, object]], sets: Sets) -> list[Any]:
    """Read values, given as (step of the path, reader, value)."""
    found = []
    for step, read, value in values:
        try:
            found.append(read(value, sets))
        except ValueError as error:
            raise _WrongError(str(error), step + getattr(error, "path", "")) from None
    return found


def _record(kind: type[R], value: object, sets: Sets) -> R:
    values, readers = _object(value, sets), _readers(kind)
    elements = _each(((f".{name}", read, values.get(name)) for name, read in readers.items()), sets)
    return kind(**dict(zip(readers, elements, strict=True)))


def _list(read: _Reader, most: int, value: object, sets: Sets) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise _WrongError(_expected("a list", value))
    _require_at_most(most, len(value))
    return tuple(_each(((f"[{i}]", read, item) for i, item in enumerate(value)), sets))


def _mapping(most: int, value: object, sets: Sets) -> dict[int, int]:
    given = _object(value, sets)
    _require_at_most(most, len(given))
    if not all(name.isascii() and name.isdigit() and len(name) <= _MAX_DIGITS for name in given):
        raise _WrongError(_expected("an object with numbers as keys", given))
    numbers = _each(((f".{name}", _number, number) for name, number in given.items()), sets)
    return dict(zip(map(int, given), numbers, strict=True))


def _require_at_most(most: int, number: int) -> None:
    if number > most:
        raise _WrongError(f"{number} entries; at most {most} are accepted")


def _object(value: object, _: Sets) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _WrongError(_expected("an object", value))
    return value


def _number(value: object, _: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _WrongError(_expected("a non-negative integer", value))
    if value > MAX_NUMBER:
        raise _WrongError(f"the number is larger than {MAX_NUMBER}, the largest accepted")
    return value


def _decimal(value: object, _: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_NUMBER:
        raise _WrongError(_expected("a non-negative number", value))
    return float(value)


def _flag(value: object, _: Sets) -> bool:
    if not isinstance(value, bool):
        raise _WrongError(_expected("true or false", value))
    return value


def _text(value: object, _: object) -> str:
    """Return a string; a lone surrogate is refused, which JSON can spell and no terminal or file can show."""
    if not isinstance(value, str):
        raise _WrongError(_expected("a string", value))
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _WrongError(_expected("text that can be encoded", value)) from None
    return value


_SIMPLE: Final[dict[Any, _Reader]] = {
    str: _text,
    int: _number,
    float: _decimal,
    bool: _flag,
    CpuSet: lambda value, sets: sets.get(_text(value, sets)),
    Mapping[str, object]: _object,
}


# --- errors ----------------------------------------------------------------------------------------------------------


def _expected(wanted: str, found: object) -> str:
    return f"expected {wanted}, found {'nothing' if found is None else _shown(found)}"


def _shown(found: object) -> str:
    """Return the start of a value's text, without rendering all of a long list or number."""
    shown = reprlib.repr(found)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
