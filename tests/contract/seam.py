"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.data import install, iterator, queues, torch_names
from numapin.data.balance import Balance
from numapin.data.message import Miss
from numapin.data.packing import MOST_KEPT, Packer
from numapin.data.torch_names import CUDA_NAMES, LAST, NAMES, STATEFUL, TORCH, TORCHDATA
from numapin.errors import LoaderStateError
