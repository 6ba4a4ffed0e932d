"""Typed reading of decoded JSON, with the element's path in every error. Pure.

Comes in: the text of an untrusted file. Goes out: plain values, or a MachineFileError that names the file and the
element, such as "dgx.json: nodes[3].distances: …".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from numapin.base.bounds import MAX_NUMBER, MAX_TEXTS
from numapin.base.cpu_set import CpuSet, Sets
from numapin.base.strict_json import decode
from numapin.errors import MachineFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sized

T = TypeVar("T")

_MAX_DIGITS: Final = 19  # of MAX_NUMBER
_SHOWN: Final = 20  # entries


class Fields(NamedTuple):
    """A JSON object, its file, its path in the file, and the hint for errors; `sets` are the whole file's."""

    source: str
    where: str
    values: dict[str, object]
    hint: str
    sets: Sets

    @classmethod
    def top(cls, source: str, text: str, *, hint: str) -> Fields:
        """Decode a file's text, whose outermost value must be an object."""
        try:
            value = decode(text)
        except ValueError as error:
            raise MachineFileError(f"{source}: not JSON: {error}", hint) from None
        if not isinstance(value, dict):
            raise MachineFileError(f"{source}: top level: {_expected('an object', value)}", hint)
        return cls(source, "", value, hint, Sets())

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
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._wrong(key, "a non-negative integer or null", value)
        if value > MAX_NUMBER:
            raise self.error(key, f"the number is larger than {MAX_NUMBER}, the largest accepted")
        return value

    def flag(self, key: str) -> bool:
        """Return a boolean."""
        value = self.values.get(key)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def numbers(self, key: str) -> CpuSet:
        """Return a set written as a Linux list string."""
        return self._required(key, self.optional_numbers(key), 'a list string such as "0-3,8"')

    def optional_numbers(self, key: str) -> CpuSet | None:
        """Return a set written as a Linux list string, or None."""
        text = self.optional_text(key)
        try:
            return None if text is None else self.sets.get(text)
        except ValueError as error:
            raise self.error(key, str(error)) from None

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings."""
        return tuple(self._element_text(key, value) for value in self._list(key, MAX_TEXTS))

    def number_map(self, key: str, *, most: int) -> dict[int, int]:
        """Return an object of at most `most` entries whose keys and values are non-negative integers."""
        inner = self.mapping(key)
        self._check_count(key, inner.values, most)
        if not all(map(_is_number, inner.values)):
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

    def each(self, key: str, read: Callable[[Fields], T], *, most: int) -> tuple[T, ...]:
        """Read a list of at most `most` objects; a longer list is refused before any of it is read."""
        return tuple(self._read(f"{key}[{i}]", value, read) for i, value in enumerate(self._list(key, most)))

    def expect_schema(self, schema: str) -> None:
        """Check the schema name, which identifies our files and their version."""
        found = self.values.get("schema")
        if found != schema:
            raise self._wrong("schema", repr(schema), found)

    def _read(self, at: str, value: object, read: Callable[[Fields], T]) -> T:
        if not isinstance(value, dict):
            raise self._wrong(at, "an object", value)
        try:
            return read(self._replace(where=self._at(at), values=value))
        except ValueError as error:
            raise self.error(at, str(error)) from None

    def _list(self, key: str, most: int) -> list[object]:
        value = self.values.get(key)
        if not isinstance(value, list):
            raise self._wrong(key, "a list", value)
        self._check_count(key, value, most)
        return value

    def _check_count(self, key: str, values: Sized, most: int) -> None:
        if len(values) > most:
            raise self.error(key, f"{len(values)} entries; at most {most} are accepted")

    def _required(self, key: str, value: T | None, wanted: str) -> T:
        if value is None:
            raise self._wrong(key, wanted, None)
        return value

    def _element_text(self, key: str, value: object) -> str:
        if not isinstance(value, str):
            raise self._wrong(key, "a list of strings", value)
        return self._encodable(key, value)

    def _encodable(self, key: str, value: str) -> str:
        """Refuse a lone surrogate, which JSON can spell and no terminal or file can show."""
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self._wrong(key, "text that can be encoded", value) from None
        return value

    def _at(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def error(self, key: str, problem: str) -> MachineFileError:
        """Return the error for an element; the key "" stands for this object itself."""
        at = self._at(key) if key else self.where
        return MachineFileError(": ".join(part for part in (self.source, at, problem) if part), self.hint)

    def _wrong(self, key: str, wanted: str, found: object) -> MachineFileError:
        return self.error(key, _expected(wanted, found))


def _expected(wanted: str, found: object) -> str:
    return f"expected {wanted}, found {'nothing' if found is None else _shown(found)}"


def _shown(found: object) -> str:
    """Return the start of a value's text, without rendering all of a long list or number."""
    if isinstance(found, int) and abs(found) > MAX_NUMBER:
        return "a number of more than 63 bits"
    if isinstance(found, list) and _is_large(found):
        return f"a list of {len(found)} entries"
    if isinstance(found, dict) and _is_large(found.values()):
        return f"an object of {len(found)} entries"
    shown = repr(found)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _is_large(values: Collection[object]) -> bool:
    return len(values) > _SHOWN or any(isinstance(value, list | dict) for value in values)


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) <= _MAX_DIGITS
