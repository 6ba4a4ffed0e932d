"""Processes that are forked after a loader was used, or in the middle of it, do not touch CUDA."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.integration.gpu_loading import needs_gpu, run_program

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from tests.cuda.fake import FakeCuda

WAYS = ("whole", "broken off", "kept", "persistent", "in the middle")


@pytest.fixture(params=["stand-in", pytest.param("gpu", marks=needs_gpu)])
def run(request: pytest.FixtureRequest) -> Callable[[str, str], str]:
    if request.param == "gpu":
        return run_program
    fake: FakeCuda = request.getfixturevalue("fake_cuda")
    return lambda scene, argument: run_program(scene, argument, fake.environment(child_aborts=1))


def assert_children_live(output: str) -> None:
    """Fail unless all children ended well; one that ends as a script does, as if only torch had used the GPU."""
    told = json.loads(output)
    alone = told.pop("torch alone")
    assert told == {**dict.fromkeys(told, 0), "fork_and_end": alone}


@pytest.mark.parametrize("way", WAYS)
def test_children_of_all_kinds(run: Callable[[str, str], str], way: str) -> None:
    """Children collect garbage, drop batches and loader, end normally and load with workers of their own."""
    assert_children_live(run("fork", f"device {way}"))


@pytest.mark.gpu
@needs_gpu[1]
@pytest.mark.parametrize("way", WAYS)
def test_children_beside_pinned_batches(way: str) -> None:
    """The same with batches in pinned memory."""
    assert_children_live(run_program("fork", f"host {way}"))


def test_the_guard_is_needed(run: Callable[[str, str], str]) -> None:
    """A child that may free the memory of a batch is aborted by torch."""
    assert run("unguarded", "").strip() == str(-signal.SIGABRT)


def test_no_garbage_in_cycles(run: Callable[[str, str], str]) -> None:
    """A loader that is gone leaves no object of numapin or of torch.cuda for the garbage collector."""
    assert json.loads(run("garbage", "device")) == {way: [] for way in WAYS}
