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

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.contract.describe import Described


CAUGHT: list[tuple[LoaderClass, Callable[..., object], tuple[Any, ...]]] = [
    (broken.Reverses, test_values.test_the_same_batches_as_torch, ("plain-2",)),
    (broken.DropsLast, test_values.test_the_same_batches_as_torch, ("any-order-1",)),
    (broken.DrawsInPython, test_values.test_the_same_batches_as_torch, ("prefetch-1-1",)),
    (broken.Warns, test_values.test_the_same_batches_as_torch, ("plain-0",)),
    (broken.LooksAhead, test_values.test_the_same_number_of_batches_ahead, (1, 2)),
    (broken.DrawsTwice, test_rng.test_one_base_seed_per_iterator, (2, True, False)),
    (broken.DrawsTwice, test_rng.test_one_base_seed_per_iterator, (0, False, False)),
    (broken.Reseeds, test_rng.test_workers_have_torchs_seeds, (1,)),
    (broken.SkipsInit, test_rng.test_errors_of_worker_init_fn, (test_rng.fail_in_worker_one,)),
    (broken.SkipsInit, test_rng.test_worker_init_fn_runs_after_seeding_and_before_loading, (2,)),
    (broken.Swallows, test_errors.test_errors_in_the_dataset, ("ValueError", 2)),
    (broken.Rewords, test_errors.test_errors_in_the_dataset, ("ValueError", 1)),
    (broken.Thaws, test_surface.test_frozen_attributes, ("dataset",)),
    (broken.LooksAhead, test_surface.test_signature, ()),
    (broken.Wraps, test_surface.test_attributes, (test_surface.GIVEN,)),
    (broken.Renames, test_surface.test_profiler_range, (1,)),
    (broken.ForgetsLength, test_surface.test_warning_about_a_streams_length, (2,)),
    (broken.StartsAnew, test_surface.test_a_persistent_iterator_is_one, ()),
    (broken.SharesIterator, test_surface.test_two_iterators_at_once, ()),
    (broken.Reuses, test_ownership.test_a_list_of_batches_edited_in_place, ()),
    (broken.Reuses, test_ownership.test_a_batch_edited_while_others_come, ()),
    *(
        (broken.Reuses, test_ownership.test_whatever_keeps_a_batch, (way,))
        for way in ("numpy", "storage", "saved-for-backward", "cycle", "unbound")
    ),
    (broken.Locks, test_ownership.test_a_list_of_batches_edited_in_place, ()),
    (broken.Reuses, test_ownership.test_batches_outlive_everything, (False,)),
    (broken.Reuses, test_ownership.test_a_fork_by_the_user, ()),
    (broken.KeepsBigStorage, test_ownership.test_what_is_made_of_a_batch, ()),
    (broken.LeavesPipes, test_lifetime.test_forgotten, (2, False)),
    (broken.LeavesWorkers, test_lifetime.test_forgotten, (2, False)),
]
KINDS_CAUGHT = [
    *((broken.MakesLists, kind) for kind in ("tuple", "named-tuple", "typed-tuple")),
    *((broken.Copies, kind) for kind in ("transposed", "channels-last", "every-other", "expanded")),
    *((broken.Copies, kind) for kind in ("views", "bitcast-views", "twice", "leaf-with-gradient")),
    (broken.Demotes, "float64"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "test", "arguments"), CAUGHT, ids=name_of)
def test_a_broken_loader_is_caught(kind: LoaderClass, test: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """The test fails for the loader with this fault."""
    with pytest.raises((AssertionError, pytest.fail.Exception, RuntimeError)):
        test(kind, *arguments)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "name"), KINDS_CAUGHT)
def test_a_broken_batch_is_caught(kind: LoaderClass, name: str, torchs: dict[str, list[Described]]) -> None:
    """The comparison of batches fails for the batches of this loader."""
    with pytest.raises(AssertionError):
        test_zoo.test_a_batch_of_each_kind(kind, torchs, name)


def test_torchs_own_loader_passes(torchs: dict[str, list[Described]]) -> None:
    """The tests that catch broken loaders pass for torch's; CONTRACT_LOADER runs the whole contract for it."""
    test_values.test_the_same_batches_as_torch(TORCH, "any-order-1")
    test_ownership.test_a_batch_edited_while_others_come(TORCH)
    test_zoo.test_a_batch_of_each_kind(TORCH, torchs, "views")
