"""Thousands of plans and of environments give the recorded answers: a digest for each group.

To see which answers differ, compare what `python -m tests.recorded.oracle` prints before and after a change.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.recorded.oracle import environments, plans
from tests.recorded.screens import compare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.mark.parametrize("answers", [plans, environments])
def test_the_answers_are_the_recorded_ones(answers: Callable[[], Iterator[tuple[str, list[Any]]]]) -> None:
    """No plan, error, warning or variable is another one."""
    digests = ((name, hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]) for name, found in answers())
    compare("".join(f"{digest} {name}\n" for name, digest in digests), f"oracle-{answers.__name__}.txt")
