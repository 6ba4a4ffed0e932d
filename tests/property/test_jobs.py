"""Times, names, words and YAML of job scripts, for any input."""

from __future__ import annotations

import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from numapin.errors import UsageError
from tests.property.seam import JobRequest, kubernetes, manifest, name_of, notation

SECONDS = st.integers(1, 400 * 24 * 3600)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
LINES = st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20), min_size=2, max_size=4)
WORDS = TEXT | LINES.map("\n".join)
VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(), WORDS),
    lambda inner: st.one_of(
        st.dictionaries(WORDS, inner, max_size=4),
        st.lists(st.one_of(WORDS, st.integers(), st.dictionaries(TEXT, inner, min_size=1, max_size=4)), max_size=4),
    ),
    max_leaves=20,
)


@given(SECONDS)
def test_times_are_read_as_they_are_written(time_s: int) -> None:
    """Each engine's notation is the same time, to the second or rounded up to the minute."""
    assert notation.parse_time(notation.with_days(time_s)) == time_s
    assert notation.parse_time(f"{time_s}s") == time_s
    assert notation.parse_time(f"{time_s // 3600}h{time_s // 60 % 60}m{time_s % 60}s") == time_s
    hours, minutes = map(int, notation.hours_and_minutes(time_s).split(":"))
    assert time_s <= (hours * 60 + minutes) * 60 < time_s + 60
    hours, minutes, seconds = map(int, notation.clock(time_s).split(":"))
    assert hours * 3600 + minutes * 60 + seconds == time_s


@given(TEXT)
def test_a_time_is_a_time_or_an_error(text: str) -> None:
    """Any text is a positive time or a ValueError."""
    try:
        time_s = notation.parse_time(text)
    except ValueError:
        time_s = None
    assert time_s is None or time_s > 0


@pytest.mark.parametrize(
    ("text", "time_s"),
    [("4:00:00", 14400), ("1-12", 129600), ("1-12:30", 131400), ("2-00:00:01", 172801), ("1d2h", 93600), ("90m", 5400)],
)
def test_known_times(text: str, time_s: int) -> None:
    """Each notation is read correctly."""
    assert notation.parse_time(text) == time_s


@given(TEXT.filter(lambda text: text != ""))
def test_names_are_safe_or_refused(text: str) -> None:
    """An accepted name has letters, digits and a few marks only; names derived from scripts are accepted."""
    try:
        taken = JobRequest(command=("a",), gpus_per_node=1, name=text).job_name
    except UsageError as error:
        assert repr(text) in error.message  # noqa: PT017 - most texts are refused, some are taken
    else:
        assert re.fullmatch(r"[A-Za-z0-9._+-]+", taken)
    made = name_of(text)
    assert JobRequest(command=("a",), gpus_per_node=1, name=made).job_name == made


@given(TEXT.filter(lambda text: text and text[0] != "-" and "\0" not in text))
def test_every_script_has_a_name_for_kubernetes(text: str) -> None:
    """A name derived from a script's is a DNS label with room for an index."""
    name = kubernetes.job_name(JobRequest(command=(text,), gpus_per_node=1))
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", name)


@given(st.dictionaries(WORDS, VALUES, min_size=1, max_size=5))
def test_yaml_reads_back_as_what_was_written(value: dict[str, object]) -> None:
    """PyYAML, which reads YAML 1.1, returns the same strings, numbers and booleans; `no` and 1e3 stay strings.

    Whatever the strings are, the document is visible ASCII.
    """
    text = "\n".join(manifest.yaml_lines(value))
    assert yaml.safe_load(text) == value
    assert all(line.isascii() and line.isprintable() for line in text.split("\n"))


@given(VALUES, LINES)
def test_yaml_with_comments_reads_back_too(value: object, lines: list[str]) -> None:
    """A comment is written above its key, at any depth, and changes no value; without a value, both are left out."""
    note = "\n".join(f"note {line}" for line in lines)
    filled = manifest.fill("a:\n- b: c\n  # $note\n  d: $value", {"note": note, "value": value})
    assert yaml.safe_load("\n".join(filled)) == {
        "a": [{"b": "c", "d": value}] if value not in ("", [], {}) else [{"b": "c"}]
    }
    assert manifest.fill("a: b\n# $note\nc: $value", {"note": note, "value": None}) == ("a: b",)


@pytest.mark.parametrize(
    "text",
    [
        *("no", "Yes", "on", "Off", "y", "null", "~", "1e3", "0x1f", "1:30", "2001-01-01", ".inf"),
        *("=", "<<", "-", "a: b", "#a", "", " a"),
    ],
)
def test_strings_that_look_like_something_else_stay_strings(text: str) -> None:
    """Strings that a YAML reader could read as a number, date, boolean or null are quoted."""
    assert yaml.safe_load("\n".join(manifest.yaml_lines({"a": text, text: "b"}))) == {"a": text, text: "b"}
