"""Ratios over equal numbers of steps, and the doubts about them: batches fetched ahead, and steps that change."""

from __future__ import annotations

import random

import pytest

from tests.unit.compare.seam import Arm, StepRatio, Verdict, compare_arms

ROUNDS = 8


def loop(
    *, num_steps: int = 100, compute_s: float = 0.01, load_s: float = 0.0, num_ahead: int = 0, skip: int = 10
) -> Arm:
    """Return the runs of a loop whose loader takes `load_s` a batch, and had time to fill its queue before step 1."""
    chance = random.Random(f"{compute_s} {load_s} {num_ahead} {skip}")  # noqa: S311 - noise, no secret
    rounds, waited, total = {}, 0.0, 0.0
    for number in range(ROUNDS):
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


def compared(base: Arm, own: Arm) -> StepRatio:
    """Return the ratio with the default margin."""
    ratio = compare_arms(base, own, against="base", margin=0.05)
    assert ratio is not None
    return ratio


def test_verdicts_without_doubt() -> None:
    """Steps that take 10 % longer throughout are slower, and the second half agrees; equal loops do not differ.

    That holds where both begin to wait in the middle of the window, too.
    """
    ratio = compared(loop(), loop(compute_s=0.011))
    assert (ratio.verdict, ratio.doubt) == (Verdict.SLOWER, None)
    assert ratio.late == pytest.approx(1 / 1.1, rel=0.02)
    assert compared(loop(), loop(compute_s=0.009)).verdict is Verdict.FASTER
    for one in ({}, {"load_s": 0.013, "num_ahead": 30}):
        base, own = loop(**one), loop(**one, compute_s=0.010001)  # type: ignore[arg-type] # another noise
        assert compared(base, own).verdict is Verdict.NO_DIFFERENCE


def test_batches_fetched_ahead_do_not_make_a_loader_faster() -> None:
    """Of two loaders that are equally slow, one that has fetched 64 batches ahead is not called faster."""
    slow = {"load_s": 0.013, "compute_s": 0.01}
    few, many = loop(**slow, num_ahead=2), loop(**slow, num_ahead=64)  # type: ignore[arg-type]
    ratio = compared(few, many)
    assert ratio.ratio > 1.05
    assert ratio.verdict is Verdict.UNSETTLED
    assert ratio.doubt is not None
    assert "64 batches ahead" in ratio.doubt
    assert "--steps" in ratio.doubt
    assert compared(many, few).verdict is Verdict.UNSETTLED


def test_enough_steps_clear_the_doubt() -> None:
    """With as many steps as the doubt asks for, loaders that are equally slow do not differ; a faster one does."""
    slow = {"load_s": 0.013, "num_steps": 2500, "skip": 400}
    few, many = loop(**slow, num_ahead=2), loop(**slow, num_ahead=64)  # type: ignore[arg-type]
    assert compared(few, many).verdict is Verdict.NO_DIFFERENCE
    quick = loop(load_s=0.005, num_steps=2500, num_ahead=64)
    assert compared(few, quick).verdict is Verdict.FASTER


def test_a_stock_that_ends_within_the_window_is_seen() -> None:
    """If one variant begins to wait in the second half, the verdict of the whole window is not believed."""
    base, own = loop(load_s=0.02), loop(load_s=0.02, num_ahead=40)
    base = Arm(steps_s=base.steps_s, num_steps=110, num_ahead=40, wait_share=base.wait_share)
    ratio = compared(base, own)
    assert ratio.verdict is Verdict.UNSETTLED
    assert ratio.doubt is not None
    assert "over the second half" in ratio.doubt


def test_each_round_compares_as_many_steps_of_both() -> None:
    """A run that was cut short is compared with the beginning of the other one; an epoch's end after it counts not."""
    own = loop()
    border = {number: [*steps[:50], *(10 * step for step in steps[50:])] for number, steps in own.steps_s.items()}
    cut = Arm(steps_s={n: steps[:50] for n, steps in own.steps_s.items()}, num_steps=60, num_ahead=0, wait_share=0)
    long = Arm(steps_s=border, num_steps=110, num_ahead=0, wait_share=0)
    assert compared(long, cut).ratio == pytest.approx(1, rel=1e-6)
    assert compare_arms(long, Arm(steps_s={}, num_steps=0, num_ahead=0, wait_share=0), against="", margin=1) is None
