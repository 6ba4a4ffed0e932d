"""Build the stand-in CUDA driver, and steer it. `fake_cuda.c` says what it does and lists its numbers."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from numapin.system import cuda

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE: Final = Path(__file__).with_name("fake_cuda.c")
_FLAGS: Final = ("-std=gnu99", "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared", "-pthread")


def compiler() -> str | None:
    """Return the C compiler on PATH, or None."""
    return shutil.which("cc") or shutil.which("gcc")


def build(folder: Path, *, old: bool = False) -> Path:
    """Compile the stand-in below `folder`, unless it is there already, and return the library's path.

    `old` leaves out what drivers before R555 lack. The library lies in a folder of its own, fit for LD_LIBRARY_PATH,
    that is named by what it was made from. It has no soname: loaded by its path it must not stand in for the real
    driver, which torch looks for by name. Raises CalledProcessError with the compiler's words.
    """
    flags = (*_FLAGS, *(("-DOLD_CUDA",) if old else ()))
    made_from = hashlib.sha256(SOURCE.read_bytes() + " ".join(flags).encode()).hexdigest()[:16]
    library = folder / made_from / "libcuda.so.1"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        scratch = library.with_name(f"{os.getpid()}.so")  # renamed when whole: tests in parallel build it at once
        subprocess.run([compiler() or "cc", *flags, "-o", str(scratch), str(SOURCE)], check=True)
        scratch.replace(library)
    return library


@contextmanager
def installed(library: Path) -> Iterator[FakeCuda]:
    """Make `numapin.system.cuda.driver()` find the stand-in, as new, inside the block."""
    fake = FakeCuda(library)
    fake.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_LIBRARY", str(library))
        cuda._load.cache_clear()
        yield fake
    cuda._load.cache_clear()


@dataclass(frozen=True, slots=True)
class FakeCuda:
    """The stand-in, loaded into this process: two devices, of which device 0 has an active context."""

    library: Path

    def environment(self, **numbers: int) -> dict[str, str]:
        """Return the environment in which a new process finds the stand-in, steered by numbers by name."""
        steered = {f"FAKE_CUDA_{name.upper()}": str(value) for name, value in numbers.items()}
        others = os.environ.get("LD_LIBRARY_PATH")
        path = os.pathsep.join([str(self.library.parent), *([others] if others else [])])
        return {**os.environ, **steered, "LD_LIBRARY_PATH": path}

    def reset(self) -> None:
        """Forget everything: registrations, counts, what was steered, cuInit. Handed-out handles are void."""
        self._loaded.fake_cuda_reset()

    def set(self, **numbers: int) -> None:
        """Set numbers by name, as `fake_cuda.c` lists them."""
        for name, value in numbers.items():
            self._loaded.fake_cuda_set(name.encode(), ctypes.c_long(value))

    def get(self, name: str) -> int:
        """Return a number by name."""
        ask = self._loaded.fake_cuda_get
        ask.restype = ctypes.c_long
        return int(ask(name.encode()))

    def refuse_registration(self, *, above_bytes: int = 0) -> None:
        """From now on refuse, as out of memory, what would bring the registered bytes above a sum."""
        self.set(limit_bytes=above_bytes)

    def registered_bytes(self) -> int:
        """Return how many bytes are registered now."""
        return self.get("registered_bytes")

    def hold_events(self) -> None:
        """Let no event pass that is recorded from now on, until `pass_events`."""
        self.set(hold_events=1, passed=self.get("recorded"))

    def pass_events(self) -> None:
        """Let all events pass that were recorded so far."""
        self.set(passed=self.get("recorded"))

    def begin_capture(self) -> None:
        """Let streams capture, in global mode, until `end_capture` or until a call breaks it."""
        self.set(capturing=1)

    def end_capture(self) -> None:
        """Let no stream capture any more."""
        self.set(capturing=0)

    def invalidated(self) -> int:
        """Return how many captures were broken."""
        return self.get("invalidated")

    def depth(self) -> int:
        """Return how many contexts the calling thread has pushed."""
        return int(self._loaded.fake_cuda_depth())

    def mode(self) -> int:
        """Return the calling thread's capture mode: 0 global, 1 of the thread, 2 relaxed."""
        return int(self._loaded.fake_cuda_mode())

    @property
    def _loaded(self) -> ctypes.CDLL:
        return ctypes.CDLL(str(self.library))  # the same one every time: the loader knows the file
