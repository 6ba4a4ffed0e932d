"""Hooks and fixtures that all tests share."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import tests

_HERE = Path(__file__).resolve().parent
if _HERE not in [Path(folder).resolve() for folder in tests.__path__]:
    raise pytest.UsageError(
        f"the package `tests` is {list(tests.__path__)}, not {_HERE}: py-libnuma and others install one. Type, in "
        f"{_HERE.parent}: python -m pytest"
    )

from collections.abc import Iterator, Mapping

from tests.cuda import fake as fake_driver
from tests.nvml import fake
from tests.seam import run_folder

ROOT = _HERE.parent

# By default waiting OpenMP threads spin, which takes the cores from other tests: one took 41 s instead of 6.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Property tests check results; the time of an example depends on the load of this machine.
settings.register_profile("numapin", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("numapin")


@pytest.fixture(scope="module")
def modules_are_no_garbage() -> Iterator[None]:
    """Spare each collection the objects of torch and pytest: it takes 1 ms instead of 80, also in forked workers."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def cuda_is_in_use() -> None:
    import torch

    torch.ones(1, device="cuda")


def pytest_configure() -> None:
    """Restore the signals that a shell's background job inherits as ignored, and make fork the start method."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    # Python 3.14's default imports torch in each worker. Tests of start methods name theirs.
    multiprocessing.set_start_method("fork", force=True)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fail if xdist ignores groups: each of its processes would then set up what a group shares."""
    if not getattr(session.config.option, "loadgroup", False):
        return
    for item in session.items:
        if item.get_closest_marker("xdist_group") is not None and "@" not in item.nodeid:
            raise pytest.UsageError("pytest-xdist ignores xdist_group under this pytest; see constraints.txt")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remove the group that xdist appends to a test's name: --last-failed looks for the plain name."""
    is_of_worker = hasattr(report, "node")
    if is_of_worker and "xdist_group" in report.keywords:
        report.nodeid = report.nodeid.rpartition("@")[0]


@pytest.fixture(scope="session")
def fake_nvml() -> fake.FakeNvml:
    if fake.compiler() is None:
        pytest.skip("no C compiler on PATH to build the stand-in NVML with; type: apt-get install gcc libc6-dev")
    folder = ROOT / ".cache" / "fake-nvml"
    return fake.FakeNvml(library=fake.build(folder), old_library=fake.build(folder, old=True))


@pytest.fixture
def only_places_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide /tmp and the current directory, where this user's real runs may be active."""
    places = run_folder.temporary_directories

    def own_places(environ: Mapping[str, str]) -> list[str]:
        return [place for place in places(environ) if tmp_path in (Path(place), *Path(place).parents)]

    monkeypatch.setattr(run_folder, "temporary_directories", own_places)


@pytest.fixture
def fake_cuda() -> Iterator[fake_driver.FakeCuda]:
    yield from _fake_cuda(old=False)


@pytest.fixture
def old_fake_cuda() -> Iterator[fake_driver.FakeCuda]:
    """Replace the CUDA driver by a fake one from before R555, in its initial state."""
    yield from _fake_cuda(old=True)


def _fake_cuda(*, old: bool) -> Iterator[fake_driver.FakeCuda]:
    if fake_driver.compiler() is None:
        pytest.skip("no C compiler on PATH to build the stand-in CUDA driver with; type: apt-get install gcc libc6-dev")
    with fake_driver.installed(fake_driver.build(ROOT / ".cache" / "fake-cuda", old=old)) as fake_cuda:
        yield fake_cuda
