"""Findings of a trace: the cost in time, and the change that removes it.

`find` looks at one rank: copies, loading, communication, the host, and steps that take much longer than the others.
`find_straggler` compares ranks. What takes less than a hundredth of the step time is not reported.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import chain
from math import sqrt
from operator import attrgetter, itemgetter
from statistics import median, mode
from typing import TYPE_CHECKING, Final

from numapin.base.text import counted
from numapin.trace.analysis import COMMUNICATION, PARTS, common, length, union, without
from numapin.trace.records import DEVICE_TO_HOST, HOST_TO_DEVICE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numapin.trace.analysis import Analysis, Group, Intervals
    from numapin.trace.records import ScriptNotes

# Shares of the step time from which on something is reported.
FLOOR: Final = 0.01
WAITING: Final = 0.05
_COMMUNICATING: Final = 0.1
_IDLE: Final = 0.2  # launching small kernels leaves gaps in any program
_UNEVEN: Final = 0.05
_LATE: Final = 0.05
_BUSY: Final = 0.9

_OVERLAPPED: Final = 0.5  # of the time of the copies
_FULL: Final = 0.9  # of the workers' time, spent on making batches
_ASLEEP: Final = 0.5  # of the stack samples
_FEWEST_SAMPLES: Final = 3
_FEWEST_STEPS: Final = 5  # to call steps uneven, or a rank slow
_SLOW_STEP: Final = 1.5  # times the median step
_NOTICED: Final = 0.01  # of the time of all steps, above the median step
_OTHERS: Final = 0.05  # of the time of a rank's CPUs
_TICK_MS: Final = 10
_SLOW_RANK: Final = 1.15  # times the median of the other ranks

_IN_WORDS: Final = {
    "other": "other work of the loop",
    "copy": "copies",
    "pin": "pinning memory",
    "epoch": "the start of an epoch",
    "wait": "waiting for data",
}
_WAITING_FOR_RANKS: Final = "waiting for other ranks"
_THEY_WAIT: Final = ", which wait for the slowest rank and then transfer"
_TRANSFER_LESS: Final = (
    "transfer less (bfloat16, no_sync() while accumulating), or overlap it with compute (DDP's buckets, FSDP's "
    "prefetch)"
)
_IMAGES: Final = {
    "jpeg": "decode with torchvision or on the GPU instead of PIL",
    "float": "send uint8 and make floats on the GPU, with device_transform=",
}
_UNEVEN_REMEDIES: Final = {
    "compute": "inputs of similar size in each batch: sort or bucket by length, or pack; a compiler or cuDNN that "
    "tunes itself for each new shape needs fixed shapes",
    COMMUNICATION: "see whether another rank is slow in these steps, or checkpoints",
    "copy": "copy less in these steps: evaluate, log or save from the GPU less often, or with pinned memory",
    "pin": "use batches of the same size, so that pinned memory is used again",
    "other": "do that less often, or in another thread or process: logging, checkpoints, evaluation, garbage",
}
_UNSEEN: Final = (
    "look at these steps in the Chrome trace: logging, checkpoints, evaluation and garbage collection are usual "
    "causes, and so are other processes on the rank's CPUs (numapin verify @last)"
)
_SAME_SHAPES: Final = (
    "every step computes with the same shapes, so look outside of the script: clocks and temperature (numapin top), "
    "other programs on its CPUs or its GPU"
)
_SLOW_RANK_REMEDIES: Final = {
    "compute": "compare its device and its CPUs with the others': numapin doctor; numapin top shows clocks and load",
    "wait": "compare its data with the others': larger samples, slower storage, fewer CPUs for its workers",
    "epoch": "compare its data with the others': its workers start more slowly",
    "copy": "see whether its memory is on its GPU's node: numapin verify @last",
    "pin": "see whether its memory is on its own node: numapin verify @last",
    "other": "see what else runs on its CPUs, and whether only this rank logs or saves: numapin verify @last",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFinding:
    """Something that costs time, or the statement that nothing does.

    `costs` is the share of the step time that the remedy can save at most; 0 if nothing can be gained. `part` is the
    part of a step that it is about, None if there is no single one. A report adds the names of the `ranks` that have
    it; costs and evidence are then from one of them, usually the costliest, and `saves_s` is that part of its step.
    """

    what: str
    costs: float
    evidence: str
    remedy: str
    part: str | None = None
    ranks: tuple[str, ...] = ()
    saves_s: float = 0.0


def find(analysis: Analysis) -> tuple[TraceFinding, ...]:
    """Return the findings about a rank's steps; the most costly comes first."""
    uneven = uneven_steps(analysis)
    usual = analysis
    if uneven is not None:  # the extra time of slow steps is not the other findings' as well
        left_us = max(analysis.parts_us[uneven.part] - uneven.excess_us, 0.0)
        usual = replace(analysis, parts_us={**analysis.parts_us, uneven.part: left_us})
    found = [*_copies(usual), *_loading(usual), *_host(usual, uneven)]
    if usual.share(COMMUNICATION) >= _COMMUNICATING:
        time = _ms_per_step(usual, usual.parts_us[COMMUNICATION])
        waiting = TraceFinding(
            what=_WAITING_FOR_RANKS,
            costs=usual.share(COMMUNICATION),
            evidence=f"for {time} per step only collective operations ran{_THEY_WAIT}",
            remedy=f"make ranks equally fast; {_TRANSFER_LESS}",
        )
        found.append(waiting)
    if uneven is not None:  # the slow steps' extra time is theirs; other findings on that part cost what is left of it
        left = usual.share(uneven.part)
        found = [replace(one, costs=min(one.costs, left)) if one.part == uneven.part else one for one in found]
        found = [one for one in found if one.part != uneven.part or one.costs >= FLOOR]
        found.append(_uneven_finding(analysis, uneven))
    # Without findings only the computing itself is left, if it takes most of the time.
    busy = analysis.share("compute") + analysis.share(COMMUNICATION)
    if not found and busy >= _BUSY and analysis.share("wait") + _epoch_costs(analysis) < WAITING:
        device = "GPU" if analysis.trace.on_gpu else "CPU"
        bound = TraceFinding(
            what="bound by compute",
            costs=0.0,
            evidence=f"the {device} computed or communicated for {busy:.0%} of the time",
            remedy="nothing in loading or copying: a faster model, or more or faster devices",
        )
        found.append(bound)
    return tuple(sorted(found, key=attrgetter("costs"), reverse=True))


# --- copies ------------------------------------------------------------------------------------------------------


def _copies(analysis: Analysis) -> Iterator[TraceFinding]:
    """Yield the kinds of copies between host and GPU that take time in which no kernel runs."""
    to_gpu = [group for group in analysis.groups if group.direction == HOST_TO_DEVICE]
    pinned = [group for group in to_gpu if group.source == "Pinned"]
    noted = analysis.trace.noted
    ahead = 'copy one batch ahead on a separate stream, as numapin.DataLoader(…, device="cuda") does'
    if noted.loader is not None and noted.loader.delivers_on_gpu:
        ahead = "prefetch the script's own copies by one step, on a separate stream"
    pageable = [group for group in to_gpu if group.source == "Pageable"]
    blocking = [group for group in pinned if group.num_blocking]
    late = [group for group in pinned if not group.num_blocking]
    to_host = [group for group in analysis.groups if group.direction == DEVICE_TO_HOST]
    less = "copy less often (.item(), .cpu(), logging, checkpoints), or into pinned memory with non_blocking=True"
    kinds = (
        ("pageable copies", pageable, _pageable_remedy(noted), "the driver stages each copy and blocks the host"),
        (
            "pinned, but blocking",
            blocking,
            "use .to(device, non_blocking=True)",
            "the host waited for each copy to finish",
        ),
        ("asynchronous, but not overlapped", late, ahead, ""),
        ("copies to the host", to_host, less, ""),
    )
    for what, groups, remedy, seen in kinds:
        exposed_us = sum(group.exposed_us for group in groups)  # of copies that overlap each other it may exceed all
        costs = min(exposed_us / analysis.window_us, 1.0) if analysis.window_us else 0.0
        busy_us = sum(group.busy_us for group in groups)
        overlapped = sum(group.overlapped_us for group in groups) / busy_us if busy_us else 1.0
        if costs < FLOOR or (groups is late and overlapped >= _OVERLAPPED):
            continue
        which = "to the host" if groups is to_host else f"from {(groups[0].source or '').lower()} memory"
        same_stream = groups is late and any(group.same_stream for group in groups)
        stream = " on the stream of the kernels" if same_stream else ""
        shown = seen or f"kernels ran during {overlapped:.0%} of that time"
        evidence = f"{_described(analysis, groups, which)}{stream}: {shown}"
        yield TraceFinding(what=what, costs=costs, evidence=evidence, remedy=remedy, part="copy")


def _described(analysis: Analysis, groups: Sequence[Group], which: str) -> str:
    """Return the number, size and time of copies, and the operator and shape that most of the time goes to."""
    sizes = [group.num_bytes for group in groups if group.num_bytes is not None]
    size = f"{sum(sizes) / 1e6:.1f} MB in total, " if len(sizes) == len(groups) else ""
    busy = f"{_ms_per_step(analysis, sum(group.busy_us for group in groups))} per step"
    longest = groups[0]
    shape = f" of shape {longest.shapes}" if longest.shapes else ""
    origin = f", mostly {longest.operator}{shape}" if longest.operator else ""
    blocked_us = sum(group.blocked_us for group in groups)
    blocked = f"; host blocked for {_ms_per_step(analysis, blocked_us)} per step" if blocked_us else ""
    return f"{sum(group.count for group in groups)} copies {which} ({size}{busy}{origin}{blocked})"


def _pageable_remedy(noted: ScriptNotes) -> str:
    """Return how to copy from pinned memory, with the loader that is in use."""
    loader = noted.loader
    if loader is not None and loader.delivers_on_gpu:
        return (
            "these copies are the script's own, beside numapin's loader: pin that memory (numapin.pinned), and copy "
            "with non_blocking=True"
        )
    if noted.uses_numapin:
        return (
            'numapin\'s loader is in use: let it deliver on the GPU, numapin.DataLoader(…, device="cuda"), or pin, '
            "pin_memory=True with .to(device, non_blocking=True)"
        )
    has_no_workers = loader is not None and not loader.num_workers  # --dataloader=numapin changes nothing then
    launched = "" if has_no_workers else "; without changing the script: numapin run --dataloader=numapin"
    return (
        "use DataLoader(…, pin_memory=True) and .to(device, non_blocking=True), or numapin.DataLoader(…, "
        f'device="cuda"){launched}'
    )


# --- loading -----------------------------------------------------------------------------------------------------


def _loading(analysis: Analysis) -> Iterator[TraceFinding]:
    """Yield waiting for data, workers that start again at each epoch, and pinning in the loop's own thread."""
    noted = analysis.trace.noted
    if analysis.share("wait") >= WAITING:
        yield TraceFinding(
            what="waiting for data",
            costs=analysis.share("wait"),
            evidence="the loop waited in next() on its DataLoader for "
            f"{_ms_per_step(analysis, analysis.waited_within_us)} per step, "
            f"{_ms_per_step(analysis, analysis.parts_us['wait'])} of it while nothing computed",
            remedy=_waiting_remedy(analysis),
        )
    if _epoch_costs(analysis) >= FLOOR:
        num_epochs = len(analysis.epoch_starts)
        each = f"{analysis.parts_us['epoch'] / max(num_epochs, 1) / 1000:.1f} ms"
        began = (
            f"{num_epochs} of the traced steps began an epoch; ending the last one and starting the next, to "
            f"its first batch, took {each}"
        )
        yield TraceFinding(
            what="start of an epoch",
            costs=_epoch_costs(analysis),
            evidence=began if num_epochs else f"an epoch ended, and ending its workers took {each}",
            remedy=_epoch_remedy(analysis),
        )
    if analysis.share("pin") >= FLOOR:
        yield TraceFinding(
            what="pinning in the loop",
            costs=analysis.share("pin"),
            evidence=f".pin_memory() takes {_ms_per_step(analysis, analysis.parts_us['pin'])} per step in the loop's "
            "own thread",
            remedy="remove .pin_memory(): batches of numapin's loader with pin_memory=True or device= are pinned"
            if noted.uses_numapin
            else "use DataLoader(…, pin_memory=True), which pins in a separate thread, or numapin.DataLoader",
        )


def _waiting_remedy(analysis: Analysis) -> str:
    """Return what helps a loop that waits: workers, more of them while CPUs are left, or cheaper samples.

    Workers that make batches nearly all of the time are the limit of every loader, so no other one is advised then.
    """
    noted = analysis.trace.noted
    waited_us: dict[str, float] = defaultdict(float)
    for wait in analysis.trace.waits:
        waited_us[wait.name] += wait.end - wait.start
    if "SingleProcess" in max(waited_us, key=lambda name: waited_us[name], default=""):
        own = "numapin.DataLoader" if noted.uses_numapin else "DataLoader"
        return f"the loop loads its own batches: use worker processes, {own}(…, num_workers=N)"
    workers, cpus = noted.loader.num_workers if noted.loader else 0, noted.num_cpus
    more = "use more workers"
    if workers and cpus and workers >= cpus:
        more = (
            f"give each rank more CPUs (--cpus-per-rank, --bind; {workers} workers share {cpus} CPUs), or use more "
            "workers if they mostly wait for storage or the network"
        )
    elif workers and cpus:
        more = f"use more workers (num_workers={workers} now, and the rank has {cpus} CPUs)"
    load = _worker_load(analysis)
    if load is not None and load >= _FULL:
        limit = f"the workers are the limit ({load:.0%} of their time goes to samples)"
        images = ", ".join(advice for work, advice in _IMAGES.items() if work in noted.image_work)
        guide = f"; for images: {images} (docs/guides/images.md)" if images else ""
        return f"{limit}: {more}, a cheaper __getitem__{guide}"
    if noted.uses_numapin:
        balance = ", or balance=True if samples are unequal" if workers != 1 else ""
        return f"numapin's loader is in use: {more}, a cheaper __getitem__{balance}"
    return f"{more}, a cheaper __getitem__, or numapin.DataLoader: numapin run --dataloader=numapin"


def _worker_load(analysis: Analysis) -> float | None:
    """Return the share of the loop's waiting in which its loader's workers made batches; None if it is unknown.

    The starts of epochs do not count, nor do workers that are not the loader's: those of epochs that have ended, and of
    other loaders, which rest. The batch that a worker makes when the trace ends is not noted; it is taken to last as
    long as the others.
    """
    trace, loader = analysis.trace, analysis.trace.noted.loader
    steps = union(step.pair for step in trace.steps)
    starts = union(chain.from_iterable(start.moments for start in analysis.epoch_starts))
    waiting = without(common(union(wait.pair for wait in trace.waits), steps), starts)
    if loader is None or not loader.num_workers or not trace.loads or not waiting:
        return None
    by_worker: dict[int | None, list[tuple[float, float]]] = defaultdict(list)
    for load in trace.loads:
        by_worker[load.row].append(load.pair)
    busy_us = 0.0
    for own in by_worker.values():
        last_end = max(end for _, end in own)  # a loader in a dataset has loads inside those of its worker
        unfinished = (last_end, last_end + median(end - start for start, end in own))
        busy_us += length(common(union([*own, unfinished]), waiting))
    return min(busy_us / loader.num_workers / length(waiting), 1.0)


def _epoch_costs(analysis: Analysis) -> float:
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
    slowest = max(analysis.epoch_starts, key=attrgetter("time_us"), default=None)
    loaders, number = analysis.trace.noted.loaders, slowest.loader if slowest else None
    if number is not None and 0 <= number < len(loaders) and loaders[number].is_persistent:
        return (
            "the workers are already persistent (persistent_workers=True): make an epoch's first batch cheaper: its "
            "samples, the sampler, an iterable dataset's __iter__"
        )
    return "keep the workers between epochs: DataLoader(…, persistent_workers=True)"


# --- communication and the host -----------------------------------------------------------------------------------


def without_waiting(found: Sequence[TraceFinding], *, is_slowest: bool) -> list[TraceFinding]:
    """Return a rank's findings without its waiting for the slowest rank. That rank's own communication is transfer."""
    kept = []
    for one in found:
        if one.what != _WAITING_FOR_RANKS:
            kept.append(one)
        elif is_slowest:
            evidence = f"{one.evidence.removesuffix(_THEY_WAIT)} on the slowest rank, too; it waits for no other"
            kept.append(replace(one, what=COMMUNICATION, evidence=evidence, remedy=_TRANSFER_LESS))
    return kept


def _host(analysis: Analysis, uneven: Uneven | None) -> Iterator[TraceFinding]:
    """Yield the time in which nothing was loaded, copied or computed."""
    idle, idle_us = analysis.share("other"), analysis.parts_us["other"]
    explained = uneven.slow if uneven is not None and uneven.part == "other" else ()
    usual = union(step.pair for i, step in enumerate(analysis.trace.steps) if i not in explained)
    place = place_within(analysis, usual)
    if idle < _IDLE or not (analysis.trace.on_gpu or place):
        return
    happened = "no kernel and no copy ran" if analysis.trace.on_gpu else "no operator of torch ran"
    what = "GPU idle" if analysis.trace.on_gpu else "Python between operators"
    remedy = (
        "find what the host does in these gaps in the Chrome trace: .item(), logging, or launching small kernels "
        "(larger batches, torch.compile or CUDA graphs help)"
    )
    if place is not None and place.slept >= _ASLEEP:
        what = "the script sleeps or waits"
        remedy = f"take what blocks out of the loop, or into another thread: {place.own}"
    elif place is not None:
        kernels = "; if it launches many small kernels, larger batches, torch.compile or CUDA graphs help"
        remedy = f"make {place.own} cheaper, or call it less often{kernels if analysis.trace.on_gpu else ''}"
    yield TraceFinding(
        what=what,
        costs=idle,
        evidence=f"for {_ms_per_step(analysis, idle_us)} per step {happened}, and the loop was not waiting for data"
        + (f"; the loop's thread was mostly in {place}" if place else ""),
        remedy=remedy,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CodePlace:
    """The function of the script where most samples are, and their share; `inside` is what it called, "" if nothing.

    `slept` is the share of these samples in which the thread did not run.
    """

    own: str
    inside: str
    share: float
    slept: float

    def __str__(self) -> str:
        """Return "load (train.py:12), in sleep (x.py:3) (80 % of the samples)"."""
        inside = f", in {self.inside}" if self.inside else ""
        return f"{self.own}{inside} ({self.share:.0%} of the samples)"


def place_within(analysis: Analysis, window: Intervals) -> CodePlace | None:
    """Return where the thread was in the window while it did what no part explains; None with too few samples."""
    all_samples, at = analysis.trace.noted.samples, attrgetter("at")
    samples = [
        sample
        for start, end in common(analysis.other, window)
        for sample in all_samples[bisect_left(all_samples, start, key=at) : bisect_left(all_samples, end, key=at)]
    ]
    if len(samples) < _FEWEST_SAMPLES:
        return None
    functions = [sample.own.rpartition(":")[0] for sample in samples]  # without the line
    function, count = Counter(functions).most_common(1)[0]
    there = [sample for sample, own in zip(samples, functions, strict=True) if own == function]
    own, innermost = Counter((one.own, one.innermost) for one in there).most_common(1)[0][0]
    return CodePlace(
        own=own,
        inside="" if own == innermost else innermost,
        share=count / len(samples),
        slept=sum(not one.is_running for one in there) / len(there),
    )


# --- steps that take much longer than the others --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Uneven:
    """The slow steps, the part that takes most of their extra time, and that time, in all of them together.

    `totals_us` are the steps' times without what has findings of its own: epochs and waiting.
    """

    slow: tuple[int, ...]
    part: str
    excess_us: float
    totals_us: tuple[float, ...]


def uneven_steps(analysis: Analysis) -> Uneven | None:
    """Return the slow steps; None if they cost little."""
    if len(analysis.steps_us) < _FEWEST_STEPS or not analysis.window_us:
        return None
    steps = [{part: step[part] for part in _UNEVEN_REMEDIES} for step in analysis.steps_us]
    totals = tuple(sum(step.values()) for step in steps)
    least = max(_SLOW_STEP * median(totals), median(totals) + _NOTICED * analysis.window_us)
    slow = tuple(i for i, total in enumerate(totals) if total > least)
    excess: dict[str, float] = {}
    for part in _UNEVEN_REMEDIES:
        usual = median(step[part] for step in steps)
        excess[part] = sum(max(steps[i][part] - usual, 0.0) for i in slow)
    part = max(excess, key=lambda name: excess[name])
    if excess[part] / analysis.window_us < _UNEVEN:
        return None
    return Uneven(slow=slow, part=part, excess_us=excess[part], totals_us=totals)


def _uneven_finding(analysis: Analysis, uneven: Uneven) -> TraceFinding:
    """Return what is uneven, with the slowest step."""
    totals, slowest = uneven.totals_us, max(uneven.slow, key=lambda i: uneven.totals_us[i])
    place = place_within(analysis, (analysis.trace.steps[slowest].pair,)) if uneven.part == "other" else None
    seen = f"; there, the loop was mostly in {place}" if place else ""
    remedy = _UNEVEN_REMEDIES[uneven.part]
    if uneven.part == "other" and place is None:
        remedy = _UNSEEN
    elif uneven.part == "compute" and analysis.trace.same_shapes:
        remedy = _SAME_SHAPES
    return TraceFinding(
        what="uneven steps",
        costs=uneven.excess_us / analysis.window_us,
        evidence=f"slow steps: {len(uneven.slow)} of {len(totals)}; step {slowest} took {_ms(totals[slowest])}, the "
        f"median step {_ms(median(totals))}, without waiting for data; most of the difference is in "
        f"{_IN_WORDS.get(uneven.part, uneven.part)}{seen}",
        remedy=remedy,
        part=uneven.part,
    )


# --- a rank that is slower than the others ---------------------------------------------------------------------------


def find_straggler(analyses: Sequence[Analysis]) -> tuple[Analysis, TraceFinding] | None:
    """Return the rank that is slower than all others, with its finding; None if there is none.

    Ranks that wait for each other have equal steps; so what counts is a rank's own time, without communication. It has
    to be late in most steps: a single slow step says nothing about the rank.
    """
    ranks = [one for one in _latest(analyses) if len(one.steps_us) >= _FEWEST_STEPS]
    if len(ranks) < 2:
        return None
    own_us = {id(one): median(map(_own_us, one.steps_us)) for one in ranks}
    slowest = max(ranks, key=lambda one: own_us[id(one)])
    others = [one for one in ranks if one is not slowest]
    usual_us = median(own_us[id(one)] for one in others)
    costs = (own_us[id(slowest)] - usual_us) / slowest.step_us if slowest.step_us else 0.0
    late = [step for step in slowest.steps_us if _own_us(step) >= _SLOW_RANK * usual_us]
    if costs < _LATE or len(late) <= len(slowest.steps_us) / 2:
        return None
    # The part that takes most of the difference in most of the late steps. A single long step decides nothing; nor do
    # the medians of parts, which miss parts that take turns.
    usual_parts = {
        part: median(median(step[part] for step in other.steps_us) for other in others) for part in _SLOW_RANK_REMEDIES
    }
    part = mode(max(usual_parts, key=lambda name: step[name] - usual_parts[name]) for step in late)
    place = place_within(slowest, slowest.other) if part == "other" else None
    doing = f", where its loop is mostly in {place}" if place else ""
    noted = slowest.trace.noted
    known = ", ".join(filter(None, (f"host {noted.host}" if noted.host else "", noted.place)))
    where, effect = f" ({known})" if known else "", "the others wait for it"
    if median(other.step_us for other in others) * _SLOW_RANK < slowest.step_us:
        effect = "the others do not wait for it in these steps, but finish earlier"
    finding = TraceFinding(
        what="one slow rank",
        costs=costs,
        evidence=f"rank {slowest.trace.rank}{where} spends {_ms(own_us[id(slowest)])} per step outside communication, "
        f"the others {_ms(usual_us)} (medians); most of the difference is in {_IN_WORDS.get(part, part)}{doing}; "
        f"{effect}",
        remedy=_SLOW_RANK_REMEDIES[part],
    )
    return slowest, finding


def too_few_steps(analyses: Sequence[Analysis]) -> str:
    """Return a note on the ranks that have too few steps to be called slow; "" if there are none to compare."""
    latest = _latest(analyses)
    short = sum(len(one.steps_us) < _FEWEST_STEPS for one in latest)
    if len(latest) < 2 or not short:
        return ""
    where, few = f"on {short} of {len(latest)} ranks", _FEWEST_STEPS
    return f"fewer than {few} steps {where}, too few to look for a slow rank: trace more (--steps {few})"


def other_programs(analyses: Sequence[Analysis]) -> str:
    """Return a note on other programs that used a rank's CPUs while it was traced; "" if there were none."""
    found = []
    for analysis in _latest(analyses):
        noted = analysis.trace.noted
        if noted.traced_ms and noted.num_cpus and noted.other_cpu_ms is not None:
            all_ms = noted.traced_ms * noted.num_cpus
            # CPU time is sampled in ticks of 10 ms: over a short time, or on many CPUs, chance makes a difference.
            if noted.other_cpu_ms > max(_OTHERS * all_ms, 2 * sqrt(all_ms * _TICK_MS)):
                found.append((min(noted.other_cpu_ms, all_ms) / noted.traced_ms, analysis))
    if not found:
        return ""
    num_busy, worst = max(found, key=itemgetter(0))
    place = f"{counted(worst.trace.noted.num_cpus or 0, 'CPU')} of rank {worst.trace.rank}"
    most = "up to " if len(found) > 1 else ""
    return f"other programs used {most}{num_busy:.1f} of the {place} during the traced steps, and may have slowed them"


def _latest(analyses: Sequence[Analysis]) -> list[Analysis]:
    """Return the analysis of each rank's last start."""
    return list({one.trace.rank: one for one in analyses if one.trace.rank is not None}.values())


def _own_us(step: Mapping[str, float]) -> float:
    """Return the time of a step without communication."""
    return sum(step[part] for part in PARTS if part != COMMUNICATION)


def _ms_per_step(analysis: Analysis, time_us: float) -> str:
    return f"{time_us / len(analysis.trace.steps) / 1000:.2f} ms"


def _ms(time_us: float) -> str:
    return f"{time_us / 1000:.1f} ms"
