"""The report on ranks that failed: which was the first, and what it says."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from numapin.launcher.failure import EndedRank, ranks_failed

RECORDED = {
    "message": {"message": "KeyError: 'x'", "extraInfo": {"py_callstack": "Traceback:\n  File\nKeyError: 'x'\n"}}
}


def ended(rank: int, exitcode: int, **changes: Any) -> EndedRank:
    """Return the end of a rank."""
    given = {"ended_s": 100.0, "was_ended": False, "error_file": f"/run/error-{rank}.json", "error": None}
    return EndedRank(local_rank=rank, rank=rank, pid=1000 + rank, exitcode=exitcode, **{**given, **changes})


def at(seconds: int) -> dict[str, Any]:
    """Return a recorded error with a time, as torch's @record writes it."""
    message = RECORDED["message"]
    return {"message": {**message, "extraInfo": {**message["extraInfo"], "timestamp": str(seconds)}}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("ranks", "first"),
    [
        ([ended(0, 0), ended(1, 3), ended(2, -15, was_ended=True)], 1),
        ([ended(0, 1, ended_s=101.0), ended(1, 1, ended_s=100.9)], 1),
        ([ended(0, 1, ended_s=101.0), ended(1, 1, ended_s=108.0, error=at(99))], 1),
        ([ended(0, -9, ended_s=100.7), ended(1, 1, ended_s=100.9, error=at(100))], 0),
        ([ended(0, 1, ended_s=99.0, was_ended=True), ended(1, 1)], 1),
    ],
    ids=["the only one", "seen first", "recorded first", "in the same second", "not one that was ended"],
)
def test_first(ranks: list[EndedRank], first: int) -> None:
    """The first failure is the one that happened first, by what the rank recorded or by when its end was seen."""
    error = ranks_failed("train.py", "host", ranks)
    assert f"rank      : {first} (local_rank: {first})" in error.message
    assert first in error.failures
    assert all(failure.exitcode for failure in error.failures.values())


@pytest.mark.parametrize(
    ("rank", "lines"),
    [
        (ended(1, 3), ["exitcode  : 3 (pid: 1001)", "error_file: <N/A>", "traceback : To enable traceback see: https"]),
        (ended(1, -9), ["exitcode  : -9 (pid: 1001) (SIGKILL)", "traceback : Signal 9 (SIGKILL) received by PID 1001"]),
        (ended(1, -40), ["exitcode  : -40 (pid: 1001) (<N/A>)"]),
        (ended(1, 1, error=at(9)), ["error_file: /run/error-1.json", "traceback : Traceback:\n      " + "  File"]),
        (ended(1, 1, error={"message": "just text", "timestamp": 5}), ["traceback : just text"]),
        (ended(1, 1, error={"message": {"message": "no stack", "extraInfo": {}}}), ["traceback : no stack"]),
        (ended(1, 1, error=["not", "torch's"]), ["traceback : To enable"]),
        (ended(1, 1, error={"message": {"extraInfo": 7}, "timestamp": "soon"}), ["traceback : To enable"]),
    ],
    ids=["status", "signal", "real-time signal", "recorded", "text", "no stack", "no mapping", "other types"],
)
def test_lines(rank: EndedRank, lines: list[str]) -> None:
    """The report has torch's fields; an error file that torch did not write does not break it."""
    message = ranks_failed("train.py", "host", [rank]).message
    assert message.startswith("train.py FAILED\n")
    for line in lines:
        assert f"\n    {line}" in message


def test_others_and_pickle() -> None:
    """The other ranks are named, those that failed too and those that were ended; the error can be pickled."""
    ranks = [ended(0, -15, was_ended=True), ended(1, 3), ended(2, 4, ended_s=100.1), ended(3, -15, was_ended=True)]
    error = ranks_failed("train.py", "host", ranks)
    assert "also failed: rank 2, exitcode 4 (pid: 1002)" in error.message
    assert "ended then : ranks 0,3" in error.message
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - ours
    assert (again.message, again.failures) == (error.message, error.failures)
