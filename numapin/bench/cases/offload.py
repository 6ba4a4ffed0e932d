"""`numapin bench offload`: its cases and peers as data. Pure.

Comes in: options, and the thread counts of numapin's plans. Goes out: a `Benchmark` for measure/offload.py. Does not
import torch.

A peer is a launcher with options. Its job measures all cases one after another, so a repeat starts each launcher once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

from numapin.base.plural import counted
from numapin.bench.model import Benchmark, Case, Comparison, Peer
from numapin.bench.python import PYTHON, running

BASELINE: Final = "torchrun"
EQUAL: Final = "torchrun-threads"
_TORCHRUN: Final = (*PYTHON, "-m", "torch.distributed.run", "--standalone")
_RUN: Final = (*running("from numapin.cli.entry import main; main()"), "run", "--quiet")
PEERS: Final = {
    BASELINE: "torchrun as installed: one thread per rank if there are several ranks",
    EQUAL: "torchrun with the OMP_NUM_THREADS of `node`",
    "node": "numapin run --bind node",
    "exclusive": "numapin run --bind exclusive",
}
TORCHRUNS: Final = (BASELINE, EQUAL)

ADAMW: Final = "adamw"
FSDP: Final = "fsdp"
LOADED: Final = "-loader"
CASES: Final = {
    ADAMW: "a fused AdamW on the CPU, alone",
    ADAMW + LOADED: "the same beside a busy DataLoader",
    FSDP: "FSDP2 with its parameters and optimizer on the CPU",
    FSDP + LOADED: "the same beside a busy DataLoader",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSize:
    """The size of the measured jobs.

    Attributes:
        num_parameters: The parameters of a rank in the `adamw` cases.
        width: The width of the model in the `fsdp` cases; a block has 8 * width**2 parameters.
        num_blocks: The blocks of that model.
        batch_size: The samples in a rank's step.
    """

    num_parameters: int
    width: int
    num_blocks: int
    batch_size: int

    @property
    def num_model_parameters(self) -> int:
        """The parameters of the model, over all ranks."""
        return 8 * self.width**2 * self.num_blocks


ON_GPUS: Final = OffloadSize(num_parameters=32 << 20, width=2048, num_blocks=4, batch_size=512)
ON_CPUS: Final = OffloadSize(num_parameters=4 << 20, width=512, num_blocks=2, batch_size=32)
QUICK: Final = OffloadSize(num_parameters=1 << 20, width=128, num_blocks=2, batch_size=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadBenchOptions:
    """The options of this benchmark. `num_threads` are a rank's threads under `node`."""

    cases: tuple[str, ...]
    peers: tuple[str, ...]
    num_ranks: int
    num_workers: int
    seconds: float
    size: OffloadSize
    on_gpu: bool
    num_threads: int


def offload_benchmark(options: OffloadBenchOptions, *, folder: str) -> Benchmark:
    """Return the benchmark; jobs leave their answers in `folder`."""
    job = {
        "cases": [*options.cases],
        "num_workers": options.num_workers,
        "seconds": options.seconds,
        "size": asdict(options.size),
        "on_gpu": options.on_gpu,
    }
    cases = (
        Case(
            name=name,
            about=about(name, options),
            peers=tuple(
                Peer(
                    name=peer,
                    specs=({**_start(peer, options), "case": name, "peer": peer, "folder": folder, "job": job},),
                )
                for peer in options.peers
            ),
        )
        for name in options.cases
    )
    return Benchmark(
        name="offload",
        module="numapin.bench.measure.offload",
        cases=tuple(cases),
        comparisons=(
            Comparison(name="ratio", figure="steps_per_s", against=BASELINE),
            Comparison(name="ratio_threads", figure="steps_per_s", against=EQUAL),
        ),
        shares_starts=True,
    )


def about(case: str, options: OffloadBenchOptions) -> str:
    """Return a case in words."""
    size, ranks = options.size, counted(options.num_ranks, "rank")
    if case.startswith(ADAMW):
        task = f"fused AdamW on the CPU, {size.num_parameters / 1e6:.1f} M parameters a rank"
    else:
        where = "offloaded to the CPU" if options.on_gpu else "all on the CPU"
        task = f"FSDP2 {where}, {size.num_model_parameters / 1e6:.1f} M parameters in all"
    beside = f", beside {counted(options.num_workers, 'busy worker')} a rank" if case.endswith(LOADED) else ""
    return f"{task}, {ranks}{beside}"


def _start(peer: str, options: OffloadBenchOptions) -> dict[str, object]:
    """Return the command and the variables of a launcher."""
    number = ("--nproc-per-node", str(options.num_ranks))
    if peer in TORCHRUNS:
        variables = {"OMP_NUM_THREADS": str(options.num_threads)} if peer == EQUAL else {}
        return {"command": [*_TORCHRUN, *number], "variables": variables}
    return {"command": [*_RUN, *number, "--bind", peer], "variables": {}}
