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

    def event(self, cat: str, name: str, start: float, duration: float, tid: object = LOOP, **args: object) -> Made:
        times = {"ts": ZERO_US + start, "dur": duration}
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, **times, "args": args})
        return self

    def step(self, i: int, start: float, duration: float) -> Made:
        return self.event("user_annotation", f"ProfilerStep#{i}", start, duration)

    def wait(self, start: float, duration: float, iterator: str = "_MultiProcessingDataLoaderIter") -> Made:
        return self.event("user_annotation", f"enumerate(DataLoader)#{iterator}.__next__", start, duration)

    def load(self, start: float, duration: float, worker: int = 9) -> None:
        """Let a worker make a batch."""
        begin_ns = BASE_NS + round((ZERO_US + start) * 1000)
        self.loads.append([worker, begin_ns, begin_ns + round(duration * 1000)])

    def noting(self, **noted: object) -> Made:
        self.noted |= noted
        return self

    def noted_at(self, name: str, start: float, duration: float = 0.0, *, loader: int = 0) -> Made:
        """Note an epoch of a loader ("epochs") or the end of one ("ends")."""
        begin_ns = BASE_NS + round((ZERO_US + start) * 1000)
        self.noted.setdefault(name, []).append([loader, begin_ns, begin_ns + round(duration * 1000)])
        return self

    def sampled(self, *times: tuple[float, float], stack: int = 0, running: bool = True) -> Made:
        """Sample the loop's thread in one place in these times, each a start and a duration."""
        for start, duration in times:
            for i in range(round(duration / 50)):
                at_ns = BASE_NS + round((ZERO_US + start + i * 50) * 1000)
                self.noted.setdefault("samples", []).append([at_ns, stack, int(running)])
        return self

    def kernel(self, start: float, duration: float, name: str = "sgemm", device: int = 0) -> Made:
        return self.event("kernel", name, start, duration, LAUNCHER, device=device, stream=LAUNCHER)

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
    ) -> Made:
        """Copy a batch to the GPU, or to the host.

        The host's call starts 5 us before, and lasts `called`; then it waits `waited`.
        """
        self.number += 1
        operator, link = {"External id": self.number, "Input Dims": [[8, 4], []]}, {"External id": self.number}
        self.event("cpu_op", "aten::copy_", start - 6, called + waited + 3, **operator)
        self.event("cuda_runtime", "cudaMemcpyAsync", start - 5, called, correlation=self.number, **link)
        if waited:
            self.event("cuda_runtime", "cudaStreamSynchronize", start - 5 + called, waited, correlation=0)
        name = f"Memcpy DtoH (Device -> {memory})" if to_host else f"Memcpy HtoD ({memory} -> Device)"
        where = {"bytes": num_bytes, "device": device, "stream": stream, "correlation": self.number}
        return self.event("gpu_memcpy", name, start, duration, stream, **where, **link)

    def content(self, **ours: object) -> dict[str, Any]:
        own = {"rank": 0, "step_unit": "optimizer step", "loads": self.loads, "noted": self.noted} | ours
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
    own = {"rank": rank, "local_rank": rank, "num_ranks": rank + 1, "num_local_ranks": 0, "restart": 0, "pid": 1}
    of_steps = {"phase": "done", "unit": "batch", "num_seen": 4, "num_skipped": 0, "num_ahead": 0, "step_ns": []}
    of_batches = {"waited_ns": 0, "num_batches": 0, "num_traced": 0, "reason": ""}
    return json.dumps({"schema": "numapin.steps/1", **own, **of_steps, **of_batches, **values})
