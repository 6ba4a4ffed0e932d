"""What a rank leaves where it cannot write."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from numapin.trace.settings import Settings
from numapin.trace.tracer import Tracer

if TYPE_CHECKING:
    from pathlib import Path


def test_a_record_without_room_beside_it(tmp_path: Path) -> None:
    """Where no second file can be made, the record is rewritten in place, and nothing is left of the first."""
    claim = tmp_path / ("r" * 255)  # with a dot before it, the name is too long
    claim.touch()
    settings = Settings(folder=str(tmp_path), steps=1, skip=1)
    tracer = Tracer(
        settings=settings, rank=0, restart=0, claim=claim, check=lambda: None, require_no_other=lambda: None
    )
    tracer.record(trace=None, num_steps=0, reason="long " * 500)
    tracer.record(trace=None, num_steps=0, reason="short")
    assert json.loads(claim.read_text())["reason"] == "short"
    assert list(tmp_path.iterdir()) == [claim]
