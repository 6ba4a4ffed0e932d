"""Training loops, each named by what `numapin trace` must say about it: a trace for each rank, made by hand."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from tests.trace.made import Made, loop

Ranks: TypeAlias = list[Made]
STACKS = [["augment (train.py:7)", "augment (train.py:7)"], ["log (train.py:9)", "send (sockets.py:1)"]]
BUSY: Final[dict[str, object]] = {"num_cpus": 2, "traced_ms": 10_000}
TRAINING: Final[dict[str, object]] = {"num_workers": 4, "is_persistent": True, "num_batches": 10}
VALIDATION: Final[dict[str, object]] = {"num_workers": 2, "num_batches": 5}
REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"


def pageable(**more: Any) -> Made:
    return loop(copy=200, compute=800, memory="Pageable", called=220, **more)


def with_loader(made: Made, **loader: object) -> Made:
    return made.noting(loaders=[{"is_numapin": True, "num_workers": 2} | loader])


def on_cpu(*steps: tuple[float, float]) -> Made:
    made, now = Made(), 0.0
    for i, (compute, idle) in enumerate(steps):
        made.step(i, now, compute + idle)
        made.event("cpu_op", "aten::mm", now, compute)
        now += compute + idle
    return made.noting(stacks=STACKS)


def without_workers(*, on_gpu: bool = True, pins: bool = False) -> Made:
    """Return a step that waits half of its time for a loader without workers, which may pin meanwhile."""
    made = Made().step(0, 0, 1000).wait(0, 500, "_SingleProcessDataLoaderIter")
    made.event("cpu_op", "aten::pin_memory" if pins else "aten::stack", 100, 400)
    return made.event(*(("kernel", "sgemm") if on_gpu else ("cpu_op", "aten::mm")), 500, 300)


def workers_at_their_limit(num_old: int) -> Made:
    """Return a loop whose worker needs 1200 us for a batch of each 1000 us; other workers have ended before."""
    made = loop(wait=600, compute=400).noting(loaders=[{"num_workers": 1}], num_cpus=8)
    for i in range(num_old):
        made.load(-50_000 + i, 900, worker=100 + i)
    return made


def restarting_workers() -> Made:
    """Return 8 steps of which the fifth begins an epoch: the old workers end, new ones start, a batch comes."""
    made, now = Made(), 0
    for i in range(8):
        extra = 3000 if i == 4 else 0
        made.step(i, now, 1000 + extra)
        if extra:
            made.wait(now, 500).noted_at("ends", now, 500)
            made.noted_at("epochs", now + 500, 1500).wait(now + 2000, 1000)
        made.kernel(now + extra, 1000)
        now += 1000 + extra
    return made


def late_first_batch() -> Made:
    """Return a step in which two iterators are made, and the script computes before it takes a batch."""
    made = Made().step(0, 0, 1000).noted_at("epochs", 0, 100).noted_at("epochs", 100, 50, loader=1)
    return made.event("cpu_op", "aten::mm", 150, 750).wait(900, 100)


def two_loaders(*loaders: dict[str, object]) -> Made:
    """Return a loop of two loaders, of which the second one's workers start slowly."""
    made = loop(steps=8, wait=10, compute=990).noting(loaders=[*loaders])
    for start, duration, loader in ((2000, 0.5, 0), (5990, 8, 1), (8000, 700, 1)):
        made.noted_at("epochs", start, duration, loader=loader)
    return made.step(8, 8000, 700)


def shaped(last: list[int] | None, *, logs: bool) -> Made:
    """Return steps of which the last is slow, and multiplies a tensor of this shape; None: no shapes are known."""
    made, now = Made(), 0.0
    for i, length in enumerate([1000] * 6 + [4000]):
        made.step(i, now, length)
        shapes = {} if last is None else {"Input Dims": [last if i == 6 else [8, 4], [4, 4]]}
        made.event("cpu_op", "aten::addmm", now, length, **shapes)
        now += length
    if logs:
        made.event("cpu_op", "aten::mean", 6100, 10, **{"Input Dims": [[8, 1000]]})
    return made


def rank(*own: float, step: float = 1000) -> Made:
    """Return a rank that computes for these times, or the same time in each of 6 steps, and then communicates."""
    made = Made()
    for i, computing in enumerate(own if len(own) > 1 else own * 6):
        made.step(i, i * step, step).kernel(i * step, computing)
        made.kernel(i * step + computing, step - computing, REDUCE)
    return made.noting(host="node7", cpus="8-15", nodes="1")


def copying_rank(*steps: tuple[float, float, float]) -> Made:
    """Return a rank whose steps copy, compute, and last for these times; at the end it communicates."""
    made, now = Made(), 0.0
    for i, (copying, computing, length) in enumerate(steps):
        made.step(i, now, length).copy(now, copying)
        made.kernel(now + copying, computing).kernel(now + length - 50, 50, REDUCE)
        now += length
    return made


def saving_in_one_step() -> Ranks:
    """Return two ranks of which the second saves in one step, while the first waits for it."""
    made, now = [Made(), Made()], 0
    for i in range(8):
        extra = 9000 if i == 5 else 0
        for number, one in enumerate(made):
            one.step(i, now, 1000 + extra).kernel(now, 950)
            late = (extra - 10) * number * bool(extra)
            one.kernel(now + 950 + late, 50 + extra * (1 - number), REDUCE)
        now += 1000 + extra
    return made


IDLE = [(i * 1000 + 100.0, 900.0) for i in range(4)]
OPERATORS = [(i * 1000.0, 100.0) for i in range(4)]
OF_COPIES: Final[dict[str, Made]] = {
    "pageable copies block the host": pageable(),
    "a few pageable copies are nothing": loop(copy=5, compute=995, memory="Pageable"),
    "a pageable copy waits behind kernels": loop(copy=100, compute=1000, memory="Pageable", waited=800),
    "pinned copies block": loop(copy=200, compute=800, called=10, waited=190),
    "pinned copies run on the stream of the kernels": loop(copy=200, compute=800),
    "overlapped copies cost nothing": loop(copy=200, compute=1000, ahead=True),
    "copies and waits that kernels hide cost nothing": loop(copy=300, compute=1000, ahead=True)
    .wait(400, 500)
    .wait(1400, 500)
    .wait(2400, 500)
    .wait(3400, 500),
    "copies to the host": loop(copy=500, compute=500, memory="Pageable", waited=490, to_host=True),
    "another GPU's kernels hide no copy": loop(steps=1, compute=1000).copy(100, 200, device=1).copy(500, 200, device=0),
    "a copy without a size or a call has dashes": loop(compute=10).event("gpu_memcpy", "Memcpy", 5, 2),
    "beside numapin's loader, pageable copies need its delivery or pinning": with_loader(pageable()),
    "beside delivery on the GPU, pageable copies are the script's own": with_loader(pageable(), delivers_on_gpu=True),
    "beside delivery on the GPU, so are exposed ones": with_loader(loop(copy=200, compute=800), delivers_on_gpu=True),
    "without workers, no launcher option is advised": with_loader(pageable(), is_numapin=False, num_workers=0),
    "pinning in the loop": loop(steps=1, compute=800, idle=200).event("cpu_op", "aten::pin_memory", 800, 200),
    "pinning of batches that are pinned": with_loader(
        loop(steps=1, compute=800, idle=200).event("cpu_op", "aten::pin_memory", 800, 200)
    ),
    "pinning inside next() is waiting, on the GPU": without_workers(pins=True),
    "pinning inside next() is waiting, on the CPU": without_workers(on_gpu=False, pins=True),
}
OF_LOADING: Final[dict[str, Made]] = {
    "consecutive parts have their own lengths": loop(wait=200, copy=100, compute=600, idle=100),
    "on the CPU, operators inside next() make the batch": without_workers(on_gpu=False),
    "work outside of the steps does not count": loop(steps=1, compute=1000).kernel(1000, 5000, REDUCE),
    "waiting for numapin's loader": with_loader(loop(wait=300, compute=700)),
    "waiting for numapin's one worker has nothing to balance": with_loader(loop(wait=300, compute=700), num_workers=1),
    "waiting for workers that share all CPUs": with_loader(loop(wait=300, compute=700)).noting(num_cpus=2),
    "waiting for workers while CPUs are left": with_loader(loop(wait=300, compute=700)).noting(num_cpus=8),
    "waiting without workers": without_workers(),
    "waiting without workers, and longer for a loader with some": without_workers()
    .step(1, 1000, 1000)
    .wait(1000, 400)
    .wait(1500, 400),
    "waiting for workers at their limit": workers_at_their_limit(0),
    "workers at their limit that decode images": workers_at_their_limit(0).noting(image_work=["float", "jpeg", 7]),
    "workers that have ended do not count": workers_at_their_limit(20),
    "waiting for a twentieth is not bound by compute": loop(wait=60, compute=940),
    "hardly waiting is bound by compute": loop(wait=40, compute=960),
    "waiting at the border of an epoch is not in the evidence of waiting": loop(wait=200, compute=800)
    .step(4, 4000, 5000)
    .noted_at("epochs", 4000, 1000)
    .wait(5000, 4000),
    "workers that start again": restarting_workers(),
    "workers that start again in long epochs": with_loader(restarting_workers(), is_numapin=False, num_batches=20),
    "workers that stay": with_loader(restarting_workers(), is_persistent=True),
    "a rare border does not keep the loop from being bound by compute": with_loader(
        loop(steps=10, wait=3, compute=997).step(10, 10_000, 700).noted_at("epochs", 10_000, 700),
        is_numapin=False,
        num_batches=1000,
    ),
    "an epoch that only ended": loop(compute=1000).step(4, 4000, 800).noted_at("ends", 4000, 800),
    "what lies between iter() and next() is not the epoch's": late_first_batch(),
    "of two loaders, the one whose epoch began slowly": two_loaders(TRAINING, VALIDATION),
}
OF_THE_HOST: Final[dict[str, Made]] = {
    "bound by compute": loop(compute=1000),
    "an idle GPU": loop(compute=500, idle=500),
    "what the host does while the GPU is idle": loop(compute=500, idle=500)
    .noting(stacks=STACKS)
    .sampled(*((i * 1000 + 500, 500) for i in range(4))),
    "Python on the CPU": on_cpu(*[(100, 900)] * 4).sampled(*IDLE).sampled(*OPERATORS, stack=1),
    "sleep on the CPU": on_cpu(*[(100, 900)] * 4).sampled(*IDLE, stack=1, running=False).sampled(*OPERATORS),
    "communication that nothing hides": loop(steps=2, compute=500, idle=500)
    .kernel(500, 500, REDUCE)
    .kernel(1500, 500, REDUCE),
    "communication that is hidden in part": loop(steps=1, compute=600, idle=400).kernel(500, 300, REDUCE),
}
OF_SLOW_STEPS: Final[dict[str, Made]] = {
    "a slow step, besides what all steps do": on_cpu(*[(300, 700)] * 5, (300, 5700))
    .sampled((300, 4700))
    .sampled((5300, 5700), stack=1, running=False),
    "a slow step that no sample saw": on_cpu(*[(300, 200)] * 5, (300, 5700)),
    "a slow step that computes": on_cpu(*[(1000, 0)] * 6, (4000, 0)),
    "a slow step of the same shapes, whatever it logs": shaped([8, 4], logs=True),
    "a slow step of another shape": shaped([8, 9], logs=False),
    "a slow step of unknown shape": shaped(None, logs=False),
    "a slow step that communicates is one finding": loop(steps=8, compute=1000)
    .step(8, 8000, 5000)
    .kernel(8000, 5000, REDUCE),
    "a slow step that copies is one finding": loop(steps=8, compute=1000)
    .step(8, 8000, 5000)
    .copy(8000, 5000, memory="Pageable"),
    "steps that differ a little are even": on_cpu(*[(1000, 0)] * 6, (1400, 0)),
}
OF_OTHER_PROGRAMS: Final[dict[str, Ranks]] = {
    "other programs are noted": [loop(compute=1000).noting(other_cpu_ms=5000, **BUSY)],
    "no more CPUs than there are, although ticks are coarse": [
        loop(compute=1000).noting(other_cpu_ms=230, num_cpus=2, traced_ms=100)
    ],
    "a little of other programs is not": [loop(compute=1000).noting(other_cpu_ms=600, **BUSY)],
    "nor what may be chance": [loop(compute=1000).noting(other_cpu_ms=50, num_cpus=2, traced_ms=100)],
    "nor what is unknown": [loop(compute=1000).noting(other_cpu_ms=None, **BUSY)],
    "one note has the rank that they disturbed most": [
        loop(compute=1000).noting(num_cpus=4, traced_ms=10_000, other_cpu_ms=other) for other in (4000, 8000, 0)
    ],
}
OF_RANKS: Final[dict[str, Ranks]] = {
    "the slow rank is named with its place": [rank(600), rank(950), rank(600)],
    "communication of the slow rank is transfer": [rank(200), rank(260)],
    "a rank whose parts take turns": [
        rank(600),
        copying_rank((350, 600, 1000), (350, 600, 1000), (0, 600, 1000), (0, 600, 1000), (0, 950, 1000)),
    ],
    "one long step names no part": [
        rank(600),
        copying_rank(*((9000, 900, 10_000) if i == 3 else (0, 900, 1000) for i in range(8))),
    ],
    "a rank that is late in one step": [rank(*[600] * 6), rank(950, *[600] * 5), rank(600)],
    "a rank that is late in half of its steps": [rank(*[600] * 6), rank(*[950] * 3, *[600] * 3), rank(600)],
    "a rank with few steps": [rank(*[600] * 4), rank(*[950] * 4), rank(600)],
    "a rank that saves in one step": saving_in_one_step(),
    "all ranks have too few steps": [loop(steps=number, compute=600) for number in (4, 3)],
    "one rank has too few steps": [loop(steps=number, compute=600) for number in (6, 4, 6)],
    "ranks that wait differently": [loop(wait=100, compute=900), loop(wait=500, compute=500)],
}
OF_ONE: Final = OF_COPIES | OF_LOADING | OF_THE_HOST | OF_SLOW_STEPS
CASES: Final[dict[str, Ranks]] = {name: [made] for name, made in OF_ONE.items()} | OF_OTHER_PROGRAMS | OF_RANKS
