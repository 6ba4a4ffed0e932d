"""The runs of a comparison: their order, number of steps and failures; which steps count. Nothing is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.compare import seam
from tests.unit.compare.seam import ComparedRun, JobOptions, JobResult, StepSettings, Variant, campaign

Job = tuple[str, int, str]  # variant, steps to measure, name of the log


class Campaign:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: Callable[[str], float | None]) -> None:
        """Make jobs whose steps take `step_s(variant)`; None: the job fails."""
        self.jobs: list[Job] = []
        self.lines: list[str] = []
        self.runs: list[ComparedRun] = []

        def run_job(variant: Variant, options: JobOptions, *, log_name: str, report: Callable[[], None]) -> JobResult:
            report()
            took_s = step_s(variant.name)
            self.jobs.append((variant.name, options.settings.steps, log_name))
            if took_s is None:
                return JobResult(failure="it broke")
            return JobResult(steps_s=(took_s,) * options.settings.steps)

        monkeypatch.setattr(campaign, "run_job", run_job)

    def measure(self, *names: str, num_rounds: int = 2) -> list[ComparedRun]:
        variants = [Variant(name=name, shown=(name,), command=(name,), variables={}) for name in names]
        settings = StepSettings(folder="", skip=1, steps=100, seconds=10)
        options = JobOptions(settings=settings, timeout_s=60, grace_s=1, logs=None)
        self.runs = list(seam.measure_all(variants, options, num_rounds=num_rounds, progress=self.lines.append))
        return self.runs


def test_all_runs_measure_what_fits_into_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first run that is not counted finds that 50 steps fit; then each variant runs once a round, in turn."""
    made = Campaign(monkeypatch, lambda _: 0.2)
    runs = made.measure("a", "b c")
    order = [name for _, name in seam.turns(["a", "b c"], 2)]
    assert [(run.round, run.variant) for run in runs] == [(None, "a"), *zip([0, 0, 1, 1], order, strict=True)]
    assert [run.order for run in runs] == [0, 1, 2, 3, 4]
    assert [steps for _, steps, _ in made.jobs] == [100, *[50] * 4]
    names = ["a", *(name.replace(" ", "_") for name in order)]
    assert [log for _, _, log in made.jobs] == [f"{number:03d}-{name}" for number, name in enumerate(names)]
    assert made.lines[0] == "first run, not counted: a, 0 s"
    assert made.lines[1] == f"run 1/4: {order[0]}, 0 s; about 0 s left"


def test_no_secret_is_in_a_line_or_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant's text may set a token; neither the progress nor a file's name has it."""
    made = Campaign(monkeypatch, lambda _: 0.01)
    made.measure("HF_TOKEN=sesame numapin", "b")
    assert made.lines[0] == "first run, not counted: HF_TOKEN=*** numapin, 0 s"
    assert "sesame" not in f"{made.lines} {[log for _, _, log in made.jobs]}"


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
    runs = Campaign(monkeypatch, lambda name: None if name in broken else 0.01).measure("a", "b", "c")
    assert " ".join(sorted(run.variant for run in runs)) == made
    assert {run.variant for run in runs if run.result.failure} == set(broken)


def test_every_other_round_runs_backwards() -> None:
    """Each variant runs once a round; a pair of rounds mirrors itself, and not all pairs have the same order."""
    names = ["a", "b", "c", "d"]
    order = list(seam.turns(names, 8))
    assert order == list(seam.turns(names, 8)), "it can be repeated"
    rounds = [[name for number, name in order if number == one] for one in range(8)]
    assert all(sorted(one) == names for one in rounds)
    assert all(second == first[::-1] for first, second in zip(rounds[::2], rounds[1::2], strict=True))
    assert len({tuple(one) for one in rounds[::2]}) > 1


@pytest.mark.parametrize(("first_s", "steps"), [((0.01,) * 9, 100), ((90.0, 0.5, 0.1, 0.9), 20), ((60.0, 60.0), 2)])
def test_the_first_run_finds_a_number_of_steps_for_all(first_s: tuple[float, ...], steps: int) -> None:
    """As many steps as fit into the time, by the second half, at least two; a slow variant gets more time."""
    found = seam.with_equal_steps(StepSettings(folder="", skip=10, steps=100, seconds=10), first_s)
    assert (found.steps, found.skip, found.seconds) == (steps, 10, 40)


# --- which steps of a loop are measured, and whose --------------------------------------------------------------------


S = 10**9


def window(*, skip: int = 2, steps: int = 3, seconds: float = 100) -> seam.StepWindow:
    return seam.StepWindow(skip=skip, steps=steps, limit_ns=int(seconds * S))


def test_steps_and_borders() -> None:
    """After two steps, three are measured; the GPU is waited for at the begin and the end of the window only."""
    one, noted, borders = window(), [], []
    for time in (10, 20, 25, 31, 38):
        borders.append(one.is_border(time))
        noted.append(one.stepped(time))
    assert borders == [False, True, False, False, True]
    assert noted == [True, True, False, False, True]
    assert not one.stepped(50)
    assert (one.first_ns, one.begin_ns, one.step_ns, one.is_done) == (10, 20, (5, 6, 7), True)


def test_the_window_begins_after_what_was_fetched_ahead() -> None:
    """The measurement begins that many steps later, at most as many as are measured; once begun, it stays there."""
    one = window(skip=1, steps=3)
    one.begin_after(2)
    assert [one.stepped(time) for time in (10, 20)] == [True, True]
    one.begin_after(3)
    assert (one.skip, one.begin_ns) == (2, 20)
    one = window(skip=1, steps=3)
    one.begin_after(1000)
    assert one.skip == 3


@given(
    st.integers(1, 5), st.integers(2, 8), st.floats(0.01, 50), st.lists(st.integers(1, 10 * S), min_size=1, max_size=30)
)
def test_steps_fill_the_window(skip: int, steps: int, seconds: float, took: list[int]) -> None:
    """The measured steps follow each other without a gap, are at most those asked for, and none is a first one."""
    one, now = window(skip=skip, steps=steps, seconds=seconds), 0
    for step in took:
        now += step
        one.stepped(now)
    assert len(one.step_ns) <= steps
    assert list(one.step_ns) == took[skip : skip + len(one.step_ns)]
    assert one.is_done == (len(one.step_ns) == steps or (len(one.step_ns) > 1 and sum(one.step_ns) >= seconds * S - 1))


def test_one_process_takes_over_from_one_that_has_ended(tmp_path: Path) -> None:
    """Once the first process of a rank has ended, one other is measured, also before it has written anything."""
    settings, place = StepSettings(folder=str(tmp_path), skip=1, steps=2), seam.Place(0, 0, 1, 1, 0)
    path = seam.claim_file(settings, place)
    seam.StepMeter(settings=settings, place=place, path=path, pid=1 << 30).write(seam.Phase.STARTED)
    assert seam.claim_file(settings, place) == path
    with pytest.raises(FileExistsError):
        seam.claim_file(settings, place)
