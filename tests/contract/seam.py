"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.data import buffer, queues, stateful, torch_names
from numapin.data.iterator import iterator_of
from numapin.data.message import Miss
from numapin.data.packing import MOST_KEPT, Packer
from numapin.data.path import PathOptions, path_of
from numapin.data.torch_names import CUDA_NAMES, LAST, NAMES, STATEFUL, TORCH, TORCHDATA
