"""A stand-in for torch with only what `numapin compare` counts: optimizers that step, and loaders that return batches.

Scripts beside it start in 0.05 s instead of 1.5 s. Tests of what is counted, and of launchers, use the real torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.integration.launching import script

_MODULES: Final = {
    "__init__": "class cuda: is_initialized = staticmethod(lambda: False)",
    "optim/__init__": "from torch.optim.optimizer import Optimizer",
    "optim/optimizer": """
hooks = []
register_optimizer_step_post_hook = hooks.append
class Optimizer:
    def __init__(self): pass
    def step(self):
        for hook in hooks: hook(self, (), {})
""",
    "utils/__init__": "",
    "utils/data/__init__": "from torch.utils.data.dataloader import DataLoader\nget_worker_info = lambda: None",
    "utils/data/dataloader": """
class _BaseDataLoaderIter:
    _auto_collation = True
    def __init__(self, loader): self._index_sampler, self._batches = loader, iter(loader.batches)
    def __iter__(self): return self
    def __next__(self): return next(self._batches)
class DataLoader:
    def __init__(self, batches, batch_size): self.batches, self.batch_size = batches, batch_size
    def __iter__(self): return _BaseDataLoaderIter(self)
""",
}
_TRAINS: Final = """
import os, pathlib, sys, time
from torch.optim import Optimizer
from torch.utils.data import DataLoader
if __name__ == "__main__":
    pathlib.Path(sys.argv[1], f"pid-{os.getpid()}").touch()
    optimizer = Optimizer()
    while True:
        for batch in DataLoader(range(16), batch_size=4):
            time.sleep(float(sys.argv[2]))
            optimizer.step()
"""


def training_script(folder: Path) -> str:
    """Return a script that trains forever: it leaves pid-PID in folder argv[1]; a step takes argv[2] seconds."""
    return script_with_stand_in(folder, _TRAINS)


def script_with_stand_in(folder: Path, text: str) -> str:
    place = folder / "stepping"
    for name, module in _MODULES.items():
        path = place / "torch" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(module)
    return script(place, text)
