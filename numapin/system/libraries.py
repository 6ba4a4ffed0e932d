"""The effects of NCCL, OpenMP and CPython on a rank, by version and environment.

While NCCL creates a communicator, it binds the calling thread to those of its CPUs that are on the GPU's node, so that
its buffers and its own threads are there. With NCCL_IGNORE_CPU_AFFINITY it takes all CPUs of that node instead
(src/graph/topo.cc, ncclTopoGetCpuAffinity). At the end it restores the affinity; 2.29.2 to 2.29.7 do not
(NVIDIA/nccl#2033), so the calling thread stays on these CPUs, with all threads that it starts later.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

NCCL_IGNORE: Final = "NCCL_IGNORE_CPU_AFFINITY"
NCCL_MENDED: Final = "2.30.3"
_FIRST: Final = (2, 29, 2)
_VERSION: Final = re.compile(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})", re.ASCII)
_MAPPED: Final = re.compile(r"^\S+ \S+ \S+ \S+ \S+ +(/.*/libnccl\.so(?:\.[0-9.]+)?)(?: \(deleted\))?$", re.MULTILINE)


def narrows(text: str | None) -> bool | None:
    """Return whether a version leaves its caller on the CPUs of the GPU's node; None for a text without a version."""
    version = _VERSION.match(text or "")
    mended = tuple(map(int, NCCL_MENDED.split(".")))
    return None if version is None else _FIRST <= tuple(map(int, version.groups())) < mended


def ignores_affinity(environ: Mapping[str, str]) -> bool:
    """Return whether NCCL does not keep to the CPUs of its caller."""
    return environ.get(NCCL_IGNORE, "").strip() not in ("", "0")


def mapped_library(maps: str) -> str | None:
    """Return the path of the NCCL library in the text of /proc/PID/maps; its plugins do not count."""
    match = _MAPPED.search(maps)
    return None if match is None else match[1]


# --- OpenMP ----------------------------------------------------------------------------------------------------------

_NO_BINDING: Final = {
    "OMP_PROC_BIND": ("false",),
    "OMP_PLACES": (),
    "KMP_AFFINITY": ("disabled", "none"),
    "GOMP_CPU_AFFINITY": (),
}
"""Variables that bind threads, and the values that turn this off."""


def binding_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that bind threads, with their values."""
    binding: dict[str, str] = {}
    for name, unbound in _NO_BINDING.items():
        value = environ.get(name, "")
        if value and set(value.lower().replace(" ", "").split(",")).isdisjoint(unbound):
            binding[name] = value
    if environ.get("OMP_PROC_BIND", "").strip().lower() == "false":
        for name in ("OMP_PLACES", "GOMP_CPU_AFFINITY"):  # places without binding
            binding.pop(name, None)
    return binding


# --- CPython ---------------------------------------------------------------------------------------------------------

FORKS_ISSUE: Final = "github.com/python/cpython/issues/112275"
FORKS_MENDED: Final = "3.11.10"


def forks_may_hang(version: tuple[int, ...]) -> bool:
    """Return whether a forked child can hang because a C++ thread, such as gloo's, was acquiring the GIL at the fork.

    In the child, CPython 3.11.0 to 3.11.9 takes the lock of its list of threads before it resets it.
    Source: `FORKS_ISSUE`.
    """
    return version < tuple(map(int, FORKS_MENDED.split(".")))
