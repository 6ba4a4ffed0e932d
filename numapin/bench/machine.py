"""The host, versions and GPUs that a benchmark's figures depend on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from numapin.base.formats import running

_PACKAGES: Final = ("numapin", "torch", "numpy")
_QUERY_TORCH_S: Final = 120.0  # the first import of torch from a cold disk


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchMachine:
    """The host, the versions, and the GPUs that torch sees. `no_gpu` is the reason if it sees no GPU."""

    cpu: str | None
    num_cpus: int
    memory_bytes: int
    kernel: str
    python: str
    versions: dict[str, str | None]
    cuda: str | None
    driver: str | None
    gpus: tuple[str, ...]
    no_gpu: str | None

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return asdict(self)


def read_machine() -> BenchMachine:
    """Read this host. Takes as long as importing torch, which another process does."""
    command = running("from numapin.bench.machine import print_gpus; print_gpus()")
    seen: dict[str, Any]
    try:
        done = subprocess.run(command, capture_output=True, errors="replace", timeout=_QUERY_TORCH_S, check=True)
        seen = json.loads(done.stdout.splitlines()[-1])  # after what was printed at the start
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        seen = {"no_gpu": f"torch cannot be queried: {last}"}
    except subprocess.TimeoutExpired:
        seen = {"no_gpu": f"torch did not answer within {_QUERY_TORCH_S:.0f} s"}
    versions: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    cpu_lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = (line.partition(":")[2].strip() for line in cpu_lines if line.startswith("model name"))
    driver = Path("/proc/driver/nvidia/version")  # "NVRM version: … 580.65.06 …"
    return BenchMachine(
        cpu=next(models, None),
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        kernel=platform.release(),
        python=platform.python_version(),
        versions=versions,
        cuda=seen.get("cuda"),
        driver=driver.read_text(encoding="utf-8").splitlines()[0] if driver.exists() else None,
        gpus=tuple(seen.get("gpus", ())),
        no_gpu=seen.get("no_gpu"),
    )


def print_gpus() -> None:
    """Print what torch sees, as JSON; whatever others print goes to stderr."""
    answer = os.dup(1)
    os.dup2(2, 1)
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    why = "torch is built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
    found = {"cuda": torch.version.cuda, "gpus": names, "no_gpu": None if names else why}
    os.write(answer, f"\n{json.dumps(found)}".encode())
