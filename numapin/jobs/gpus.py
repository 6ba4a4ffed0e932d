"""The number of GPUs per host of a job, and whether --gpus names enough of them. Pure.

Comes in: --gpus-per-node, --gpus and the machine file. Goes out: the number, or a UsageError. The --gpus of Slurm, of
other launchers and of people is a number of GPUs; ours lists them, as in `numapin run`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numapin.base.plural import counted
from numapin.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.topology.model import Topology


def gpus_per_host(given: int | None, topology: Topology | None, *, named: Sequence[str] | None) -> int:
    """Return the number of GPUs per host. Raises UsageError if it is unknown."""
    if given is not None:
        return given
    if topology is not None:
        return len(topology.vendor_gpus)
    number = _only_number(named)
    if number is not None:
        raise UsageError(
            f"the number of GPUs per host is unknown: --gpus {number} names one GPU, number {number}",
            f"for {number} GPUs per host, give --gpus-per-node {number}",
        )
    raise UsageError(
        "the number of GPUs per host is unknown",
        "give --gpus-per-node N (0 for none), or --machine FILE (topo --save)",
    )


def require_gpu_per_rank(named: Sequence[str] | None, *, num_ranks: int) -> None:
    """Raise UsageError if --gpus names too few GPUs for a host's ranks, because NCCL accepts no GPU twice."""
    if named is None or len(named) >= num_ranks:
        return
    number = _only_number(named)
    if number is not None:
        raise UsageError(
            f"--gpus {number} names one GPU, number {number}, for the {num_ranks} ranks of a host",
            f"for {number} GPUs per host, give --gpus-per-node {number}; --gpus lists GPUs by number: --gpus 0,1",
        )
    raise UsageError(
        f"--gpus {','.join(named)} names {counted(len(named), 'GPU')} for the {num_ranks} ranks of a host",
        f"each rank needs its own GPU: --ranks-per-node {len(named)}, or name more GPUs",
    )


def _only_number(named: Sequence[str] | None) -> str | None:
    """Return the value of --gpus if it is one number, which may have been meant as a number of GPUs."""
    return named[0] if named and len(named) == 1 and named[0].isdecimal() else None
