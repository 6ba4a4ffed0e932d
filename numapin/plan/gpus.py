"""The GPUs of a request, in the order of its ranks: the only place that looks up the GPUs of --gpus. Pure.

Comes in: a `Topology` and a `Request`. Goes out: the GPU of each rank, and the environment that shows CUDA these GPUs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from numapin.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numapin.plan.request import Request
    from numapin.topology.model import Gpu, Topology

T = TypeVar("T")


def settle_gpus(topology: Topology, request: Request) -> tuple[Request, dict[str, str]]:
    """Look up the GPUs that --gpus names; return the request with their indices, and the ranks' environment variables.

    The environment names all of them by UUID, in the order of the ranks; it is empty without --gpus. Raises UsageError
    for a GPU that does not exist, is hidden or is named twice, and for one that CUDA_VISIBLE_DEVICES cannot name.
    """
    if request.gpus is None:
        return request, {}
    gpus = _named_gpus(topology, request.gpus)
    indices = in_turn([gpu.index for gpu in gpus], request.num_ranks or 0)
    return replace(request, gpus=None, rank_gpus=indices), {"CUDA_VISIBLE_DEVICES": ",".join(map(_uuid, gpus))}


def rank_gpus(topology: Topology, request: Request) -> tuple[Gpu | None, ...]:
    """Return the GPUs in the order of the ranks; None: unknown. Raises UsageError as `settle_gpus` does."""
    if request.rank_gpus is not None:
        by_index: dict[int | None, Gpu | None] = {gpu.index: gpu for gpu in topology.gpus}
        by_index[None] = None
        return tuple(map(by_index.__getitem__, request.rank_gpus))
    if request.gpus is not None:
        return _named_gpus(topology, request.gpus)
    return tuple(None if gpu.cuda_index is None else gpu for gpu in topology.visible_gpus)


def in_turn(gpus: Sequence[T], num_ranks: int) -> tuple[T, ...]:
    """Return every GPU; if there are more ranks than GPUs, start over, so that rank n uses GPU n mod G."""
    return tuple(gpus[number % len(gpus)] for number in range(max(num_ranks, len(gpus))))


def _named_gpus(topology: Topology, keys: Sequence[str]) -> tuple[Gpu, ...]:
    named = tuple(topology.find_gpu(key, option="--gpus") for key in keys)
    _require_visible(named, topology.visible_gpus)
    indices = [gpu.index for gpu in named]
    if len(set(indices)) < len(indices):
        raise UsageError(f"--gpus names a GPU twice: {indices}", "for several ranks per GPU: --nproc-per-node N")
    return named


def _require_visible(named: Sequence[Gpu], visible: Sequence[Gpu]) -> None:
    hidden = [gpu for gpu in named if gpu not in visible]
    if hidden or not named:
        names, shown = _labels(hidden) or "nothing", _labels(visible) or "none"
        raise UsageError(f"--gpus names {names}; CUDA_VISIBLE_DEVICES shows {shown}", "unset CUDA_VISIBLE_DEVICES")


def _labels(gpus: Iterable[Gpu]) -> str:
    return ", ".join(gpu.label for gpu in gpus)


def _uuid(gpu: Gpu) -> str:
    """Return the name by which CUDA_VISIBLE_DEVICES shows the whole GPU. Raises UsageError if it has none."""
    if gpu.uuid is None:
        raise UsageError(
            f"--gpus: the UUID of {gpu.label} is unknown; only NVML reports it", "see why with: numapin doctor"
        )
    if gpu.mig:
        raise UsageError(
            f"--gpus: {gpu.label} is cut into {len(gpu.mig)} MIG instances, which it cannot choose from",
            f"name one: CUDA_VISIBLE_DEVICES={gpu.mig[0].uuid}",
        )
    return gpu.uuid
