"""A stand-in for torch with what a process does that takes a GPU: it starts in 0.02 s, and needs none.

The folder above is put on PYTHONPATH. As in torch, `set_device` and everything else that needs CUDA initializes it by
`torch.cuda._lazy_init`, which callers look up in the module each time; and without OMP_NUM_THREADS, the number of
threads is that of the CPUs at the import.
"""

import os

from torch import cuda

__all__ = ["cuda"]
_threads = [int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))]


def get_num_threads() -> int:
    return _threads[0]


def set_num_threads(number: int) -> None:
    _threads[0] = number
