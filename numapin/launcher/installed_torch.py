"""Stage 3: the store requests of the installed torch, without importing it. Edge.

Comes in: the installed torch's header of its store, or its version. Goes out: why `store.py` cannot serve its clients.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from numapin.launcher.store import REQUESTS

_HEADER: Final = "include/torch/csrc/distributed/c10d/TCPStoreBackend.hpp"
_NEWEST: Final = (2, 13)  # the newest torch whose requests were compared


def why_not_served(folder: Path | None) -> str | None:
    """Return why a torch's clients cannot be served; None if they can, or if there is no torch.

    Args:
        folder: torch's folder, as `torch_folder` returns it.
    """
    if folder is None:
        return None
    version = _read(folder / "version.py", r"__version__\s*=\s*['\"]([^'\"]*)") or "of unknown version"
    listed = _read(folder / _HEADER, r"enum class QueryType[^{]*{([^}]*)}")
    if listed is None:  # some distributions leave the headers out
        numbers = re.match(r"(\d+)\.(\d+)", version)
        is_known = numbers is not None and (int(numbers[1]), int(numbers[2])) <= _NEWEST
    else:
        requests = tuple(re.findall(r"\w+", listed))
        is_known = bool(requests) and requests == REQUESTS[: len(requests)]
    return None if is_known else f"the store of torch {version} is newer than this numapin"


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
