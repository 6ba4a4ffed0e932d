"""`numapin bench launch`: its cases as data. Pure.

Comes in: options. Goes out: a `Benchmark` for measure/launch.py. Does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.base.plural import counted
from numapin.bench.model import Benchmark, Case, Comparison, Peer, Question
from numapin.bench.python import PYTHON, running

if TYPE_CHECKING:
    from collections.abc import Sequence

BASELINE: Final = "torchrun"
_TORCHRUN: Final = (*PYTHON, "-m", "torch.distributed.run")
_RUN: Final = (*running("from numapin.cli.entry import main; main()"), "run")
PEERS: Final = {
    BASELINE: _TORCHRUN,
    "torchrun-numa": (*_TORCHRUN, "--numa-binding=node"),
    "numapin": (*_RUN, "--launcher", "direct"),
    "numapin-agent": (*_RUN, "--launcher", "agent"),
}

# One write, because ranks share the file.
_PRINTS: Final = "import os, time; os.write(1, f'MARK {time.monotonic()}\\n'.encode())\n"
_IMPORTS: Final = f"import torch\n{_PRINTS}"
_ALL_REDUCE: Final = """
import os, time, torch, torch.distributed as dist
on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if on_gpu else "gloo")
x = torch.ones(1, device="cuda" if on_gpu else "cpu")
dist.all_reduce(x)
assert x.item() == dist.get_world_size()
if dist.get_rank() == 0:
    os.write(1, f"MARK {time.monotonic()}\\n".encode())
dist.destroy_process_group()
"""
_QUESTION: Final = Question(
    subject="{own} instead of torchrun",
    things="whole runs are",
    figure="total_s",
    own=("numapin", "numapin-agent"),
    against=BASELINE,
    less_is_better=True,
)
SCRIPTS: Final = {"print": _PRINTS, "import-torch": _IMPORTS, "all-reduce": _ALL_REDUCE}
"""In "print" and "import-torch" every rank prints; in "all-reduce" rank 0 prints after its first all-reduce."""


def launch_benchmark(scripts: Sequence[str], peers: Sequence[str], *, num_ranks: int) -> Benchmark:
    """Return the benchmark: each script under each launcher, with `num_ranks` ranks."""
    number = ("--nproc-per-node", str(num_ranks))
    return Benchmark(
        name="launch",
        module="numapin.bench.measure.launch",
        cases=tuple(
            Case(
                name=name,
                about=counted(num_ranks, "rank"),
                session="launch",
                peers=tuple(
                    Peer(name=peer, specs=({"command": [*PEERS[peer], *number], "script": SCRIPTS[name]},))
                    for peer in peers
                ),
            )
            for name in scripts
        ),
        comparisons=(
            Comparison(name="ratio", figure="total_s", against=BASELINE),
            Comparison(name="last_ratio", figure="last_s", against=BASELINE),
        ),
        questions=(_QUESTION,),
    )
