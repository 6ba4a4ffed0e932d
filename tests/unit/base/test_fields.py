"""Typed reading of JSON: accepted values, and errors that name the element."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from numapin.base.fields import Fields
from numapin.errors import MachineFileError

if TYPE_CHECKING:
    from collections.abc import Callable

HINT = "how to get a good file"


def top(value: object) -> Fields:
    """Return the fields of a file that holds this value."""
    return Fields.top("m.json", json.dumps(value), hint=HINT)


GOOD = top(
    {"t": "x", "n": 3, "f": True, "set": "0-2", "list": ["a"], "map": {"0": 10, "8": 40}, "objects": [{"n": 1}]},
)
BAD = top(
    {
        "t": 3,
        "n": -1,
        "bool": True,
        "float": 1.0,
        "f": 1,
        "set": "0-x",
        "list": ["a", 3],
        "map": {"x": 1},
        "deep": {"0": "far"},
        "objects": [{"n": 1}, {}],
        "mixed": [3],
        "long": "y" * 500,
    },
)


def test_values_are_returned_as_they_are() -> None:
    """Every kind of value has its reader; sets are list strings, and keys of maps are numbers."""
    assert (GOOD.text("t"), GOOD.number("n"), GOOD.flag("f"), GOOD.numbers("set")) == (
        "x",
        3,
        True,
        frozenset({0, 1, 2}),
    )
    assert (GOOD.texts("list"), GOOD.number_map("map", most=9)) == (("a",), {0: 10, 8: 40})
    assert GOOD.each("objects", lambda f: f.number("n"), most=9) == (1,)


def test_what_is_optional_may_be_null_or_missing() -> None:
    """Unknown is None, and a missing key means the same."""
    fields = top({"null": None})
    for key in ("null", "missing"):
        asked = (fields.optional_text, fields.optional_number, fields.optional_numbers, fields.optional_mapping)
        assert [ask(key) for ask in asked] == [None] * 4


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: BAD.text("t"), "m.json: t: expected a string or null, found 3"),
        (lambda: BAD.text("missing"), "m.json: missing: expected a string, found nothing"),
        (lambda: BAD.number("n"), "m.json: n: expected a non-negative integer or null, found -1"),
        (lambda: BAD.number("bool"), "m.json: bool: expected a non-negative integer or null, found True"),
        (lambda: BAD.number("float"), "m.json: float: expected a non-negative integer or null, found 1.0"),
        (lambda: BAD.flag("f"), "m.json: f: expected true or false, found 1"),
        (lambda: BAD.numbers("set"), "m.json: set: '0-x' in '0-x' is not a number or a range such as 0-3"),
        (lambda: BAD.texts("list"), "m.json: list: expected a list of strings, found 3"),
        (lambda: BAD.texts("n"), "m.json: n: expected a list, found -1"),
        (lambda: BAD.number_map("map", most=9), "m.json: map: expected an object with numbers as keys, found {'x': 1}"),
        (
            lambda: BAD.number_map("deep", most=9),
            "m.json: deep.0: expected a non-negative integer or null, found 'far'",
        ),
        (lambda: BAD.mapping("n"), "m.json: n: expected an object, found -1"),
        (
            lambda: BAD.each("objects", lambda f: f.number("n"), most=9),
            "m.json: objects[1].n: expected a non-negative integer, found nothing",
        ),
        (lambda: BAD.each("mixed", lambda f: f, most=9), "m.json: mixed[0]: expected an object, found 3"),
        (lambda: BAD.each("objects", lambda _: int("x"), most=9), "m.json: objects[0]: invalid literal for int()"),
        (lambda: BAD.expect_schema("s/1"), "m.json: schema: expected 's/1', found nothing"),
        (lambda: Fields.top("m.json", '{"a"', hint=HINT), "m.json: not JSON: Expecting ':' delimiter: line 1 column 5"),
        (lambda: top([1]), "m.json: top level: expected an object, found [1]"),
    ],
)
def test_errors_name_file_and_element(read: Callable[[], object], message: str) -> None:
    """The error names the file, the element and the value found; the hint says how to get a valid file."""
    with pytest.raises(MachineFileError) as caught:
        read()
    assert caught.value.message.startswith(message)
    assert caught.value.hint == HINT


def test_long_values_are_shown_in_part() -> None:
    """A message stays a line."""
    with pytest.raises(MachineFileError) as caught:
        BAD.number("long")
    assert len(caught.value.message) < 150
