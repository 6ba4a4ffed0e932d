"""Records from JSON: what is accepted, and how a bad element is named."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import pytest

from numapin import Topology
from numapin.errors import MachineFileError
from tests.unit.base.seam import AtMost, CpuSet, Texts, decode, encode, read_record, to_json

HINT = "how to get a good file"


class Word(StrEnum):
    """A choice."""

    ONE = "one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """A record inside another one; 7 is no good."""

    n: int

    def __post_init__(self) -> None:
        """Check the number."""
        if self.n == 7:
            msg = "7 is no good"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """A record with an element of each type."""

    t: str
    n: int
    f: bool
    set: CpuSet
    word: Word
    list: Texts
    map: Annotated[Mapping[int, int], AtMost(9)]
    objects: Annotated[tuple[Inner, ...], AtMost(9)]
    inner: Inner
    open: Mapping[str, object]
    maybe_t: str | None
    maybe_n: int | None = 3
    maybe_set: CpuSet | None
    maybe_word: Word | None
    maybe_inner: Inner | None


GOOD = {
    "t": "x",
    "n": 3,
    "f": True,
    "set": "0-2",
    "word": "one",
    "list": ["a"],
    "map": {"0": 10, "8": 40},
    "objects": [{"n": 1}],
    "inner": {"n": 2},
    "open": {"a": [1]},
}
MAYBE = {"maybe_t": "y", "maybe_n": 0, "maybe_set": "", "maybe_word": "one", "maybe_inner": {"n": 4}}


def read(value: object) -> Outer:
    """Read a file that holds this value."""
    return read_record(Outer, json.dumps(value), source="m.json", hint=HINT)


def test_values_are_returned_as_they_are() -> None:
    """Each type has its reader; sets are list strings, and keys of maps are numbers. The way back gives the same."""
    found = read({**GOOD, **MAYBE, "unknown": 1})
    assert found == Outer(
        t="x",
        n=3,
        f=True,
        set=CpuSet({0, 1, 2}),
        word=Word.ONE,
        list=("a",),
        map={0: 10, 8: 40},
        objects=(Inner(n=1),),
        inner=Inner(n=2),
        open={"a": [1]},
        maybe_t="y",
        maybe_n=0,
        maybe_set=CpuSet(),
        maybe_word=Word.ONE,
        maybe_inner=Inner(n=4),
    )
    assert to_json(found) == {**GOOD, **MAYBE}


def test_what_is_optional_may_be_null_or_missing() -> None:
    """Unknown is None, and a missing key means the same, whatever the field's default."""
    found = read(GOOD)
    assert [getattr(found, name) for name in MAYBE] == [None] * len(MAYBE)
    assert found == read({**GOOD, **dict.fromkeys(MAYBE)})


def test_elements_that_older_files_lack() -> None:
    """They get the value that the reader names."""
    text = json.dumps({key: value for key, value in GOOD.items() if key != "list"})
    assert read_record(Outer, text, source="m.json", hint=HINT, list=[]).list == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"t": 3}, "t: expected a string, found 3"),
        ({"t": None}, "t: expected a string, found nothing"),
        ({"t": "\ud800"}, "t: expected text that can be encoded, found '\\ud800'"),
        ({"n": -1}, "n: expected a non-negative integer, found -1"),
        ({"n": True}, "n: expected a non-negative integer, found True"),
        ({"n": 1.0}, "n: expected a non-negative integer, found 1.0"),
        ({"n": None}, "n: expected a non-negative integer, found nothing"),
        ({"n": 2**63}, "n: the number is larger than 9223372036854775807, the largest accepted"),
        ({"n": "y" * 500}, "n: expected a non-negative integer, found 'yyyyy"),
        ({"maybe_n": "3"}, "maybe_n: expected a non-negative integer, found '3'"),
        ({"f": 1}, "f: expected true or false, found 1"),
        ({"set": "0-x"}, "set: '0-x' is not a number or a range such as 0-3"),
        ({"set": 3}, "set: expected a string, found 3"),
        ({"word": "two"}, "word: 'two' is not a valid Word"),
        ({"list": ["a", 3]}, "list[1]: expected a string, found 3"),
        ({"list": -1}, "list: expected a list, found -1"),
        ({"list": ["a"] * 5000}, "list: 5000 entries; at most 4096 are accepted"),
        ({"map": {"x": 1}}, "map: expected an object with numbers as keys, found {'x': 1}"),
        ({"map": {"9" * 5000: 1}}, "map: expected an object with numbers as keys, found {'9999"),
        ({"map": {"0": "far"}}, "map.0: expected a non-negative integer, found 'far'"),
        ({"map": {str(n): 1 for n in range(10)}}, "map: 10 entries; at most 9 are accepted"),
        ({"inner": -1}, "inner: expected an object, found -1"),
        ({"inner": {"n": 7}}, "inner: 7 is no good"),
        ({"open": []}, "open: expected an object, found []"),
        ({"objects": [{"n": 1}, {}]}, "objects[1].n: expected a non-negative integer, found nothing"),
        ({"objects": [3]}, "objects[0]: expected an object, found 3"),
        ({"objects": [{"n": 7}]}, "objects[0]: 7 is no good"),
        ({"objects": [{"n": 1}] * 10}, "objects: 10 entries; at most 9 are accepted"),
        ({"objects": {str(n): 1 for n in range(99)}}, "objects: expected a list, found an object of 99 entries"),
    ],
)
def test_errors_name_file_and_element(change: dict[str, object], message: str) -> None:
    """What is wrong is named by file and path, with what was found, in a line, and how to get a good file."""
    with pytest.raises(MachineFileError) as caught:
        read({**GOOD, **change})
    assert caught.value.message.startswith(f"m.json: {message}")
    assert caught.value.hint == HINT
    assert len(caught.value.message) < 150


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a"', "m.json: not JSON: Expecting ':' delimiter: line 1 column 5"),
        ("[1]", "m.json: top level: expected an object, found [1]"),
        ("{}", "m.json: schema: expected 's/1', found nothing"),
        ('{"schema": "s/2"}', "m.json: schema: expected 's/1', found 's/2'"),
    ],
)
def test_files_that_are_no_such_record(text: str, message: str) -> None:
    """They are named before any element is looked at."""
    with pytest.raises(MachineFileError) as caught:
        read_record(Outer, text, source="m.json", hint=HINT, schema="s/1")
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize("key", ["set", "n", "f", "t", "list", "map", "inner", "word"])
@pytest.mark.parametrize("value", ["[[[]]]", "9" * 4000, "[" * 900 + "]" * 900, '{"a": {"b": 1}}'])
def test_a_wrong_value_is_named_however_large_it_is(key: str, value: str) -> None:
    """Its text is not made for the message: it may be deep, or have more digits than Python writes."""
    text = json.dumps({**GOOD, key: "VALUE"}).replace('"VALUE"', value)
    with pytest.raises(MachineFileError) as caught:
        read_record(Outer, text, source="m.json", hint=HINT)
    assert len(caught.value.message) < 200


# --- JSON -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("NaN", "NaN is not a JSON number"),
        ('{"a": [Infinity]}', "Infinity is not a JSON number"),
        ("-Infinity", "-Infinity is not a JSON number"),
        ("1e999", "the number 1e999 is too large"),
        ("[-1e999]", "the number -1e999 is too large"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"a":' * 100_000, "it is nested too deeply"),
        ("9" * 5000, "digits"),
        ("{", "Expecting property name"),
        ("", "Expecting value"),
    ],
)
def test_what_is_no_json_is_a_value_error(text: str, problem: str) -> None:
    """Text that Python's decoder accepts is refused too, if it is not JSON; a machine file's error has the reason."""
    with pytest.raises(ValueError, match=problem):
        decode(text)
    with pytest.raises(MachineFileError, match=f"m.json: not JSON: .*{problem}"):
        Topology.from_json(text, source="m.json")


def test_numbers_that_can_be_written_are_read() -> None:
    """Numbers are read up to the largest float, and down to those that round to zero."""
    assert decode("[1e308, 5e-324, 1e-999, 0.1, -7]") == [1e308, 5e-324, 0.0, 0.1, -7]


def test_no_nan_is_written() -> None:
    """NaN and infinities become null at any depth; other values do not change."""
    content = {"a": [math.nan, 1.5, (math.inf, {"b": -math.inf})], "c": "NaN"}
    expected = {"a": [None, 1.5, [None, {"b": None}]], "c": "NaN"}
    assert json.loads(encode(content)) == expected
    assert encode([1.0, "ä"], indent=None) == '[1.0,"\\u00e4"]'
    assert encode("ä", ascii_only=False) == '"ä"'
