"""Made ends of jobs, and the block that is printed for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from tests.recorded.seam import EndedRank, HostFailure, JobFailure, failure_block
from tests.terminals import HOSTILE


@dataclass(frozen=True, slots=True)
class End:
    """The ends of a job's ranks, the first to fail first, and other facts of the failure."""

    ranks: tuple[EndedRank, ...]
    facts: dict[str, Any] = field(default_factory=dict)


def ended(rank: int = 0, exitcode: int = 1, *, text: str = "", trace: str = "", **changes: Any) -> EndedRank:
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
    given = {"program": "train.py", "host": "node7", **facts}
    first, *rest = failure_block(JobFailure(ranks=ranks, **given), file=file)
    return [f"numapin: error: {first}", *rest]


_FRAMES = "".join(
    f'  File "/home/ada/{"x" * n}/train.py", line {n}, in f{n}\n    f{n}()\n    ^^^^\n' for n in range(90)
)
DEEP: Final = f"Traceback (most recent call last):\n{_FRAMES}E: x"
_LONG = "名前" * 200
_KILLED = "DataLoader worker (pid 1) is killed by signal: Killed"
_CALLS = 'Traceback (most recent call last):\n  File "a.py", line 1, in a\n    a()\n'
_RECORD = (
    '  File "/v/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 3, in wrapper\n    return f()\n'
)
_CHAIN = (
    f"{_CALLS}KeyError: 1\n\nDuring handling of the above exception, another exception occurred:\n\n"
    f'Traceback (most recent call last):\n{_RECORD}  File "b.py", line 2, in b\n    b()\n    ~^^\nValueError: x'
)
_TORCHS = "".join(
    f'  File "/v/lib/python3.12/site-packages/torch/utils/data/dataloader.py", line {n}, in f{n}\n    f{n}()\n'
    for n in range(9)
)
_IN_DATA = '  File "/ada/numapin/data/a.py", line 1, in a\n    a(\n' + 9 * "      b,\n"  # as Python 3.13 shows a call
_CALL_B = '  File "b.py", line 2, in b\n    b()\nE: x'

WORST: Final = {
    "many words, many frames": End((ended(text="E: " + "word " * 300, trace=DEEP),)),
    "a message of many lines, SIGABRT": End((ended(text="E: a\nb\nc\nd\ne\nf\ng", trace=DEEP, exitcode=-6),)),
    "hostile": End(
        (ended(text=HOSTILE * 9, trace=f"Traceback (most recent call last):\n{HOSTILE * 50}"),), {"host": HOSTILE * 9}
    ),
    "wide": End(
        (
            ended(
                text=_LONG,
                trace=f'Traceback (most recent call last):\n  File "{_LONG}", line 3, in {_LONG}\n    {_LONG}',
            ),
        )
    ),
    "out of memory, a long log": End(
        (ended(exitcode=-9, logs=("/" + "l" * 900,)),),
        {"out_of_memory": "x" * 900, "out_of_memory_advice": "y " * 900},
    ),
    "out of memory, wide": End(
        (ended(exitcode=-9, logs=("/a" * 900,)),),
        {"out_of_memory": _LONG, "out_of_memory_advice": _LONG, "program": _LONG},
    ),
    "large numbers, SIGBUS": End(
        (ended(rank=10**9, local_rank=7, gpu=10**9, node=10**9, exitcode=-7),), {"host": "h" * 300}
    ),
    "why it is the first": End(
        (ended(exitcode=-9),),
        {"why_first": "w " * 300, "out_of_memory": "x " * 900, "out_of_memory_advice": "y " * 900},
    ),
    "a killed worker, a long log": End(
        (ended(text=f"{_KILLED}. {'x ' * 900}", logs=("/a" * 900,)),),
        {"out_of_memory": "x " * 900, "out_of_memory_advice": "y " * 900},
    ),
    "a killed worker after many lines, one of several hosts": End(
        (ended(text="x\n" * 900 + _KILLED, exitcode=-6, logs=("/a" * 900,)),),
        {"out_of_memory": _LONG, "out_of_memory_advice": _LONG, "is_only_host": False},
    ),
    "large numbers and a long log, one of several hosts": End(
        (ended(rank=10**9, local_rank=7, exitcode=-7, logs=("/a" * 900,)),),
        {"host": "h" * 300, "is_only_host": False},
    ),
    "text instead of a traceback": End((ended(trace="no traceback at all"),)),
    "a traceback without frames": End((ended(text="x", trace="Traceback (most recent call last):"),)),
    "an exception group": End(
        (ended(text="x", trace="  + Exception Group Traceback (most recent call last):\n  |   File"),)
    ),
}
"""The longest, widest and most hostile."""

ENDS: Final = {
    **WORST,
    "an exit status": End((ended(exitcode=3),)),
    "frames of torch's @record are left out": End((ended(text="ValueError: x", trace=_CHAIN),)),
    "the script's line is above many of torch's": End((ended(text="E: x", trace=f"{_CALLS}{_TORCHS}E: x"),)),
    "the script is on stdin": End((ended(text="E: x", trace=f"{_CALLS.replace('a.py', '<stdin>')}{_TORCHS}E: x"),)),
    "the script's line is long, and in a folder named like one of ours": End(
        (ended(text="E: x", trace=f"Traceback (most recent call last):\n{_IN_DATA}{_TORCHS}E: x"),)
    ),
    "Python left out frames": End(
        (ended(text="E: x", trace=f"{_CALLS}  [Previous line repeated 996 more times]\n{_CALL_B}"),)
    ),
    "numapin cut a long traceback between two lines": End(
        (ended(text="E: x", trace=f'{_CALLS}  [12 characters left out] ile "c.py", line 1, in c\n{_CALL_B}'),)
    ),
    "the first of this host, and why": End(
        (ended(3, -11),), {"is_only_host": False, "why_first": "rank 0 failed 0.5 s before"}
    ),
    "a rank of another host": End(
        (ended(was_ended=True, exitcode=-15), ended(1)),
        {"is_only_host": False, "is_settled": True, "elsewhere": HostFailure("node7", 2, 17, "KeyError: 'x' " * 90)},
    ),
    "the launcher of another host": End(
        (ended(was_ended=True, exitcode=-15),),
        {"is_only_host": False, "elsewhere": HostFailure("h" * 300, 2, None, "its launcher is gone: it closed")},
    ),
    "a worker that was killed": End(
        (ended(text="RuntimeError: DataLoader worker (pid 9) is killed by signal: Killed. "),),
        {"out_of_memory": "out of memory", "out_of_memory_advice": "less"},
    ),
    "an exception, then ended by numapin": End((ended(exitcode=-15, text="E: x", was_ended=True),)),
    "an exception, then a crash": End((ended(exitcode=-11, text="E: x", was_ended=True),)),
    "others crash while they are ended, or stay": End(
        (
            ended(),
            ended(1, -11, was_ended=True),
            ended(2, -15, was_ended=True),
            ended(3, -9, was_ended=True, is_left=True),
        )
    ),
    "others failed later, were ended, had finished": End(
        (
            ended(),
            ended(1),
            *(ended(rank, exitcode, was_ended=True) for rank, exitcode in ((2, -15), (3, -15), (4, -9))),
            *(ended(5, 0), ended(6, 0)),
        )
    ),
}
