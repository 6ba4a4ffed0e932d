"""The number of threads for libraries in a worker, and how it reaches them."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from numapin.errors import UsageError
from tests.unit.data.seam import limit_libraries, num_worker_threads, threads

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("wanted", "environ", "expected"),
    [
        (None, {}, 1),
        (None, {"NUMAPIN_WORKER_THREADS": "4"}, 4),
        (None, {"NUMAPIN_WORKER_THREADS": "0"}, 0),
        (3, {"NUMAPIN_WORKER_THREADS": "x"}, 3),
        (0, {}, 0),
    ],
)
def test_the_number(wanted: int | None, environ: dict[str, str], expected: int) -> None:
    """The argument comes first, then the environment variable; otherwise one."""
    assert num_worker_threads(wanted, environ) == expected


@pytest.mark.parametrize("text", ["", "two", "-1", "1.5", "\u0662"])
def test_no_number(text: str) -> None:
    """A variable that is no number is a UsageError with one that is."""
    with pytest.raises(UsageError, match=r"NUMAPIN_WORKER_THREADS=.* is not a number of threads") as caught:
        num_worker_threads(None, {"NUMAPIN_WORKER_THREADS": text})
    assert caught.value.hint == "use e.g. NUMAPIN_WORKER_THREADS=1"


def test_opencv_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenCV is called if it is loaded; torch keeps its number; 0 changes nothing."""
    asked: list[int] = []
    environ = dict(os.environ)
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setitem(sys.modules, "cv2", SimpleNamespace(setNumThreads=asked.append))
    monkeypatch.setattr(threads, "_loaded", tuple)  # this process's own libraries are not called
    torchs = torch.get_num_threads()
    limit_libraries(0)
    assert (asked, environ) == ([], dict(os.environ))
    limit_libraries(3)
    assert (asked, torch.get_num_threads()) == ([3], torchs)
    assert {environ[name] for name in threads.VARIABLES} == {"3"}
    monkeypatch.setitem(sys.modules, "cv2", SimpleNamespace())  # a stand-in of the user's
    limit_libraries(1)
    assert asked == [3]


def test_libraries_are_found_by_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped files are read with their whole names, also if they were replaced; a name that is not loaded is skipped.

    A name outside Unicode, which stays as it is, does no harm.
    """
    maps = tmp_path / "maps"
    maps.write_bytes(
        b"7f00-7f01 r-xp 00000000 08:01 1    /odd \xff name/libscipy_openblas64_-32a4b2a6.so (deleted)\n"
        b"7f01-7f02 r--p 00000000 08:01 1    /usr/lib/libgomp.so.1\n"
        b"7f02-7f03 r--p 00000000 08:01 1    /usr/lib/libgomp.so.1\n"
        b"7f03-7f04 rw-p 00000000 00:00 0    [heap]\n"
        b"7f04-7f05 rw-p 00000000 00:00 0\n"
        b"7f05-7f06 r--p 00000000 08:01 1    /usr/lib/libcuda.so.1\n"
    )
    monkeypatch.setattr(threads, "_MAPS", maps)
    found = sorted(path for path, _kind in threads._loaded())
    assert found == ["/odd \udcff name/libscipy_openblas64_-32a4b2a6.so", "/usr/lib/libgomp.so.1"]
    threads.limit_threads(1, {})  # neither is loaded from there
