"""The block at the end of a failed job: at most 20 lines and 80 columns, whatever the ranks wrote."""

from __future__ import annotations

import time
from typing import Any

import pytest
from rich.cells import cell_len

from numapin.launcher.failure import EndedRank, JobFailure
from numapin.view.failure_block import failure_block, failure_text, traceback_lines
from tests.terminals import HOSTILE

FRAMES = "".join(f'  File "/home/ada/{"x" * n}/train.py", line {n}, in f{n}\n    f{n}()\n    ^^^^\n' for n in range(90))


def ended(rank: int = 0, exitcode: int = 1, *, text: str = "", trace: str = "", **changes: Any) -> EndedRank:
    """Return the end of a rank, with what it recorded."""
    error = {"message": {"message": text, "extraInfo": {"py_callstack": trace}}} if text or trace else None
    given = {
        "local_rank": rank,
        "ended_s": 100.0 + rank,
        "was_ended": False,
        "error_file": "/run/error.json",
        "error": error,
    }
    return EndedRank(rank=rank, pid=1000 + rank, exitcode=exitcode, **{**given, **changes})


def block(*ranks: EndedRank, file: str = "/run/failure.txt", **facts: Any) -> list[str]:
    """Return the block, as it is printed."""
    given = {"program": "train.py", "host": "node7", **facts}
    first, *rest = failure_block(JobFailure(ranks=ranks, **given), file=file)
    return [f"numapin: error: {first}", *rest]


LONG = "名前" * 200
WORST = [
    (ended(text="E: " + "word " * 300, trace=f"Traceback (most recent call last):\n{FRAMES}E: x"), {}),
    (ended(text="E: a\nb\nc\nd\ne\nf\ng", trace=f"Traceback (most recent call last):\n{FRAMES}E: x", exitcode=-6), {}),
    (ended(text=HOSTILE * 9, trace=f"Traceback (most recent call last):\n{HOSTILE * 50}"), {"host": HOSTILE * 9}),
    (ended(text=LONG, trace=f'Traceback (most recent call last):\n  File "{LONG}", line 3, in {LONG}\n    {LONG}'), {}),
    (ended(exitcode=-9, logs=("/" + "l" * 900,)), {"out_of_memory": "x" * 900, "out_of_memory_advice": "y " * 900}),
    (ended(exitcode=-9, logs=("/a" * 900,)), {"out_of_memory": LONG, "out_of_memory_advice": LONG, "program": LONG}),
    (ended(rank=10**9, local_rank=7, gpu=10**9, node=10**9, exitcode=-7), {"host": "h" * 300}),
    (ended(exitcode=-9), {"why_first": "w " * 300, "out_of_memory": "x " * 900, "out_of_memory_advice": "y " * 900}),
    (
        ended(text=f"DataLoader worker (pid 1) is killed by signal: Killed. {'x ' * 900}", logs=("/a" * 900,)),
        {"out_of_memory": "x " * 900, "out_of_memory_advice": "y " * 900},
    ),
    (
        ended(
            text="x\n" * 900 + "DataLoader worker (pid 1) is killed by signal: Killed", exitcode=-6, logs=("/a" * 900,)
        ),
        {"out_of_memory": LONG, "out_of_memory_advice": LONG, "is_only_host": False},
    ),
    (ended(rank=10**9, local_rank=7, exitcode=-7, logs=("/a" * 900,)), {"host": "h" * 300, "is_only_host": False}),
    (ended(trace="no traceback at all"), {}),
    (ended(text="x", trace="Traceback (most recent call last):"), {}),
    (ended(text="x", trace="  + Exception Group Traceback (most recent call last):\n  |   File"), {}),
]


@pytest.mark.parametrize(("rank", "facts"), WORST)
@pytest.mark.parametrize("file", ["", "/run/x", "/n" * 400, f"/{LONG}"], ids=["none", "short", "long", "wide"])
def test_it_fits(rank: EndedRank, facts: dict[str, Any], file: str) -> None:
    """However long, wide or hostile the facts are, the block fits and has visible characters only."""
    others = [ended(n, exitcode, was_ended=n > 3) for n, exitcode in enumerate((1, 0, 3, -15, -15, -9, 2, 5), 1)]
    lines = block(rank, *others, file=file, **facts)
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
    assert time.process_time() - start < 2


def test_last_frames_without_record() -> None:
    """The last frames of the last exception are shown, without marks and without the frames of torch's @record."""
    record = (
        '  File "/v/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 3, in wrapper\n    return f()\n'
    )
    first = 'Traceback (most recent call last):\n  File "a.py", line 1, in a\n    a()\nKeyError: 1\n\n'
    first += "During handling of the above exception, another exception occurred:\n\n"
    last = f'Traceback (most recent call last):\n{record}  File "b.py", line 2, in b\n    b()\n    ~^^\nValueError: x'
    lines = block(ended(text="ValueError: x", trace=first + last))
    assert lines[2:5] == ["  failed  ValueError: x", '  at      File "b.py", line 2, in b', "            b()"]


def test_frames_around_a_gap() -> None:
    """The last frames are shown if Python, or our record, has left out some in the middle."""
    calls = '  File "a.py", line 1, in a\n    a()\n'
    for gap in ("  [Previous line repeated 996 more times]\n", "  [12 entries left out]\n"):
        trace = f'Traceback (most recent call last):\n{calls}{gap}  File "b.py", line 2, in b\n    b()\nE: x'
        assert '          File "b.py", line 2, in b' in block(ended(text="E: x", trace=trace))


def test_first_of_this_host_and_why() -> None:
    """On several hosts the block says so; a reason for the order has its row."""
    lines = block(ended(3, -11), is_only_host=False, why_first="rank 0 failed 0.5 s before")
    assert lines[1].startswith("  rank    3, the first to fail on this host: no GPU")
    assert "  why     rank 0 failed 0.5 s before" in lines


def test_a_worker_that_was_killed() -> None:
    """Its exception is followed by the likely cause."""
    text = "RuntimeError: DataLoader worker (pid 9) is killed by signal: Killed. "
    lines = block(ended(text=text), out_of_memory="out of memory", out_of_memory_advice="less")
    assert [line for line in lines if line.startswith(("  likely", "  next"))] == [
        "  likely  out of memory",
        "  next    less",
    ]


def test_an_exception_before_the_end_by_numapin() -> None:
    """A rank that failed first and was slow to end got our signal, which says nothing of its failure."""
    lines = block(ended(exitcode=-15, text="E: x", was_ended=True))
    assert lines[2:4] == ["  failed  E: x", "          then ended by numapin (SIGTERM)"]
    assert not any("likely" in line for line in lines)
    lines = block(ended(exitcode=-11, text="E: x", was_ended=True))
    assert lines[2:4] == ["  failed  E: x", "          then killed by SIGSEGV"]


def test_ends_that_were_not_ours() -> None:
    """Ranks that crash while they are ended are shown as such, and those that do not end."""
    others = [ended(1, -11, was_ended=True), ended(2, -15, was_ended=True), ended(3, -9, was_ended=True, is_left=True)]
    told = " ".join(" ".join(block(ended(), *others)).split())
    assert "1 failed while numapin ended it (rank 1: SIGSEGV); 1 was running and ended by numapin (SIGTERM)" in told
    assert "others 1 is still there after SIGKILL (rank 3); 1 failed" in told
    found = JobFailure(program="t.py", host="h", ranks=(ended(), *others))
    assert "--- rank 3 (pid 1003), left: still there after SIGKILL\n" in failure_text(found)


def test_what_the_others_did() -> None:
    """One row counts the others: failed later, running and ended, finished."""
    others = [ended(1, 1), ended(2, -15, was_ended=True), ended(3, -15, was_ended=True), ended(4, -9, was_ended=True)]
    lines = block(ended(), *others, ended(5, 0), ended(6, 0))
    told = " ".join(" ".join(lines).split())
    assert (
        "others 1 failed later (rank 1); 3 were running and ended by numapin (2 SIGTERM, 1 SIGKILL); 2 had finished"
        in told
    )
    assert any("others  no other rank ran on this host" in line for line in block(ended()))


def test_text_has_all_frames_of_all_ranks() -> None:
    """The file has each rank's end and whole traceback, in lines of visible characters."""
    trace = f"Traceback (most recent call last):\n{FRAMES}E: x"
    found = JobFailure(program="t.py", host="h", ranks=(ended(text="E: x", trace=trace), ended(1, -9)))
    text = failure_text(found)
    assert trace in text
    assert text.startswith(
        "t.py failed on h: rank 0 failed first: E: x\n--- rank 0 (pid 1000), failed: exit status 1\n"
    )
    assert text.endswith("--- rank 1 (pid 1001), failed: SIGKILL\nno exception was recorded\n")
    assert traceback_lines(ended(text="\x1b[2J")) == ["\ufffd[2J"]
