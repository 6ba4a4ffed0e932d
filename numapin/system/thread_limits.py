"""Limit the threads of the BLAS, MKL and OpenMP libraries of this process.

A library reads its environment variables once, when it is loaded; in a forked process it is loaded already. So loaded
libraries are called, and the variables are set for the others.
"""

from __future__ import annotations

import ctypes
import os
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping

VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "OPENCV_FOR_THREADS_NUM",
)
"""The variables that libraries read when they are loaded."""

_MAPS: Final = Path("/proc/self/maps")


class _Kind(NamedTuple):
    """A kind of library: the beginnings of its file names, and the functions that may set its number of threads."""

    files: tuple[str, ...]
    setters: tuple[str, ...]


_OPENBLAS: Final = _Kind(
    ("libopenblas", "libscipy_openblas"),  # numpy's and scipy's wheels rename its functions
    tuple(map("".join, product(("", "scipy_"), ("openblas_set_num_threads",), ("", "64_", "_64")))),
)
_KINDS: Final = (
    _OPENBLAS,
    _Kind(("libmkl_rt",), ("MKL_Set_Num_Threads",)),
    _Kind(("libgomp", "libiomp5", "libomp"), ("omp_set_num_threads",)),
    _Kind(("libblis",), ("bli_thread_set_num_threads",)),
)


def limit_threads(num_threads: int, environ: MutableMapping[str, str]) -> None:
    """Let every such library use `num_threads` threads, as far as it is called from this thread.

    OpenMP's number belongs to the calling thread; threads that exist already keep theirs.
    """
    environ.update(dict.fromkeys(VARIABLES, str(num_threads)))
    for path, kind in _loaded():
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
        except (OSError, UnicodeDecodeError):  # mapped as data, e.g. by a profiler; its name is in the error's text
            continue
        for name in kind.setters:
            setter = getattr(library, name, None)
            if setter is not None:
                setter(ctypes.c_int(num_threads))
        # In a forked process OpenBLAS's setter first starts as many threads as the parent had, and each then spins for
        # some 20 ms. This ends them; they are started again when they are needed.
        end_threads = getattr(library, "blas_thread_shutdown_", None)
        if kind is _OPENBLAS and num_threads == 1 and end_threads is not None:
            end_threads()


def _loaded() -> Iterator[tuple[str, _Kind]]:
    """Yield the path and kind of each such library in this process.

    A file that was replaced meanwhile is still known by its former name.
    """
    lines = _MAPS.read_text(errors="surrogateescape").splitlines()
    starts = ((line, line.find("/")) for line in lines)
    for path in {line[start:].removesuffix(" (deleted)") for line, start in starts if start >= 0}:
        name = os.path.basename(path)
        kind = next((kind for kind in _KINDS if name.startswith(kind.files)), None)
        if kind is not None:
            yield path, kind
