"""JSON as other programs read and write it."""

from __future__ import annotations

import json
import math

import pytest

from numapin import Topology
from numapin.errors import MachineFileError
from tests.unit.base.seam import decode, encode


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
