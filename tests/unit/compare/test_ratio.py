"""Ratios of step times: identical variants do not differ, and a difference is found; doubts about steps that change."""

from __future__ import annotations

import math
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.compare.made import recorded_noise, recorded_on_cpus, rounds
from tests.unit.compare.seam import Arm, Faster, StepRatio, Verdict, compare_arms, faster, student_t

QUIET, NOISY = recorded_noise(most=0.005), recorded_noise(most=1.0)


def compared(base: dict[int, float], own: dict[int, float]) -> Faster:
    ratio = faster(base, own, margin=0.05)
    assert ratio is not None
    return ratio


def test_identical_variants_are_no_different() -> None:
    """Twenty comparisons of a program with itself, with the noise of real quiet runs, come out as no difference."""
    assert len(QUIET) >= 12
    assert max(QUIET) / min(QUIET) < 1.01
    verdicts = [compared(rounds(QUIET, seed=2 * n), rounds(QUIET, seed=2 * n + 1)).verdict for n in range(20)]
    assert verdicts == [Verdict.NO_DIFFERENCE] * 20


@pytest.mark.parametrize(
    ("noise", "number"),
    [(NOISY, 8), (recorded_on_cpus(), 8), ([2.0, 2.002, 3.0, 3.003], 5)],
    ids=["GPUs", "CPUs", "two speeds"],
)
def test_noisy_identical_variants_are_rarely_told_apart(noise: list[float], number: int) -> None:
    """With the noise of real runs, or runs that are fast or slow by chance, at most one of 60 claims a difference."""
    verdicts = [
        compared(rounds(noise, seed=2 * n, number=number), rounds(noise, seed=2 * n + 1, number=number)).verdict
        for n in range(60)
    ]
    assert sum(verdict in (Verdict.FASTER, Verdict.SLOWER) for verdict in verdicts) <= 1


@pytest.mark.parametrize(("number", "spread"), [(3, 0.02), (6, 0.2)])
def test_the_interval_misses_the_truth_in_one_of_a_hundred(number: int, spread: float) -> None:
    """Of 100 comparisons of identical variants with normal noise, at most 4 intervals leave out 1."""
    chance = random.Random(3)  # noqa: S311 - noise, no secret
    missed = 0
    for _ in range(100):
        base, own = ({i: math.exp(chance.gauss(0, spread)) for i in range(number)} for _ in range(2))
        ratio = compared(base, own)
        missed += not (ratio.low or math.inf) <= 1 <= (ratio.high or 0)
    assert missed <= 4


@pytest.mark.parametrize(
    ("confidence", "freedom", "quantile"),
    [
        *((0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 10, 2.228), (0.95, 40, 2.021), (0.99, 1, 63.657)),
        *((0.99, 2, 9.925), (0.99, 3, 5.841), (0.99, 4, 4.604), (0.99, 7, 3.499), (0.99, 49, 2.680)),
    ],
)
def test_quantiles_of_students_t(confidence: float, freedom: int, quantile: float) -> None:
    """They are those of printed tables: exact for one and two degrees of freedom, else at most 1 % less."""
    found = student_t(confidence, freedom)
    assert found <= quantile * 1.0005
    assert found == pytest.approx(quantile, rel=0.0005 if freedom < 3 else 0.01)


@settings(max_examples=30, deadline=None, derandomize=True)  # any seed out of 10,000 might be the unlucky one
@given(st.integers(0, 10_000), st.sampled_from([0.5, 0.9, 1.1, 2.0]))
def test_a_difference_of_a_tenth_is_found(seed: int, factor: float) -> None:
    """With the noise of quiet recorded runs, eight rounds find 10 % in either direction, whichever runs they draw."""
    base, own = rounds(QUIET, seed=seed), rounds(QUIET, seed=seed + 1, factor=factor)
    ratio = compared(base, own)
    assert ratio.verdict is (Verdict.SLOWER if factor > 1 else Verdict.FASTER)
    is_inside = (ratio.low or math.inf) <= 1 / factor <= (ratio.high or 0)
    assert is_inside or math.isclose(ratio.ratio, 1 / factor, rel_tol=0.02)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(1e-5, 100), st.floats(1e-5, 100)), min_size=1, max_size=12), st.floats(0.01, 0.5))
def test_any_times_give_an_interval_around_the_estimate(pairs: list[tuple[float, float]], margin: float) -> None:
    """The estimate is inside its interval and between the rounds' ratios; a swap turns it around."""
    base, own = {i: a for i, (a, _) in enumerate(pairs)}, {i: b for i, (_, b) in enumerate(pairs)}
    ratio = faster(base, own, margin=margin)
    back = faster(own, base, margin=margin)
    assert ratio is not None
    assert back is not None
    each = [a / b for a, b in pairs]
    assert min(each) * 0.999 <= ratio.ratio <= max(each) * 1.001
    assert math.isclose(ratio.ratio * back.ratio, 1, rel_tol=1e-6)
    if ratio.low is not None and ratio.high is not None:
        assert ratio.low <= ratio.ratio <= ratio.high
    opposite = {Verdict.FASTER: Verdict.SLOWER, Verdict.SLOWER: Verdict.FASTER}
    assert back.verdict is opposite.get(ratio.verdict, ratio.verdict)


def test_what_changes_from_round_to_round_does_not_count() -> None:
    """A machine that becomes twice as slow in the middle leaves the ratio as it is."""
    base = {i: 0.02 * (2 if i > 3 else 1) * (1 + 0.001 * (i % 3)) for i in range(7)}
    own = {i: value * 0.9 * (1 + 0.001 * (i % 2)) for i, value in base.items()}
    ratio = compared(base, own)
    assert ratio.verdict is Verdict.FASTER
    assert ratio.ratio == pytest.approx(1 / 0.9, rel=0.005)


def test_one_bad_round_does_not_decide() -> None:
    """One round in eight that took five times as long moves the estimate by less than 5 %."""
    base, own = rounds(QUIET, seed=1), rounds(QUIET, seed=2)
    own[3] *= 5
    ratio = compared(base, own)
    assert abs(ratio.ratio - 1) < 0.05
    assert ratio.verdict is Verdict.UNKNOWN


def test_a_verdict_takes_five_rounds() -> None:
    """Four rounds that agree on twice the speed have an interval, and no verdict; the fifth one gives it.

    Two rounds have no interval, and no round in common has no ratio.
    """
    base, own = rounds(QUIET, seed=1, number=5), rounds(QUIET, seed=2, number=5, factor=2)
    four = compared({i: base[i] for i in range(4)}, own)
    assert (four.verdict, four.num_rounds_needed) == (Verdict.UNKNOWN, 5)
    assert 0 < (four.high or 0) < 1
    assert compared(base, own).verdict is Verdict.SLOWER
    two = compared({0: 1.0, 1: 1.0}, {0: 2.0, 1: 2.0})
    assert (two.verdict, two.low) == (Verdict.UNKNOWN, None)
    assert faster({0: 1.0}, {1: 1.0}, margin=0.05) is None


def test_a_certain_but_tiny_difference_is_none() -> None:
    """A difference of 0.3 % that every round shows is no difference."""
    base = {i: 0.02 * (1 + 1e-4 * (i % 2)) for i in range(9)}
    own = {i: value * 1.003 for i, value in base.items()}
    assert compared(base, own).verdict is Verdict.NO_DIFFERENCE


# --- over equal numbers of steps, and the doubts about them: batches fetched ahead, and steps that change -----------


def loop(
    *, num_steps: int = 100, compute_s: float = 0.01, load_s: float = 0.0, num_ahead: int = 0, skip: int = 10
) -> Arm:
    """Return the runs of a loop whose loader takes `load_s` a batch, and had time to fill its queue before step 1."""
    chance = random.Random(f"{compute_s} {load_s} {num_ahead} {skip}")  # noqa: S311 - noise, no secret
    rounds, waited, total = {}, 0.0, 0.0
    for number in range(8):
        noise, stock, steps = chance.gauss(1, 0.004), float(num_ahead), []
        for step in range(skip + num_steps):
            wait_s = max(load_s * (1 - stock) - compute_s, 0.0) if stock < 1 else 0.0
            took_s = compute_s + wait_s
            stock = min(stock - 1 + took_s / load_s, num_ahead) if load_s else stock
            stock = max(stock, 0.0)
            if step >= skip:
                steps.append(took_s * noise * chance.gauss(1, 0.01))
                waited, total = waited + wait_s, total + took_s
        rounds[number] = steps
    return Arm(steps_s=rounds, num_steps=skip + num_steps, num_ahead=num_ahead, wait_share=waited / total)


def of_arms(base: Arm, own: Arm) -> StepRatio:
    ratio = compare_arms(base, own, against="base", margin=0.05)
    assert ratio is not None
    return ratio


def test_verdicts_without_doubt() -> None:
    """Steps that take 10 % longer throughout are slower, and the second half agrees; equal loops do not differ.

    That holds where both begin to wait in the middle of the window, too.
    """
    ratio = of_arms(loop(), loop(compute_s=0.011))
    assert (ratio.verdict, ratio.doubt) == (Verdict.SLOWER, None)
    assert ratio.late == pytest.approx(1 / 1.1, rel=0.02)
    assert of_arms(loop(), loop(compute_s=0.009)).verdict is Verdict.FASTER
    for one in ({}, {"load_s": 0.013, "num_ahead": 30}):
        base, own = loop(**one), loop(**one, compute_s=0.010001)  # type: ignore[arg-type] # another noise
        assert of_arms(base, own).verdict is Verdict.NO_DIFFERENCE


def test_batches_fetched_ahead_do_not_make_a_loader_faster() -> None:
    """Of two loaders that are equally slow, one that has fetched 64 batches ahead is not called faster."""
    slow = {"load_s": 0.013, "compute_s": 0.01}
    few, many = loop(**slow, num_ahead=2), loop(**slow, num_ahead=64)  # type: ignore[arg-type]
    ratio = of_arms(few, many)
    assert ratio.ratio > 1.05
    assert ratio.verdict is Verdict.UNSETTLED
    assert re.search("64 batches ahead.*--steps", ratio.doubt or "")
    assert of_arms(many, few).verdict is Verdict.UNSETTLED


def test_enough_steps_clear_the_doubt() -> None:
    """With as many steps as the doubt asks for, loaders that are equally slow do not differ; a faster one does."""
    slow = {"load_s": 0.013, "num_steps": 2500, "skip": 400}
    few, many = loop(**slow, num_ahead=2), loop(**slow, num_ahead=64)  # type: ignore[arg-type]
    assert of_arms(few, many).verdict is Verdict.NO_DIFFERENCE
    quick = loop(load_s=0.005, num_steps=2500, num_ahead=64)
    assert of_arms(few, quick).verdict is Verdict.FASTER


def test_a_stock_that_ends_within_the_window_is_seen() -> None:
    """If one variant begins to wait in the second half, the verdict of the whole window is not believed."""
    base, own = loop(load_s=0.02), loop(load_s=0.02, num_ahead=40)
    base = Arm(steps_s=base.steps_s, num_steps=110, num_ahead=40, wait_share=base.wait_share)
    ratio = of_arms(base, own)
    assert ratio.verdict is Verdict.UNSETTLED
    assert "over the second half" in (ratio.doubt or "")


def test_each_round_compares_as_many_steps_of_both() -> None:
    """A run that was cut short is compared with the beginning of the other one; an epoch's end after it counts not."""
    own = loop()
    border = {number: [*steps[:50], *(10 * step for step in steps[50:])] for number, steps in own.steps_s.items()}
    cut = Arm(steps_s={n: steps[:50] for n, steps in own.steps_s.items()}, num_steps=60, num_ahead=0, wait_share=0)
    long = Arm(steps_s=border, num_steps=110, num_ahead=0, wait_share=0)
    assert of_arms(long, cut).ratio == pytest.approx(1, rel=1e-6)
    assert compare_arms(long, Arm(steps_s={}, num_steps=0, num_ahead=0, wait_share=0), against="", margin=1) is None
