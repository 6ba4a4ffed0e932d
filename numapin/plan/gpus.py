"""The GPUs of a request, in the order of its ranks: the only place that looks up what --gpus names. Pure.

Comes in: a `Topology` and a `Request`. Goes out: the GPU of each rank, and the environment that shows CUDA these GPUs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from numapin.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.plan.request import Request
    from numapin.topology.model import Gpu, Topology

T = TypeVar("T")


def settle_gpus(topology: Topology, request: Request) -> tuple[Request, dict[str, str]]:
    """Look up the GPUs that --gpus names; return the request with their indices, and what the ranks' environment needs.

    The environment names all of them by UUID, in the order of the ranks; it is empty without --gpus. Raises UsageError
    for a GPU that is not there, is hidden or is named twice, and for one that CUDA_VISIBLE_DEVICES cannot name.
    """
    if request.gpus is None:
        return request, {}
    gpus = _named_gpus(topology, request.gpus)
    indices = in_turn([gpu.index for gpu in gpus], request.num_ranks or 0)
    return replace(request, gpus=None, rank_gpus=indices), {"CUDA_VISIBLE_DEVICES": ",".join(map(_uuid, gpus))}


def rank_gpus(topology: Topology, request: Request) -> tuple[Gpu | None, ...]:
    """Return the GPUs in the order of the ranks; None is one that cannot be known. Raises UsageError as above."""
    if request.rank_gpus is not None:
        by_index = {gpu.index: gpu for gpu in topology.gpus}
        return tuple(None if index is None else by_index[index] for index in request.rank_gpus)
    if request.gpus is not None:
        return _named_gpus(topology, request.gpus)
    return tuple(None if gpu.cuda_index is None else gpu for gpu in topology.visible_gpus)


def in_turn(gpus: Sequence[T], num_ranks: int) -> tuple[T, ...]:
    """Return every GPU, and as many more as there are ranks, starting over: rank n uses GPU n mod G."""
    return tuple(gpus[number % len(gpus)] for number in range(max(num_ranks, len(gpus))))


def _named_gpus(topology: Topology, keys: Sequence[str]) -> tuple[Gpu, ...]:
    visible = topology.visible_gpus
    named = tuple(topology.find_gpu(key, option="--gpus") for key in keys)
    hidden = [gpu for gpu in named if gpu not in visible]
    if hidden or not named:
        names = ", ".join(gpu.label for gpu in hidden) or "nothing"
        seen = ", ".join(gpu.label for gpu in visible) or "none"
        raise UsageError(f"--gpus names {names}; CUDA_VISIBLE_DEVICES shows {seen}", "unset CUDA_VISIBLE_DEVICES")
    indices = [gpu.index for gpu in named]
    if len(set(indices)) < len(indices):
        raise UsageError(f"--gpus names a GPU twice: {indices}", "for several ranks per GPU: --nproc-per-node N")
    return named


def _uuid(gpu: Gpu) -> str:
    """Return the name by which CUDA_VISIBLE_DEVICES shows the whole GPU. Raises UsageError where it has none."""
    if gpu.uuid is None:
        raise UsageError(f"--gpus: the UUID of {gpu.label} is unknown; only NVML tells", "see why with: numapin topo")
    if gpu.mig:
        raise UsageError(
            f"--gpus: {gpu.label} is cut into {len(gpu.mig)} MIG instances, which it cannot choose from",
            f"name one: CUDA_VISIBLE_DEVICES={gpu.mig[0].uuid}",
        )
    return gpu.uuid
