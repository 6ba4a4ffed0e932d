"""A rank of the tests: says where it is, into a file of a folder, after it met the others.

Usage: probe.py FOLDER [--alone]. Writes FOLDER/rank-RANK-RESTART.json, whole or not at all. Alone it meets nobody, and
needs no torch.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any


def status(field: str) -> str:
    """Return what the kernel tells of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{field}:"))


def write(folder: Path, name: str, content: Any) -> None:
    """Write under another name and rename."""
    scratch = folder / f".{name}.{os.getpid()}"
    scratch.write_text(json.dumps(content))
    scratch.replace(folder / name)


def meet() -> dict[str, int]:
    """Meet the others and add up all ranks' numbers."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    total = torch.tensor([distributed.get_rank() + 1])
    distributed.all_reduce(total)
    told = {"rank": distributed.get_rank(), "world_size": distributed.get_world_size(), "sum": int(total)}
    distributed.destroy_process_group()
    return told


def main() -> None:
    """Say where this rank was at its start, and whom it met."""
    told = {
        "host": socket.gethostname(),
        "cpus": status("Cpus_allowed_list"),
        "binding": json.loads(os.environ["NUMAPIN_BINDING"]),
        "cuda": os.environ.get("CUDA_VISIBLE_DEVICES"),
        **({"rank": int(os.environ["RANK"])} if "--alone" in sys.argv else meet()),
    }
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    write(Path(sys.argv[1]), f"rank-{told['rank']}-{restart}.json", told)


if __name__ == "__main__":
    main()
