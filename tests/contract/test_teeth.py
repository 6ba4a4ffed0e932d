"""The contract's tests fail for loaders that break it: each broken loader is caught by the matching test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.contract import (
    broken,
    test_errors,
    test_lifetime,
    test_ownership,
    test_rng,
    test_surface,
    test_values,
    test_zoo,
)
from tests.contract.describe import name_of
from tests.contract.watching import TORCH, LoaderClass
from tests.contract.zoo import of_each_kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.contract.describe import Described


CAUGHT: list[tuple[LoaderClass, Callable[..., object], tuple[Any, ...]]] = [
    (broken.reverses, test_values.test_the_same_batches_as_torch, ("plain-1",)),
    (broken.drops_last, test_values.test_the_same_batches_as_torch, ("any-order-1",)),
    (broken.draws_in_python, test_values.test_the_same_batches_as_torch, ("prefetch-1-1",)),
    (broken.Wraps, test_values.test_the_same_batches_as_torch, ("plain-0",)),
    (broken.LooksAhead, test_values.test_the_same_number_of_batches_ahead, (1, 2)),
    (broken.draws_twice, test_rng.test_one_base_seed_per_iterator, (2, True, False)),
    (broken.reseeds, test_rng.test_workers_have_torchs_seeds, (1,)),
    (broken.skips_init, test_rng.test_errors_of_worker_init_fn, (test_rng.fail_in_worker_one,)),
    (broken.skips_init, test_rng.test_worker_init_fn_runs_after_seeding_and_before_loading, (2,)),
    (broken.swallows, test_errors.test_errors_in_the_dataset, ("ValueError", 2)),
    (broken.rewords, test_errors.test_errors_in_the_dataset, ("ValueError", 2)),
    (broken.Thaws, test_surface.test_frozen_attributes, ("dataset",)),
    (broken.LooksAhead, test_surface.test_signature, ()),
    (broken.Wraps, test_surface.test_attributes, (test_surface.GIVEN,)),
    (broken.Renames, test_surface.test_profiler_range, (1,)),
    (broken.ForgetsLength, test_surface.test_warning_about_a_streams_length, (2,)),
    (broken.StartsAnew, test_surface.test_a_persistent_iterator_is_one, ()),
    (broken.SharesIterator, test_surface.test_two_iterators_at_once, ()),
    (broken.reuses, test_ownership.test_a_list_of_batches_edited_in_place, ()),
    (broken.locks, test_ownership.test_a_list_of_batches_edited_in_place, ()),
    (broken.reuses, test_ownership.test_a_fork_by_the_user, ()),
    (broken.keeps_big_storage, test_ownership.test_what_is_made_of_a_batch, ()),
    (broken.leaves_pipes, test_lifetime.test_forgotten, (2, False)),
    (broken.StartsAnew, test_lifetime.test_forgotten, (2, False)),
]
KINDS_CAUGHT: dict[LoaderClass, set[str]] = {
    broken.makes_lists: {"tuple", "named-tuple", "typed-tuple"},
    broken.copies: {"transposed", "channels-last", "every-other", "expanded", "views", "bitcast-views", "twice"},
    broken.demotes: {"float64"},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "test", "arguments"), CAUGHT, ids=name_of)
def test_a_broken_loader_is_caught(kind: LoaderClass, test: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """The test fails for the loader with this fault."""
    with pytest.raises((AssertionError, pytest.fail.Exception, RuntimeError)):
        test(kind, *arguments)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS_CAUGHT, ids=name_of)
def test_a_broken_batch_is_caught(kind: LoaderClass, torchs: dict[str, list[Described]]) -> None:
    """The comparison of batches fails for the batches of this loader."""
    ours = of_each_kind(kind)
    for name in KINDS_CAUGHT[kind]:
        with pytest.raises(AssertionError):
            test_zoo.test_a_batch_of_each_kind(ours, torchs, name)


@pytest.mark.filterwarnings("ignore")
def test_a_batch_that_is_overwritten_is_caught() -> None:
    """A loader that reuses the memory of a batch fails the test, in whatever way the batch is kept."""
    held = test_ownership.hold(broken.reuses)
    for way in test_ownership.KEPT:
        with pytest.raises((AssertionError, RuntimeError)):  # autograd notices by itself
            test_ownership.test_whatever_keeps_a_batch(held, way)


def test_torchs_own_loader_passes() -> None:
    """The tests that catch broken loaders pass for torch's; CONTRACT_LOADER runs the whole contract for it."""
    test_values.test_the_same_batches_as_torch(TORCH, "any-order-1")
    test_ownership.test_a_batch_edited_while_others_come(TORCH)
