"""Chrome traces as Kineto writes them, made by hand: a training loop whose parts last as long as a test wants."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

BASE_NS = 1_790_857_026_000_000_000
ZERO_US = 4_349_902_183_095.342  # where the clock of a real trace stood
LOOP, LAUNCHER, COPIER = 100, 7, 21  # the loop's thread, the kernels' stream, another stream


@dataclass
class Made:
    """A trace in the making; times are microseconds from the first step."""

    events: list[dict[str, Any]] = field(default_factory=list)
    loads: list[list[int]] = field(default_factory=list)
    noted: dict[str, Any] = field(default_factory=dict)
    number: int = 0

    def event(self, cat: str, name: str, start: float, duration: float, tid: object = LOOP, **args: object) -> None:
        """Add a complete event."""
        times = {"ts": ZERO_US + start, "dur": duration}
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, **times, "args": args})

    def step(self, i: int, start: float, duration: float) -> None:
        """Mark a step."""
        self.event("user_annotation", f"ProfilerStep#{i}", start, duration)

    def wait(self, start: float, duration: float, iterator: str = "_MultiProcessingDataLoaderIter") -> None:
        """Let the loop wait for a batch."""
        self.event("user_annotation", f"enumerate(DataLoader)#{iterator}.__next__", start, duration)

    def load(self, start: float, duration: float, worker: int = 9) -> None:
        """Let a worker make a batch."""
        begin_ns = BASE_NS + round((ZERO_US + start) * 1000)
        self.loads.append([worker, begin_ns, begin_ns + round(duration * 1000)])

    def noted_at(self, name: str, start: float, duration: float = 0.0, *, loader: int = 0) -> None:
        """Note an epoch of a loader ("epochs") or the end of one ("ends")."""
        begin_ns = BASE_NS + round((ZERO_US + start) * 1000)
        self.noted.setdefault(name, []).append([loader, begin_ns, begin_ns + round(duration * 1000)])

    def samples(self, start: float, duration: float, *, stack: int = 0, running: bool = True, every: float = 5) -> None:
        """Sample the loop's thread in one place for some time."""
        for i in range(round(duration / every)):
            at_ns = BASE_NS + round((ZERO_US + start + i * every) * 1000)
            self.noted.setdefault("samples", []).append([at_ns, stack, int(running)])

    def kernel(self, start: float, duration: float, name: str = "sgemm", device: int = 0) -> None:
        """Let a GPU compute."""
        self.event("kernel", name, start, duration, LAUNCHER, device=device, stream=LAUNCHER)

    def copy(
        self,
        start: float,
        duration: float,
        *,
        memory: str = "Pinned",
        called: float = 10.0,
        waited: float = 0.0,
        stream: int = LAUNCHER,
        device: int = 0,
        num_bytes: int = 1_000_000,
        to_host: bool = False,
    ) -> None:
        """Copy a batch to the GPU, or to the host.

        The host's call starts 5 us before, and lasts `called`; then it waits `waited`.
        """
        self.number += 1
        link = {"correlation": self.number, "External id": self.number}
        self.event(
            "cpu_op", "aten::copy_", start - 6, called + waited + 3, **self.linked, **{"Input Dims": [[8, 4], []]}
        )
        self.event("cuda_runtime", "cudaMemcpyAsync", start - 5, called, **link)
        if waited:
            self.event("cuda_runtime", "cudaStreamSynchronize", start - 5 + called, waited, correlation=0)
        name = f"Memcpy DtoH (Device -> {memory})" if to_host else f"Memcpy HtoD ({memory} -> Device)"
        self.event("gpu_memcpy", name, start, duration, stream, bytes=num_bytes, device=device, stream=stream, **link)

    @property
    def linked(self) -> dict[str, int]:
        """Return what ties an operator to the last copy."""
        return {"External id": self.number}

    def content(self, **ours: object) -> dict[str, Any]:
        """Return the file's content."""
        own = {
            "rank": 0,
            "step_unit": "optimizer step",
            "loads": self.loads,
            "noted": self.noted,
        } | ours
        return {"schemaVersion": 1, "baseTimeNanoseconds": BASE_NS, "numapin": own, "traceEvents": self.events}


def loop(
    *,
    steps: int = 4,
    wait: float = 0.0,
    copy: float = 0.0,
    compute: float = 0.0,
    idle: float = 0.0,
    ahead: bool = False,
    **copying: Any,
) -> Made:
    """Return a loop in which each step waits, copies, computes and idles, one after the other.

    With `ahead` the copy runs beside the kernels, on a stream of its own.
    """
    made, now = Made(), 0.0
    copying = {"stream": COPIER if ahead else LAUNCHER, **copying}
    for i in range(steps):
        made.step(i, now, wait + copy * (not ahead) + compute + idle)
        if wait:
            made.wait(now, wait)
            made.load(now - 2 * wait, 2 * wait)
        now += wait
        if copy:
            made.copy(now, copy, **copying)
            now += 0 if ahead else copy
        if compute:
            made.kernel(now, compute)
        now += compute + idle
    return made


def record(rank: int, **values: object) -> str:
    """Return the record of a rank, as a file has it."""
    own = {"rank": rank, "local_rank": rank, "num_ranks": rank + 1, "num_local_ranks": 0, "restart": 0, "pid": 1}
    of_steps = {"phase": "done", "unit": "batch", "num_seen": 4, "num_skipped": 0, "num_ahead": 0, "step_ns": []}
    of_batches = {"waited_ns": 0, "num_batches": 0, "num_traced": 0, "reason": ""}
    return json.dumps({"schema": "numapin.steps/1", **own, **of_steps, **of_batches, **values})
