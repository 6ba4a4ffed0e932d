"""Text for streams whose encoding lacks some of its characters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.base.seam import formats

formats.register_stand_ins()


@given(st.text(st.characters(exclude_categories=())), st.sampled_from(["ascii", "latin-1", "utf-8", "cp1252"]))
def test_every_text_can_be_encoded(text: str, encoding: str) -> None:
    """No encoding raises, lone surrogates included, and what it has stays."""
    written = text.encode(encoding, formats.STAND_INS)
    if text.isascii():
        assert written == text.encode("ascii")


@pytest.mark.parametrize(
    ("text", "encoding", "written"),
    [
        ("DataLoader(…) ±3%", "ascii", b"DataLoader(...) +-3%"),
        ("±3% …", "latin-1", b"\xb13% ..."),
        ("日本", "latin-1", rb"\u65e5\u672c"),
        ("😀", "ascii", rb"\U0001f600"),
        ("a\udcffb", "utf-8", b"a\xffb"),
        ("\ud800", "utf-8", rb"\ud800"),
    ],
)
def test_stand_ins(text: str, encoding: str, written: bytes) -> None:
    """Our own punctuation is spelled out, names get escapes, and bytes that were not text are themselves again."""
    assert text.encode(encoding, formats.STAND_INS) == written
