"""Stage 3: the store protocol of the installed torch, without importing it."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from numapin.launcher.store import CHECK_ANSWERS, MAGIC, REQUESTS, WAIT_ANSWERS

_HEADER: Final = "include/torch/csrc/distributed/c10d/TCPStoreBackend.hpp"
_NEWEST: Final = (2, 15)  # the newest torch whose clients ran against our store; since 2.15 it has no such header


def why_not_served(folder: Path | None) -> str | None:
    """Return why a torch's clients cannot be served; None if they can, or if there is no torch.

    Args:
        folder: torch's folder, as `torch_folder` returns it.
    """
    if folder is None:
        return None
    version = _read(folder / "version.py", r"__version__\s*=\s*['\"]([^'\"]*)") or "of unknown version"
    header = _read(folder / _HEADER, r"(?s)(.*)")
    if header is None:  # some distributions leave the headers out
        numbers = re.match(r"(\d+)\.(\d+)", version)
        is_known = numbers is not None and (int(numbers[1]), int(numbers[2])) <= _NEWEST
    else:
        is_known = _is_our_protocol(header)
    return None if is_known else f"this numapin does not know the store of torch {version}"


def _is_our_protocol(header: str) -> bool:
    """Return whether clients and server of this header send what ours do. An older torch may lack the last requests."""
    magic = re.search(r"validationMagicNumber\s*=\s*(0[xX][0-9a-fA-F]+|\d+)\s*;", header)
    requests = _names(header, "QueryType")
    return (
        magic is not None
        and int(magic[1], 0) == MAGIC
        and bool(requests)
        and requests == REQUESTS[: len(requests)]
        and _names(header, "CheckResponseType") == CHECK_ANSWERS
        and _names(header, "WaitResponseType") == WAIT_ANSWERS
    )


def _names(header: str, enum: str) -> tuple[str, ...]:
    """Return the names of an enum of bytes; () if there is none, and more than names if it sets values."""
    found = re.search(rf"enum class {enum}\s*:\s*uint8_t\s*{{([^}}]*)}}", header)
    body = re.sub(r"//.*", "", found[1]) if found else ""
    return tuple(name.strip() for name in body.split(",") if name.strip())


def torch_folder() -> Path | None:
    """Return the folder of the installed torch, None if there is none."""
    spec = find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _read(path: Path, pattern: str) -> str | None:
    """Return what the pattern's group finds in a file; None if it is not there."""
    try:
        found = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found[1] if found else None
