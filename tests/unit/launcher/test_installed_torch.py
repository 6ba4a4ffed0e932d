"""Whether the installed torch's clients can be served, from its header or its version."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.launcher.seam import REQUESTS, store_server, torch_folder, why_not_served


def test_the_installed_torch() -> None:
    """It is found without an import, and its requests are known. Without one, ranks that need no store can start."""
    assert torch_folder() == Path(torch.__file__).parent
    assert why_not_served(torch_folder()) is why_not_served(None) is None


HEADER = """
// Magic number for client validation.
static const uint32_t validationMagicNumber = 0x3C85F7CE;
enum class QueryType : uint8_t {
  %s,
};
enum class CheckResponseType : uint8_t { READY, NOT_READY };
enum class WaitResponseType : uint8_t { STOP_WAITING, WAIT_CANCELED };
"""


KNOWN = HEADER % ",\n  ".join(REQUESTS)
SERVED = {
    "the same": KNOWN,
    "older": HEADER % ",\n  ".join(REQUESTS[:17]),
    "with a comment": KNOWN.replace("CHECK,\n  WAIT", "CHECK, // of keys\n  WAIT"),
}
CHANGES = {
    "newer": (f"{REQUESTS[-1]},", f"{REQUESTS[-1]}, NEW,"),
    "another request": ("CHECK,", "NEW,"),
    "another number": ("CHECK,", "CHECK = 9,"),
    "unreadable": (",\n  ".join(REQUESTS), ""),
    "another magic number": ("0x3C85F7CE", "0x3C85F7CF"),
    "no magic number": ("static const uint32_t validationMagicNumber = 0x3C85F7CE;", ""),
    "other answers to CHECK": ("READY, NOT_READY", "NOT_READY, READY"),
    "one more answer": ("STOP_WAITING, WAIT_CANCELED", "STOP_WAITING, WAIT_CANCELED, TIMED_OUT"),
    "another order of answers": ("STOP_WAITING, WAIT_CANCELED", "WAIT_CANCELED, STOP_WAITING"),
    "wider answers": ("WaitResponseType : uint8_t", "WaitResponseType : uint16_t"),
    "no answers to CHECK": ("enum class CheckResponseType : uint8_t { READY, NOT_READY };", ""),
}
HEADERS = SERVED | {name: KNOWN.replace(*change) for name, change in CHANGES.items()}


@pytest.mark.parametrize("name", HEADERS)
def test_header(tmp_path: Path, name: str) -> None:
    """An older torch may lack requests at the end. One with other requests, numbers or answers is not served."""
    path = tmp_path / store_server._HEADER
    path.parent.mkdir(parents=True)
    path.write_text(HEADERS[name])
    assert list(HEADERS.values()).count(HEADERS[name]) == 1  # each change applies
    (tmp_path / "version.py").write_text("__version__ = '9.9.0'\n")
    unknown = "this numapin does not know the store of torch 9.9.0"
    assert why_not_served(tmp_path) == (None if name in SERVED else unknown)


@pytest.mark.parametrize(
    ("version", "is_served"),
    [("2.9.0+cu128", True), ("2.15.1", True), ("2.16.0a0", False), ("3.0", False), ("", False)],
)
def test_version_without_header(tmp_path: Path, version: str, is_served: bool) -> None:  # noqa: FBT001
    """Where the headers were left out, the version decides."""
    (tmp_path / "version.py").write_text(f"__version__ = '{version}'\n")
    assert (why_not_served(tmp_path) is None) is is_served
