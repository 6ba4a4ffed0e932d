"""A rank for the tests that runs steps in common with the others until the test ends it.

Usage: steps.py FOLDER. Writes FOLDER/HOST-PROCESS.json after the first step; ends when FOLDER/end exists.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

from tests.engines.probe import status, write


def main() -> None:
    """Run steps, and write where this rank runs after the first one."""
    folder = Path(sys.argv[1])
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    ended, step = torch.tensor([0]), 0
    while not int(ended):
        ended[0] = (folder / "end").exists()
        distributed.all_reduce(ended, op=distributed.ReduceOp.MAX)  # so that all end after the same step
        if step == 0:
            told = {
                "rank": distributed.get_rank(),
                "world_size": distributed.get_world_size(),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "restart": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
                "cpus": status("Cpus_allowed_list"),
                "binding": json.loads(os.environ["NUMAPIN_BINDING"]),
            }
            write(folder, f"{told['host']}-{os.getpid()}.json", told)
        step += 1
        time.sleep(0.05)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
