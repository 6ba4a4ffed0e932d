"""Text, JSON and shell words with any characters: the output is visible, and no value is lost."""

from __future__ import annotations

import json
import os
import subprocess

from hypothesis import given, settings
from hypothesis import strategies as st

from numapin.errors import NumapinError
from tests.property.seam import formats, json_text, printable, printable_lines

TEXT = st.text(st.characters(), max_size=30) | st.text(
    "\x1b[31m\x07\x9b\x85\x7f\n\t\u202e\u2066\ud800é名'\\\"", max_size=12
)
WORDS = st.lists(TEXT.map(lambda text: text.encode(errors="ignore").decode()).filter(lambda word: "\0" not in word))


@given(TEXT)
def test_what_is_shown_is_as_long_and_visible(text: str) -> None:
    """Each character is kept or replaced by one visible character; text of several lines also keeps its newlines."""
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) == len(text)
    assert all(new in (old, "\ufffd") for old, new in zip(text, shown, strict=True))
    lines = printable_lines(text)
    assert lines.count("\n") == text.count("\n")
    assert lines.replace("\n", "").isprintable()


@given(st.recursive(TEXT, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=8))
def test_json_has_the_same_value_in_visible_characters(value: object) -> None:
    """JSON keeps the value of its strings and keys in visible characters; letters of all scripts stay readable."""
    text = json_text(value)
    assert json.loads(text) == value
    assert text.replace("\n", "").isprintable()
    assert json_text({"é": "名🜁"}) == '{\n "é": "名🜁"\n}\n'


@settings(max_examples=40)
@given(WORDS)
def test_a_shell_gives_the_same_words_back(words: list[str]) -> None:
    """Bash parses the line into the original words, in UTF-8 and in the C locale; every character is visible."""
    line = formats.quote_all(words)
    assert line.isprintable()
    for locale in ("C", "C.UTF-8"):
        done = subprocess.run(
            ["bash", "-c", f"for word in {line}; do printf '%s\\0' \"$word\"; done"],
            capture_output=True,
            check=True,
            env={**os.environ, "LC_ALL": locale},
        )
        assert done.stdout == b"".join(word.encode() + b"\0" for word in words)


def test_words_that_are_no_text() -> None:
    """Bytes of an argument that are not UTF-8 are restored by the shell; visible characters are quoted as usual."""
    word = os.fsdecode(b"\xff\x9b'\\")
    told = subprocess.run(["bash", "-c", f"printf %s {formats.quote(word)}"], capture_output=True, check=True).stdout
    assert told == b"\xff\x9b'\\"
    assert formats.quote_all(["a b", "c", ""]) == "'a b' c ''"
    assert formats.quote("\x1b[31m") == r"$'\e[31m'"


def test_an_error_that_nobody_catches() -> None:
    """Python writes the text of an uncaught error to the terminal: it keeps its lines and contains no command."""
    error = NumapinError("a\x1b[2J\n\tb", "c\u202e")
    assert str(error) == "a\ufffd[2J\n    b\n  hint: c\ufffd"
    assert (error.message, error.hint) == ("a\x1b[2J\n\tb", "c\u202e")
