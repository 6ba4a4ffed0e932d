"""`numapin bench exec`: its cases as data. Pure.

Comes in: options. Goes out: a `Benchmark` for measure/exec.py. Does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.base.plural import counted
from numapin.bench.model import Benchmark, Case, Peer, Question
from numapin.bench.python import PYTHON, running

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM: Final = ("true",)
"""The program that is run, alone and with each peer's words in front."""

# The installed program `numapin`, run by this interpreter.
_NUMAPIN: Final = (*running("from numapin.cli.entry import main; main()"), "exec")
_TASK: Final = ("--local-rank", "0", "--local-size", "1")
PEERS: Final = {
    "python": (*PYTHON, "-c", "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"),
    "numapin-plan": (*_NUMAPIN, *_TASK, "--plan"),
    "numapin": (*_NUMAPIN, *_TASK, "--"),
}
"""A bare interpreter; `numapin exec --plan FILE`; `numapin exec`, which reads the machine."""
_QUESTION: Final = Question(
    subject="make the plan once (exec --plan)",
    things="starts are",
    figure="total_ms",
    own=("numapin-plan",),
    against="numapin",
    less_is_better=True,
)


def exec_benchmark(peers: Sequence[str], *, plan: str, num_samples: int) -> Benchmark:
    """Return the benchmark; `plan` is the path of a plan of one rank."""
    words = {**PEERS, "numapin-plan": (*PEERS["numapin-plan"], plan, "--")}
    return Benchmark(
        name="exec",
        module="numapin.bench.measure.exec",
        questions=(_QUESTION,),
        cases=(
            Case(
                name="exec",
                about=f"{counted(num_samples, 'run')} of {' '.join(PROGRAM)}, each with and without the peer",
                session="exec",
                peers=tuple(
                    Peer(
                        name=peer,
                        specs=({"with": [*words[peer], *PROGRAM], "without": [*PROGRAM], "num_samples": num_samples},),
                    )
                    for peer in peers
                ),
            ),
        ),
    )
