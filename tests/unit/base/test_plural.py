"""Counts and lists as text."""

from __future__ import annotations

import pytest

from tests.unit.base.seam import counted, listed


@pytest.mark.parametrize(("number", "text"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks")])
def test_counted(number: int, text: str) -> None:
    """One is singular."""
    assert counted(number, "rank") == text


@pytest.mark.parametrize(("noun", "text"), [("batch", "2 batches"), ("process", "2 processes")])
def test_plurals_in_es(noun: str, text: str) -> None:
    """Nouns that end in a hiss get "es"."""
    assert counted(2, noun) == text


@pytest.mark.parametrize(("ids", "text"), [({3}, "rank 3"), ([7, 0, 1], "ranks 0-1,7")])
def test_listed(ids: set[int] | list[int], text: str) -> None:
    """Ids are in Linux's list format; one is singular."""
    assert listed("rank", ids) == text
