"""Suggestions for mistyped words."""

from __future__ import annotations

from tests.unit.base.seam import did_you_mean


def test_a_beginning_of_a_few_words() -> None:
    """A beginning suggests the words that begin so, but not a long list of them."""
    assert did_you_mean("--tr", ["--train", "--trace", "--x"]) == "; did you mean --train or --trace?"
    assert did_you_mean("--", ["--train", "--trace", "--x"]) == ""
    assert did_you_mean("--t", [f"--t{n}" for n in range(9)]) == "; did you mean --t8?"
