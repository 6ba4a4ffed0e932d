"""Whether the installed torch's clients can be served, from its header or its version."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from numapin.launcher import installed_torch
from numapin.launcher.installed_torch import torch_folder, why_not_served
from numapin.launcher.store import REQUESTS


def test_the_installed_torch() -> None:
    """It is found without an import, and its requests are known."""
    assert torch_folder() == Path(torch.__file__).parent
    assert why_not_served(torch_folder()) is None


def test_no_torch() -> None:
    """Without torch there is no agent, and ranks that need no store can be started."""
    assert why_not_served(None) is None


@pytest.mark.parametrize(
    ("requests", "is_served"),
    [
        (REQUESTS, True),
        (REQUESTS[:17], True),
        ((*REQUESTS, "NEW"), False),
        ((*REQUESTS[:5], "NEW"), False),
        ((), False),
    ],
    ids=["same", "older", "newer", "other", "unreadable"],
)
def test_header(tmp_path: Path, requests: tuple[str, ...], is_served: bool) -> None:  # noqa: FBT001
    """An older torch may lack requests at the end; a newer one, or one with other numbers, is not served."""
    header = tmp_path / installed_torch._HEADER
    header.parent.mkdir(parents=True)
    header.write_text(f"enum class QueryType : uint8_t {{\n  {', '.join(requests)},\n}};\n")
    (tmp_path / "version.py").write_text("__version__ = '9.9.0'\n")
    assert why_not_served(tmp_path) == (None if is_served else "the store of torch 9.9.0 is newer than this numapin")


@pytest.mark.parametrize(
    ("version", "is_served"),
    [("2.9.0+cu128", True), ("2.13.1", True), ("2.14.0a0", False), ("3.0", False), ("", False)],
)
def test_version_without_header(tmp_path: Path, version: str, is_served: bool) -> None:  # noqa: FBT001
    """Where the headers were left out, the version decides."""
    (tmp_path / "version.py").write_text(f"__version__ = '{version}'\n")
    assert (why_not_served(tmp_path) is None) is is_served
