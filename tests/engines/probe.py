"""A rank for the tests: it joins the others and writes its binding to a file.

Usage: probe.py FOLDER [--alone | --steps]. Writes FOLDER/HOST-PROCESS.json atomically. With --alone it joins no group
and does not need torch. With --steps it runs steps in common with the others until FOLDER/end exists.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path


def main() -> None:
    folder, how = Path(sys.argv[1]), sys.argv[2:]
    lines = Path("/proc/self/status").read_text().splitlines()
    told = {
        "host": socket.gethostname(),
        "pid": os.getpid(),  # of a rank that comes back all else may be as before
        "cpus": next(line.split()[1] for line in lines if line.startswith("Cpus_allowed_list:")),
        "binding": json.loads(os.environ["NUMAPIN_BINDING"]),
        "cuda": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "rank": int(os.environ["RANK"]),
    }
    if "--alone" in how:
        _write(folder, told)
        return
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    total = torch.tensor([distributed.get_rank() + 1])
    distributed.all_reduce(total)
    _write(
        folder,
        told | {"rank": distributed.get_rank(), "world_size": distributed.get_world_size(), "sum": int(total)},
    )
    ended = torch.tensor([0])
    while "--steps" in how and not int(ended):
        ended[0] = (folder / "end").exists()
        distributed.all_reduce(ended, op=distributed.ReduceOp.MAX)  # so that all end after the same step
        time.sleep(0.05)
    distributed.destroy_process_group()


def _write(folder: Path, told: dict[str, object]) -> None:
    """Write the file under another name, then rename it."""
    name = f"{told['host']}-{os.getpid()}.json"
    (folder / f".{name}").write_text(json.dumps(told))
    (folder / f".{name}").replace(folder / name)


if __name__ == "__main__":
    main()
