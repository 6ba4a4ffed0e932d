"""Ratios of step times: identical variants do not differ, and a difference is found."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.compare.made import recorded_noise, recorded_on_cpus, rounds
from tests.unit.compare.seam import Faster, Verdict, faster, student_t

QUIET, NOISY = recorded_noise(most=0.005), recorded_noise(most=1.0)


def compared(base: dict[int, float], own: dict[int, float]) -> Faster:
    """Return the ratio with the default margin."""
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
        assert ratio.low is not None
        assert ratio.high is not None
        missed += not ratio.low <= 1 <= ratio.high
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
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low <= 1 / factor <= ratio.high or math.isclose(ratio.ratio, 1 / factor, rel_tol=0.02)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.floats(1e-5, 100), st.floats(1e-5, 100)), min_size=1, max_size=12),
    st.floats(0.01, 0.5),
)
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
    """Four rounds that agree on twice the speed have an interval, and no verdict; the fifth one gives it."""
    base, own = rounds(QUIET, seed=1, number=5), rounds(QUIET, seed=2, number=5, factor=2)
    four = compared({i: base[i] for i in range(4)}, own)
    assert (four.verdict, four.num_rounds_needed) == (Verdict.UNKNOWN, 5)
    assert four.high is not None
    assert four.high < 1
    assert compared(base, own).verdict is Verdict.SLOWER


def test_few_rounds_tell_nothing() -> None:
    """One or two rounds have no interval, and no round in common has no ratio."""
    assert compared({0: 1.0, 1: 1.0}, {0: 2.0, 1: 2.0}).verdict is Verdict.UNKNOWN
    assert compared({0: 1.0, 1: 1.0}, {0: 2.0, 1: 2.0}).low is None
    assert faster({0: 1.0}, {1: 1.0}, margin=0.05) is None


def test_a_certain_but_tiny_difference_is_none() -> None:
    """A difference of 0.3 % that every round shows is no difference."""
    base = {i: 0.02 * (1 + 1e-4 * (i % 2)) for i in range(9)}
    own = {i: value * 1.003 for i, value in base.items()}
    assert compared(base, own).verdict is Verdict.NO_DIFFERENCE


def test_more_rounds_are_suggested() -> None:
    """An interval that is too wide comes with the number of rounds that would narrow it enough."""
    base = {i: 0.02 * (1 + 0.04 * (i % 3)) for i in range(5)}
    ratio = compared(base, {i: 0.0208 * (1 + 0.04 * ((i + 1) % 2)) for i in range(5)})
    assert ratio.verdict is Verdict.UNKNOWN
    assert ratio.num_rounds_needed is not None
    assert ratio.num_rounds_needed > 5
