"""When the ranks of a traced job have recorded their steps."""

from __future__ import annotations

import pytest

from tests.unit.cli.seam import are_all_recorded


def record(rank: int, *, done: bool = True, num_local_ranks: object = 2) -> dict[str, object]:
    """Return a rank's record."""
    return {"rank": rank, "done": done, "num_local_ranks": num_local_ranks}


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([record(0), record(1)], True),
        ([record(0)], False),
        ([record(0), record(1, done=False)], False),
        ([record(0), record(0)], False),
        ([record(0, num_local_ranks=None)], True),
        ([{"rank": 0, "reason": "cut off"}], False),
    ],
    ids=["both", "one has not stepped", "one still steps", "one twice", "of an older version", "broken"],
)
def test_all_ranks(records: list[dict[str, object]], expected: bool) -> None:  # noqa: FBT001 - a parameter
    """All ranks of the host have a record, and each is done."""
    assert are_all_recorded(records) is expected
