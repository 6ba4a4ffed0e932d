"""Fixtures for the tests of the loader's parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.data.loopback import ANYWHERE, Loopback, loopback
from tests.unit.data.seam import DataPath, PathOptions, watch_captures

if TYPE_CHECKING:
    from tests.cuda.fake import FakeCuda


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Let torch use one thread, as in workers: its others spin, which takes long beside other tests."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[DataPath]:
    made = DataPath(PathOptions())
    monkeypatch.setattr(made, "_locality", ANYWHERE)
    yield made
    made.close()


@pytest.fixture
def loop() -> Iterator[Loopback]:
    with loopback() as made:
        yield made


@pytest.fixture
def graphs(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Any:
    class CUDAGraph:
        def __init__(self, *, fails: str = "") -> None:
            self.fails = fails

        def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
            if self.fails == "begin":
                raise ArithmeticError(pool, capture_error_mode)
            fake_cuda.begin_capture()

        def capture_end(self) -> None:
            fake_cuda.end_capture()
            if self.fails == "end":
                raise ArithmeticError

        def reset(self) -> None:
            fake_cuda.end_capture()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
    watch_captures()
    return CUDAGraph
