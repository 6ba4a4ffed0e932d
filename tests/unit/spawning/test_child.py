"""The answers of ranks: which exceptions survive a pickle, and which pickles are accepted."""

from __future__ import annotations

import pickle

import pytest

from numapin.errors import RankError
from tests.unit.spawning.seam import InheritedDescriptor, Outcome, _failed, unpickle


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
    answer = _failed(Outcome.RAISED, RankError("a message", "a hint"))
    assert answer.outcome is Outcome.RAISED
    assert str(unpickle(answer.content, RankError)) == "a message\n  hint: a hint"


def test_an_exception_that_changes_is_not_sent() -> None:
    """If the pickle changes the exception's text, only the traceback is in the answer."""
    answer = _failed(Outcome.RAISED, Forgetful("this", "that"))
    assert answer.content == b""
    assert "Forgetful: this that" in answer.text


@pytest.mark.parametrize("kind", [int, BaseException])
def test_a_pickle_of_another_type_is_refused(kind: type) -> None:
    """An object of another type than expected is an error that names both types."""
    with pytest.raises(TypeError, match=f"str is not a {kind.__name__}"):
        unpickle(pickle.dumps("text"), kind)


def test_an_inherited_descriptor_keeps_its_number() -> None:
    """The unpickler gets the number back from the pickle, without a copy of the descriptor."""
    assert unpickle(pickle.dumps(InheritedDescriptor(7)), InheritedDescriptor).detach() == 7
