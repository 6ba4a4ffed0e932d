"""The start of a rank that the kernel refuses."""

from __future__ import annotations

import pytest

from numapin.errors import NumapinError
from numapin.launcher import direct
from numapin.launcher.direct_options import DirectJob, read_line


@pytest.mark.parametrize("argument", ["a\0b", "x" * (1 << 18)], ids=["NUL", "too long"])
def test_a_rank_that_cannot_be_started(argument: str) -> None:
    """It is an error of ours that names the rank and the reason."""
    job = read_line(["train.py", argument], {}, {}, python="python3")
    assert isinstance(job, DirectJob)
    with direct._Alarm(job.signals) as alarm, pytest.raises(NumapinError, match="rank 0 cannot be started: "):
        direct._start([], job, [{}], alarm)
