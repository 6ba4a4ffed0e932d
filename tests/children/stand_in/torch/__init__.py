"""A stand-in for torch with what a process does that takes a GPU: it starts in 0.02 s, and needs none.

The folder above is put on PYTHONPATH. As in torch, `set_device` and everything else that needs CUDA initializes it by
`torch.cuda._lazy_init`, which callers look up in the module each time.
"""

from torch import cuda

__all__ = ["cuda"]
