"""`numapin bench loader`: batches per second of numapin's DataLoader and torch's."""

from __future__ import annotations

import dataclasses
import os
import time
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Final

from numapin.base.text import counted
from numapin.bench.model import Benchmark, Case, Column, Comparison, Peer, Question
from numapin.bench.overlap import spin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch

    from numapin.bench.process import Harness
    from numapin.data.stats import Stats

    Batch = Sequence[torch.Tensor]  # samples, and their labels

PREFETCH: Final = 2  # batches ahead per worker, torch's default, for every peer
_WORKERS_EACH: Final = 12  # per GPU, with several GPUs at once
_ITEM_BYTES: Final = {"float32": 4, "int64": 8, "uint8": 1}
_GIL_NS: Final = 100_000  # per sample
_NUM_SAMPLES: Final = 512
_NUM_CODES: Final = 128  # a sample's elements are its index modulo this, which fits every dtype
_ENDLESS: Final = 1 << 30  # samples; more than any window takes
_PATIENCE_S: Final = 30.0  # until numapin makes and pins no more slots
_PAGE_BYTES: Final = 4096
_PEAK_BYTES: Final = 256 << 20
_PEAK_COPIES: Final = 8  # between two synchronizations


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderCase:
    """One kind of batch. A sample is a tensor of `shape` with a label; `holds_gil` adds 0.1 ms of Python to each."""

    name: str
    batch_size: int
    shape: tuple[int, ...]
    dtype: str
    num_workers: int
    prefetch: int = PREFETCH
    holds_gil: bool = False
    on_device: bool = True

    @property
    def batch_bytes(self) -> int:
        """The bytes of a batch, without its labels."""
        return self.batch_size * prod(self.shape) * _ITEM_BYTES[self.dtype]

    @property
    def about(self) -> str:
        """The case in words."""
        shape = "x".join(map(str, (self.batch_size, *self.shape)))
        parts = (
            f"{shape} {self.dtype}",
            f"{self.batch_bytes / 1e6:.1f} MB",
            counted(self.num_workers, "worker"),
            "" if self.prefetch == PREFETCH else f"{self.prefetch} ahead each",
            "0.1 ms under the GIL per sample" if self.holds_gil else "",
            "to the GPU" if self.on_device else "to this process only",
        )
        return ", ".join(filter(None, parts))


_LARGE: Final = LoaderCase(name="154MB", batch_size=256, shape=(3, 224, 224), dtype="float32", num_workers=12)
_MIDDLE: Final = LoaderCase(name="38MB", batch_size=256, shape=(3, 224, 224), dtype="uint8", num_workers=8)
_SMALL: Final = LoaderCase(name="1MB", batch_size=32, shape=(4096,), dtype="int64", num_workers=8)
CASES: Final = {
    case.name: case
    for case in (
        _LARGE,
        _MIDDLE,
        _SMALL,
        replace(_MIDDLE, name="gil-38MB", holds_gil=True),
        replace(_SMALL, name="gil-transport", holds_gil=True, on_device=False),
        replace(_MIDDLE, name="transport", num_workers=2, on_device=False),
    )
}
PEERS: Final = {
    "pinned-peak": "copies of one pinned buffer to the GPU: the upper bound",
    "torch": "torch.utils.data.DataLoader, pin_memory=True and .to(non_blocking=True)",
    "numapin-device": "numapin.DataLoader(device=…): yields batches on the GPU",
    "numapin-host": "numapin.DataLoader(pin_memory=True) and .to(non_blocking=True)",
    "numapin-bf16": "numapin-device with cast=torch.bfloat16; its GB/s count the bytes of the narrower batches",
    "numapin-buffer": "numapin-device with a dataset that writes whole batches into numapin.batch_buffer",
    "numapin-transport": "numapin.DataLoader without a GPU",
    "numapin-balanced": "numapin.DataLoader(balance=True), with device=… if there is a GPU",
}


def loader_benchmark(
    *,
    cases: Sequence[str] = tuple(CASES),
    peers: Sequence[str] = tuple(PEERS),
    num_workers: int | None = None,
    prefetch: int = PREFETCH,
    seconds: float,
    warm_up_s: float,
    num_batches: int,
    all_gpus: bool = False,
    num_gpus: int,
    no_gpu: str | None,
) -> Benchmark:
    """Return the benchmark for a machine with `num_gpus` GPUs; without one, cases that need it are skipped.

    If `num_workers` is None, each case has its own number, or 12 if several GPUs run at once. `prefetch` is in batches
    per worker. A window lasts at least `seconds` and `num_batches` batches.
    """
    used_gpus = num_gpus if all_gpus else min(num_gpus, 1)
    made = []
    for name in cases:
        gpus = tuple(range(used_gpus)) if CASES[name].on_device else (None,)  # one process each
        default = _WORKERS_EACH if len(gpus) > 1 else CASES[name].num_workers
        case = replace(CASES[name], num_workers=num_workers or default, prefetch=prefetch)
        if not gpus:
            made.append(Case(name=name, about=case.about, skipped=no_gpu or "torch sees no GPU"))
            continue
        common = {
            "case": name,
            "num_workers": case.num_workers,
            "prefetch": prefetch,
            "num_ranks": len(gpus),
            "seconds": seconds,
            "warm_up_s": warm_up_s,
            "num_batches": num_batches,
        }
        fit = tuple(
            Peer(name=peer, specs=tuple({**common, "peer": peer, "gpu": gpu} for gpu in gpus))
            for peer in peers
            if _fits(peer, case)
        )
        at_once = f", {len(gpus)} GPUs at once" if len(gpus) > 1 else ""
        made.append(Case(name=name, about=case.about + at_once, peers=fit))
    return Benchmark(
        name="loader",
        module="numapin.bench.loader",
        cases=tuple(made),
        comparisons=(
            Comparison(name="ratio", figure="batches_per_s", against="torch"),
            Comparison(name="share_of_peak", figure="gbps", against="pinned-peak"),
        ),
        summed=frozenset({"batches_per_s", "gbps", "num_batches", "hits", "misses", "pinned_mb"}),
        questions=(
            Question(
                subject="{own} instead of torch's loader",
                things="batches are",
                figure="batches_per_s",
                own=("numapin-device", "numapin-transport", "numapin-host", "numapin-balanced"),
                against="torch",
            ),
        ),
        settings={
            "cases": cases,
            "peers": peers,
            "num_workers": num_workers,
            "prefetch": prefetch,
            "seconds": seconds,
            "warm_up_s": warm_up_s,
            "num_batches": num_batches,
            "all_gpus": all_gpus,
            "peers_are": PEERS,
        },
        columns=(
            Column(figure="batches_per_s", heading="batches/s", form=",.1f", spread=True),
            Column(figure="gbps", heading="GB/s", form=".2f"),
            Column(figure="share_of_peak", heading="of peak", form=".0%"),
            Column(figure="ratio", heading="x torch", form=".2f", spread=True),
            Column(figure="main_cpu_ms", heading="CPU ms", form=".3f", meaning="of the loop's thread per batch"),
            Column(figure="first_batch_s", heading="first s", form=".2f", meaning="time to the first batch"),
            Column(figure="hits", heading="hits", form=",.0f"),
            Column(figure="misses", heading="misses", form=",.0f"),
            Column(figure="pinned_mb", heading="pinned MB", form=",.0f"),
        ),
    )


def _fits(peer: str, case: LoaderCase) -> bool:
    if peer in ("torch", "numapin-balanced"):
        return True
    if peer == "numapin-transport":
        return not case.on_device
    return case.on_device and (peer != "numapin-bf16" or case.dtype == "float32")


# --- in the measuring process -----------------------------------------------------------------------------------------


class InMemory:
    """The samples of a case, each filled with its code. It is pickled as the case, so a spawned worker makes its own.

    There are 512 in memory, which come again and again.
    """

    def __init__(self, case: LoaderCase) -> None:
        import torch

        self.case = case
        codes = (torch.arange(_NUM_SAMPLES) % _NUM_CODES).to(getattr(torch, case.dtype))
        self._samples = codes.view(-1, *[1] * len(case.shape)).expand(-1, *case.shape).contiguous()

    def __reduce__(self) -> tuple[type[InMemory], tuple[LoaderCase]]:
        """Pickle only the case."""
        return InMemory, (self.case,)

    def __len__(self) -> int:
        """Return more samples than any run takes."""
        return _ENDLESS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return a sample, after the case's work."""
        if self.case.holds_gil:
            spin(_GIL_NS)
        return self._samples[index % _NUM_SAMPLES], index


class Written:
    """Whole batches, written into `numapin.batch_buffer` as by a decoder: the one sample stays in the caches."""

    def __init__(self, samples: InMemory) -> None:
        self._samples = samples

    def __getitem__(self, indices: Sequence[int]) -> Batch:
        """Write the batch of these samples, each with its own first and last element."""
        import torch

        import numapin

        sample, _ = self._samples[0]
        batch, labels = numapin.batch_buffer((len(indices), *sample.shape), sample.dtype), torch.tensor(indices)
        for out in batch:
            out.copy_(sample)
        batch.flatten(1)[:, [0, -1]] = (labels % _NUM_CODES).to(batch.dtype)[:, None]
        return batch, labels


def require_intact(batch: Batch, case: LoaderCase) -> None:
    """Require every sample to be intact: its first and last element are its code. Raises ValueError."""
    samples, labels = (tensor.cpu() for tensor in batch)
    ends, codes = samples.flatten(1)[:, [0, -1]], labels % _NUM_CODES
    if samples.shape != (case.batch_size, *case.shape) or not bool((ends == codes[:, None]).all()):
        raise ValueError(f"a batch differs from the dataset: {tuple(samples.shape)}, first elements {ends[:4]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A loader that is ready. Iterating over `batches` starts it; `stats` returns None for torch's."""

    batches: Iterable[Batch]
    stats: Callable[[], Stats | None] = lambda: None
    close: Callable[[], None] = lambda: None


def build(peer: str, case: LoaderCase, device: torch.device | None) -> Source:
    """Build a peer's loader; `device` is None for a case that ends in this process."""
    import torch

    import numapin

    def moved(batches: Iterable[Batch]) -> Iterator[Batch]:
        """Copy each batch in this thread, as a training loop does."""
        for batch in batches:
            yield batch if device is None else [tensor.to(device, non_blocking=True) for tensor in batch]

    shared: dict[str, Any] = {
        "dataset": InMemory(case),
        "batch_size": case.batch_size,
        "num_workers": case.num_workers,
        "prefetch_factor": case.prefetch,
    }
    if peer == "torch":
        return Source(batches=moved(torch.utils.data.DataLoader(**shared, pin_memory=device is not None)))
    options_of: dict[str, dict[str, Any]] = {
        "numapin-device": {"device": device},
        "numapin-bf16": {"device": device, "cast": torch.bfloat16},
        "numapin-buffer": {"device": device},
        "numapin-host": {"pin_memory": True},
        "numapin-transport": {},
        "numapin-balanced": {"balance": True} if device is None else {"balance": True, "device": device},
    }
    if peer == "numapin-buffer":
        samples = shared["dataset"]
        in_order = torch.utils.data.BatchSampler(range(len(samples)), case.batch_size, drop_last=True)
        shared |= {"dataset": Written(samples), "batch_size": None, "sampler": in_order}
    loader = numapin.DataLoader(**shared, **options_of[peer])
    batches = loader if "device" in options_of[peer] else moved(loader)
    return Source(batches=batches, stats=loader.stats, close=loader.close)


def measure(spec: dict[str, Any], harness: Harness) -> None:
    """Measure one peer, between the harness's start and stop."""
    import torch

    device = None if spec["gpu"] is None else torch.device("cuda", spec["gpu"])
    torch.set_num_threads(1)  # peers have many threads or processes of their own
    if device is not None:
        torch.cuda.set_device(device)
        torch.cuda.synchronize()  # initialize CUDA before any peer is timed
    if spec["peer"] == "pinned-peak":
        _measure_peak(spec, harness)
        return
    case = replace(CASES[spec["case"]], num_workers=spec["num_workers"], prefetch=spec["prefetch"])
    os.environ["LOCAL_WORLD_SIZE"] = str(spec["num_ranks"])  # as in a rank, where CPUs are shared
    source = build(spec["peer"], case, device)

    def finish() -> None:
        if device is not None:
            torch.cuda.synchronize(device)

    start = time.perf_counter()
    batches = iter(source.batches)
    batch = next(batches)
    finish()
    first_batch_s = time.perf_counter() - start
    require_intact(batch, case)
    batch_bytes = sum(tensor.nbytes for tensor in batch)
    del batch

    def take() -> None:
        """Take the next batch as a training loop would; without a GPU read every page."""
        batch = next(batches)
        if device is None:
            for tensor in batch:
                tensor.flatten().view(torch.uint8)[::_PAGE_BYTES].sum()

    _warm_up(take, source.stats, seconds=spec["warm_up_s"], num_outstanding=case.prefetch * case.num_workers)
    harness.wait_for_start(take)
    before = source.stats()
    window = _window(take, seconds=spec["seconds"], num_batches=spec["num_batches"], end=finish)
    after = source.stats()
    require_intact(next(batches), case)
    figures = {
        "batches_per_s": window.num_batches / window.wall_s,
        "gbps": window.num_batches * batch_bytes / window.wall_s / 1e9,
        "main_cpu_ms": window.cpu_s / window.num_batches * 1e3,
        "first_batch_s": first_batch_s,
        "num_batches": window.num_batches,
    }
    if before is not None and after is not None:  # the batches that found a slot, and those that did not
        figures["hits"] = after.hits - before.hits
        figures["misses"] = sum(after.misses.values()) - sum(before.misses.values())
    if device is not None:
        from numapin import pinned

        budget = pinned.budget()
        if budget.torch_pinned_bytes is not None:
            figures["pinned_mb"] = (budget.torch_pinned_bytes + budget.pinned_bytes) / 1e6
    harness.report(figures, details={"stats": after and dataclasses.asdict(after)}, idle=take)
    source.close()


def _measure_peak(spec: dict[str, Any], harness: Harness) -> None:
    """Measure repeated copies of one pinned buffer to the GPU."""
    import torch

    source = torch.empty(_PEAK_BYTES, dtype=torch.uint8, pin_memory=True)
    on_gpu = torch.empty_like(source, device="cuda")

    def copy() -> None:
        for _ in range(_PEAK_COPIES):
            on_gpu.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    copy()
    harness.wait_for_start(copy)
    window = _window(copy, seconds=min(spec["seconds"], 1.0), num_batches=1)
    gbps = window.num_batches * _PEAK_COPIES * _PEAK_BYTES / window.wall_s / 1e9
    harness.report({"gbps": gbps}, details={}, idle=copy)


def _warm_up(
    take: Callable[[], None], stats: Callable[[], Stats | None], *, seconds: float, num_outstanding: int
) -> None:
    """Take rounds of `num_outstanding` batches for `seconds`, and until numapin makes and pins no slots in a round."""
    start = time.perf_counter()
    earliest, latest, steady = start + seconds, start + _PATIENCE_S, False
    while time.perf_counter() < earliest or not (steady or time.perf_counter() > latest):
        before = stats()
        for _ in range(num_outstanding):
            take()
        after = stats()
        steady = before is None or after is None or start_costs(before) == start_costs(after)


def start_costs(stats: Stats) -> tuple[int, int, int]:
    """Return what changes while slots are made and pinned, and while batches do without one."""
    return stats.slots_made, stats.pinned_bytes, sum(stats.misses.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A number of batches, and the wall-clock and this thread's CPU seconds that they took."""

    num_batches: int
    wall_s: float
    cpu_s: float


def _window(
    take: Callable[[], None], *, seconds: float, num_batches: int, end: Callable[[], None] = lambda: None
) -> Window:
    """Take at least `num_batches` for at least `seconds`; `end`, which waits for the copies, is part of the time."""
    count, cpu, start = 0, time.thread_time(), time.perf_counter()
    while count < num_batches or time.perf_counter() - start < seconds:
        take()
        count += 1
    end()
    return Window(num_batches=count, wall_s=time.perf_counter() - start, cpu_s=time.thread_time() - cpu)
