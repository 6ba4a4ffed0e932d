"""A rank for the tests: it joins the others and writes its binding to a file.

Usage: probe.py FOLDER [--alone]. Writes FOLDER/rank-RANK-RESTART.json atomically. With --alone it joins no group and
does not need torch.
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
    """Return a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{field}:"))


def write(folder: Path, name: str, content: Any) -> None:
    """Write the file under another name, then rename it."""
    scratch = folder / f".{name}.{os.getpid()}"
    scratch.write_text(json.dumps(content))
    scratch.replace(folder / name)


def meet() -> dict[str, int]:
    """Join the other ranks and add up all ranks' numbers."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    total = torch.tensor([distributed.get_rank() + 1])
    distributed.all_reduce(total)
    told = {"rank": distributed.get_rank(), "world_size": distributed.get_world_size(), "sum": int(total)}
    distributed.destroy_process_group()
    return told


def main() -> None:
    """Write where this rank runs, and the group that it joined."""
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
