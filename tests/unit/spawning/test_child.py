"""The answers of ranks: which exceptions survive a pickle."""

from __future__ import annotations

import pickle

from numapin.errors import RankError
from tests.unit.spawning.seam import Outcome, failed


class Forgetful(Exception):  # noqa: N818 - a user's own
    """An exception whose pickle loses a part of its text."""

    def __init__(self, text: str, more: str = "") -> None:
        super().__init__(text)
        self.more = more

    def __str__(self) -> str:
        """Return both parts."""
        return f"{self.args[0]} {self.more}"

    def __reduce__(self) -> tuple[object, ...]:
        """Forget the second part."""
        return Forgetful, self.args


def test_an_exception_that_survives_is_sent() -> None:
    """An exception that comes back with its type and text is in the answer, with the outcome."""
    answer = failed(Outcome.RAISED, RankError("a message", "a hint"))
    assert answer.outcome is Outcome.RAISED
    assert answer.content == pickle.dumps(RankError("a message", "a hint"))


def test_an_exception_that_changes_is_not_sent() -> None:
    """If the pickle changes the exception's text, only the traceback is in the answer."""
    answer = failed(Outcome.RAISED, Forgetful("this", "that"))
    assert answer.content == b""
    assert "Forgetful: this that" in answer.text
