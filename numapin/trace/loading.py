"""Findings about loading: waiting for data, the start of epochs, pinning in the loop. Pure.

Comes in: an `Analysis`. Goes out: findings, with remedies that fit the loader that the script uses already.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final

from numapin.base.plural import counted
from numapin.trace.finding import FLOOR, TraceFinding, ms, ms_per_step

if TYPE_CHECKING:
    from numapin.trace.analysis import Analysis
    from numapin.trace.noted import LoaderUse, ScriptNotes

WAITING: Final = 0.05
"""The share of the step time from which on waiting is reported."""


def waits(analysis: Analysis) -> TraceFinding | None:
    """Find waiting for data, without the first batches of epochs."""
    costs = analysis.share("wait")
    if costs < WAITING:
        return None
    return TraceFinding(
        what="waiting for data",
        costs=costs,
        evidence="the loop waited in next() on its DataLoader for "
        f"{ms_per_step(analysis, analysis.waited_within_us)} per step, "
        f"{ms_per_step(analysis, analysis.parts_us['wait'])} of it while nothing computed",
        remedy=_loading_remedy(analysis.trace.noted, loop_loads=_loop_loads(analysis)),
    )


def _loop_loads(analysis: Analysis) -> bool:
    """Return whether the loop waited longest for a loader without workers."""
    waited_us: dict[str, float] = defaultdict(float)
    for wait in analysis.trace.waits:
        waited_us[wait.name] += wait.end - wait.start
    return "SingleProcess" in max(waited_us, key=lambda name: waited_us[name], default="")


def _loading_remedy(noted: ScriptNotes, *, loop_loads: bool) -> str:
    if loop_loads:
        own = "numapin.DataLoader" if noted.uses_numapin else "DataLoader"
        return f"the loop loads its own batches: use worker processes, {own}(…, num_workers=N)"
    more = _more_workers(noted)
    if noted.uses_numapin:
        return f"numapin's loader is in use: {more}, a cheaper __getitem__, or balance=True if samples are unequal"
    return f"{more}, a cheaper __getitem__, or numapin.DataLoader: numapin run --dataloader=numapin"


def _more_workers(noted: ScriptNotes) -> str:
    """Return the advice on the number of workers: more of them only help while CPUs are left."""
    workers, cpus = noted.loader.num_workers if noted.loader else 0, noted.origin.num_cpus
    if not workers or not cpus:
        return "use more workers"
    if workers >= cpus:
        return f"give each rank more CPUs (--cpus-per-rank, --bind; {workers} workers share {cpus} CPUs)"
    return f"use more workers (num_workers={workers} now, and the rank has {cpus} CPUs)"


def epochs(analysis: Analysis) -> TraceFinding | None:
    """Find workers that start again at each epoch."""
    costs, time_us = epoch_costs(analysis), analysis.parts_us["epoch"]
    if costs < FLOOR:
        return None
    each = ms(time_us / max(analysis.num_epochs, 1))
    began = (
        f"{analysis.num_epochs} of the traced steps began an epoch; ending the last one and starting the next, to its "
        f"first batch, took {each}"
    )
    return TraceFinding(
        what="start of an epoch",
        costs=costs,
        evidence=began if analysis.num_epochs else f"an epoch ended, and ending its workers took {each}",
        remedy=_epoch_remedy(analysis),
    )


def epoch_costs(analysis: Analysis) -> float:
    """Return the share of the step time that starts of epochs take over a whole epoch, if its length is known.

    A training epoch is as long as the longest loader; a validation in between is a part of it.
    """
    share, loader = analysis.share("epoch"), analysis.trace.noted.loader
    if not share or loader is None or not loader.num_batches or not analysis.num_batches:
        return share
    num_starts = Counter(start.loader for start in analysis.epoch_starts)
    batches_per_start = analysis.num_batches / max(num_starts.values(), default=1)
    return share * min(batches_per_start / loader.num_batches, 1.0)


def _epoch_remedy(analysis: Analysis) -> str:
    loader = analysis.slowest_loader
    which = _which(loader) if loader is not None and len(analysis.trace.noted.loaders) > 1 else ""
    if loader is not None and loader.is_persistent:
        return (
            f"the workers{which} are already persistent (persistent_workers=True): make the dataset's __iter__ and "
            "first samples cheaper"
        )
    return f"keep the workers{which} between epochs: DataLoader(…, persistent_workers=True)"


def _which(loader: LoaderUse) -> str:
    """Return how to tell a loader from the others of the script."""
    length = "no length" if loader.num_batches is None else counted(loader.num_batches, "batch")
    return f" of the loader with {length} and {counted(loader.num_workers, 'worker')}"


def pins(analysis: Analysis) -> TraceFinding | None:
    """Find pinning in the loop's own thread."""
    costs = analysis.share("pin")
    if costs < FLOOR:
        return None
    uses_numapin = analysis.trace.noted.uses_numapin
    return TraceFinding(
        what="pinning in the loop",
        costs=costs,
        evidence=f".pin_memory() takes {ms_per_step(analysis, analysis.parts_us['pin'])} per step in the loop's own "
        "thread",
        remedy="remove .pin_memory(): batches of numapin's loader with pin_memory=True or device= are pinned"
        if uses_numapin
        else "use DataLoader(…, pin_memory=True), which pins in a separate thread, or numapin.DataLoader",
    )
