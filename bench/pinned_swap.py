"""Under a memory limit the kernel swaps out ordinary memory, but not pinned memory. Needs root, cgroups and swap."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.test_gpu import needs_gpu
from tests.needs import needs_root

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [*needs_gpu, needs_root]
LIMIT_MIB, SIZE_MIB = 1024, 2048
ROOT = Path("/sys/fs/cgroup")

# Enters the limit only after CUDA has started, so the memory of the context does not count.
PROGRAM = """
import ctypes, json, mmap, os, sys
import torch
how, group, size = sys.argv[1], sys.argv[2], int(sys.argv[3]) << 20
torch.ones(1, device="cuda")
with open(f"{group}/cgroup.procs", "w") as procs:
    procs.write(str(os.getpid()))
if how == "cudaHostAlloc":
    held = torch.empty(size, dtype=torch.uint8, pin_memory=True)
else:
    held = torch.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    if how == "cudaHostRegister":
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(held.data_ptr(), size, 0)))
for start in range(0, size, 1 << 26):
    held[start:start + (1 << 26)] = start >> 26
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({name: int(status[name].split()[0]) >> 10 for name in ("VmSwap", "VmRSS", "VmLck")}), flush=True)
os._exit(int(not all(held[start] == start >> 26 for start in range(0, size, 1 << 26))))
"""


@pytest.fixture(scope="module")
def swap() -> Iterator[None]:
    """Provide swap space."""
    path = Path("/var/tmp/numapin-test-swap")  # noqa: S108 - a disk, where /tmp may be memory
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, (SIZE_MIB + 512) << 20)
        path.chmod(0o600)
        for command in (["mkswap", str(path)], ["swapon", str(path)]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"{command[0]}: {done.stderr.strip()}")
        yield
        subprocess.run(["swapoff", str(path)], check=True)
    finally:
        path.unlink(missing_ok=True)


@pytest.fixture
def group() -> Iterator[Path]:
    """Give a control group, of either version, that limits memory but not swap."""
    old = (ROOT / "memory").is_dir()
    path = (ROOT / "memory" if old else ROOT) / f"numapin-test-{os.getpid()}"
    try:
        path.mkdir()
        if not old:
            (ROOT / "cgroup.subtree_control").write_text("+memory")
        (path / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(LIMIT_MIB << 20))
    except OSError as error:
        pytest.skip(f"no control group with a limit on memory: {error}")
    yield path
    path.rmdir()


def held(how: str, group: Path) -> tuple[int, dict[str, int]]:
    """Hold twice the limit; return the exit status, and MiB by field of /proc/PID/status, if there are any."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how, str(group), str(SIZE_MIB)], capture_output=True, text=True, check=False
    )
    sys.stdout.write(f"{how}: status {done.returncode}, {done.stdout}{done.stderr[-300:]}\n")  # for the report of a run
    return done.returncode, json.loads(done.stdout or "{}")


@pytest.mark.usefixtures("swap")
def test_ordinary_memory_is_paged_out(group: Path) -> None:
    """With ordinary memory the program continues, with half of its memory in swap."""
    status, told = held("malloc", group)
    assert status == 0
    assert told["VmSwap"] >= SIZE_MIB - LIMIT_MIB - 64


@pytest.mark.usefixtures("swap")
@pytest.mark.parametrize("how", ["cudaHostAlloc", "cudaHostRegister"])
def test_pinned_memory_is_not(how: str, group: Path) -> None:
    """Pinned memory never goes to swap: it is allocated in spite of the limit, or not at all."""
    status, told = held(how, group)
    assert status != 0 or told["VmSwap"] < 64
    assert status == 0 or not told
