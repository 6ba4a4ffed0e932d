"""The block at the end of a failed job: at most 20 lines and 80 columns, whatever the ranks wrote.

What it says is recorded: tests/recorded/failures.txt.
"""

from __future__ import annotations

import time

import pytest
from rich.cells import cell_len

from tests.recorded.failures import DEEP, ENDS, WORST, block, ended
from tests.unit.view.seam import JobFailure, failure_text, traceback_lines


@pytest.mark.parametrize("name", WORST)
@pytest.mark.parametrize("file", ["", "/run/x", "/n" * 400, f"/{'名前' * 200}"], ids=["none", "short", "long", "wide"])
def test_it_fits(name: str, file: str) -> None:
    """However long, wide or hostile the facts are, the block fits and has visible characters only."""
    others = [ended(n, exitcode, was_ended=n > 3) for n, exitcode in enumerate((1, 0, 3, -15, -15, -9, 2, 5), 1)]
    lines = block(*WORST[name].ranks, *others, file=file, **WORST[name].facts)
    assert len(lines) <= 20
    assert max(map(cell_len, lines)) <= 80
    assert all(line.isprintable() for line in lines)
    assert all(line.startswith("  ") for line in lines[1:])


@pytest.mark.parametrize("text", ["x" * (1 << 24), "x\n" * (1 << 23)], ids=["one word", "lines"])
def test_the_largest_exception_takes_no_time(text: str) -> None:
    """A message of 16 MiB, the largest error file that is read, is cut before its lines are made."""
    start = time.process_time()
    rank = ended(text=text)
    assert len(block(rank)) <= 20
    assert len(JobFailure(ranks=(rank,), program="train.py", host="node7").summary) < 1000
    assert time.process_time() - start < 10


def test_text_has_all_frames_of_all_ranks() -> None:
    """The file has each rank's end and whole traceback, in lines of visible characters, and names one that stays."""
    found = JobFailure(program="t.py", host="h", ranks=(ended(text="E: x", trace=DEEP), ended(1, -9)))
    text = failure_text(found)
    assert DEEP in text
    assert text.startswith(
        "t.py failed on h: rank 0 failed first: E: x\n--- rank 0 (pid 1000), failed: exit status 1\n"
    )
    assert text.endswith("--- rank 1 (pid 1001), failed: SIGKILL\nno exception was recorded\n")
    assert traceback_lines(ended(text="\x1b[2J")) == ["\ufffd[2J"]
    stays = JobFailure(program="t.py", host="h", ranks=ENDS["others crash while they are ended, or stay"].ranks)
    assert "--- rank 3 (pid 1003), left: still there after SIGKILL\n" in failure_text(stays)
