"""The GPU of each rank, and the variables that show CUDA, HIP or Level Zero the GPUs of --gpus."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from numapin.errors import UsageError
from numapin.topology.vendors import support_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numapin.plan.request import Request
    from numapin.topology.model import Gpu, Topology

T = TypeVar("T")


def settle_gpus(topology: Topology, request: Request, environ: Mapping[str, str]) -> tuple[Request, dict[str, str]]:
    """Look up the GPUs that --gpus names; return the request with their indices, and the ranks' environment variables.

    The variables name all of them, in the order of the ranks: NVIDIA's by UUID, others by number. There are none
    without --gpus. `environ` has the variables that hide GPUs already. Raises UsageError for a GPU that does not exist,
    is hidden or is named twice, and for one that the variables cannot name.
    """
    if request.gpus is None:
        return request, {}
    gpus = _named_gpus(topology, request.gpus)
    indices = in_turn([gpu.index for gpu in gpus], request.num_ranks or 0)
    return replace(request, gpus=None, rank_gpus=indices), support_of(gpus[0].vendor).variables_for(gpus, environ)


def rank_gpus(topology: Topology, request: Request) -> tuple[Gpu | None, ...]:
    """Return the GPUs in the order of the ranks; None: unknown. Raises UsageError as `settle_gpus` does."""
    if request.rank_gpus is not None:
        by_index: dict[int | None, Gpu | None] = {gpu.index: gpu for gpu in topology.gpus} | {None: None}
        for index in request.rank_gpus:
            if index not in by_index:
                raise UsageError(f"rank_gpus names gpu{index}, which does not exist", "list them with: numapin topo")
        return tuple(by_index[index] for index in request.rank_gpus)
    if request.gpus is not None:
        return _named_gpus(topology, request.gpus)
    return tuple(None if gpu.cuda_index is None else gpu for gpu in topology.visible_gpus)


def in_turn(gpus: Sequence[T], num_ranks: int) -> tuple[T, ...]:
    """Return every GPU; if there are more ranks than GPUs, start over, so that rank n uses GPU n mod G."""
    return tuple(gpus[number % len(gpus)] for number in range(max(num_ranks, len(gpus))))


def _named_gpus(topology: Topology, keys: Sequence[str]) -> tuple[Gpu, ...]:
    """Return the GPUs of names, which must exist, be visible, differ, and be in an order that their runtime keeps."""
    try:
        named = tuple(topology.find_gpu(key, option="--gpus") for key in keys)
    except UsageError as error:
        if not topology.gpus and topology.source == "live":
            raise UsageError(error.message, "see why this host shows no GPU: numapin doctor") from None
        if not topology.gpus or len(keys) > 1 or not keys[0].isdecimal():
            raise
        # A single number that is no GPU's may have been meant as a number of GPUs.
        ranks = f"`run` takes {keys[0]} ranks as --nproc-per-node {keys[0]}"
        hint = f"--gpus lists GPUs, such as 0,1: see numapin topo; {ranks}"
        raise UsageError(error.message, hint) from None

    visible = topology.visible_gpus
    hidden = [gpu for gpu in named if gpu not in visible]
    if hidden or not named:
        raise _not_visible(hidden, visible)
    indices = [gpu.index for gpu in named]
    if len(set(indices)) < len(indices):
        hint = "name each GPU once; `run` takes several ranks per GPU as --nproc-per-node N"
        raise UsageError(f"--gpus names a GPU twice: {indices}", hint)
    if indices != sorted(indices) and not support_of(named[0].vendor).keeps_list_order:
        raise UsageError(
            f"--gpus names {_labels(named)}, but Level Zero numbers the GPUs of a list in ascending order",
            f"write: --gpus {','.join(map(str, sorted(indices)))}",
        )
    return named


def _not_visible(hidden: Sequence[Gpu], visible: Sequence[Gpu]) -> UsageError:
    """Return the error for GPUs that ranks cannot use; for no GPU at all, too."""
    shown = _labels(visible) or "none"
    of_others = [gpu for gpu in hidden if visible and gpu.vendor != visible[0].vendor]
    if of_others:
        problem = f"--gpus names {_labels(of_others)} ({of_others[0].vendor})"
        why = f"ranks use the GPUs of one vendor, here {visible[0].vendor}"
        return UsageError(f"{problem}, but {why}", f"choose from: {shown}")
    support = support_of(next((gpu.vendor for gpu in (*visible, *hidden)), None))
    hint = f"see why with: numapin topo; if a variable hides it: unset {' '.join(support.hiding_variables)}"
    return UsageError(f"--gpus names {_labels(hidden) or 'no GPU'}; {support.runtime} shows {shown}", hint)


def _labels(gpus: Iterable[Gpu]) -> str:
    return ", ".join(gpu.label for gpu in gpus)
