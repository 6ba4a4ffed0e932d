"""Whether the installed torch's clients can be served, by its version."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.launcher.seam import torch_folder, why_not_served


def test_the_installed_torch() -> None:
    """It is found without an import, and its requests are known. Without one, ranks that need no store can start."""
    assert torch_folder() == Path(torch.__file__).parent
    assert why_not_served(torch_folder()) is why_not_served(None) is None


@pytest.mark.parametrize(
    ("version", "is_served"),
    [("2.9.0+cu128", True), ("2.15.1", True), ("2.16.0a0", False), ("3.0", False), ("", False)],
)
def test_version(tmp_path: Path, version: str, is_served: bool) -> None:  # noqa: FBT001
    """A torch that is newer than all that were tried serves the store itself."""
    (tmp_path / "version.py").write_text(f"__version__ = '{version}'\n")
    assert (why_not_served(tmp_path) is None) is is_served
