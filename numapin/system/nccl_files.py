"""The version of an NCCL library, without loading it."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_IN_PACKAGE: Final = "/nvidia/nccl/lib/"  # of the packages nvidia-nccl-cu11, -cu12 and -cu13
_METADATA: Final = re.compile(r"nvidia_nccl_cu[0-9]{1,3}-([0-9][^-]{0,63})\.dist-info", re.ASCII)
_FILE: Final = re.compile(r"libnccl\.so\.([0-9]{1,4}\.[0-9]{1,4}\.[0-9]{1,4})", re.ASCII)
_NAME: Final = "libnccl.so.2"
FOLDERS: Final = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/local/cuda/lib64",
)
"""Where packages of distributions and NVIDIA's containers put the library."""


def library_version(path: str) -> str | None:
    """Return the version of a library; None if it is unknown, or if two packages could have brought it."""
    site, inside, _ = path.partition(_IN_PACKAGE)
    named = _FILE.fullmatch(os.path.basename(path))
    if named is not None:
        return named[1]
    try:
        names = os.listdir(site) if inside else []
    except OSError:
        return None
    versions = {match[1] for match in map(_METADATA.fullmatch, names) if match}
    return versions.pop() if len(versions) == 1 else None


def installed_library(folders: Iterable[str]) -> str | None:
    """Return the path of the first NCCL library in some folders, without links; None if there is none."""
    paths = (f"{folder}/{_NAME}" for folder in folders if folder)
    return next((os.path.realpath(path) for path in paths if os.path.isfile(path)), None)
