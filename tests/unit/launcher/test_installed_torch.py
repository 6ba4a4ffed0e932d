"""Whether the installed torch's clients can be served, from its header or its version."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.launcher.seam import REQUESTS, store_server, torch_folder, why_not_served


def test_the_installed_torch() -> None:
    """It is found without an import, and its requests are known."""
    assert torch_folder() == Path(torch.__file__).parent
    assert why_not_served(torch_folder()) is None


def test_no_torch() -> None:
    """Without torch, ranks that need no store can be started."""
    assert why_not_served(None) is None


HEADER = """
// Magic number for client validation.
static const uint32_t validationMagicNumber = 0x3C85F7CE;
enum class QueryType : uint8_t {
  %s,
};
enum class CheckResponseType : uint8_t { READY, NOT_READY };
enum class WaitResponseType : uint8_t { STOP_WAITING, WAIT_CANCELED };
"""
UNKNOWN = "this numapin does not know the store of torch 9.9.0"


def reason(folder: Path, header: str) -> str | None:
    """Return why the clients of a torch with this header cannot be served."""
    path = folder / store_server._HEADER
    path.parent.mkdir(parents=True)
    path.write_text(header)
    (folder / "version.py").write_text("__version__ = '9.9.0'\n")
    return why_not_served(folder)


@pytest.mark.parametrize(
    ("requests", "is_served"),
    [
        (REQUESTS, True),
        (REQUESTS[:17], True),
        ((*REQUESTS[:5], "CHECK, // of keys\n  WAIT", *REQUESTS[7:]), True),
        ((*REQUESTS, "NEW"), False),
        ((*REQUESTS[:5], "NEW"), False),
        ((*REQUESTS[:5], "CHECK = 9", *REQUESTS[6:]), False),
        ((), False),
    ],
    ids=["same", "older", "comment", "newer", "other", "numbered", "unreadable"],
)
def test_requests(tmp_path: Path, requests: tuple[str, ...], is_served: bool) -> None:  # noqa: FBT001
    """An older torch may lack requests at the end; a newer one, or one with other numbers, is not served."""
    assert reason(tmp_path, HEADER % ",\n  ".join(requests)) == (None if is_served else UNKNOWN)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("0x3C85F7CE", "0x3C85F7CF"),
        ("static const uint32_t validationMagicNumber = 0x3C85F7CE;", ""),
        ("READY, NOT_READY", "NOT_READY, READY"),
        ("STOP_WAITING, WAIT_CANCELED", "STOP_WAITING, WAIT_CANCELED, TIMED_OUT"),
        ("STOP_WAITING, WAIT_CANCELED", "WAIT_CANCELED, STOP_WAITING"),
        ("WaitResponseType : uint8_t", "WaitResponseType : uint16_t"),
        ("enum class CheckResponseType : uint8_t { READY, NOT_READY };", ""),
    ],
    ids=["magic", "no magic", "check", "one more", "order", "width", "missing"],
)
def test_the_rest_of_the_protocol(tmp_path: Path, ours: str, theirs: str) -> None:
    """A torch that validates clients with another number, or has other answers, is not served."""
    header = HEADER % ", ".join(REQUESTS)
    assert ours in header
    assert reason(tmp_path, header.replace(ours, theirs)) == UNKNOWN


@pytest.mark.parametrize(
    ("version", "is_served"),
    [("2.9.0+cu128", True), ("2.15.1", True), ("2.16.0a0", False), ("3.0", False), ("", False)],
)
def test_version_without_header(tmp_path: Path, version: str, is_served: bool) -> None:  # noqa: FBT001
    """Where the headers were left out, the version decides."""
    (tmp_path / "version.py").write_text(f"__version__ = '{version}'\n")
    assert (why_not_served(tmp_path) is None) is is_served
