"""CPU time that the hook of `numapin compare` adds to a step: python -m bench.compare_hook.

Comes in: nothing. Goes out: the CPU time of a step that takes one batch and does nothing else, with and without the
hook, on stdout.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from typing import Final

import torch
import torch.utils.data.dataloader as loader_module
from torch.optim import optimizer as optimizer_module
from torch.utils.data import DataLoader

from numapin.compare import hook
from numapin.compare.record import StepSettings
from numapin.launcher.preload import STEPS_VARIABLE

NUM_STEPS: Final = 3000
NUM_LOOPS: Final = 15


def loop_us() -> float:
    """Return the CPU time of a step."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    batches = iter(DataLoader(list(range(NUM_STEPS)), batch_size=1, collate_fn=len))  # type: ignore[arg-type]
    began_s = time.process_time()
    for _ in range(NUM_STEPS):
        next(batches)
        optimizer.step()
    return (time.process_time() - began_s) / NUM_STEPS * 1e6


def main() -> None:
    """Measure without the hook first, because it cannot be removed."""
    loop_us()
    without = [loop_us() for _ in range(NUM_LOOPS)]
    with tempfile.TemporaryDirectory() as folder:
        settings = StepSettings(folder=folder, skip=10, steps=10_000_000, seconds=1e6)
        os.environ[STEPS_VARIABLE] = settings.to_text()
        hook.attach(optimizer_module)
        hook.attach(loader_module)
        loop_us()
        hooked = [loop_us() for _ in range(NUM_LOOPS)]
        hook._Counted.closed = True  # noqa: SLF001 - nothing is written into the folder that is gone
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, {NUM_LOOPS} loops of {NUM_STEPS} steps")
    print("CPU time of a step, us        lowest  median")
    for name, values in (("without the hook", without), ("with the hook", hooked)):
        print(f"{name:28} {min(values):7.2f} {statistics.median(values):7.2f}")
    added = statistics.median(hooked) - statistics.median(without)
    print(f"{'the hook':28} {min(hooked) - min(without):7.2f} {added:7.2f}")


if __name__ == "__main__":
    main()
