"""What the tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nvml import fake

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def fake_nvml() -> fake.FakeNvml:
    """Give the stand-in NVML, built once into the repository's cache folder."""
    if fake.compiler() is None:
        pytest.skip("no C compiler on PATH to build the stand-in NVML with; type: apt-get install gcc libc6-dev")
    folder = ROOT / ".cache" / "fake-nvml"
    return fake.FakeNvml(library=fake.build(folder), old_library=fake.build(folder, old=True))
