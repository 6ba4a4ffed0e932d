"""A running job as OpenMetrics text. Pure.

Comes in: a `Top`. Goes out: the text that Prometheus and compatible programs read (OpenMetrics 1.0). It is also valid
in Prometheus's own text format, which node_exporter's textfile collector reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from numapin.base.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numapin.observe.top import Top, TopRank

CONTENT_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
UNKNOWN: Final = "# EOF\n"
"""No metrics: before the first sample, nothing is known about the job."""
_UNITS: Final = ("bytes_per_second", "bytes", "seconds", "ratio", "watts")
_ESCAPES: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric of every rank or GPU.

    Attributes:
        name: Its name; a counter's samples add _total.
        help: What it is.
        value: Returns it; None is unknown, and left out.
        is_counter: Whether it only grows.
        of_gone: Whether a rank that has ended has it.
    """

    name: str
    help: str
    value: Callable[[TopRank], float | None]
    is_counter: bool = False
    of_gone: bool = False

    def head(self) -> Iterator[str]:
        """Yield the lines before the samples."""
        yield f"# TYPE {self.name} {'counter' if self.is_counter else 'gauge'}"
        unit = next((unit for unit in _UNITS if self.name.endswith(f"_{unit}")), None)
        if unit is not None:
            yield f"# UNIT {self.name} {unit}"
        yield f"# HELP {self.name} {self.help}"

    def sample(self, labels: Mapping[str, str], value: float) -> str:
        """Return the line of one rank or GPU."""
        return f"{self.name}{'_total' if self.is_counter else ''}{_braces(labels)} {_number(value)}"


def _of_loop(name: str) -> Callable[[TopRank], float | None]:
    return lambda rank: None if rank.loop is None else getattr(rank.loop, name)


def _gbps(rank: TopRank) -> float | None:
    return None if rank.load.h2d_gbps is None else rank.load.h2d_gbps * 1e9


_ACTIVE: Final = Metric(
    name="numapin_run_active",
    help="Whether a rank of the run is alive and watched.",
    value=lambda _: None,
    of_gone=True,
)
_RANK: Final = (
    Metric(name="numapin_rank_info", help="The process and the binding of a rank.", value=lambda _: 1, of_gone=True),
    Metric(
        name="numapin_rank_up",
        help="Whether the rank's process is alive.",
        value=lambda rank: int(not rank.is_gone),
        of_gone=True,
    ),
    Metric(name="numapin_rank_uptime_seconds", help="Time since the process started.", value=lambda rank: rank.up_s),
    Metric(
        name="numapin_rank_threads",
        help="Threads of the rank and of the processes that it started.",
        value=lambda rank: rank.num_threads,
    ),
    Metric(
        name="numapin_rank_threads_off_plan",
        help="Threads that may run on CPUs outside the plan.",
        value=lambda rank: rank.num_off_plan,
    ),
    Metric(
        name="numapin_rank_cpu_ratio",
        help="CPU time used per second; 1 is one CPU that is never idle.",
        value=lambda rank: rank.cpu_share,
    ),
    Metric(
        name="numapin_rank_memory_off_node_ratio",
        help="Share of the pages on nodes outside the plan; files do not count.",
        value=lambda rank: rank.remote_share,
    ),
    Metric(name="numapin_rank_pinned_bytes", help="Page-locked memory.", value=lambda rank: rank.pinned_bytes),
    Metric(
        name="numapin_rank_steps",
        help="Steps of the loops over numapin's loaders.",
        value=lambda rank: None if rank.loop is None else rank.loop.num_steps or None,
        is_counter=True,
    ),
    Metric(
        name="numapin_rank_step_seconds",
        help="Time of these steps, from batch to batch.",
        value=_of_loop("stepped_s"),
        is_counter=True,
    ),
    Metric(
        name="numapin_rank_wait_seconds",
        help="Time of these steps spent waiting for the next batch.",
        value=_of_loop("waited_s"),
        is_counter=True,
    ),
    Metric(
        name="numapin_rank_loaded_bytes",
        help="Bytes of the batches of these steps.",
        value=_of_loop("num_bytes"),
        is_counter=True,
    ),
)
_GPU: Final = (
    Metric(
        name="numapin_gpu_busy_ratio",
        help="Share of the time in which a kernel ran.",
        value=lambda rank: rank.load.busy_share,
    ),
    Metric(name="numapin_gpu_memory_used_bytes", help="GPU memory in use.", value=lambda rank: rank.load.used_bytes),
    Metric(name="numapin_gpu_memory_size_bytes", help="GPU memory.", value=lambda rank: rank.load.memory_bytes),
    Metric(name="numapin_gpu_power_watts", help="Power that the GPU draws.", value=lambda rank: rank.load.power_w),
    Metric(name="numapin_gpu_received_bytes_per_second", help="Bytes that the GPU receives over PCIe.", value=_gbps),
)


def openmetrics(top: Top) -> str:
    """Return the metrics of a running job, by rank and by the GPUs' UUIDs. What is unknown is left out."""
    run = {"run": top.run}
    lines = [*_ACTIVE.head(), _ACTIVE.sample(run, int(not top.has_ended))]
    for metric in _RANK:
        lines += _family(metric, ((_rank_labels(metric, run, rank), rank) for rank in top.ranks))
    gpus = _by_gpu(top)
    for metric in _GPU:
        lines += _family(metric, (({**run, "uuid": uuid}, rank) for uuid, rank in gpus.items()))
    return "".join(f"{line}\n" for line in [*lines, "# EOF"])


def _by_gpu(top: Top) -> dict[str, TopRank]:
    """Return a living rank for each GPU's UUID; ranks may share a GPU."""
    uuids = ((_uuid(rank), rank) for rank in top.ranks if not rank.is_gone)
    return {uuid: rank for uuid, rank in uuids if uuid}


def _uuid(rank: TopRank) -> str:
    """Return the UUID of a rank's GPU; empty if it is unknown."""
    gpu = rank.plan.gpu
    return (gpu.uuid if gpu else None) or ""


def ended(run: str) -> str:
    """Return the metrics of a run that is not watched any more or has ended."""
    return "".join(f"{line}\n" for line in [*_ACTIVE.head(), _ACTIVE.sample({"run": run}, 0), "# EOF"])


def _family(metric: Metric, ranks: Iterable[tuple[dict[str, str], TopRank]]) -> list[str]:
    """Return the lines of a metric; none if it is unknown for all."""
    known = ((labels, metric.value(rank)) for labels, rank in ranks if metric.of_gone or not rank.is_gone)
    samples = [metric.sample(labels, value) for labels, value in known if value is not None]
    return [*metric.head(), *samples] if samples else []


def _rank_labels(metric: Metric, run: dict[str, str], rank: TopRank) -> dict[str, str]:
    labels = {**run, "local_rank": str(rank.plan.local_rank)}
    if metric.name != "numapin_rank_info":
        return labels
    node = rank.plan.node
    return {
        **labels,
        "pid": str(rank.pid),
        "cpus": str(rank.plan.cpus),
        "node": "" if node is None else str(node),
        "uuid": _uuid(rank),
    }


def _braces(labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{name}="{printable(value).translate(_ESCAPES)}"' for name, value in labels.items())
    return f"{{{pairs}}}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))
