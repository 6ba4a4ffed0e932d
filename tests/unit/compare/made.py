"""Reports of comparisons that are made of numbers, without running anything."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.unit.compare.seam import ComparedRun, CompareReport, JobResult, Script, Variant, known_variant, make_report

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"
SCRIPT = Script(words=("train.py", "--lr", "0.1"), is_module=False, num_ranks=2, num_threads=8)
MACHINE = {"num_cpus": 16, "gpus": ["NVIDIA H200"], "versions": {"torch": "2.11.0"}}
SETTINGS = {"repeats": 8, "steps": 100, "skip": 10, "seconds": 10.0, "margin": 0.05, "timeout": 600.0}


def run(variant: str, number: int | None, step_s: float, **figures: float) -> ComparedRun:
    steps_s = tuple(step_s * (1 + 0.1 * (step % 4 == 0)) for step in range(40))
    shared = {"step_s": step_s, "step_median_s": step_s, "step_p95_s": step_s * 1.1}
    result = JobResult(figures={**shared, **figures}, steps_s=steps_s, num_ranks=2, unit="optimizer step")
    return ComparedRun(variant=variant, round=number, order=1 + (number or 0), took_s=12.0, result=result)


def failed(variant: str, why: str, number: int | None = 0) -> ComparedRun:
    return ComparedRun(
        variant=variant, round=number, order=1 + (number or 0), took_s=1.0, result=JobResult(failure=why)
    )


def report_of(steps_s: Mapping[str, Sequence[float]], *more: ComparedRun, **figures: float) -> CompareReport:
    runs = [run(name, i, value, **figures) for name, values in steps_s.items() for i, value in enumerate(values)]
    return report_on([*runs, *more])


def report_on(runs: Sequence[ComparedRun], variants: Sequence[Variant] = ()) -> CompareReport:
    """Return the report on these runs, by default of known variants."""
    names = dict.fromkeys(one.variant for one in runs)
    return make_report(
        variants or [known_variant(name, SCRIPT) for name in names],
        runs,
        command=("numapin", "compare", "train.py"),
        host="host",
        date="2026-11-22T12:00:00Z",
        machine=MACHINE,
        settings=SETTINGS,
        num_host_cpus=64,
        margin=0.05,
        is_complete=True,
    )


def recorded_noise(*, most: float) -> list[float]:
    """Return how runs of one and the same program differed from their median, as factors, in recorded results.

    They are from training of three networks on four H200, for peers whose runs differ by at most the share `most`.
    With three runs a peer, the differences from the middle one are enlarged as those of a sample are.
    """
    content = json.loads((RESULTS / "training-h200x4.json").read_text())
    spreads = [peer["figures"]["samples_per_s"] for case in content["cases"] for peer in case["peers"]]
    kept = [spread for spread in spreads if (spread["high"] - spread["low"]) / spread["median"] <= most]
    return [
        1 + (value / spread["median"] - 1) * (3 / 2) ** 0.5 for spread in kept for value in spread["values"]
    ]  # the middle one is 1


def recorded_on_cpus() -> list[float]:
    """Return how 14 runs of one command differed from their median on two busy CPUs, as factors."""
    content = json.loads((RESULTS / "compare-aa-cpu.json").read_text())
    values = [value for variant in content["variants"] for value in variant["figures"]["step_s"]["values"]]
    return [value / sorted(values)[len(values) // 2] for value in values]


def rounds(noise: Sequence[float], *, seed: int, number: int = 8, factor: float = 1.0) -> dict[int, float]:
    """Return step times by round: 20 ms times a factor, with noise."""
    chance = random.Random(seed)  # noqa: S311 - noise, no secret
    return {i: 0.020 * factor * chance.choice(noise) for i in range(number)}
