"""The report of a comparison: the figures of a run, and outcomes, notes and tables as recorded; its variants."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from numapin import Request, discover, make_plan
from numapin.errors import UsageError
from tests.recorded.screens import compare, compare_answers, rendered
from tests.unit.compare import seam
from tests.unit.compare.made import SCRIPT, failed, report_of, report_on, run
from tests.unit.compare.seam import ComparedRun, CompareReport, RankSteps, known_variant, own_command, own_variant

MS = 10**6
RECORDED = Path(__file__).with_name("reports.txt")


def rank(number: int, *, step_ms: float = 10, **changes: object) -> RankSteps:
    """Return a rank with ten measured steps of 64 samples, a quarter of whose time is waiting."""
    one = RankSteps(
        rank=number,
        local_rank=number,
        num_ranks=2,
        restart=0,
        pid=100 + number,
        phase=seam.Phase.DONE,
        unit=seam.StepUnit.OPTIMIZER_STEP,
        num_seen=20,
        num_skipped=10,
        num_ahead=0,
        first_ns=5000 * MS,
        begin_ns=6000 * MS,
        step_ns=(int(step_ms * MS),) * 10,
        waited_ns=int(2.5 * step_ms * MS),
        num_batches=10,
        num_samples=640,
    )
    return replace(one, **changes)  # type: ignore[arg-type]


def readings(**changes: object) -> dict[str, Any]:
    """Return readings of a job that uses two CPUs all the time."""
    return {"started_s": 2.0, "cpu_at": lambda at_s: 2 * at_s, "host_cpu_at": lambda _: None} | changes


FIGURES: dict[str, tuple[list[RankSteps], dict[str, Any]]] = {
    "the slowest rank's steps, the samples of all, the mean wait": (
        [rank(0, step_ms=100), rank(1, step_ms=200, waited_ns=0)],
        readings(host_cpu_at=lambda at_s: 3 * at_s),
    ),
    "only times, without a loader of torch, a GPU or readings": (
        [rank(0, num_batches=0, num_samples=None)],
        readings(cpu_at=lambda _: None),
    ),
    "half a second is too short for CPU time": ([rank(0, step_ms=50)], readings(host_cpu_at=lambda at_s: at_s)),
    "less CPU time than before: a process ended": (
        [rank(0, step_ms=500)],
        readings(cpu_at=lambda at_s: -at_s, host_cpu_at=lambda at_s: at_s),
    ),
    "unknown CPU time": ([rank(0, step_ms=500)], readings(cpu_at=lambda _: None, host_cpu_at=lambda at_s: at_s)),
    "the mean counts, not the median": ([rank(0, step_ns=(10 * MS, 10 * MS, 10 * MS, 50 * MS))], readings()),
}


def test_figures_are_the_recorded_ones() -> None:
    """The figures of a run, from its ranks' steps and readings; what is unknown is left out."""
    text = ""
    for title, (ranks, used) in FIGURES.items():
        found = {name: float(f"{value:.10g}") for name, value in seam.figures_of(ranks, **used).items()}
        text += f"{title}\n  {json.dumps(found)}\n"
    compare(text, str(RECORDED.with_name("figures.txt")))


def test_cpu_time_is_read_between_two_readings() -> None:
    """CPU time between readings is in proportion; outside of them it is unknown."""
    assert seam.between([(1.0, 10.0), (2.0, 20.0)], 1.5) == 15.0
    assert seam.between([(1.0, 10.0), (2.0, 20.0)], 2.5) is None


def every_outcome(**figures: float) -> CompareReport:
    return report_of(
        {
            "torchrun": (0.0200, 0.0201, 0.0199, 0.0200, 0.0202, 0.0200, 0.0199),
            "torchrun-threads": (0.0201, 0.0200, 0.0199, 0.0201, 0.0201, 0.0200, 0.0200),
            "numapin": (0.0100, 0.0101, 0.0100, 0.0099, 0.0100, 0.0101, 0.0100),
            "numapin-loader": (0.0150, 0.0250, 0.0200, 0.0260, 0.0190, 0.0310, 0.0170),
            "numapin-exclusive": (0.0150, 0.0250),
        },
        failed("torchrun-node", "it ended with status 1\n    numactl: not found"),
        **figures,
    )


def pair(step_s: float = 0.1, *, num_runs: int = 5, **figures: float) -> list[ComparedRun]:
    return [run(name, i, step_s, **figures) for name in ("torchrun", "numapin") for i in range(num_runs)]


def with_results(runs: list[ComparedRun], **changes: object) -> list[ComparedRun]:
    return [replace(one, result=replace(one.result, **changes)) for one in runs]  # type: ignore[arg-type]


def reports() -> dict[str, CompareReport]:
    few = {"samples_per_s": 3200.0, "wait_share": 0.25, "startup_s": 4.0}
    broken = failed("torchrun", "it broke")
    others = [run(name, i, step_s) for name, step_s in (("numapin", 0.1), ("numapin-loader", 0.05)) for i in range(5)]
    unlike = pair()[:5] + with_results(pair(samples_per_s=640.0)[5:], unit="batch")
    changing = with_results(pair()[5:], steps_s=(0.05,) * 20 + (0.1,) * 20)
    return {
        "every outcome": every_outcome(**few),
        "all figures": every_outcome(**dict.fromkeys(seam.OTHERS, 12345678.9)),
        "the baseline failed": report_on([broken, *others]),
        "only one was measured": report_of({"numapin": [0.1] * 5}, broken),
        "none was measured": report_on([broken]),
        "a slow first run": report_on(pair(0.001)),
        "scripts that ended": report_on(with_results(pair(0.001), notes=("the script ended after 50 steps",))),
        "uneven steps": report_on(pair(step_median_s=0.02)),
        "other samples": report_on(pair(samples_per_s=320.0)[:5] + pair(samples_per_s=640.0)[5:]),
        "other units": report_on(unlike),
        "other numbers of steps and ranks": report_on(
            pair()[:5] + with_results(pair()[5:], steps_s=(0.1,) * 30, num_ranks=3)
        ),
        "busy": report_on(pair(other_cpus=4.0)),
        "more repeats would tell": report_of({"torchrun": [0.1] * 5, "numapin": (0.09, 0.1, 0.11, 0.1, 0.097)}),
        "not settled, stopped early": replace(report_on(pair()[:5] + changing), is_complete=False),
    }


def test_reports_are_the_recorded_ones() -> None:
    """Outcomes, notes and tables are these, on a terminal of 80 columns."""
    text = "".join(f"=== {title}\n{rendered(seam.compare_table(made), 80)}" for title, made in reports().items())
    compare(text, str(RECORDED))


def test_no_secret_is_in_a_report() -> None:
    """Tokens in the script's arguments, in variables and in a variant's own text are nowhere in a report.

    Variants that differ in a token only are compared, although they have the same name.
    """
    secret = replace(SCRIPT, words=("train.py", "--api-key", "sesame1"))
    variants = [
        seam.own_variant("HF_TOKEN=sesame numapin", secret),
        seam.own_variant("HF_TOKEN=sesame2 numapin", secret),
        seam.own_variant("HF_TOKEN=sesame2 NOTE='b c' numapin", secret),
        seam.own_command("WANDB_API_KEY=sesame3 python x.py --password sesame4", option="--a"),
    ]
    made = report_on([run(variant.name, i, 0.1) for variant in variants for i in range(3)], variants)
    assert [one.ratio is None for one in made.variants] == [True, False, False, False]
    for text in (json.dumps(made.to_json()), rendered(seam.compare_table(made), 80)):
        assert "sesame" not in text
        assert "***" in text
    assert "HF_TOKEN='***' NOTE='b c' numapin run" in rendered(seam.compare_table(made), 80), (
        "a shell reads it as it was meant"
    )


# --- names and texts of variants as command lines; errors are in tests/recorded/errors.txt ----------------------------


def test_variants_are_the_recorded_ones() -> None:
    """Each variant runs the same script with as many ranks; what a user writes may set variables."""
    module = replace(SCRIPT, is_module=True)
    variants = [
        *(known_variant(name, SCRIPT) for name in seam.KNOWN),
        own_variant("OMP_NUM_THREADS=4 A='b c' numapin run --bind socket", SCRIPT),
        own_variant("torchrun", module),
        own_command("X=1 python 'a b.py'", option="--a"),
        own_command("python -c 'import a; a.b()'", option="--b"),
    ]
    text = ""
    for variant in variants:
        started = variant.command
        if started[0] == sys.executable:
            started = started[started.index("-c") + 2 :] if "-c" in started else started[1:]
        text += f"{variant.name}\n  {shlex.join(variant.shown)}\n  {variant.variables} {shlex.join(started)}\n"
    compare(text, str(Path(__file__).with_name("variants.txt")))


@pytest.mark.parametrize("name", seam.example_names())
def test_idle_cpus_that_a_wider_binding_uses(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By default --bind socket is compared where the plan warns that it would use idle CPUs, and only there."""
    topology = discover(machine=Path(name), environ={})
    plan = make_plan(topology, Request())
    warns = any("--bind socket uses them" in warning for warning in plan.warnings)
    assert seam.default_names(topology, plan) == (*seam.DEFAULT, *["numapin-socket"] * warns)
    assert ("numapin-socket is compared, too" in capsys.readouterr().err) == warns
    assert warns == (name == "example:dgx-a100")


def names(text: str) -> None:
    seam.require_different_names([known_variant(name, SCRIPT) for name in seam.parse_names(text)])


READERS: Final[dict[str, Callable[[str], object]]] = {
    "own": lambda text: own_variant(text, SCRIPT),
    "command": lambda text: own_command(text, option="--a"),
    "names": names,
    "percent": seam._percent,
}


def test_mistakes() -> None:
    """Each is an error in words; for variants, a hint says what to write.

    No shell would see the operator of a command; a program's own semicolon is none.
    """

    def answer(line: str) -> str:
        kind, _, text = line.partition(" ")
        with pytest.raises((UsageError, ValueError)) as caught:
            READERS[kind](text)
        return str(caught.value)

    compare_answers(Path(__file__).with_name("mistakes.txt"), answer)
