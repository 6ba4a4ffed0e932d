"""Records from JSON: what is accepted, and how a bad element is named."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import pytest

from numapin import Topology
from numapin.errors import MachineFileError
from tests.recorded.screens import compare_answers
from tests.unit.base.seam import AtMost, CpuSet, Texts, decode, encode, read_record, to_json

HINT = "how to get a good file"


class Word(StrEnum):
    ONE = "one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    n: int

    def __post_init__(self) -> None:
        if self.n == 7:
            msg = "7 is no good"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
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
    return read_record(Outer, json.dumps(value), source="m.json", hint=HINT)


def test_values_are_returned_as_they_are() -> None:
    """Each type has its reader; sets are list strings, and keys of maps are numbers. The way back gives the same.

    Unknown is None, and a missing key means the same, whatever the field's default.
    """
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
    found = read(GOOD)
    assert [getattr(found, name) for name in MAYBE] == [None] * len(MAYBE)
    assert found == read({**GOOD, **dict.fromkeys(MAYBE)})


def _answer(line: str) -> str:
    kind, _, text = line.partition(" ")
    reading: Callable[[], object] = {
        "change": lambda: read({**GOOD, **json.loads(text)}),
        "text": lambda: read_record(Outer, text, source="m.json", hint=HINT, schema="s/1"),
        "json": lambda: decode(text),
    }[kind]
    try:
        return repr(reading())
    except MachineFileError as error:
        return f"{error.message} ({error.hint})"
    except ValueError as error:
        return str(error)


def test_errors_name_file_and_element() -> None:
    """What is wrong is named by file and path, with what was found, in a line, and how to get a good file."""
    compare_answers(Path(__file__).with_name("records.txt"), _answer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": "y" * 500}, "n: expected a non-negative integer, found 'yyyyy"),
        ({"list": ["a"] * 5000}, "list: 5000 entries; at most 4096 are accepted"),
        ({"map": {"9" * 5000: 1}}, "map: expected an object with numbers as keys, found {'9999"),
        ({"map": {str(n): 1 for n in range(10)}}, "map: 10 entries; at most 9 are accepted"),
        ({"objects": [{"n": 1}] * 10}, "objects: 10 entries; at most 9 are accepted"),
        ({"objects": {str(n): 1 for n in range(99)}}, "objects: expected a list, found {'0': 1, '1': 1, "),
    ],
)
def test_large_elements_have_short_errors(change: dict[str, object], message: str) -> None:
    """The message has the beginning of what was found, or its size."""
    with pytest.raises(MachineFileError) as caught:
        read({**GOOD, **change})
    assert caught.value.message.startswith(f"m.json: {message}")
    assert len(caught.value.message) < 150


@pytest.mark.parametrize("key", ["set", "n", "f", "t", "list", "map", "inner", "word"])
def test_a_wrong_value_is_named_however_large_it_is(key: str) -> None:
    """Its text is not made for the message: it may be deep, or have more digits than Python writes."""
    for value in ("[[[]]]", "9" * 4000, "[" * 900 + "]" * 900, '{"a": {"b": 1}}'):
        text = json.dumps({**GOOD, key: "VALUE"}).replace('"VALUE"', value)
        with pytest.raises(MachineFileError) as caught:
            read_record(Outer, text, source="m.json", hint=HINT)
        assert len(caught.value.message) < 200


# --- JSON -------------------------------------------------------------------------------------------------------------


def test_json_that_is_too_large_is_a_value_error() -> None:
    """It is refused as text that is no JSON is, whatever Python's decoder would raise; so it is in a machine file."""
    for text in ("[" * 100_000, '{"a":' * 100_000, "9" * 5000, "[NaN]"):
        with pytest.raises(ValueError, match=r"nested too deeply|digits|NaN"):
            decode(text)
        with pytest.raises(MachineFileError, match=r"m.json: not JSON: "):
            Topology.from_json(text, source="m.json")


def test_no_nan_is_written() -> None:
    """NaN and infinities become null at any depth; other values do not change."""
    content = {"a": [math.nan, 1.5, (math.inf, {"b": -math.inf})], "c": "NaN"}
    expected = {"a": [None, 1.5, [None, {"b": None}]], "c": "NaN"}
    assert json.loads(encode(content)) == expected
    assert encode([1.0, "ä"], indent=None) == '[1.0,"\\u00e4"]'
    assert encode("ä", ascii_only=False) == '"ä"'
