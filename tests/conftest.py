"""What the tests share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # pytest's importlib mode does not, and `tests.nvml.fake` is imported by tests

from tests.nvml import fake  # noqa: E402 - needs the line above


@pytest.fixture(scope="session")
def fake_nvml() -> fake.FakeNvml:
    """Give the stand-in NVML, built once into the repository's cache folder."""
    if fake.compiler() is None:
        pytest.skip("no C compiler on PATH to build the stand-in NVML with; type: apt-get install gcc libc6-dev")
    folder = ROOT / ".cache" / "fake-nvml"
    return fake.FakeNvml(library=fake.build(folder), old_library=fake.build(folder, old=True))
