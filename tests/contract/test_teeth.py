"""The comparisons of these tests have teeth: loaders that break the contract fail them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.contract import broken, test_errors, test_lifetime, test_ownership, test_rng
from tests.contract.describe import assert_same, name_of
from tests.contract.zoo import of_each_kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.contract.describe import Described
    from tests.contract.watching import LoaderClass

pytestmark = pytest.mark.filterwarnings("ignore")
CAUGHT: list[tuple[LoaderClass, Callable[..., object], tuple[Any, ...]]] = [
    (broken.draws_twice, test_rng.test_one_base_seed_per_iterator, (2, True, False)),
    (broken.swallows, test_errors.test_errors_in_the_dataset, ("ValueError", 2)),
    (broken.reuses, test_ownership.test_a_list_of_batches_edited_in_place, ()),
    (broken.leaves_pipes, test_lifetime.test_forgotten, (2, False)),
]
KINDS_CAUGHT: dict[LoaderClass, set[str]] = {
    broken.makes_lists: {"tuple", "named-tuple", "typed-tuple"},
    broken.copies: {"transposed", "channels-last", "every-other", "expanded", "views", "bitcast-views", "twice"},
    broken.demotes: {"float64"},
}


@pytest.mark.parametrize(("kind", "test", "arguments"), CAUGHT, ids=name_of)
def test_a_broken_loader_is_caught(
    kind: LoaderClass, test: Callable[..., object], arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test fails for the loader with this fault."""
    monkeypatch.setattr(test_lifetime, "PATIENCE_S", 0.1)
    with pytest.raises((AssertionError, pytest.fail.Exception, RuntimeError)):
        test(kind, *arguments)


def test_a_broken_batch_is_caught(torchs: dict[str, list[Described]]) -> None:
    """The comparison of batches fails for the batches of these loaders."""
    for kind, names in KINDS_CAUGHT.items():
        ours = of_each_kind(kind, num_rounds=1)[0]
        for name in names:
            with pytest.raises(AssertionError):
                assert_same(ours[name][0], torchs[name][0])


def test_a_batch_that_is_overwritten_is_caught() -> None:
    """A loader that reuses the memory of a batch fails the test, in whatever way the batch is kept."""
    held = test_ownership.hold(broken.reuses)
    for way in test_ownership.KEPT:
        with pytest.raises((AssertionError, RuntimeError)):  # autograd notices by itself
            test_ownership.check(held, way)
