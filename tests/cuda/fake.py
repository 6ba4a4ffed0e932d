"""Builder and control of the fake CUDA driver. `fake_cuda.c` describes its behavior and its numbers."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

import pytest

from tests.cuda.seam import cuda

SOURCE: Final = Path(__file__).with_name("fake_cuda.c")
_FLAGS: Final = ("-std=gnu99", "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared", "-pthread")


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def build(folder: Path, *, old: bool = False) -> Path:
    """Compile the fake in `folder`, unless it already exists, and return the library's path.

    `old` leaves out functions that drivers before R555 lack. The library is in its own folder, usable as
    LD_LIBRARY_PATH, which is named after a hash of source and flags. It has no soname: when loaded by its path, it must
    not replace the real driver, which torch loads by name. Raises CalledProcessError if the compiler fails.
    """
    flags = (*_FLAGS, *(("-DOLD_CUDA",) if old else ()))
    made_from = hashlib.sha256(SOURCE.read_bytes() + " ".join(flags).encode()).hexdigest()[:16]
    library = folder / made_from / "libcuda.so.1"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        scratch = library.with_name(
            f"{os.getpid()}.so"
        )  # renamed when complete, because parallel tests build it at once
        subprocess.run([compiler() or "cc", *flags, "-o", str(scratch), str(SOURCE)], check=True)
        scratch.replace(library)
    return library


@contextmanager
def installed(library: Path) -> Iterator[FakeCuda]:
    """Make `numapin.system.cuda.driver()` return the fake, in its initial state, inside the block."""
    fake = FakeCuda(library)
    fake.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_LIBRARY", str(library))
        cuda._load.cache_clear()
        yield fake
    cuda._load.cache_clear()


class FakeStream:
    stream_id, device_index, device_type, cuda_stream = 1, 0, 1, 7

    def __init__(self, device: object = None) -> None:
        self.device = device


@contextmanager
def moving() -> Iterator[None]:
    """Let numapin.DataLoader(device="cuda") use the installed fake inside the block, without a torch that has CUDA.

    Its batches are in host memory. Forked children cannot use the GPU, and abort if they free a batch, as with torch.
    """
    import torch

    from tests.cuda.seam_torch import opening

    pid, empty = os.getpid(), torch.empty

    def is_in_child() -> bool:
        return os.getpid() != pid

    def end_child() -> None:
        if is_in_child():
            os.abort()

    def record_stream(tensor: torch.Tensor, _stream: object) -> None:
        weakref.finalize(tensor.untyped_storage(), end_child).atexit = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *size, device=None, **more: empty(*size, **more))  # noqa: ARG005, PLW0108
        patch.setattr(torch.Tensor, "record_stream", record_stream)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_initialized", lambda: not is_in_child())
        patch.setattr(torch.cuda, "_is_in_bad_fork", is_in_child)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "Stream", FakeStream)
        patch.setattr(torch.cuda, "current_stream", FakeStream)
        patch.setattr(opening, "_get_stream", lambda _: (0, 0, 1))
        patch.setattr(opening, "_set_stream", lambda _: None)
        patch.setattr(opening, "_get_device", lambda: 0)
        patch.setattr(opening, "_get_handle", lambda _: 0)
        yield


@contextmanager
def pinning(fake: FakeCuda) -> Iterator[None]:
    """Let loaders with pin_memory=True, torch's too, pin with the installed fake inside the block.

    Memory counts as pinned if it is registered, or was allocated as pinned.
    """
    import torch

    pid, tensor, accelerator = os.getpid(), torch.Tensor, torch.accelerator
    empty, empty_like, allocated = torch.empty, torch.empty_like, WeakSet[torch.UntypedStorage]()

    def noted(made: torch.Tensor, *, pin_memory: bool) -> torch.Tensor:
        if pin_memory:
            fake.allocate()
            allocated.add(made.untyped_storage())
        return made

    def is_pinned(asked: torch.Tensor) -> bool:
        return fake.is_registered(asked.data_ptr()) or asked.untyped_storage() in allocated

    def pin(pageable: torch.Tensor, _device: object = None) -> torch.Tensor:
        return pageable if is_pinned(pageable) else noted(pageable.clone(), pin_memory=True)

    def make(*size: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return noted(empty(*size, **more), pin_memory=pin_memory)

    def make_like(other: torch.Tensor, *, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return noted(empty_like(other, **more), pin_memory=pin_memory)

    changes: dict[object, dict[str, object]] = {
        torch: {"empty": make, "empty_like": make_like},
        tensor: {"is_pinned": is_pinned, "pin_memory": pin},
        torch.cuda: {
            "is_available": lambda: True,
            "is_initialized": lambda: os.getpid() == pid,
            "_is_in_bad_fork": lambda: os.getpid() != pid,
            "current_device": lambda: 0,
        },
        accelerator: {
            "is_available": lambda: True,
            "current_accelerator": lambda: torch.device("cuda"),
            "current_device_index": lambda: 0,
            "set_device_index": lambda _: None,
        },
    }
    with pytest.MonkeyPatch.context() as patch:
        for place, names in changes.items():
            for name, value in names.items():
                patch.setattr(place, name, value)
        yield


@dataclass(frozen=True, slots=True)
class FakeCuda:
    """The fake, loaded into this process. It has two devices; device 0 has an active context."""

    library: Path

    def environment(self, **numbers: int) -> dict[str, str]:
        """Return the environment in which a new process loads the fake, with these numbers set."""
        steered = {f"FAKE_CUDA_{name.upper()}": str(value) for name, value in numbers.items()}
        others = os.environ.get("LD_LIBRARY_PATH")
        path = os.pathsep.join([str(self.library.parent), *([others] if others else [])])
        return {**os.environ, **steered, "LD_LIBRARY_PATH": path}

    def reset(self) -> None:
        self._loaded.fake_cuda_reset()

    def set(self, **numbers: int) -> None:
        for name, value in numbers.items():
            self._loaded.fake_cuda_set(name.encode(), ctypes.c_long(value))

    def get(self, name: str) -> int:
        ask = self._loaded.fake_cuda_get
        ask.restype = ctypes.c_long
        return int(ask(name.encode()))

    def refuse_registration(self, *, above_bytes: int = 0) -> None:
        """Refuse registrations, as out of memory, that would raise the registered bytes above this limit."""
        self.set(limit_bytes=above_bytes)

    def allocate(self) -> None:
        """Allocate pinned memory as torch does, which breaks a capture unless the thread has relaxed its mode."""
        self._loaded.fake_cuda_allocate()

    def is_registered(self, address: int) -> bool:
        return bool(self._loaded.fake_cuda_is_registered(ctypes.c_void_p(address)))

    def registered_bytes(self) -> int:
        return self.get("registered_bytes")

    def hold_events(self) -> None:
        """Keep events recorded from now on pending until `pass_events`."""
        self.set(hold_events=1, passed=self.get("recorded"))

    def pass_events(self) -> None:
        self.set(passed=self.get("recorded"))

    def begin_capture(self) -> None:
        """Begin a capture in global mode, until `end_capture` or a call that invalidates it."""
        self.set(capturing=1)

    def end_capture(self) -> None:
        self.set(capturing=0)

    def invalidated(self) -> int:
        return self.get("invalidated")

    def depth(self) -> int:
        return int(self._loaded.fake_cuda_depth())

    def mode(self) -> int:
        """Return the calling thread's capture mode: 0 global, 1 thread-local, 2 relaxed."""
        return int(self._loaded.fake_cuda_mode())

    @property
    def _loaded(self) -> ctypes.CDLL:
        return ctypes.CDLL(str(self.library))  # always the same library, which the loader caches
