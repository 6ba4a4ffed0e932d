"""The GPU of a process. Pure.

Comes in: the machine, the environment with which a process started, and the GPUs on which the driver saw it compute.
Goes out: one GPU and how it is known; or why it is not.

1. The GPU on which the driver sees the process compute. Of several, the one that its LOCAL_RANK names, or else the
   first if all of them are on one node.
2. The GPU that LOCAL_RANK names among those that CUDA_VISIBLE_DEVICES (AMD, Intel: their variables) shows.
3. The only GPU that these variables show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from numapin.base.bounds import MAX_RANKS
from numapin.base.plural import listed
from numapin.tasks.identify import parse_count
from numapin.topology.vendors import hiding_variables, seen_by_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numapin.topology.model import Gpu, Topology

_RANK = "LOCAL_RANK"


class KnownGpu(NamedTuple):
    """A process's GPU and how it is known. `gpu` None: unknown, and `source` has the reason."""

    gpu: Gpu | None
    source: str


def gpu_of(topology: Topology, environ: Mapping[str, str], uuids: Sequence[str]) -> KnownGpu:
    """Return the GPU of a process; `uuids` are those of the GPUs on which the driver sees it compute."""
    computing = [gpu for gpu in topology.gpus if gpu.uuid in uuids]
    named = _by_rank(topology, environ)
    if computing:
        return _of_computing(computing, named)
    if named is not None:
        return KnownGpu(named, f"{_RANK}={environ[_RANK]}{_shown(environ)}")
    return _of_visible(topology, environ)


def visible_gpus(topology: Topology, environ: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that a process's runtime sees, in its order; none if the order is unknown."""
    seen, _ = seen_by_ranks(topology.vendor_gpus, environ)
    ordered = sorted((gpu.cuda_index, gpu.index) for gpu in seen if gpu.visible and gpu.cuda_index is not None)
    by_index = {gpu.index: gpu for gpu in topology.gpus}
    return [by_index[index] for _, index in ordered]


def local_rank(environ: Mapping[str, str]) -> int | None:
    """Return the rank that a launcher gave to a process; None if there is none, or text that no launcher writes."""
    return _number(environ, _RANK)


def local_size(environ: Mapping[str, str]) -> int | None:
    """Return the number of ranks on the host; None: unknown."""
    return _number(environ, "LOCAL_WORLD_SIZE")


def gpus_of_ranks(visible: Sequence[int], given: Mapping[int, int], num_ranks: int) -> tuple[int | None, ...]:
    """Return the GPU of each rank: the one that it was given, or that of its turn among several visible ones.

    A rank that was given another GPU than that of its turn trades with the rank whose turn it is: otherwise that one
    would be taken to use the same GPU. None: unknown.
    """
    turns = [visible[rank % len(visible)] if len(visible) > 1 else None for rank in range(num_ranks)]
    for rank, gpu in given.items():
        others = (other for other, turn in enumerate(turns) if turn == gpu and other not in given)
        turns[next(others, rank)] = turns[rank]
        turns[rank] = gpu
    return tuple(turns)


def _of_computing(gpus: Sequence[Gpu], named: Gpu | None) -> KnownGpu:
    of_rank = next((gpu for gpu in gpus if gpu == named), None)
    if of_rank is None and len({gpu.node for gpu in gpus}) > 1:
        names = listed("GPU", [gpu.index for gpu in gpus])
        return KnownGpu(None, f"it computes on {names}, which are on different nodes")
    return KnownGpu(of_rank or gpus[0], "the driver sees it compute there")


def _by_rank(topology: Topology, environ: Mapping[str, str]) -> Gpu | None:
    rank, visible = local_rank(environ), visible_gpus(topology, environ)
    return None if rank is None or not visible else visible[rank % len(visible)]


def _of_visible(topology: Topology, environ: Mapping[str, str]) -> KnownGpu:
    visible = visible_gpus(topology, environ)
    if not topology.has_usable_gpu:
        return KnownGpu(None, "this host has no GPU")
    if len(visible) == 1:
        return KnownGpu(visible[0], f"the only GPU that it sees{_shown(environ)}")
    if not visible:
        return KnownGpu(None, f"it sees no GPU{_shown(environ)}, or CUDA's order is unknown")
    names = listed("GPU", [gpu.index for gpu in visible])
    return KnownGpu(None, f"it computes on none yet, has no {_RANK}, and sees {names}{_shown(environ)}")


def _shown(environ: Mapping[str, str]) -> str:
    """Return the variables that hide GPUs from a process."""
    given = [f"{name}={environ[name][:60]}" for name in hiding_variables() if name in environ]
    return f" ({', '.join(given)})" if given else ""


def _number(environ: Mapping[str, str], name: str) -> int | None:
    number = parse_count(environ.get(name, ""))
    return number if number is not None and number < MAX_RANKS else None
