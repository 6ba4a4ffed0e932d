"""Typed reading of decoded JSON, with the element's path in every error. Pure.

Comes in: what `json.loads` returned, from a file that may be anything. Goes out: plain values, or a MachineFileError
that names the file and the element, such as "dgx.json: nodes[3].distances: …".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from numapin import cpulist
from numapin.errors import MachineFileError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
_REGENERATE: Final = "write the file again with: numapin topo --save FILE"


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object, and where it stands in which file."""

    source: str
    where: str
    values: dict[str, object]

    @classmethod
    def top(cls, source: str, value: object) -> Fields:
        """Wrap a file's outermost value, which must be an object."""
        if not isinstance(value, dict):
            raise _bad(source, "top level", "an object", value)
        return cls(source, "", value)

    def text(self, key: str) -> str:
        """Return a string."""
        return self._required(key, self.optional_text(key), "a string")

    def optional_text(self, key: str) -> str | None:
        """Return a string or None."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, "a string or null", value)
        return value

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
            return None if text is None else cpulist.parse(text)
        except ValueError as error:
            raise MachineFileError(f"{self.source}: {self._at(key)}: {error}", _REGENERATE) from None

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings."""
        values = self._list(key)
        for value in values:
            if not isinstance(value, str):
                raise self._wrong(key, "a list of strings", value)
        return tuple(str(value) for value in values)

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
        return Fields(self.source, self._at(key), value)

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
        where = self._at(at)
        if not isinstance(value, dict):
            raise _bad(self.source, where, "an object", value)
        try:
            return decode(Fields(self.source, where, value))
        except ValueError as error:
            raise MachineFileError(f"{self.source}: {where}: {error}", _REGENERATE) from None

    def _list(self, key: str) -> list[object]:
        value = self.values.get(key)
        if not isinstance(value, list):
            raise self._wrong(key, "a list", value)
        return value

    def _required(self, key: str, value: T | None, wanted: str) -> T:
        if value is None:
            raise self._wrong(key, wanted, None)
        return value

    def _at(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def _wrong(self, key: str, wanted: str, found: object) -> MachineFileError:
        return _bad(self.source, self._at(key), wanted, found)


def _bad(source: str, where: str, wanted: str, found: object) -> MachineFileError:
    shown = "nothing" if found is None else repr(found)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return MachineFileError(f"{source}: {where}: expected {wanted}, found {shown}", _REGENERATE)
