"""The process of `bench exec`: run a program directly and through a peer, in turn. Edge.

Comes in: specs (see `exec.exec_benchmark`) from the harness. Goes out: medians over the samples, in ms: `plain_ms` and
`total_ms` from start to exit, directly and through the peer, and `added_ms`, their difference in each pair. `least_ms`
is the smallest total minus the smallest plain time, and `cpu_ms` the smallest CPU time; other load disturbs these two
least.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING, Any

from numapin.bench.child import serve
from numapin.errors import NumapinError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.bench.child import Harness


def measure(spec: dict[str, Any], harness: Harness) -> None:
    """Run both in turn, after a first run that fills the page cache."""
    plain, through = spec["without"], spec["with"]
    for command in (plain, through):
        time_ms(command)
    harness.wait_for_start(lambda: time.sleep(0.001))
    pairs = [(time_ms(plain)[0], *time_ms(through)) for _ in range(spec["num_samples"])]
    harness.report(figures(pairs), details={}, idle=lambda: time.sleep(0.001))


def figures(pairs: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    """Summarize pairs of the plain time, the peer's time and the peer's CPU time, in ms."""
    plain, total, cpu = zip(*pairs, strict=True)
    return {
        "plain_ms": statistics.median(plain),
        "total_ms": statistics.median(total),
        "added_ms": statistics.median(b - a for a, b, _ in pairs),
        "least_ms": min(total) - min(plain),
        "cpu_ms": min(cpu),
    }


def time_ms(command: list[str]) -> tuple[float, float]:
    """Run a command; return its wall-clock and CPU time. Raises NumapinError if it fails."""
    start = time.perf_counter()
    pid = os.posix_spawnp(command[0], command, os.environ)
    _, status, used = os.wait4(pid, 0)
    end = time.perf_counter()
    if status:
        raise NumapinError(f"{' '.join(command)} exited with status {os.waitstatus_to_exitcode(status)}")
    return (end - start) * 1e3, (used.ru_utime + used.ru_stime) * 1e3


if __name__ == "__main__":
    serve(measure)
