"""Running jobs as OpenMetrics 1.0 text, which node_exporter's textfile collector reads, too."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Final

from numapin.base.text import printable, without_none

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numapin.observe.node import JobOrigin
    from numapin.observe.top import Top, TopRank

_UNITS: Final = ("bytes_per_second", "bytes", "seconds", "ratio", "watts")
_ESCAPES: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
_MOST_CHARS: Final = 256  # of a label: other users' files hold any text
_END: Final = "# EOF\n"
_ACTIVE: Final = "numapin_run_active"
_ACTIVE_HELP: Final = "Whether a rank of the run is alive and watched."


def _of_loop(name: str) -> Callable[[TopRank], float | None]:
    return lambda rank: None if rank.loop is None else getattr(rank.loop, name)


# The metrics of ranks that are alive: name (a counter's samples add _total), help text, value; None is left out.
_OF_RANKS: Final[tuple[tuple[str, str, Callable[[TopRank], float | None]], ...]] = (
    ("numapin_rank_uptime_seconds", "Time since the process started.", lambda rank: rank.up_s),
    ("numapin_rank_threads", "Threads of the rank and of what it started.", lambda rank: rank.num_threads),
    ("numapin_rank_threads_off_plan", "Threads that may leave the planned CPUs.", lambda rank: rank.num_off_plan),
    ("numapin_rank_cpu_ratio", "CPU time used per second; 1 is one busy CPU.", lambda rank: rank.cpu_share),
    ("numapin_rank_memory_off_node_ratio", "Share of its pages off the planned nodes.", lambda rank: rank.remote_share),
    ("numapin_rank_pinned_bytes", "Page-locked memory.", lambda rank: rank.pinned_bytes),
    ("numapin_rank_steps_total", "Steps of the loops over DataLoaders.", _of_loop("num_steps")),
    ("numapin_rank_step_seconds_total", "Time of these steps, from batch to batch.", _of_loop("stepped_s")),
    ("numapin_rank_wait_seconds_total", "Time of these steps spent waiting for a batch.", _of_loop("waited_s")),
    ("numapin_rank_loaded_bytes_total", "Bytes of the batches of these steps.", _of_loop("num_bytes")),
)
_OF_GPUS: Final[tuple[tuple[str, str, Callable[[TopRank], float | None]], ...]] = (
    ("numapin_gpu_busy_ratio", "Share of the time in which a kernel ran.", lambda rank: rank.load.busy_share),
    ("numapin_gpu_memory_used_bytes", "GPU memory in use.", lambda rank: rank.load.used_bytes),
    ("numapin_gpu_memory_size_bytes", "GPU memory.", lambda rank: rank.load.memory_bytes),
    ("numapin_gpu_power_watts", "Power that the GPU draws.", lambda rank: rank.load.power_w),
    (
        "numapin_gpu_received_bytes_per_second",
        "Bytes that the GPU receives over PCIe.",
        lambda rank: None if rank.load.h2d_gbps is None else rank.load.h2d_gbps * 1e9,
    ),
)


def openmetrics(jobs: Iterable[tuple[Top, JobOrigin]], *, num_unread: int | None = None) -> str:
    """Return the metrics of running jobs, by rank and by the GPUs' UUIDs. What is unknown is left out.

    `num_unread` is the number of runs that could not be read, if these are all runs of a host. A run whose labels are
    those of a former one counts as such: no two samples may have the same labels.
    """
    families: dict[tuple[str, str], list[tuple[dict[str, str], float | None]]] = {}
    taken: set[str] = set()

    def add(name: str, text: str, labels: dict[str, str], value: float | None) -> None:
        families.setdefault((name, text), []).append((labels, value))

    for top, origin in jobs:
        run = _labels(top.run, origin)
        if _rendered(run) in taken:
            num_unread = None if num_unread is None else num_unread + 1
            continue
        taken.add(_rendered(run))
        add(_ACTIVE, _ACTIVE_HELP, run, int(not top.has_ended))
        living_gpus: dict[str, TopRank] = {}  # ranks may share a GPU
        for rank in top.ranks:
            plan = rank.plan
            number = {**run, "local_rank": str(plan.local_rank)}
            if plan.local_rank in origin.ranks:
                number["rank"] = str(origin.ranks[plan.local_rank])
            uuid, node = plan.gpu.uuid if plan.gpu else None, None if plan.node is None else str(plan.node)
            binding = {"pid": str(rank.pid), "cpus": str(plan.cpus), "node": node, "uuid": uuid}
            add("numapin_rank_info", "The process and the binding of a rank.", number | without_none(binding), 1)
            add("numapin_rank_up", "Whether the rank's process is alive.", number, int(not rank.is_gone))
            if rank.is_gone:
                continue
            for name, text, value in _OF_RANKS:
                add(name, text, number, value(rank))
            if uuid:
                living_gpus[uuid] = rank
        for uuid, rank in living_gpus.items():
            for name, text, value in _OF_GPUS:
                add(name, text, {**run, "uuid": uuid}, value(rank))
    if num_unread is not None:
        add("numapin_runs_unread", "Runs that could not be read, or are too many of one user.", {}, num_unread)
    lines = [line for (name, text), samples in families.items() for line in _family(name, text, samples)]
    return "\n".join([*lines, _END])


def ended(run: str, origin: JobOrigin) -> str:
    """Return the metrics of a run that has ended or is no longer watched."""
    return "\n".join([*_family(_ACTIVE, _ACTIVE_HELP, [(_labels(run, origin), 0)]), _END])


def _labels(run: str, origin: JobOrigin) -> dict[str, str]:
    of_job = {"user": origin.user, "job_id": origin.job_id, "pod": origin.pod, "namespace": origin.namespace}
    return {"run": run, "host": origin.host, **without_none(of_job)}


def _rendered(labels: Mapping[str, str]) -> str:
    pairs = (f'{label}="{printable(word[:_MOST_CHARS]).translate(_ESCAPES)}"' for label, word in labels.items())
    return f"{{{','.join(pairs)}}}" if labels else ""


def _family(name: str, text: str, samples: Sequence[tuple[Mapping[str, str], float | None]]) -> list[str]:
    found: dict[str, float] = {}
    for labels, value in samples:
        # A process may write anything into the totals of its loop, such as "not a number".
        if value is not None and isfinite(value) and value >= 0:
            found.setdefault(_rendered(labels), value)  # GPUs of a hostile plan may look alike
    lines = [f"{name}{labels} {value if isinstance(value, int) else float(value)!r}" for labels, value in found.items()]
    if not lines:
        return []
    family = name.removesuffix("_total")
    unit = next((unit for unit in _UNITS if family.endswith(f"_{unit}")), None)
    kind = "gauge" if family == name else "counter"
    head = [f"# TYPE {family} {kind}", *([f"# UNIT {family} {unit}"] if unit else []), f"# HELP {family} {text}"]
    return [*head, *lines]
