"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.system import cuda
from numapin.system.cuda import CudaRefused, Driver
