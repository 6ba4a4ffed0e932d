"""A rank of the tests: says where it is, into a file of a folder, after it met the others.

Usage: probe.py FOLDER. Writes FOLDER/rank-RANK-RESTART.json, whole or not at all.
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


def main() -> None:
    """Meet the others, add up all ranks' numbers, and tell."""
    cpus_at_start = status("Cpus_allowed_list")
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = distributed.get_rank()
    total = torch.tensor([rank + 1])
    distributed.all_reduce(total)
    told = {
        "rank": rank,
        "world_size": distributed.get_world_size(),
        "sum": int(total),
        "host": socket.gethostname(),
        "cpus": cpus_at_start,
        "cpus_at_end": status("Cpus_allowed_list"),
        "binding": json.loads(os.environ["NUMAPIN_BINDING"]),
        "environ": {key: os.environ[key] for key in os.environ if key.startswith(("SLURM", "CUDA", "OMPI", "OMP"))},
    }
    distributed.destroy_process_group()
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    write(Path(sys.argv[1]), f"rank-{rank}-{restart}.json", told)


if __name__ == "__main__":
    main()
