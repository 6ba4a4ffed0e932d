"""Which processes may be changed."""

from __future__ import annotations

import os

import pytest

from numapin.errors import UsageError
from tests.unit.attach.seam import examine, other_processes, why_untouchable


def test_own_process() -> None:
    """This process itself is refused, and is not among the others: it is about to end."""
    with pytest.raises(UsageError, match="is numapin itself"):
        examine(os.getpid(), other_users=True)
    assert os.getpid() not in other_processes()


@pytest.mark.parametrize(
    ("uid", "own", "other_users", "problem"),
    [
        (1000, 1000, False, None),
        (1001, 1000, False, "another user (uid 1001)"),
        (1001, 1000, True, "another user (uid 1001)"),
        (1001, 0, False, "another user (uid 1001)"),
        (1001, 0, True, None),
        (None, 1000, False, "several users"),
        (None, 0, False, "several users"),
        (0, 0, False, None),
    ],
)
def test_users(
    monkeypatch: pytest.MonkeyPatch, *, uid: int | None, own: int, other_users: bool, problem: str | None
) -> None:
    """A process is this user's if its real and effective users are; only root may ask for others."""
    monkeypatch.setattr(os, "geteuid", lambda: own)
    assert why_untouchable(uid, other_users=other_users) == problem
