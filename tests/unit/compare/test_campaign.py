"""The runs of a comparison: their order, their number of steps, failures, and the time left. No job is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.compare.seam import (
    JobOptions,
    JobResult,
    StepSettings,
    Variant,
    _Campaign,
    campaign,
    duration,
    measure_all,
    turns,
    with_equal_steps,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.compare.seam import ComparedRun

Job = tuple[str, int, str]  # variant, steps to measure, name of the log


class Campaign:
    """Runs that were made, the jobs behind them, and the lines of progress."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: Callable[[str, int], float | None]) -> None:
        """Make jobs whose steps take `step_s(variant, number of the job)`; None: the job fails."""
        self.jobs: list[Job] = []
        self.lines: list[str] = []
        self.runs: list[ComparedRun] = []

        def run_job(
            variant: Variant, options: JobOptions, *, log_name: str, report: Callable[[str], None]
        ) -> JobResult:
            report("measuring")
            took_s = step_s(variant.name, len(self.jobs))
            self.jobs.append((variant.name, options.settings.steps, log_name))
            if took_s is None:
                return JobResult(failure="it broke")
            return JobResult(steps_s=(took_s,) * options.settings.steps)

        monkeypatch.setattr(campaign, "run_job", run_job)

    def measure(self, *names: str, num_rounds: int = 2, seconds: float = 10) -> list[ComparedRun]:
        """Make all runs of variants with these names, of 100 steps or as many as fit into these seconds."""
        variants = [Variant(name=name, shown=(name,), command=(name,), variables={}) for name in names]
        settings = StepSettings(folder="", skip=1, steps=100, seconds=seconds)
        options = JobOptions(settings=settings, timeout_s=60, grace_s=1, logs=None)
        self.runs = list(measure_all(variants, options, num_rounds=num_rounds, progress=self.lines.append))
        return self.runs


def test_all_runs_measure_what_fits_into_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first run that is not counted finds that 100 steps fit; then each variant runs once a round, in turn."""
    made = Campaign(monkeypatch, lambda _name, _number: 0.01)
    runs = made.measure("a", "b c")
    order = [name for _, name in turns(["a", "b c"], 2)]
    assert [(run.round, run.variant) for run in runs] == [(None, "a"), *zip([0, 0, 1, 1], order, strict=True)]
    assert [run.order for run in runs] == [0, 1, 2, 3, 4]
    assert [steps for _, steps, _ in made.jobs] == [100] * 5
    names = ["a", *(name.replace(" ", "_") for name in order)]
    assert [log for _, _, log in made.jobs] == [f"{number:03d}-{name}" for number, name in enumerate(names)]
    assert made.lines[0] == "first run, not counted: a, measuring, 0 s"
    assert made.lines[1] == f"run 1/4: {order[0]}, measuring, 0 s; 0 s left"


def test_no_secret_is_in_a_line_or_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant's text may set a token; neither the progress nor a file's name has it."""
    made = Campaign(monkeypatch, lambda _name, _number: 0.01)
    made.measure("HF_TOKEN=sesame numapin", "b")
    assert made.lines[0] == "first run, not counted: HF_TOKEN=*** numapin, measuring, 0 s"
    assert "sesame" not in f"{made.lines} {[log for _, _, log in made.jobs]}"


def test_a_second_run_finds_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """If not all steps fit, a second run with a cache that is warm decides for all others."""
    made = Campaign(monkeypatch, lambda _name, number: 0.5 if number == 0 else 0.1)
    runs = made.measure("a", "b", seconds=2)
    assert [run.round for run in runs] == [None, None, 0, 0, 1, 1]
    assert [steps for _, steps, _ in made.jobs] == [100, 100, 20, 20, 20, 20]
    assert [log for _, _, log in made.jobs[:2]] == ["000-a", "000-a-again"]


@pytest.mark.parametrize(
    ("broken", "made"),
    [
        ("a", "a b b b c c"),  # the next one has the first run
        ("c", "a a a b b c"),
        ("bc", "a a b c"),  # with one left, each has its first turn only
        ("abc", "a b c"),
    ],
)
def test_a_variant_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch, broken: str, made: str) -> None:
    """It has no later turn, and with fewer than two variants left there is nothing to compare."""
    runs = Campaign(monkeypatch, lambda name, _number: None if name in broken else 0.01).measure("a", "b", "c")
    assert " ".join(sorted(run.variant for run in runs)) == made
    assert {run.variant for run in runs if run.result.failure} == set(broken)


def test_every_other_round_runs_backwards() -> None:
    """Each variant runs once a round; a pair of rounds mirrors itself, and not all pairs have the same order."""
    names = ["a", "b", "c", "d"]
    order = list(turns(names, 8))
    assert order == list(turns(names, 8)), "it can be repeated"
    rounds = [[name for number, name in order if number == one] for one in range(8)]
    assert all(sorted(one) == names for one in rounds)
    assert all(second == first[::-1] for first, second in zip(rounds[::2], rounds[1::2], strict=True))
    assert len({tuple(one) for one in rounds[::2]}) > 1


def test_the_time_left_is_what_earlier_runs_took() -> None:
    """A variant takes as long as before; one without a run, as long as the others."""
    planned = _Campaign({}, (), print)
    assert planned.left_s(["a"]) is None
    planned.durations_s.update(a=[10, 12], b=[30])
    assert planned.left_s(["a", "b", "c"]) == 11 + 30 + 12
    assert [duration(s) for s in (40, 600, 3900)] == ["40 s", "10 min", "1 h 05 min"]


@pytest.mark.parametrize(("first_s", "steps"), [((0.01,) * 9, 100), ((90.0, 0.5, 0.1, 0.9), 20), ((60.0, 60.0), 2)])
def test_the_first_run_finds_a_number_of_steps_for_all(first_s: tuple[float, ...], steps: int) -> None:
    """As many steps as fit into the time, by the second half, at least two; a slow variant gets more time."""
    found = with_equal_steps(StepSettings(folder="", skip=10, steps=100, seconds=10), first_s)
    assert (found.steps, found.skip, found.seconds) == (steps, 10, 40)
