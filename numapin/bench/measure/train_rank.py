"""A rank of `bench train`: train a model with one loader after another. Edge.

Comes in: specs from the process that started the launcher, over a socket in the working directory. Goes out: this
rank's figures; those of all ranks together are the same on each. All ranks measure the same loaders in the same order:
every step is a common one, and the ranks agree on the number of steps.
"""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from numapin.bench.cases.train import CEILING, case_of
from numapin.bench.measure.train_feeds import FEEDS, Workers
from numapin.bench.measure.train_step import Trainer
from numapin.bench.measure.train_usage import RankUsage, cpus_per_rank, memory_bytes
from numapin.bench.measure.train_wire import SOCKET, Line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numapin.bench.measure.train_feeds import Feed
    from numapin.data.stats import Stats

_PATIENCE_S: Final = 15.0  # at most, for a warm-up that does not become steady
_STRETCHES_AHEAD: Final = 2  # a stretch of a warm-up is half as long as the queue of prepared batches
_CEILING_WARM_UP_S: Final = 0.5  # it has no queue that must become steady
_EMPTY_HOST_CACHE: Final = ("_host_emptyCache", "_accelerator_emptyHostCache")  # by version of torch
_TIMEOUT: Final = timedelta(minutes=4)  # for a collective: a rank may still decode or shard


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainWindow:
    """Consecutive steps, timed; `wait_s` is this rank's time in `take`."""

    num_steps: int
    wall_s: float
    wait_s: float

    @property
    def steps_per_s(self) -> float:
        """The number of steps per second."""
        return self.num_steps / self.wall_s


class TrainingRank:
    """The state of this rank between measurements: the trainer of the current model, and its number of steps."""

    def __init__(self) -> None:
        """Select the device and join the process group: NCCL on a GPU, else gloo."""
        self._device = _device()
        on_gpu = self._device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", timeout=_TIMEOUT, device_id=self._device if on_gpu else None
        )
        self._trainer: Trainer | None = None
        self._num_steps: int | None = None

    def measure(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Start a loader, warm up, measure, and stop it with all of its workers; return figures and details.

        Raises:
            ValueError: A batch differs from the dataset.
            RuntimeError: A worker is left over.
        """
        trainer, options, peer = self._trainer_for(spec), spec["options"], spec["peer"]
        workers = Workers(number=options["num_workers"], prefetch=options["prefetch"])
        started = time.perf_counter()
        with FEEDS[peer](trainer, workers) as feed:
            feed.check(feed.take())
            first_s = time.perf_counter() - started
            warm = _warm_up(trainer, feed, *_warm_up_of(peer, options, workers))
            num_steps = self._steps(trainer, warm, options)
            before, used_before = feed.stats(), RankUsage.now()
            window = _window(trainer, feed, num_steps)
            used, after = RankUsage.now(), feed.stats()
            pss_bytes = memory_bytes()
            feed.check(feed.take())
        _require_no_workers(peer)
        _free_caches(self._device)
        return {
            "figures": {
                **_speeds(trainer, window),
                **_costs(trainer, window, used.since(used_before), workers),
                "pss_gb": _mean(self._device, pss_bytes / 1e9) * dist.get_world_size(),
                "first_batch_s": first_s,
                **_misses(before, after),
            },
            "details": {
                "num_steps": window.num_steps,
                "wall_s": window.wall_s,
                "took_s": time.perf_counter() - started,
                "stats": after and dataclasses.asdict(after),
            },
        }

    def _trainer_for(self, spec: Mapping[str, Any]) -> Trainer:
        """Return the trainer of the case; the one of another case is freed first."""
        case = case_of(spec["case"])
        if self._trainer is None or self._trainer.case != case:
            self._trainer = self._num_steps = None
            gc.collect()
            _free_caches(self._device)
            self._trainer = Trainer(case, self._device, folder=spec["options"]["folder"])
        return self._trainer

    def _steps(self, trainer: Trainer, warm: TrainWindow, options: Mapping[str, Any]) -> int:
        """Return the number of steps for every loader: as many as the first one does in `seconds`.

        It is a multiple of the distinct batches, so that all loaders train on the same ones.
        """
        if self._num_steps is None:
            wanted = options["num_steps"] or max(1, round(options["seconds"] * warm.steps_per_s))
            each = trainer.case.num_distinct
            self._num_steps = -(-wanted // each) * each
        return self._num_steps


def _device() -> torch.device:
    """Select and return this rank's GPU, or the CPU if there is no GPU."""
    torch.set_num_threads(1)  # ranks and workers share the CPUs
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True
    return device


def _warm_up_of(peer: str, options: Mapping[str, Any], workers: Workers) -> tuple[float, int]:
    """Return the least seconds of a warm-up, and the batches that may be prepared; the ceiling has no queue."""
    if peer == CEILING:
        return min(_CEILING_WARM_UP_S, options["warm_up_s"]), 1
    return options["warm_up_s"], workers.num_ahead


def _warm_up(trainer: Trainer, feed: Feed, least_s: float, num_ahead: int) -> TrainWindow:
    """Train for `least_s`, and until all batches travel in numapin's slots; return the last stretch.

    The steps before the first stretch take the batches that were prepared while the loader and its workers started.
    """
    start = time.perf_counter()
    _window(trainer, feed, num_ahead)
    while True:
        before = feed.stats()
        last = _window(trainer, feed, -(-num_ahead // _STRETCHES_AHEAD))
        spent_s = time.perf_counter() - start
        is_ready = spent_s > _PATIENCE_S or (spent_s >= least_s and _is_steady(before, feed.stats()))
        if _largest(trainer.device, float(not is_ready)) == 0:
            return last


def _window(trainer: Trainer, feed: Feed, num_steps: int) -> TrainWindow:
    """Train for some steps. The clock starts when all ranks are ready and stops when the last GPU is done."""
    waited_s = 0.0
    _largest(trainer.device, 0.0)
    _synchronize(trainer.device)
    start = time.perf_counter()
    for _ in range(num_steps):
        asked = time.perf_counter()
        batch = feed.take()
        waited_s += time.perf_counter() - asked
        trainer.step(batch)
    _synchronize(trainer.device)
    wall_s = _largest(trainer.device, time.perf_counter() - start)
    return TrainWindow(num_steps=num_steps, wall_s=wall_s, wait_s=waited_s)


def _speeds(trainer: Trainer, window: TrainWindow) -> dict[str, float]:
    """Return the speed of all ranks together."""
    return {
        "samples_per_s": window.steps_per_s * trainer.case.batch_size * dist.get_world_size(),
        "wait_share": _mean(trainer.device, window.wait_s / window.wall_s),
    }


def _costs(trainer: Trainer, window: TrainWindow, used: RankUsage, workers: Workers) -> dict[str, float]:
    """Return the CPU time per 1,000 samples, and how busy the workers' CPUs were."""
    usable_s = used.at_s * min(workers.number, cpus_per_rank())
    num_samples = window.num_steps * trainer.case.batch_size
    return {
        "cpu_s_per_1000": _mean(trainer.device, used.cpu_s / num_samples * 1000),
        "workers_busy": _mean(trainer.device, used.workers_cpu_s / usable_s),
    }


def _is_steady(before: Stats | None, after: Stats | None) -> bool:
    """Return whether no slot was made or pinned in a stretch, and all batches used one; unknown loaders always are."""
    if before is None or after is None:
        return True
    is_memory_the_same = (before.slots_made, before.pinned_bytes) == (after.slots_made, after.pinned_bytes)
    return is_memory_the_same and not _misses(before, after)["misses"]


def _misses(before: Stats | None, after: Stats | None) -> dict[str, float]:
    """Return how many of this rank's batches traveled outside the slots in between; empty for other loaders."""
    if before is None or after is None:
        return {}
    return {"misses": float(sum(after.misses.values()) - sum(before.misses.values()))}


def _require_no_workers(loader: str) -> None:
    left = multiprocessing.active_children()
    if left:
        raise RuntimeError(f"{loader}: {len(left)} workers are left over after closing the loader: {left}")


def _free_caches(device: torch.device) -> None:
    """Free the GPU and pinned memory that torch caches, so that no loader starts with another's."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        for name in _EMPTY_HOST_CACHE:
            getattr(torch._C, name, lambda: None)()  # noqa: SLF001 - torch has no public function


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _largest(device: torch.device, value: float) -> float:
    """Return the largest of the ranks' values, once all ranks have called this."""
    return _reduced(device, value, dist.ReduceOp.MAX)


def _mean(device: torch.device, value: float) -> float:
    return _reduced(device, value, dist.ReduceOp.SUM) / dist.get_world_size()


def _reduced(device: torch.device, value: float, operation: dist.ReduceOp.RedOpType) -> float:
    reduced = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(reduced, op=operation)
    return reduced.item()


def main() -> None:
    """Measure each spec that arrives, until the connection ends."""
    with Line.connected(SOCKET) as line:
        line.send({"rank": int(os.environ["RANK"])})
        _measure_all(line)
    # Only now, when no model uses the group: gloo's threads and the last user's end could wait for each other.
    dist.destroy_process_group()


def _measure_all(line: Line) -> None:
    rank = TrainingRank()
    while (spec := line.receive()) is not None:
        try:
            line.send(rank.measure(spec))
        except BaseException as error:
            line.send({"failed": _in_words(error)})
            raise


def _in_words(error: BaseException) -> str:
    """Return an error with the next step, if there is a usual one."""
    remedy = ""
    if isinstance(error, torch.OutOfMemoryError):
        remedy = "; try a smaller --batch-size"
    elif "DataLoader worker" in str(error):  # torch: "exited unexpectedly", "is killed by signal"
        remedy = "; see dmesg for the cause; if memory or /dev/shm ran out, use fewer --workers"
    return f"{type(error).__name__}: {error}{remedy}"


if __name__ == "__main__":
    main()
