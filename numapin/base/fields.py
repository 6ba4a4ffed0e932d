"""Typed reading of decoded JSON, with the element's path in every error. Pure.

Comes in: what `json.loads` returned, from a file that may be anything. Goes out: plain values, or a MachineFileError
that names the file and the element, such as "dgx.json: nodes[3].distances: …".
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from numapin.base import cpu_set
from numapin.errors import MachineFileError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Fields(NamedTuple):
    """One JSON object, where it stands in which file, and the hint for an error in it."""

    source: str
    where: str
    values: dict[str, object]
    hint: str

    @classmethod
    def top(cls, source: str, text: str, *, hint: str) -> Fields:
        """Decode a file's text, whose outermost value must be an object."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits are a ValueError too
            raise MachineFileError(f"{source}: not JSON: {error}", hint) from None
        if not isinstance(value, dict):
            raise MachineFileError(f"{source}: top level: {_expected('an object', value)}", hint)
        return cls(source, "", value, hint)

    def text(self, key: str) -> str:
        """Return a string."""
        return self._required(key, self.optional_text(key), "a string")

    def optional_text(self, key: str) -> str | None:
        """Return a string or None."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, "a string or null", value)
        return None if value is None else self._encodable(key, value)

    def number(self, key: str) -> int:
        """Return a non-negative integer."""
        return self._required(key, self.optional_number(key), "a non-negative integer")

    def optional_number(self, key: str) -> int | None:
        """Return a non-negative integer or None."""
        value = self.values.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise self._wrong(key, "a non-negative integer or null", value)
        return value

    def flag(self, key: str) -> bool:
        """Return a boolean."""
        value = self.values.get(key)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def numbers(self, key: str) -> frozenset[int]:
        """Return a set written as a Linux list string."""
        return self._required(key, self.optional_numbers(key), 'a list string such as "0-3,8"')

    def optional_numbers(self, key: str) -> frozenset[int] | None:
        """Return a set written as a Linux list string, or None."""
        text = self.optional_text(key)
        try:
            return None if text is None else cpu_set.parse(text)
        except ValueError as error:
            raise self.error(key, str(error)) from None

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings."""
        values = self._list(key)
        for value in values:
            if not isinstance(value, str):
                raise self._wrong(key, "a list of strings", value)
        return tuple(self._encodable(key, str(value)) for value in values)

    def number_map(self, key: str) -> dict[int, int]:
        """Return an object whose keys and values are non-negative integers."""
        inner = self.mapping(key)
        if not all(name.isascii() and name.isdigit() for name in inner.values):
            raise self._wrong(key, "an object with numbers as keys", inner.values)
        return {int(name): inner.number(name) for name in inner.values}

    def mapping(self, key: str) -> Fields:
        """Return an object."""
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        return self._replace(where=self._at(key), values=value)

    def optional_mapping(self, key: str) -> Fields | None:
        """Return an object or None."""
        return None if self.values.get(key) is None else self.mapping(key)

    def each(self, key: str, decode: Callable[[Fields], T]) -> tuple[T, ...]:
        """Decode a list of objects."""
        return tuple(self._decoded(f"{key}[{i}]", value, decode) for i, value in enumerate(self._list(key)))

    def expect_schema(self, schema: str) -> None:
        """Check the schema name, which is what says that the file is ours and of this version."""
        found = self.values.get("schema")
        if found != schema:
            raise self._wrong("schema", repr(schema), found)

    def _decoded(self, at: str, value: object, decode: Callable[[Fields], T]) -> T:
        if not isinstance(value, dict):
            raise self._wrong(at, "an object", value)
        try:
            return decode(self._replace(where=self._at(at), values=value))
        except ValueError as error:
            raise self.error(at, str(error)) from None

    def _list(self, key: str) -> list[object]:
        value = self.values.get(key)
        if not isinstance(value, list):
            raise self._wrong(key, "a list", value)
        return value

    def _required(self, key: str, value: T | None, wanted: str) -> T:
        if value is None:
            raise self._wrong(key, wanted, None)
        return value

    def _encodable(self, key: str, value: str) -> str:
        """Refuse half of a surrogate pair, which JSON can spell and no terminal or file can show."""
        if any("\ud800" <= char <= "\udfff" for char in value):
            raise self._wrong(key, "text that can be encoded", value)
        return value

    def _at(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def error(self, key: str, problem: str) -> MachineFileError:
        """Return the error that says what is wrong with an element; the key "" is this object itself."""
        at = self._at(key) if key else self.where
        return MachineFileError(": ".join(part for part in (self.source, at, problem) if part), self.hint)

    def _wrong(self, key: str, wanted: str, found: object) -> MachineFileError:
        return self.error(key, _expected(wanted, found))


def _expected(wanted: str, found: object) -> str:
    shown = "nothing" if found is None else repr(found)
    return f"expected {wanted}, found {shown if len(shown) <= 60 else f'{shown[:57]}...'}"
