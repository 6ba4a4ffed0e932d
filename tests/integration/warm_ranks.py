"""Ranks that run in forks of a process which has torch, and the hook of `numapin trace` in it, imported.

The launcher gets a script that has a forker (forking.py) run the real one with its own environment, folder, CPUs and
files, and that ends as the fork does. Tests of how hooks come into a rank, of DataLoaders that numapin replaces, of
signals, and of what restarts, start their ranks anew: importing torch takes a rank 1.5 s of CPU time.

What Python, OpenMP and torch read when they start (PYTHON*, LD_*, OMP_NUM_THREADS) is the forker's, not the rank's.
"""

from __future__ import annotations

import atexit
from functools import cache
from pathlib import Path
from typing import Final

from tests.integration.forking import Forker
from tests.integration.launching import environment, script
from tests.integration.seam import StepSettings, steps_environment

_IMPORTED: Final = (
    *("torch", "torch.distributed", "torch.optim", "torch.profiler", "torch.utils.data"),
    *("numapin.data.loader", "numapin.trace.hook", "torch.distributed.run"),
)


def forked_script(folder: Path, text: str) -> str:
    return script(folder, client(script(folder, text)), "starts_train.py")


def client(path: str) -> str:
    return _forker().client(path)


@cache
def _forker() -> Forker:
    own = environment()
    settings = StepSettings(folder="out", steps=1, skip=1)  # DataLoaders keep this one: use --output out
    environ = own | steps_environment(settings.to_text(), own, variable="NUMAPIN_TRACE")
    forker = Forker(environ, _IMPORTED)
    atexit.register(forker.close)
    return forker
